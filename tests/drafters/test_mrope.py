"""Positions of M-RoPE in drafters: one position per axis, in training as in serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.drafter import RoundView, Space
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.forward.prompt_images import PromptImages
from specctl.drafters.team import TeamState
from specctl.recipes.schema import DrafterPart
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.image_rows import with_images
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.init.axes import with_axes
from specctl_testing.drafters.head_cases import shaken_heads
from specctl_testing.drafters.image_texts import captured_text
from specctl_testing.runtime.tiny_vision import make_folder, picture

DRAFTERS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {}),
    ("eagle3", {"window": 12, "qk_norm": True}),
    ("eagle", {}),
    ("msd", {}),
]
EVERY = pytest.mark.parametrize(("name", "options"), DRAFTERS, ids=str)
STEPS = 3


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])  # sections, and interleaved
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, request.param)
    return load_target(str(folder), dtype="float32", device="cpu", images=True)


def axes(target: Target) -> tuple[int, ...]:
    assert target.vision is not None
    assert target.vision.axes is not None
    return target.vision.axes.axis


def prompt(target: Target, *seeds: int, end: str = "so how are you?") -> Any:
    """Text, images of several sizes with text between, text; its tokens and images."""
    assert target.vision is not None
    mark = target.vision.spelled
    text = "hello " + "".join(f"{mark} and " for _ in seeds) + end
    pictures = [picture(seed, 24 + 8 * seed, 20) for seed in seeds]
    return target.vision.see(target.encode(text), pictures)


def shaken(target: Target, name: str, **options: Any) -> Any:
    more = {"taps": (0, 1, 2)} if name == "eagle3" else {"noise": 0.0}
    return shaken_heads(target, name, ttt_steps=STEPS, **{"mrope": axes(target), **more, **options})


def opened(target: Target, drafter: Any, slots: int = 1) -> Any:
    assert target.vision is not None
    space = Space(slots, 192, 16, target.device, target.dtype, unsaid=target.vision.unsaid)
    return drafter.open(space)


def cut(images: PromptImages, length: int) -> PromptImages:
    """Those of the first tokens alone: what stands behind must follow from the offset."""
    assert images.position_3T is not None
    return replace(images, position_3T=images.position_3T[:, :length])


def begin(
    state: Any, slot: int, tokens: Sequence[int], images: Any, batch: TrainBatch, parts: Any = ()
) -> None:
    """A row joins, its prompt read in those parts."""
    known = len(tokens)
    state.see(slot, None if images is None else cut(images, known))
    taps = {tap: value[0, : known - 1] for tap, value in batch.taps.items()}
    for first, last in zip((0, *parts), parts, strict=False):
        part = {tap: value[first:last] for tap, value in taps.items()}
        state.prefill(slot, tokens, part, first, last)
    state.start(slot, tokens, taps)


def drafted(state: Any, view: RoundView, follow: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[B, K] behind the root, and behind each further token of a chain."""
    found = [state.root(view)]
    for at, token_B in enumerate(follow):
        parent_B1 = torch.full((len(token_B), 1), at - 1)
        found.append(state.expand(torch.tensor([token_B]).T, parent_B1)[:, 0])
    return found


@EVERY
@torch.no_grad()
def test_training_and_drafting_agree_at_every_position(
    target: Target, round_view: Any, name: str, options: dict[str, Any]
) -> None:
    """Of text behind images, also right behind one, in parts that end inside an image; and axes
    are other positions than indices."""
    drafter = shaken(target, name, **options)
    tokens, images = prompt(target, 1, 3)
    batch = captured_text(target, drafter, tokens, images)
    assert batch.position_BS3 is not None
    plain = replace(batch, position_BS3=None)
    steps, others = (_steps(drafter, each) for each in (batch, plain))
    end = images.spans[1].end
    for known in range(end + 1, len(tokens) - STEPS + 1):
        parts = (2, images.spans[0].first + 3, known - 3) if known % 2 else ()
        state = opened(target, drafter)
        begin(state, 0, tokens[:known], images, batch, parts)
        view = round_view({0: tokens[:known]})
        served = drafted(state, view, [[t] for t in tokens[known : known + STEPS - 1]])
        for mine, one, other in zip(served, steps, others, strict=True):
            assert apart(mine[0], one[known - 2]) < 1e-3
            assert apart(mine[0], other[known - 2]) > 1e-2


