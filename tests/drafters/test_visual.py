"""Drafters that read images as images: rows of placeholders in training and in serving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Space
from specctl.core.forward.prompt_images import PromptImages
from specctl.drafters.features.flash import Flash, runs_of
from specctl.drafters.features.msd import documents_drawn, multimodal_share
from specctl.drafters.frames.feature_drafter import FeatureDrafter
from specctl.drafters.frames.text_alone import without
from specctl.drafters.frames.visual_drafter import VISUAL, VisualDrafter
from specctl.drafters.states.feature_state import FeatureState
from specctl.runtime.target.target import Target, load_target
from specctl_testing.drafters.head_cases import shaken_heads
from specctl_testing.drafters.image_texts import captured_text
from specctl_testing.runtime.tiny_vision import make_folder, picture

DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("msd", {}),
    ("msd", {"decoupled": False}),
    ("flash", {"latents": 2, "stride": 3}),
    ("flash", {"latents": None, "stride": 1}),
    ("flash", {"latents": 64, "stride": 2}),  # more than an image has placeholders
]
EVERY = pytest.mark.parametrize(("name", "options"), DRAFTERS, ids=str)


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Target:
    folder = tmp_path_factory.mktemp("llava")
    make_folder(folder, "llava")
    return load_target(str(folder), dtype="float32", device="cpu", images=True)


def prompt(target: Target, *seeds: int) -> tuple[list[int], PromptImages]:
    assert target.vision is not None
    mark = target.vision.processor.image_token
    tokens = target.encode("hello " + f"{mark} and ".join(["", *[""] * len(seeds)]) + "so how are")
    return target.vision.see(tokens, [picture(seed, 20, 20) for seed in seeds])


def shaken(target: Target, name: str, **options: Any) -> VisualDrafter:
    drafter = shaken_heads(target, name, noise=0.0, **options)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


def opened(target: Target, drafter: VisualDrafter) -> Any:
    assert target.vision is not None
    space = Space(1, 128, 16, target.device, target.dtype, unsaid=target.vision.unsaid)
    return drafter.open(space)


def image_mask(batch: TrainBatch) -> Tensor:
    assert batch.image_BS is not None
    return batch.image_BS


def wide_logits(batch: TrainBatch) -> Tensor:
    assert batch.teacher_BSV is not None
    return batch.teacher_BSV


def taps_of(batch: TrainBatch, first: int, last: int) -> dict[int, Tensor]:
    return {tap: state_1SD[0, first:last] for tap, state_1SD in batch.taps.items()}


@EVERY
@torch.no_grad()
def test_training_and_serving_read_images_alike(
    target: Target, round_view: Any, name: str, options: dict[str, Any]
) -> None:
    """Also where the prompt is read in parts that end inside an image."""
    drafter = shaken(target, name, **options)
    tokens, images = prompt(target, 1, 2)
    batch = captured_text(target, drafter, tokens, images)
    known = len(tokens) - 1
    shown = drafter.shown(batch)
    steps = [drafter.head()(one.ready_BSD[0, -3]) for one in drafter.unroll(shown)]
    inside = images.spans[1].first + 2
    for parts in ((), (0, 1, 2, 4, inside, inside + 1, known - 2)):
        state = opened(target, drafter)
        for first, last in zip(parts[:1] + parts, parts, strict=False):
            if state.prefills_in_parts:
                state.prefill(0, tokens[:known], taps_of(batch, first, last), first, last)
        state.start(0, tokens[:known], taps_of(batch, 0, known - 1))
        served = [state.root(round_view({0: tokens[:known]}))[0]]
        for at in range(1, len(steps)):
            node = torch.tensor([[5]]), torch.tensor([[at - 2]])
            served.append(state.expand(*node)[0, 0])
        for mine, trained in zip(served, steps, strict=True):
            torch.testing.assert_close(mine, trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options", "reads"), [("msd", {}, True)], ids=str)
@torch.no_grad()
def test_a_visual_row_is_the_targets_embedding_and_nothing_else(
    target: Target, round_view: Any, name: str, options: dict[str, Any], reads: bool
) -> None:
    """The states at placeholders may be anything, but for the one before the text goes on; the
    rows of tap 0 may not, and placeholders' ids may."""
    drafter = shaken(target, name, **options)
    tokens, images = prompt(target, 3)
    batch, known = captured_text(target, drafter, tokens, images), len(tokens) - 1
    span = images.spans[0]

    def logits(tap: int, rows: slice) -> Tensor:
        taps = {t: value.clone() for t, value in taps_of(batch, 0, known - 1).items()}
        taps[tap][rows] += 1.0
        state = opened(target, drafter)
        state.start(0, tokens[:known], taps)
        found: Tensor = state.root(round_view({0: tokens[:known]}))[0]
        return found

    whole, inside = logits(0, slice(0, 0)), slice(span.first, span.end - 1)
    assert torch.equal(logits(drafter.tap, inside), whole)
    assert not torch.allclose(logits(0, inside), whole, atol=1e-3)
    assert torch.equal(logits(0, slice(0, span.first)), whole), "tap 0 of text is not read"


