"""Targets with recurrent layers in the engine: what is written is what transformers writes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

from specctl.core.drafter import Needs, Space
from specctl.core.errors import (
    BannedError,
    IncompatibleError,
    NumbersError,
    RowsError,
    SpecctlError,
)
from specctl.core.forward.slot_state import WHOLE, SlotState, StateShape
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.generate import default_policy
from specctl.runtime.pearl import Pearl
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.propd import Progressive
from specctl.runtime.proof import prove
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl_testing.hybrids import FEW, HYBRIDS, tiny_hybrid
from specctl_testing.runtime.knowing import Knowing, KnowingState
from specctl_testing.runtime.twins import greedy_text, twins

PROMPTS = ((7, 8, 9, 7, 8, 9, 7), tuple(range(40, 63)), (11, 12, 13) * 23)
KNOWING = {
    "knowing chain": {"policy": "chain", "length": 4},
    "knowing tree": {"policy": "static-tree", "branch": (3, 2, 1)},
}
FAMILIES = (None, *KNOWING, "prompt-lookup", "token-recycling")
NEW = 16


def some_of(kinds: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Every kind and every name, each kind with one name; the other pairs are proofs."""
    return [
        (kind, name)
        if names[i % len(names)] == name
        else pytest.param(kind, name, marks=pytest.mark.proof)
        for (i, kind), name in product(enumerate(kinds), names)
    ]


@cache
def made(kind: str) -> tuple[Target, Any]:
    """A target, and its twin in transformers."""
    return twins(tiny_hybrid(kind))


@cache
def said(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    return greedy_text(made(kind)[1], prompt, NEW)


def engine_of(
    kind: str,
    name: str | None,
    slots: int = 3,
    chunk: int | None = 16,
    rule: str = "auto",
) -> Engine:
    """An engine of that family, or of a drafter that knows most of the answers."""
    target, drafter, policy = made(kind)[0], None, None
    if name in KNOWING:
        texts = [(*prompt, *said(kind, prompt)) for prompt in PROMPTS]
        drafter = Knowing(texts, target.spec)
        policy = make_policy(KNOWING[name])
    elif name is not None:
        one = family(name)
        drafter = one.build(one.options(), target.spec, None)
    policy = policy or default_policy(drafter)
    return Engine(target, drafter, policy, rule, num_slots=slots, prefill_chunk=chunk)


def written(engine: Engine, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [each.tokens for each in engine.run(requests)]


GREEDY = Sampling(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)


def check_identity(kind: str, name: str | None) -> None:
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]
    wanted = [said(kind, prompt) for prompt in PROMPTS]
    taken = list[float]()
    for slots, chunk in ((3, 16), (1, None)):
        done = engine_of(kind, name, slots, chunk).run(requests)
        assert [each.tokens for each in done] == wanted, (kind, name, slots)
        taken += [each.stats.accepted / each.stats.rounds for each in done]
    assert name not in KNOWING or min(taken) >= 1.0


# Every kind of state behind a chain or a tree by turns, two of them plainly (all pairs are proofs
# below, and every node of a tree is read for each kind in test_state_lm.py); what looks texts up
# hangs on none.
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *zip(FEW, cycle(KNOWING)),
        ("lfm2", None),
        ("qwen3_next", None),
        ("qwen3_next", "prompt-lookup"),
        ("lfm2", "token-recycling"),
    ],
)
def test_greedy_text_is_that_of_transformers(kind: str, name: str | None) -> None:
    check_identity(kind, name)


@pytest.mark.proof
@pytest.mark.parametrize("name", [*FAMILIES, "goose"])
@pytest.mark.parametrize("kind", sorted(HYBRIDS))
def test_greedy_text_is_that_of_transformers_in_all_kinds(kind: str, name: str | None) -> None:
    check_identity(kind, name)


