"""Drafters that read images as images: rows of placeholders in training and in serving."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Space
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.language_model import Feed
from specctl.drafters import family
from specctl.drafters.frames.feature_drafter import FeatureDrafter
from specctl.drafters.msd import documents_drawn, multimodal_share
from specctl.drafters.states.feature_state import FeatureState
from specctl.runtime.target.target import Target, load_target
from specctl_testing.runtime.tiny_vision import make_folder, picture

DRAFTERS: list[tuple[str, dict[str, Any]]] = [("msd", {}), ("msd", {"decoupled": False})]
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


def shaken(target: Target, name: str, **options: Any) -> FeatureDrafter:
    """A drafter in which nothing is zero and nothing the identity."""
    torch.manual_seed(1)
    found = family(name)
    drafter = found.build(found.options(noise=0.0, **options), target.spec, None)
    assert isinstance(drafter, FeatureDrafter)
    drafter.bind(target.borrowed())
    with torch.no_grad():
        for parameter in drafter.trainable().values():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return drafter


@torch.no_grad()
def captured(
    target: Target, drafter: FeatureDrafter, tokens: list[int], images: PromptImages | None
) -> TrainBatch:
    """A text behind its images, with what the target makes of it; no batch knows of no images."""
    ids_1S = torch.tensor([tokens])
    at_1S = torch.arange(len(tokens))[None]
    masks = target.lm.document_masks(ids_1S * 0)
    feed = Feed(ids_1S, at_1S, masks, drafter.needs().taps, True)
    if images is not None:
        assert target.vision is not None
        feed = target.vision.feed(feed, [images], [0])
    out = target.lm.run(feed, None)
    assert out.logits_BTV is not None
    image_1S = torch.zeros_like(ids_1S, dtype=torch.bool)
    for span in () if images is None else images.spans:
        image_1S[0, span.first : span.end] = True
    return TrainBatch(
        ids_1S,
        ~image_1S & (at_1S > 2),
        ids_1S * 0,
        at_1S,
        {tap: state.clone() for tap, state in out.taps.items()},
        out.logits_BTV.clone(),
        image_BS=None if images is None else image_1S,
    )


def opened(target: Target, drafter: FeatureDrafter) -> Any:
    assert target.vision is not None
    space = Space(1, 128, 16, target.device, target.dtype, unsaid=target.vision.unsaid)
    return drafter.open(space)


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
    batch = captured(target, drafter, tokens, images)
    known = len(tokens) - 1
    trained_K = drafter.head()(drafter.unroll(batch)[0].ready_BSD[0, known - 2])
    inside = images.spans[1].first + 2
    served = []
    for parts in ((), (0, 1, 2, 4, inside, inside + 1, known - 2)):
        state = opened(target, drafter)
        for first, last in zip(parts[:1] + parts, parts, strict=False):
            if state.prefills_in_parts:
                state.prefill(0, tokens[:known], taps_of(batch, first, last), first, last)
        state.start(0, tokens[:known], taps_of(batch, 0, known - 1))
        served.append(state.root(round_view({0: tokens[:known]}))[0])
        torch.testing.assert_close(served[-1], trained_K, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "options", "reads"), [("msd", {}, True)], ids=str)
@torch.no_grad()
def test_a_visual_row_is_the_targets_embedding_and_nothing_else(
    target: Target, round_view: Any, name: str, options: dict[str, Any], reads: bool
) -> None:
    """The states at placeholders may be anything, but for the one before the text goes on; the
    rows of tap 0 may not, and placeholders' ids may."""
    drafter = shaken(target, name, **options)
    tokens, images = prompt(target, 3)
    batch, known = captured(target, drafter, tokens, images), len(tokens) - 1
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
        out = drafter.loss(replace(captured(target, drafter, tokens, None), progress=0.7))
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
    batch = captured(target, drafter, tokens, images)
    everything = replace(batch, loss_mask_BS=torch.ones_like(batch.loss_mask_BS))
    assert batch.image_BS is not None
    text = replace(batch, loss_mask_BS=~batch.image_BS)
    assert drafter.loss(everything).count == drafter.loss(text).count


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
