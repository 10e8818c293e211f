"""Targets with recurrent layers in the engine: what is written is what transformers writes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Needs, RoundView, Space, StepState
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.core.slot_state import WHOLE, SlotState, StateShape
from specctl.drafters import family
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import default_policy
from specctl.runtime.pearl import Pearl
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.propd import Progressive
from specctl.runtime.proof import prove
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl_testing.hybrids import FEW, HYBRIDS, VOCABULARY, tiny_hybrid

PROMPTS = ((7, 8, 9, 7, 8, 9, 7), tuple(range(40, 63)), (11, 12, 13) * 23)
KNOWING = {
    "knowing chain": {"policy": "chain", "length": 4},
    "knowing tree": {"policy": "static-tree", "branch": (3, 2, 1)},
}
FAMILIES = (None, *KNOWING, "prompt-lookup", "token-recycling")
NEW = 24


@cache
def made(kind: str) -> tuple[Target, Any]:
    """A target, and its twin in transformers."""
    model = tiny_hybrid(kind)
    oracle = copy.deepcopy(model)
    oracle.set_attn_implementation("eager")
    return Target.from_model(model), oracle


@cache
def said(kind: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    whole = made(kind)[1].generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return tuple(whole[0, len(prompt) :].tolist())


class KnowingState(StepState):
    """Drafts from `texts`, with the true token first at some places, second at some, and elsewhere
    not at all: paths of every length are accepted."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [list(text) for text in texts]
        self.prefix: list[list[int]] = []
        self.paths: list[list[list[int]]] = []

    def start(self, slot: int, tokens: Sequence[int], taps: Any) -> None:
        return

    def end(self, slot: int) -> None:
        return

    def observe(self, outcome: Any) -> None:
        return

    def _logits(self, tokens: list[int]) -> Tensor:
        at = len(tokens)
        drawn = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(at))
        for text in self.texts:
            if text[:at] == tokens and at < len(text) and at % 5:
                drawn[text[at]] = drawn.max() + (1.0 if at % 3 else -0.01)
        return drawn

    def root(self, view: RoundView) -> Tensor:
        self.prefix = [list(text) for text in view.tokens]
        self.paths = [[] for _ in view.tokens]
        return torch.stack([self._logits(text) for text in self.prefix])

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        found = []
        for b, known in enumerate(self.paths):
            nodes = zip(token_BM[b].tolist(), parent_BM[b].tolist(), strict=True)
            new = [[*(known[parent] if parent >= 0 else []), token] for token, parent in nodes]
            known += new
            found.append(torch.stack([self._logits(self.prefix[b] + path) for path in new]))
        return torch.stack(found)


class Knowing:
    """A drafter of these texts."""

    family, module, vocab, lossless, policies = "small-lm", None, None, True, ()

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def needs(self) -> Needs:
        return Needs()

    def bind(self, borrowed: Any) -> None:
        raise AssertionError("borrows nothing")

    def open(self, space: Space) -> KnowingState:
        return KnowingState(self.texts)


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
        drafter = Knowing([(*prompt, *said(kind, prompt)) for prompt in PROMPTS])
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


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", FEW)
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
    for token in sorted({*said(kind, prompt)})[::4]:  # the end is at any place of a path
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
    for rounds in (1, 3, 7):
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