def test_without_images_msd_is_eagle(target: Target) -> None:
    tokens = target.encode("hello world 3, how are you?\ndef f1(x):")
    losses, moved = [], []
    for name in ("eagle", "msd"):
        drafter = shaken(target, name)
        out = drafter.loss(replace(captured_text(target, drafter, tokens, None), progress=0.7))
        (out.sum / out.count).backward()
        losses.append(out.sum.detach())
        moved.append({n: p.grad for n, p in drafter.trainable().items()})
        state = opened(target, drafter)
        assert isinstance(state, FeatureState)
    assert torch.equal(*losses)
    assert moved[0].keys() == moved[1].keys()
    assert all(torch.equal(moved[0][n], moved[1][n]) for n in moved[0])


@EVERY
def test_no_row_of_an_image_is_trained(target: Target, name: str, options: dict[str, Any]) -> None:
    drafter = shaken(target, name, **options)
    tokens, images = prompt(target, 4)
    batch = captured_text(target, drafter, tokens, images)
    everything = replace(batch, loss_mask_BS=torch.ones_like(batch.loss_mask_BS))
    assert batch.image_BS is not None
    text = replace(batch, loss_mask_BS=~batch.image_BS)
    assert drafter.loss(everything).count == drafter.loss(text).count


@pytest.mark.parametrize("latents", [3, None, 64])
def test_an_image_is_its_latents(target: Target, latents: int | None) -> None:
    """A batch loses the placeholders that no latent needs; what is trained stays, where it was."""
    drafter = shaken(target, "flash", latents=latents, stride=2)
    assert isinstance(drafter, Flash)
    tokens, images = prompt(target, 5, 6)
    batch = captured_text(target, drafter, tokens, images)
    shown, first = drafter.shown(batch), images.spans[0]
    assert shown.image_BS is not None
    length = first.end - first.first
    kept = min(latents or length, length)
    assert int(shown.image_BS.sum()) == 2 * kept
    assert shown.ids_BS.shape[1] == len(tokens) - 2 * (length - kept)
    assert torch.equal(shown.position_BS[0], torch.arange(shown.ids_BS.shape[1]))
    assert torch.equal(shown.ids_BS[~shown.image_BS], batch.ids_BS[~image_mask(batch)])
    for tap, state_BSD in shown.taps.items():
        if tap != VISUAL:
            text_RD = batch.taps[tap][~image_mask(batch)]
            assert torch.equal(state_BSD[~shown.image_BS], text_RD)
    at = slice(first.first, first.end)
    state_LD = batch.taps[drafter.tap][0, at]
    query = state_LD if latents is None else drafter.net.queries
    assert query is not None
    expected = (query[:kept] @ state_LD.t()).softmax(-1) @ state_LD
    found = shown.taps[VISUAL][0, first.first : first.first + kept]
    torch.testing.assert_close(found, state_LD if latents is None else expected)
    out = drafter.loss(batch)
    assert out.count == 2 * batch.loss_mask_BS.sum(), "as many rows in each of two slots"
    out.sum.backward()
    if drafter.net.queries is not None:
        assert drafter.net.queries.grad is not None
        moved_C = drafter.net.queries.grad.abs().sum(1) > 0
        assert bool(moved_C[:kept].all()), "every latent in use learns"


def test_packed_rows_lose_placeholders_document_by_document() -> None:
    keep_BS = torch.tensor([[1, 0, 1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 0]]).bool()
    document_BS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1], [0, 0, 0, 0, 1, 1, 1, 1]])
    position_BS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 0, 1, 2, 3]])
    ids_BS = torch.arange(16).view(2, 8)
    rows = HeadRows(torch.arange(16.0)[:, None], torch.ones(3, 1))
    given = TrainBatch(ids_BS, keep_BS | True, document_BS, position_BS, teacher_rows=rows)
    short = without(given, keep_BS)
    assert short.document_BS.tolist() == [[0, 0, 1, 1, -1, -1, -1], [0, 0, 0, 0, 1, 1, 1]]
    assert short.position_BS[0, :4].tolist() == [0, 1, 0, 1]
    assert short.position_BS[1].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert short.ids_BS[0, :4].tolist() == [0, 2, 5, 6]
    assert not bool(short.loss_mask_BS[0, 5:].any())
    assert short.teacher_rows is not None
    assert torch.equal(short.teacher_rows.state_RD[:, 0].long(), short.ids_BS.flatten())