def alone(kind: str, request: Request) -> tuple[int, ...]:
    """Plain, in an engine of its own."""
    return written(engine_of(kind, None, 1), [replace(request, conversation=None)])[0]


@pytest.mark.parametrize("kind", ["lfm2", "qwen3_next"])
def test_a_conversation_goes_on_behind_its_last_prompt_or_its_end(kind: str) -> None:
    engine = engine_of(kind, "token-recycling", 1, rule="target-only")
    engine.open(120)
    text, before = PROMPTS[0], 0
    for turn in range(3):
        request = Request(text, Sampling(0.8, seed=turn, max_new_tokens=9), "ours")
        reused = 0

        def look(row: Any, new: tuple[int, ...]) -> None:
            nonlocal reused
            reused = row.reused_len

        answer = engine.run([request], look)[0].tokens
        assert answer == alone(kind, request)
        assert (reused >= before > 0) if turn else reused == 0
        before = len(text) - 1
        # An answer said again, then one of which the template drops a part.
        text = (*text, *answer, 7) if turn == 0 else (*text, *answer[3:], 5)


def test_an_end_of_text_in_mid_path_is_not_gone_on_from() -> None:
    kind, prompt, beyond = "qwen3_next", PROMPTS[0], 0
    for token in sorted({*said(kind, prompt)})[::3]:  # the end is at any place of a path
        engine = engine_of(kind, "knowing chain", 1)
        engine.open(120)
        ended = Request(prompt, replace(GREEDY, stop_token_ids=(token,)), "ours")
        answer = written(engine, [ended])[0]
        held = engine.scheduler.prefixes[0]
        assert held.states is not None
        assert max(held.states) <= len(prompt) + len(answer) - 1
        beyond += engine.reader.kv.state.position(0) not in held.states
        follow = Request((*prompt, *answer, 3), GREEDY, "ours")
        assert written(engine, [follow])[0] == alone(kind, follow)
    assert beyond, "no text ended within a path"


def test_a_row_that_is_given_up_leaves_an_empty_slot() -> None:
    kind, request = "falcon_h1", Request(PROMPTS[2], GREEDY)
    engine = engine_of(kind, "knowing tree", 1)
    engine.open(120)
    for rounds in (1, 3, 5):
        engine.submit(0, request)
        for _ in range(rounds):
            engine.step()
        assert engine.cancel(0)
        assert written(engine, [Request(PROMPTS[1], GREEDY)])[0] == said(kind, PROMPTS[1])


def test_a_prompt_of_one_token_takes_over_no_states() -> None:
    """It is not read before its first round, and its slot stood behind another text."""
    kind = "qwen3_next"
    engine = engine_of(kind, None, 1)
    engine.open(120)
    engine.run([Request(PROMPTS[0], replace(GREEDY, max_new_tokens=2), "theirs")])
    stood = engine.reader.kv.state.position(0)
    first = Request((7,), GREEDY, "ours")
    answer = written(engine, [first])[0]
    assert answer == alone(kind, first)
    assert stood < 12 < len(answer)
    follow = Request((7, *answer[:12], 3), GREEDY, "ours")
    assert written(engine, [follow])[0] == alone(kind, follow)


def test_states_whose_move_failed_halfway_are_not_gone_on_from() -> None:
    class Failing:
        def after(self, state_BX: Tensor, path_BP: Tensor) -> Tensor:
            raise MemoryError

    state = SlotState([StateShape(recurrent=(2,))], 1, torch.float32, torch.device("cpu"))
    slot_B, path_BP = torch.tensor([0]), torch.tensor([[0, 1]])
    state.begin(slot_B, torch.tensor([0]))
    state.leave((0, WHOLE), Failing())
    with pytest.raises(MemoryError):
        state.advance(slot_B, path_BP)
    for kept in (1, 2):
        with pytest.raises(SpecctlError, match="not those of its text"):
            state.begin(slot_B, torch.tensor([kept]))
    state.begin(slot_B, torch.tensor([0]))
    assert state.position(0) == 0