def apart(one: torch.Tensor, two: torch.Tensor) -> float:
    """The largest difference of logits, as a share of their deviation."""
    return float((one - two).abs().max() / two.std())


def _steps(drafter: Any, batch: TrainBatch) -> list[torch.Tensor]:
    """[S, K] of each step of training."""
    if drafter.family == "eagle3":
        return [drafter.module.lm_head(one[0]) for one in drafter.unroll(batch, STEPS)]
    return [drafter.head()(one.ready_BSD[0]) for one in drafter.unroll(batch)]


@EVERY
@torch.no_grad()
def test_rows_of_other_images_and_none_draft_as_alone(
    target: Target, round_view: Any, name: str, options: dict[str, Any]
) -> None:
    """Chains, and a tree of two branches, of one batch."""
    drafter = shaken(target, name, **options)
    texts = [prompt(target, 2), (target.encode("hello world 3, how are you?"), None),
             prompt(target, 1, 3, end="x")]  # fmt: skip
    batches = [captured_text(target, drafter, *each) for each in texts]
    together = opened(target, drafter, 3)
    for slot, ((tokens, images), batch) in enumerate(zip(texts, batches, strict=True)):
        begin(together, slot, tokens, images, batch)
    view = round_view({slot: tokens for slot, (tokens, _) in enumerate(texts)})
    chain = drafted(together, view, [[5] * 3, [9] * 3])
    fresh = opened(target, drafter, 3)
    for slot, ((tokens, images), batch) in enumerate(zip(texts, batches, strict=True)):
        begin(fresh, slot, tokens, images, batch)
    fresh.root(view)
    both_BMK = fresh.expand(torch.tensor([[5, 7]] * 3), torch.full((3, 2), -1))
    assert apart(both_BMK[:, 0], chain[1]) < 1e-3
    deeper_BMK = fresh.expand(torch.tensor([[9]] * 3), torch.full((3, 1), 0))
    assert apart(deeper_BMK[:, 0], chain[2]) < 1e-3
    for slot, ((tokens, images), batch) in enumerate(zip(texts, batches, strict=True)):
        alone = opened(target, drafter)
        begin(alone, 0, tokens, images, batch)
        for all_BK, mine in zip(
            chain, drafted(alone, round_view({0: tokens}), [[5], [9]]), strict=True
        ):
            assert apart(all_BK[slot], mine[0]) < 1e-3


@pytest.mark.parametrize("name", ["eagle3", "eagle"])
def test_without_images_a_drafter_with_axes_is_the_plain_one(
    target: Target, round_view: Any, name: str
) -> None:
    """Bit for bit, also in a slot that held a row with images."""
    tokens, shown = target.encode("hello world 3, how are you?\ndef f1(x):"), prompt(target, 2)
    losses, logits = [], []
    for mrope in (axes(target), (), None):
        drafter = shaken(target, name, mrope=mrope)
        batch, state = captured_text(target, drafter, tokens, None), opened(target, drafter)
        losses.append(drafter.loss(batch).sum.detach())
        with torch.no_grad():
            begin(state, 0, shown[0], shown[1], captured_text(target, drafter, *shown))
            begin(state, 0, tokens, None, batch)
            logits.append(torch.stack(drafted(state, round_view({0: tokens}), [[5], [9]])))
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(logits[0], logits[1])


class RootsRecorded:
    """A drafter whose states keep the logits of their roots, by prompt length."""

    def __init__(self, drafter: Any) -> None:
        self.roots: dict[int, torch.Tensor] = {}
        opened = drafter.open

        def open_one(space: Space) -> Any:
            state = opened(space)
            root = state.root

            def noted(view: RoundView) -> torch.Tensor:
                found: torch.Tensor = root(view)
                for b, tokens in enumerate(view.tokens):
                    self.roots.setdefault(len(tokens), found[b].clone())
                return found

            state.root = noted
            return state

        drafter.open = open_one


