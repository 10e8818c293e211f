"""A drafter that fails costs speed, never an answer."""

from __future__ import annotations

import pytest
import torch

from specctl.core.drafter import DraftState
from specctl.core.tree import NodeKind, chain_tree
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.guard import IN_A_ROW, Guard
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.failing import FailingDrafter
from specctl_testing.runtime.foreign import drafter_of, make_tokenizer

PROMPTS = [(3, 1, 4), (9, 2), (6, 5, 3, 5)]
CHAIN = {"policy": "chain", "length": 3}
TREE = {"policy": "static-tree", "branch": (2, 2)}


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=2)


def guarded(target, drafter, policy, rule="auto", say=print):
    guard = Guard(target.spec.vocab_size, say)
    return Engine(target, drafter, policy, rule, 3, wrap_drafter=guard.wrap), guard


def serve(target, drafter, serve=CHAIN, temperature=0.0, rule="target-only", new=14):
    said = []
    engine, guard = guarded(target, drafter, make_policy(serve), rule, said.append)
    done = engine.run(
        [
            Request(p, Sampling(temperature, seed=i, max_new_tokens=new + i))
            for i, p in enumerate(PROMPTS)
        ]
    )
    return guard, done, said


def plain(target, temperature=0.0, new=14):
    return [
        generate(target, [p], sampling=Sampling(temperature, seed=i, max_new_tokens=new + i))
        .outputs[0]
        .token_ids
        for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("where", ["start", "root", "expand", "observe", "end", "open"])
def test_a_drafter_that_raises_leaves_the_plain_answers(target, where, temperature):
    guard, done, said = serve(target, FailingDrafter(target, where), temperature=temperature)
    assert [c.tokens for c in done] == plain(target, temperature)
    lost = {"start": 1, "root": 3, "expand": 3, "observe": 3, "end": 0, "open": 1}[where]
    assert guard.num_disabled == lost
    assert len(said) == 1
    assert "ValueError" in said[0]
    assert "secret" not in said[0]
    assert (guard.why_off is not None) == (where == "open")


@pytest.mark.parametrize("how", ["nan", "inf"])
@pytest.mark.parametrize("where", ["root", "expand"])
@pytest.mark.parametrize(("serve_with", "rule"), [(CHAIN, "block"), (TREE, "traversal")])
def test_a_distribution_of_nan_ends_the_drafts_of_its_own_row(target, where, how, serve_with, rule):
    """Under rules that use q, too: what is emitted follows from the target alone."""
    drafter = FailingDrafter(target, where, at=2, slot=1, how=how)
    guard, done, _ = serve(target, drafter, serve_with, 0.0, "auto")
    assert [c.tokens for c in done] == plain(target)
    assert guard.num_disabled == 1
    after = [slots for slots in drafter.state.seen if 1 not in slots]
    assert len(after) > 1, "the row that failed is drafted for no more, the others are"
    assert done[0].stats.accepted > 0
    assert done[2].stats.accepted > 0
    guard, done, _ = serve(target, drafter, serve_with, 0.9, rule)
    assert guard.num_disabled == 1
    assert [len(c.tokens) for c in done] == [14, 15, 16]


def test_a_row_without_drafts_is_alone_in_that(target):
    drafter = FailingDrafter(target, "start", at=1)
    guard, done, _ = serve(target, drafter)
    assert guard.num_disabled == 1
    assert done[0].stats.drafted == 0
    assert done[0].stats.tested_at == []
    assert done[1].stats.accepted > 5
    assert done[2].stats.accepted > 5


def test_tokens_that_do_not_exist_never_reach_the_target(target):
    class Wild(DraftState):
        def start(self, slot, tokens, taps):
            pass

        def propose(self, view, budget):
            token_BN = torch.full((len(view.slots), 2), 5)
            token_BN[-1] = 10**6
            return chain_tree(token_BN, torch.ones_like(token_BN).bool(), NodeKind.POINT)

        def observe(self, outcome):
            pass

    drafter = FailingDrafter(target, "never")
    drafter.open = lambda space: Wild()
    guard, done, _ = serve(target, drafter, {"policy": "direct"})
    assert [c.tokens for c in done] == plain(target)
    assert guard.num_disabled == 3
    assert guard.why_off is not None
    assert [c.stats.drafted > 0 for c in done] == [True, True, False]


def test_failure_after_failure_ends_drafting_for_good(target):
    drafter, said = FailingDrafter(target, "root", at=0), []
    engine, guard = guarded(target, drafter, make_policy(CHAIN), "target-only", said.append)
    done = engine.run(
        [Request(p, Sampling(seed=i, max_new_tokens=14 + i)) for i, p in enumerate(PROMPTS)]
    )
    assert guard.why_off is None
    assert guard.num_disabled == 3
    for index in range(IN_A_ROW):
        engine.run([Request(PROMPTS[0], Sampling(max_new_tokens=4))])
        assert len(said) == (1 if index < IN_A_ROW - 2 else 2)
    assert guard.why_off is not None
    assert "ValueError" in guard.why_off
    assert guard.num_disabled == 5, "rows that come later are plain from the start"
    assert [c.tokens for c in done] == plain(target)


def test_a_policy_that_raises_is_survived_like_a_drafter(target):
    policy = make_policy(CHAIN)

    class Policy(type(policy)):
        def observe(self, outcome, seconds):
            raise KeyError("secret prompt")

    drafter, said = FailingDrafter(target, "never"), []
    engine, guard = guarded(target, drafter, Policy(length=3), say=said.append)
    done = engine.run([Request(p, Sampling(max_new_tokens=14 + i)) for i, p in enumerate(PROMPTS)])
    assert [c.tokens for c in done] == plain(target)
    assert guard.num_disabled == 3
    assert "KeyError" in said[0]


def test_a_drafter_that_works_is_drafted_with_as_without_a_guard(target):
    requests = [Request(p, Sampling(0.7, seed=i, max_new_tokens=14)) for i, p in enumerate(PROMPTS)]
    for rule, serve_with in (("target-only", CHAIN), ("block", CHAIN), ("traversal", TREE)):
        drafter = FailingDrafter(target, "never")
        free = Engine(target, drafter, make_policy(serve_with), rule, 3).run(requests)
        engine, guard = guarded(target, drafter, make_policy(serve_with), rule)
        assert [(c.tokens, c.stats) for c in engine.run(requests)] == [
            (c.tokens, c.stats) for c in free
        ]
        assert guard.num_disabled == 0


@pytest.mark.parametrize(
    ("method", "serve_with"), [("tli", CHAIN), ("slem", {"policy": "direct"}), ("slrs", CHAIN)]
)
def test_what_a_draft_of_another_tokenizer_wrote_from_nan_is_no_draft(
    make_model, method, serve_with
):
    one, other = make_tokenizer(1, 24), make_tokenizer(2, 28)
    target = Target.from_model(make_model(num_layers=2, vocab=len(one)), one)
    model = make_model(num_layers=1, vocab=len(other), seed=3)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    drafter = drafter_of(Target.from_model(model, other, "draft"), target, method)
    guard, done, _ = serve(target, drafter, serve_with, rule="auto")
    assert [c.tokens for c in done] == plain(target)
    assert guard.num_disabled == 3
    assert [c.stats.drafted for c in done] == [0, 0, 0]