# -- rows that fail ----------------------------------------------------------------------------

BROKEN = 90


class Nothing(LogitsProcessor):
    """Allows no token behind so many."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < self.length else scores - torch.inf


@pytest.mark.parametrize(
    ("kind", "name"),
    some_of(("lfm2", "qwen3_next", "falcon_h1", "jamba"), sorted(KNOWING)),
)
def test_rows_that_fail_leave_the_states_of_the_others_and_an_empty_slot(
    kind: str, name: str
) -> None:
    """One whose logits become no numbers, and one that may say nothing more, in rounds in which the
    other rows had drafts that were accepted."""
    model = tiny_hybrid(kind)
    with torch.no_grad():
        model.get_input_embeddings().weight[BROKEN] = torch.nan
        model.get_output_embeddings().weight[BROKEN] = 0.0
    target = Target.from_model(copy.deepcopy(model))
    plain = Engine(target, num_slots=1)
    wanted = [written(plain, [Request(prompt, GREEDY)])[0] for prompt in PROMPTS]
    assert not any(BROKEN in text for text in wanted)
    texts = [(*prompt, *text) for prompt, text in zip(PROMPTS, wanted, strict=True)]
    drafter = Knowing(texts, target.spec, never=[BROKEN])
    engine = Engine(target, drafter, make_policy(KNOWING[name]), num_slots=3, prefill_chunk=16)
    engine.open(120)
    breaks = replace(GREEDY, logit_bias={BROKEN: 1e4})
    ends = replace(GREEDY, processors=(Nothing(len(PROMPTS[0]) + 4),))
    for index, request in enumerate([
        Request(PROMPTS[1], GREEDY), Request(PROMPTS[0], breaks), Request(PROMPTS[0], ends),
        Request(PROMPTS[2], GREEDY), Request(PROMPTS[0], GREEDY),
    ]):  # fmt: skip
        engine.submit(index, request)
    failed, done = dict[int, type](), dict[int, tuple[int, ...]]()
    while engine.is_busy:
        try:
            emitted = engine.step()
        except RowsError as error:
            failed |= dict.fromkeys(error.rows, type(error))
            if isinstance(error, NumbersError):
                kv = engine.reader.kv
                [empty] = [slot for slot in range(3) if kv.state.position(slot) == 0]
                assert not any(each[empty].any() for each in kv.state.conv.values())
            continue
        for each in emitted:
            if each.finished:
                done[each.row.index] = each.row.completion().tokens
                assert each.row.stats.accepted > 0
    assert failed == {1: NumbersError, 2: BannedError}
    assert done == {0: wanted[1], 3: wanted[2], 4: wanted[0]}


# -- drafters that read hidden states ----------------------------------------------------------

TAPS = (1, 3)


class Tapped(Knowing):
    """One that wants hidden states, and keeps what it is given of each token of a row."""

    def needs(self) -> Needs:
        return Needs(taps=TAPS)

    def open(self, space: Space) -> KnowingState:
        self.seen: dict[int, list[dict[int, Tensor]]] = {}
        return TappedState(self)


class TappedState(KnowingState):
    def __init__(self, drafter: Tapped) -> None:
        super().__init__(drafter.texts, drafter.spec.vocab_size)
        self.seen = drafter.seen

    def start(self, slot: int, tokens: Sequence[int], taps: Any) -> None:
        self.seen[slot] = [dict(taps)]

    def observe(self, outcome: Any) -> None:
        for b, slot in enumerate(outcome.view.slots):
            kept = slice(0, len(outcome.emitted[b]))
            self.seen[slot].append({tap: outcome.taps[tap][b, kept] for tap in TAPS})


@pytest.mark.parametrize(("kind", "name"), some_of(FEW, sorted(KNOWING)))
def test_hidden_states_of_accepted_tokens_are_those_of_the_text(kind: str, name: str) -> None:
    """Of prompts, of what was read before in a conversation, and of every accepted token."""
    target, oracle = made(kind)
    texts = [(*prompt, *said(kind, prompt)) for prompt in PROMPTS]
    drafter = Tapped(texts, target.spec)
    engine = Engine(target, drafter, make_policy(KNOWING[name]), num_slots=3, prefill_chunk=16)
    engine.open(120)
    requests = [Request(prompt, GREEDY, f"{i}") for i, prompt in enumerate(PROMPTS)]
    rows: dict[int, Row] = {}
    for turn in range(2):
        done = engine.run(requests, lambda row, new: rows.update({row.index: row}))
        assert [each.tokens for each in done] == [said(kind, prompt) for prompt in PROMPTS]
        for i, text in enumerate(texts):
            with torch.no_grad():
                out = oracle(input_ids=torch.tensor([text]), output_hidden_states=True)
            for tap in TAPS:
                seen = torch.cat([part[tap] for part in drafter.seen[rows[i].slot]])
                wanted = out.hidden_states[tap][0, : len(seen)]
                assert len(seen) >= len(text) - 1
                torch.testing.assert_close(seen, wanted, atol=2e-3, rtol=2e-3)
            assert rows[i].reused_len == turn * (len(PROMPTS[i]) - 1)


@pytest.mark.parametrize(("kind", "name"), some_of(FEW, ("eagle3", "medusa", "dflash")))
def test_heads_on_hidden_states_change_nothing(kind: str, name: str) -> None:
    """Drafters as their families make them: in a batch, and over the turns of a conversation."""
    requests = [Request(prompt, GREEDY) for prompt in PROMPTS]
    engine = engine_of(kind, name)
    assert engine.needs.taps
    done = engine.run(requests)
    assert [each.tokens for each in done] == [said(kind, prompt) for prompt in PROMPTS]
    assert all(each.stats.drafted > 0 for each in done)
    engine.open(120)
    text, reused = PROMPTS[0], list[int]()
    for _ in range(2):
        request = Request(text, replace(GREEDY, max_new_tokens=9), "ours")
        answer = engine.run([request], lambda row, new: reused.append(row.reused_len))[0].tokens
        assert answer == alone(kind, request)
        text = (*text, *answer, 7)
    assert max(reused) == len(PROMPTS[0]) - 1


@pytest.mark.proof
@pytest.mark.parametrize("name", ["prompt-lookup", "token-recycling"])
@pytest.mark.parametrize("kind", FEW)
def test_sampled_text_follows_the_target_exactly(kind: str, name: str) -> None:
    """As a chain and as a tree: the joint distribution of the first tokens, and after every round
    the logits behind the kept states."""
    one, target = family(name), made(kind)[0]
    drafter = one.build(one.options(), target.spec, None)
    proof = prove.verify(target, drafter, prompts=PROMPTS[:2])
    assert proof.passed, proof.lines()


def test_rounds_with_states_are_not_recorded_which_the_configuration_tells(tmp_path: Path) -> None:
    tiny_hybrid("qwen3_next").config.save_pretrained(tmp_path)
    with pytest.raises(IncompatibleError, match="cannot be recorded"):
        load_target(str(tmp_path), compile=True)


def test_what_cannot_go_with_states_is_refused() -> None:
    target = made("qwen3_next")[0]
    lookup = family("prompt-lookup")
    drafter = lookup.build(lookup.options(), target.spec, None)
    with pytest.raises(IncompatibleError, match="drafting in parallel needs"):
        Pearl(target, drafter, make_policy({"policy": "chain", "length": 2}))
    with pytest.raises(IncompatibleError, match="layer by layer"):
        Engine(target, None, Progressive(early_layer=2))
    for name in ("skip-layers", "ppd", "calm"):
        one = family(name)
        with pytest.raises(IncompatibleError, match="does not lend its layers"):
            Engine(target, one.build(one.options(), target.spec, None))