@pytest.mark.parametrize("policy", [{"policy": "chain", "length": 3},
                                    {"policy": "dynamic-tree", "nodes": 6}], ids=str)  # fmt: skip
def test_the_engine_shows_drafters_the_images_of_rows(
    target: Target, round_view: Any, policy: dict[str, Any]
) -> None:
    """In a batch with text alone, and of a conversation whose beginning is kept."""
    drafter, later = shaken(target, "eagle3"), prompt(target, 2, end="so how is that one?")
    texts = [prompt(target, 2), (target.encode("hello world 3"), None), prompt(target, 1, 3), later]
    expected = {}
    for tokens, images in texts:
        state = opened(target, drafter)
        with torch.no_grad():
            begin(state, 0, tokens, images, captured_text(target, drafter, tokens, images))
            expected[len(tokens)] = state.root(round_view({0: tokens}))[0]
    requests = [
        with_images(
            target, Request(tuple(ids), Sampling(temperature=0.0, max_new_tokens=8)), images
        )
        for ids, images in texts[:3]
    ]
    plain = Engine(target, None, None, num_slots=3).run(requests)
    recorded = RootsRecorded(drafter)
    done = Engine(target, drafter, make_policy(policy), num_slots=3).run(requests)
    assert [one.tokens for one in done] == [one.tokens for one in plain]
    engine = Engine(target, drafter, make_policy(policy))
    engine.open(300)
    for index, (ids, images) in enumerate((texts[0], later)):
        talk = Request(tuple(ids), Sampling(temperature=0.0, max_new_tokens=2), conversation="one")
        engine.submit(index, with_images(target, talk, images))
        ended: list[Any] = []
        while engine.is_busy:
            ended += [each.row for each in engine.step() if each.row.finished]
    assert ended[0].reused_len > later[1].spans[0].end
    for length, logits_K in expected.items():
        assert apart(recorded.roots[length], logits_K) < 1e-3


def test_a_team_shows_its_members() -> None:
    seen: list[Any] = []

    class Member:
        def see(self, slot: int, images: Any) -> None:
            seen.append((slot, images))

    team = TeamState.__new__(TeamState)
    team.members = [Member(), Member()]  # type: ignore[list-item]
    images = PromptImages((), torch.empty(0))
    team.see(1, images)
    assert seen == [(1, images)] * 2


def test_what_learns_from_images_takes_the_axes_of_its_target(target: Target) -> None:
    own = list(axes(target))
    for name in ("eagle3", "eagle", "hass", "msd"):
        assert with_axes(DrafterPart(family=name), target, True).options == {"mrope": own}
    off = DrafterPart(family="eagle3", options={"mrope": []})
    for part, images in (
        (off, True),
        (DrafterPart(family="eagle3"), False),
        (DrafterPart(family="falcon"), True),
    ):
        assert with_axes(part, target, images) == part
    wide = DrafterPart(family="eagle3", options={"head_dim": 64})
    with pytest.raises(RecipeError, match=r"width 64, and 8 in the target"):
        with_axes(wide, target, True)
    with pytest.raises(RecipeError, match=r"4 of 0 \(time\)"):
        shaken(target, "eagle3", mrope=(0, 1))
    given = DrafterPart(family="eagle3", options={"mrope": own})
    for alone, found in ((replace(target, vision=None), "reads no images"),):
        with pytest.raises(IncompatibleError, match=rf"no positions of several axes.*{found}"):
            with_axes(given, alone, True)


def test_a_target_without_axes_refuses_them(tmp_path: Path) -> None:
    make_folder(tmp_path, "llava")
    target = load_target(str(tmp_path), dtype="float32", device="cpu", images=True)
    assert with_axes(DrafterPart(family="eagle3"), target, True).options == {}
    given = DrafterPart(family="eagle3", options={"mrope": [0, 1, 2, 2]})
    with pytest.raises(IncompatibleError, match=r"no positions of several axes.*llava"):
        with_axes(given, target, True)
