"""Drafters with a window: training and drafting see the same rows, and the rest is not kept."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.api.arguments.drafting import load_draft
from specctl.core.drafter import Space
from specctl.core.errors import RecipeError, SpecctlError
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.kept_rows import KeptRows
from specctl.drafters.attention.seen import AttentionWindow, Seen, SeenWindow, seen_ahead
from specctl.drafters.features.eagle3 import Eagle3, Eagle3Options
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.drafters.kept_logits import kept_logits
from specctl_testing.drafters.moved_rows import moved_rows
from specctl_testing.drafters.random_texts import packed, random_text

STEPS, LONG = 3, 64
WINDOWS = [{"window": 4}, {"window": 6, "sink": 2}, {"window": 30, "sink": 1}]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    made: Target = make_target(num_layers=4, vocab=48)
    return made


def make(target: Target, **options: Any) -> Eagle3:
    """An attention that has something to say."""
    drafter: Eagle3 = make_heads(target, "eagle3", ttt_steps=STEPS, **options)
    with torch.no_grad():
        for part in (drafter.module.layer.self_attn.o_proj, drafter.module.layer.mlp.down_proj):
            part.weight.normal_(std=part.in_features**-0.5)
        drafter.module.layer.self_attn.q_proj.weight.mul_(4.0)
    return drafter


@torch.no_grad()
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_training_step_j_equals_j_drafting_steps_of_a_long_text(
    target: Target, drive: Any, capture_batch: Any, options: dict[str, int]
) -> None:
    """Behind prompts of which most has left the cache, and behind short ones."""
    drafter, ids = make(target, **options), random_text(LONG)
    batch = capture_batch(target, drafter, packed(random_text(7, seed=1), ids))
    steps = [drafter.module.lm_head(normed_BSD)[0, 7:] for normed_BSD in drafter.unroll(batch, 3)]
    for true_len in (2, 5, 20, 41, 60, LONG - 3):
        served = drive(target, drafter).chain_logits(ids[: true_len + 2], true_len)
        for j, step_TK in enumerate(steps):
            torch.testing.assert_close(step_TK[true_len - 2], served[j], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_window_changes_what_is_drafted_and_only_behind_its_size(
    target: Target, drive: Any
) -> None:
    narrow, whole, ids = make(target, window=6), make(target), random_text(LONG)
    for true_len, is_same in ((4, True), (LONG - 1, False)):
        ours, theirs = (
            drive(target, one).chain_logits(ids[:true_len], true_len) for one in (narrow, whole)
        )
        assert torch.allclose(ours, theirs, atol=1e-5) == is_same


@pytest.mark.parametrize("window", [LONG + STEPS - 1, 5000])
def test_a_window_over_everything_is_no_window_bit_for_bit(
    target: Target, drive: Any, capture_batch: Any, window: int
) -> None:
    ids = random_text(LONG)
    plain = make(target)
    batch = capture_batch(target, plain, packed(ids, ids[:9]))
    found = []
    for drafter in (plain, make(target, window=window)):
        out = drafter.loss(batch)
        out.sum.backward()
        grads = [p.grad for p in drafter.trainable().values() if p.grad is not None]
        served = drive(target, drafter).chain_logits(ids, LONG - 4)
        found.append([out.sum.detach(), *grads, served])
    assert len(found[0]) > 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("size", "sink", "ahead"), list(product((3, 5), (0, 1, 4), (0, 2))))
def test_rows_are_seen_as_a_mask_says(size: int, sink: int, ahead: int) -> None:
    """Attention by sets of keys, and its gradient, against a dense mask in float64."""
    torch.manual_seed(0)
    lengths = (11, 1, 6)
    batch = packed(*(list(range(n)) for n in lengths))
    document_S, S = batch.document_BS[0], sum(lengths)
    rows = Seen.text(batch.document_BS)
    seen = SeenWindow.of(batch, rows, rows, AttentionWindow(size, sink), ahead)
    at_S = torch.arange(S)
    far_SS = at_S[:, None] + ahead - at_S
    shown_SS = (document_S[:, None] == document_S) & (at_S[:, None] >= at_S)
    shown_SS = shown_SS & ((far_SS < size) | (batch.position_BS[0] < sink))
    query, key, value = (
        torch.randn(1, 2, S, 4, dtype=torch.double, requires_grad=True) for _ in range(3)
    )
    score = (query @ key.transpose(-1, -2) / math.sqrt(4)).masked_fill(~shown_SS, -torch.inf)
    dense = (score.softmax(-1) @ value).transpose(1, 2).flatten(2)
    ours = attend_seen(query, seen.sets(key, value))
    torch.testing.assert_close(ours, dense)
    weight = torch.randn_like(dense)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), (query, key, value)),
        torch.autograd.grad((dense * weight).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_documents_that_fit_a_window_are_read_as_before() -> None:
    batch = packed(list(range(9)), list(range(4)))
    kinds = [type(each) for each in seen_ahead(batch, AttentionWindow(10), 3)]
    assert kinds == [Seen, Seen, SeenWindow]


def logits_of(
    target: Target, drafter: Eagle3, policy: dict[str, Any], patch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Of every call of a long generation of rows of several lengths."""
    prompts = [random_text(n, seed=n) for n in (3, 50, 21)]
    sampling = Sampling(max_new_tokens=70, ignore_eos=True)
    with kept_logits(patch) as found:
        generate(target, prompts, drafter=drafter, policy=make_policy(policy), sampling=sampling)
    return found