def test_runs_end_where_a_document_begins() -> None:
    flags = [False, True, True, True, False, True]
    assert list(runs_of(flags)) == [(1, 4), (5, 6)]
    assert list(runs_of(flags, [False, False, True])) == [(1, 2), (2, 4), (5, 6)]


@torch.no_grad()
def test_slots_guess_without_the_tokens_before_them(target: Target, round_view: Any) -> None:
    """And one forward a round is all that runs."""
    drafter = shaken(target, "flash", stride=4, latents=2)
    tokens, images = prompt(target, 7)
    batch, known = captured_text(target, drafter, tokens, images), len(tokens) - 1
    found, calls = [], []
    drafter.module.layers[0].register_forward_hook(lambda *_: calls.append(1))
    for drafted in ([5, 6, 7], [9, 2, 2]):
        state = opened(target, drafter)
        state.start(0, tokens[:known], taps_of(batch, 0, known - 1))
        del calls[:]
        rows = [state.root(round_view({0: tokens[:known]}))]
        for at, token in enumerate(drafted):
            rows.append(state.expand(torch.tensor([[token]]), torch.tensor([[at - 1]]))[:, 0])
        assert len(calls) <= 1
        found.append(torch.stack(rows))
    assert torch.equal(*found)
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-3)


def test_documents_are_counted_by_the_share_of_their_kind() -> None:
    assert [multimodal_share(p) for p in (0.0, 0.3, 0.5, 0.75, 1.0)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    document_BS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, -1]]).repeat(64, 1)
    image_BS = torch.zeros_like(document_BS, dtype=torch.bool)
    image_BS[:, [3, 5]] = True
    ones_BS = torch.ones_like(image_BS)
    batch = TrainBatch(document_BS, ones_BS, document_BS, document_BS * 0, image_BS=image_BS)
    for share, text, both in ((0.0, 1.0, 0.0), (1.0, 0.0, 1.0)):
        drawn_BS = documents_drawn(batch, share)
        assert drawn_BS[:, :3].float().mean() == text
        assert drawn_BS[:, 3:7].float().mean() == both
    drawn_BS = documents_drawn(batch, 0.5)
    assert torch.equal(drawn_BS[:, 3], drawn_BS[:, 4])
    assert not torch.equal(drawn_BS[:, 3], drawn_BS[:, 5])
    assert 0.3 < drawn_BS[:, 3].float().mean() < 0.7
    for alone in (torch.zeros_like(image_BS), ones_BS):
        assert bool(documents_drawn(replace(batch, image_BS=alone), 0.25).all())


@pytest.mark.parametrize("staged", [True, False])
def test_the_loss_counts_text_first_and_images_last(target: Target, staged: bool) -> None:
    drafter = shaken(target, "msd", staged=staged)
    shown, images = prompt(target, 8)
    words = (target.encode("hello world 3, how are you? ") * 9)[: len(shown)]
    with_image = captured_text(target, drafter, shown, images)
    alone = captured_text(target, drafter, words, None)
    no_image = torch.zeros_like(image_mask(with_image))
    both = TrainBatch(
        torch.cat([with_image.ids_BS, alone.ids_BS]),
        torch.cat([with_image.loss_mask_BS, alone.loss_mask_BS]),
        torch.cat([with_image.document_BS, alone.document_BS]),
        torch.cat([with_image.position_BS, alone.position_BS]),
        {tap: torch.cat([value, alone.taps[tap]]) for tap, value in with_image.taps.items()},
        torch.cat([wide_logits(with_image), wide_logits(alone)]),
        image_BS=torch.cat([image_mask(with_image), no_image]),
    )
    counts = [float(drafter.loss(each).count) for each in (alone, with_image)]
    for progress, expected in ((0.0, counts[0]), (1.0, counts[1])):
        batch = replace(both, progress=progress)
        assert drafter.loss(batch).count == (expected if staged else sum(counts))
        with torch.no_grad():
            assert drafter.loss(batch).count == sum(counts), "a measured loss is of all"
