"""Blocks with a window and sinks: training and drafting see the same features, and the rest is not
kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.api.arguments.drafting import load_draft
from specctl.core.batch import TrainBatch
from specctl.core.drafter import RoundView, Space
from specctl.core.errors import RecipeError
from specctl.drafters import families
from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.blocks.dflash import DFlashOptions
from specctl.drafters.frames.block_drafter import BlockState
from specctl.drafters.nets.block_net import Block
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.drafters.moved_rows import moved_rows
from specctl_testing.drafters.random_texts import packed, random_text

LONG = 64
TREE = {"policy": "marginal-tree", "nodes": 6}
FAMILIES = families().items()
BLOCKS = ("dflare", "dflash", "dflash2", "dfly", "domino", "dspark", "lilicorr", "xpress")


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made: Target = make_target(num_layers=4, vocab=48)
    return made


def make(target: Target, family: str = "dflash", **options: Any) -> Any:
    """An attention that has something to say."""
    drafter = make_heads(target, family, **{"num_heads": 3, "layers": 2, "taps": (0, 2), **options})
    with torch.no_grad():
        for matrix in (p for p in drafter.module.net.parameters() if p.dim() == 2):
            matrix.mul_(12.0)
    return drafter


@pytest.mark.parametrize(("size", "sink", "causal"), product((5, 9), (0, 2, 7), (False, True)))
def test_slots_see_what_a_mask_says(size: int, sink: int, causal: bool) -> None:
    """Every feature once, by documents, behind the newest of its anchor or among the first."""
    batch, anchors, slots = packed(range(12), range(3), range(20)), (2, 11, 13, 17, 34), 4
    anchor_1A, counts = torch.tensor([anchors]), [5, 5, 3, 3]
    block = Block.of(batch, anchor_1A, counts, causal, AttentionWindow(size, sink))
    masks = torch.stack([run.mask(35)[0, 0] for run in block.known]).int().sum(0)
    rows = [(a, k) for k in range(slots) for a in anchors[: counts[k]]]
    document_S, place_S = batch.document_BS[0], batch.position_BS[0]
    for row, (anchor, slot) in zip(masks[block.order_BM.argsort(1)[0]], rows, strict=True):
        place = int(place_S[anchor]) + 1 + slot
        for at in range(35):
            is_known = document_S[at] == document_S[anchor] and at <= anchor
            is_near = place - place_S[at] < size or place_S[at] < sink
            assert row[at] == int(is_known and is_near), (anchor, slot, at)


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sees_the_same_features_in_training_as_in_drafting(
    target: Target, drive: Any, capture_batch: Any, causal: bool
) -> None:
    """Within a window of eight positions, with sinks, and where either shows everything."""
    ids, anchors, found = random_text(LONG), (3, 20, LONG - 6), {}
    for window, sink in ((8, 0), (8, 3), (500, 0), (500, 3), (8, LONG), (None, 0)):
        drafter = make(target, window=window, sink=sink, causal=causal)
        batch = capture_batch(target, drafter, packed(ids))
        states = drafter.unroll(batch, torch.tensor([anchors]))
        trained = [state_BSD[0] @ drafter.head_weights()[0].T for state_BSD in states]
        for at in anchors:
            known = ids[: at + 2]
            served_TK = drive(target, drafter).chain_logits([*known, 0, 0], len(known))
            for logits_SK, served_K in zip(trained, served_TK, strict=True):
                torch.testing.assert_close(logits_SK[at], served_K, rtol=1e-4, atol=1e-4)
        found[window, sink] = torch.stack([each[list(anchors)] for each in trained])
    whole = found[None, 0]
    assert torch.equal(found[500, 0], whole)
    assert torch.equal(found[500, 3], whole)
    torch.testing.assert_close(found[8, LONG], whole, rtol=1e-4, atol=1e-4)
    for near in (found[8, 0], found[8, 3]):
        assert torch.allclose(near[:, 0], whole[:, 0], atol=1e-5)
        assert not torch.allclose(near[:, 2], whole[:, 2], atol=1e-2)
    assert not torch.allclose(found[8, 0][:, 2], found[8, 3][:, 2], atol=1e-2)


def rounds_of(
    target: Target, drafter: Any, policy: dict[str, Any], patch: pytest.MonkeyPatch
) -> list[tuple[tuple[int, ...], Tensor]]:
    """Text and block of every row, in every round of a long generation, so hot that rows of one
    round take different numbers of drafted tokens."""
    found, at = list[tuple[tuple[int, ...], Tensor]](), BlockState.at

    def kept(self: BlockState, view: RoundView) -> Tensor:
        out = at(self, view)
        found.extend(zip(map(tuple, view.tokens), out.clone(), strict=True))
        return out

    prompts = [random_text(n, seed=n) for n in (3, 40)]
    sampling = Sampling(temperature=4.0, max_new_tokens=40, ignore_eos=True)
    with patch.context() as inner:
        inner.setattr(BlockState, "at", kept)
        how = {"policy": make_policy(policy), "sampling": sampling, "batch": 2}
        generate(target, prompts, drafter=drafter, **how)
    return found


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "options", "policy"),
    [
        ("dflash", {"sink": 3}, {"policy": "chain", "length": 3}),
        ("dflare", {}, TREE),
        ("dspark", {"sink": 3, "causal": True}, TREE),
        ("dflash2", {"sink": 9}, {"policy": "dynamic-tree", "nodes": 6, "beam": 2}),
    ],
)
def test_what_has_left_the_window_is_not_missed(
    target: Target,
    capture_batch: Callable[..., TrainBatch],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    options: dict[str, Any],
    policy: dict[str, Any],
) -> None:
    """Chains and trees drafted from rows that move in the cache, against the block that training
    computes of the whole text."""
    drafter = make(target, family, window=12, **options)
    with moved_rows() as moved:
        rounds = rounds_of(target, drafter, policy, monkeypatch)
    assert sum(map(bool, moved)) >= 3
    for tokens, state_X in rounds:
        batch = capture_batch(target, drafter, packed(tokens))
        _, slots = drafter.outputs(batch, torch.tensor([[len(tokens) - 2]]))
        whole_X = torch.cat([slot_11D[0, 0] for slot_11D in slots[drafter.first_slot :]])
        torch.testing.assert_close(state_X, whole_X, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", BLOCKS)
def test_every_family_of_blocks_reads_its_sinks(
    target: Target, drive: Any, make_batch: Any, family: str
) -> None:
    """In its loss, and in what it drafts behind a long text."""
    ids, losses, drafted = random_text(LONG), list[float](), list[Tensor]()
    for sink in (0, 4):
        drafter = make(target, family, window=6, sink=sink)
        torch.manual_seed(0)
        batch = make_batch(target, drafter, rows=2, seq_len=40)
        losses.append(float(drafter.loss(batch).sum.detach()))
        drafted.append(drive(target, drafter).chain_logits(ids, LONG - 2))
    assert losses[0] != losses[1]
    assert not torch.allclose(drafted[0], drafted[1], atol=1e-3)


def test_families_with_sinks(target: Target) -> None:
    """Others that have a `window` mean something else by it (a model's own, columns of guesses),
    and refuse sinks as an option they do not have."""
    named = {
        name: {*getattr(found.options, "__dataclass_fields__", {})} for name, found in FAMILIES
    }
    assert {name for name, names in named.items() if "sink" in names} == {"eagle3", *BLOCKS}
    others = {name for name, names in named.items() if "window" in names and "sink" not in names}
    assert others == {"lookahead", "rasd", "small-lm", "sorted", "staged", "superposed", "swift"}
    with pytest.raises(RecipeError, match="no option of it"):
        load_draft(make_heads(target, "p-eagle"), target, draft_options=["sink=2"])


def test_a_slot_costs_no_more_however_long_texts_are(target: Target) -> None:
    space = Space(2, 1000, 8, torch.device("cpu"), torch.float32)
    bounded, whole = make(target, window=64, sink=4), make(target)
    sizes = [
        [one.slot_bytes(replace(space, max_len=length)) for length in (100, 1000, 100_000)]
        for one in (bounded, whole)
    ]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] == sizes[0][2] < sizes[1][1] / 4
    kv = bounded.open(replace(space, max_len=100_000)).features.kv
    assert kv.max_len == 4 + 2 * 64 + 10


@torch.no_grad()
def test_nothing_of_a_long_text_is_left_in_its_slot(
    target: Target, drive: Any, round_view: Any
) -> None:
    drafter, found = make(target, window=8, sink=2), list[Tensor]()
    for before in ([random_text(LONG)], []):
        state = drive(target, drafter).open()
        for tokens in (*before, [7]):
            drive(target, drafter).start(state, 0, tokens)
        found.append(state.features.at(round_view({0: [7]})))
    torch.testing.assert_close(*found)


def test_a_trained_block_is_served_with_sinks(target: Target, drive: Any) -> None:
    trained, ids = make(target), random_text(LONG)
    loaded = load_draft(trained, target, draft_options=["window=6", "sink=2"]).drafter
    ours, theirs = (
        drive(target, one).chain_logits(ids, LONG - 2)
        for one in (loaded, make(target, window=6, sink=2))
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{"window": 6}, {"sink": 2}, {"window": 9, "sink": -1}])
def test_a_window_without_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=r"window|too small"):
        DFlashOptions(num_heads=5, **options)