CHAIN = {"policy": "chain", "length": 3}
TREE = {"policy": "dynamic-tree", "nodes": 6, "beam": 3}
NARROW, SUNK = {"window": 4}, {"window": 7, "sink": 3}


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (CHAIN, NARROW),
        (TREE, SUNK),
        pytest.param(CHAIN, SUNK, marks=pytest.mark.proof),
        pytest.param(TREE, NARROW, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_what_has_left_the_window_is_not_missed(
    target: Target, monkeypatch: pytest.MonkeyPatch, options: dict[str, int], policy: dict[str, Any]
) -> None:
    """Rows of true positions that move in the cache, against a cache that keeps everything."""
    drafter = make(target, **options)
    with moved_rows() as moved:
        bounded = logits_of(target, drafter, policy, monkeypatch)
    assert sum(map(bool, moved)) >= 4
    with monkeypatch.context() as patch:
        patch.setattr(KeptRows, "most", property(lambda _: 10**6))
        whole = logits_of(target, drafter, policy, monkeypatch)
    torch.testing.assert_close(bounded, whole, rtol=1e-4, atol=1e-4)


def test_a_prompt_read_in_parts_leaves_what_one_read_whole_does(
    target: Target, drive: Any, features: Any, round_view: Any
) -> None:
    drafter, ids = make(target, window=5, sink=3), random_text(LONG)
    taps = features(target, ids[:-1], drafter.needs().taps)
    state = drive(target, drafter).open()
    for first, last in ((0, 2), (2, 40), (40, 44), (44, 60)):
        part = {tap: value[first:last] for tap, value in taps.items()}
        state.prefill(0, ids, part, first, last)
    state.start(0, ids, taps)
    root_K = state.root(round_view({0: ids}))[0]
    torch.testing.assert_close(root_K, drive(target, drafter).chain_logits(ids, LONG)[0])


def test_a_slot_costs_no_more_however_long_texts_are(target: Target) -> None:
    space = Space(2, 1000, 8, torch.device("cpu"), torch.float32)
    bounded, whole = make(target, window=64, sink=4), make(target)
    sizes = [
        [one.slot_bytes(replace(space, max_len=length)) for length in (100, 1000, 100_000)]
        for one in (bounded, whole)
    ]
    assert sizes[0][0] == sizes[1][0]
    assert sizes[0][1] == sizes[0][2] < sizes[1][1] / 4
    kv = bounded.open(replace(space, max_len=100_000)).kv
    assert kv.max_len == 4 + 2 * 64 + 10


def test_a_trained_drafter_is_served_with_another_window(target: Target, drive: Any) -> None:
    """As `drafter.options` says; nothing else of it may change, nor the drafter that was given."""
    trained, ids = make(target), random_text(LONG)
    loaded = load_draft(trained, target, draft_options=["window=6", "sink=2"]).drafter
    assert isinstance(loaded, Eagle3)
    assert trained.options.window is None
    ours, theirs = (
        drive(target, one).chain_logits(ids, LONG - 2)
        for one in (loaded, make(target, window=6, sink=2))
    )
    torch.testing.assert_close(ours, theirs)
    for given, said in (
        (["norm_output=true"], "decided when this drafter was trained"),
        (["window"], "a name and a value"),
        ({"window": 0}, "too small"),
    ):
        with pytest.raises(SpecctlError, match=said):
            load_draft(trained, target, draft_options=given)
    with pytest.raises(SpecctlError, match=r"drafter\.options says how to draft"):
        load_draft(None, target, draft_options={"window": 6})
    with pytest.raises(SpecctlError, match=r"drafter\.translate says how to draft"):
        load_draft(None, target, translate="tli")


@pytest.mark.parametrize(
    "options", [{"window": STEPS - 1}, {"sink": 2}, {"window": 8, "sink": -1}, {"window": 0}]
)
def test_a_window_without_sense_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match=r"window|too small"):
        Eagle3Options(ttt_steps=STEPS, **options)
