"""Chains of a draft model in one call, or with a short call a token: the stepwise chain bit for
bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import RoundView, Space
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.states.lm_state import LmState
from specctl.models.llama import fast_llama
from specctl.models.native import library as built
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling, SamplingBatch
from specctl.runtime.verify.walk import log_distribution

LENGTH, CONTEXT = 4, 40
PROMPTS = ([3, 1, 4, 1, 5], [7], [9, 2, 6])
KINDS = ("stored", "8 bits", "bfloat16", "windowed", "trimmed")
needs_compiler = pytest.mark.skipif(
    built.library().functions is None, reason=f"no compiled step: {built.library().missing}"
)


@pytest.fixture
def make_drafter(make_target: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], SmallLm]:
    def make(kind: str) -> SmallLm:
        spec = make_target().spec
        ids = torch.arange(0, spec.vocab_size, 3)
        vocab = VocabMap(ids, spec.vocab_size) if kind == "trimmed" else None
        window = 6 if kind == "windowed" else None
        options = SmallLmOptions(layers=2, width=40, head_dim=20, window=window)
        drafter = SmallLm(options, spec, vocab)
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in drafter.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        monkeypatch.setattr(fast_llama, "drafts_in_int8", lambda stack: kind == "8 bits")
        rows = "specctl.models.native.step.most_rows"
        monkeypatch.setattr(rows, lambda dtype, width: 64)  # on CPUs with AMX, too
        return drafter.to("cpu", torch.bfloat16) if kind == "bfloat16" else drafter

    return make


def started(drafter: SmallLm) -> tuple[LmState, RoundView]:
    """Three rows of other lengths, one of which lacks two tokens, in slots out of order."""
    state = drafter.open(Space(4, CONTEXT, LENGTH, torch.device("cpu"), torch.float32))
    torch.manual_seed(6)
    texts = tuple(torch.randint(0, drafter.spec.vocab_size, (n,)).tolist() for n in (9, 14, 11))
    slots = (2, 0, 3)
    for slot, text in zip(slots, texts, strict=True):
        state.start(slot, text, {})
    state.num_cached[0] -= 1
    host = torch.tensor([slots, [t[-1] for t in texts], [len(t) - 1 for t in texts]])
    return state, RoundView(slots, *host.unbind(), texts)


def stepwise(state: LmState, view: RoundView, ids_K: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and their logits."""
    logits_BK, tokens, best = state.root(view), list[Tensor](), list[Tensor]()
    for step in range(LENGTH):
        row_B = best_token(logits_BK)
        tokens.append(row_B if ids_K is None else ids_K[row_B])
        best.append(logits_BK.gather(1, row_B[:, None])[:, 0].float())
        if step + 1 < LENGTH:
            parent_B1 = torch.full_like(row_B[:, None], step - 1)
            logits_BK = state.expand(tokens[-1][:, None], parent_B1)[:, 0]
    return torch.stack(tokens, 1), torch.stack(best, 1)


def drawn_stepwise(
    state: LmState, view: RoundView, sampling: SamplingBatch, noise: RoundNoise, vocab: Any
) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and the logits of all choices [B, N, K]."""
    ids_K = None if vocab is None else vocab.ids_K
    logits_BK, tokens, seen = state.root(view), list[Tensor](), list[Tensor]()
    for step in range(LENGTH):
        score_B1K = log_distribution(sampling.draft_distribution(logits_BK[:, None], ids_K))
        row_B = noise.draft_draw_BM(score_B1K, step)[:, 0]
        tokens.append(row_B if ids_K is None else ids_K[row_B])
        seen.append(logits_BK.float())
        if step + 1 < LENGTH:
            parent_B1 = torch.full_like(row_B[:, None], step - 1)
            logits_BK = state.expand(tokens[-1][:, None], parent_B1)[:, 0]
    return torch.stack(tokens, 1), torch.stack(seen, 1)


def caches(state: LmState) -> list[Tensor]:
    return [*state.kv.key_ZJLE, *state.kv.value_ZJLE]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_it_is_the_chain_of_whole_forwards(
    kind: str, make_drafter: Callable[[str], SmallLm], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = make_drafter(kind)
    ids_K = None if drafter.vocab is None else drafter.vocab.ids_K
    short, view = started(drafter)
    by_token = stepwise(short, view, ids_K)
    assert short._next_token is not None
    whole, view = started(drafter)
    found = whole.whole_chain(view, LENGTH)
    assert found is not None
    monkeypatch.setattr(LmState, "_read_next", lambda *given: None)
    slow, view = started(drafter)
    tokens, best = stepwise(slow, view, ids_K)
    assert len(tokens.unique()) > 4, "no chain of one token"
    for mine in (by_token, (found.token_BN, found.logits)):
        assert torch.equal(mine[0], tokens)
        assert torch.equal(mine[1], best)
    for state in (short, whole):
        assert all(map(torch.equal, caches(state), caches(slow)))
        assert torch.equal(state._growth.kept_B, slow._growth.kept_B)
        assert (state._growth.num_nodes, state._growth.is_chain) == (LENGTH - 1, True)


@needs_compiler
@pytest.mark.parametrize(
    "rows",
    [
        [Sampling(0.7), Sampling(1.0), Sampling(1.6)],
        [Sampling(0.7, top_k=9), Sampling(0.0), Sampling(1.6, top_p=0.9, min_p=0.01)],
    ],
    ids=["by temperature", "cut"],
)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drawn_it_is_the_chain_of_whole_forwards(
    kind: str,
    rows: list[Sampling],
    make_drafter: Callable[[str], SmallLm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = make_drafter(kind)
    sampling = SamplingBatch(rows, drafter.spec.vocab_size)
    noise = RoundNoise([5, 2**62, 7], [0, 9, 2], [8, 13, 10])
    draws = sampling.chain_draws(noise)
    assert draws is not None
    whole, view = started(drafter)
    found = whole.whole_chain(view, LENGTH, draws)
    assert found is not None
    monkeypatch.setattr(LmState, "_read_next", lambda *given: None)
    slow, view = started(drafter)
    tokens, logits = drawn_stepwise(slow, view, sampling, noise, drafter.vocab)
    assert len(tokens.unique()) > 4, "no chain of one token"
    assert torch.equal(found.token_BN, tokens)
    assert torch.equal(found.logits, logits)
    assert all(map(torch.equal, caches(whole), caches(slow)))


@needs_compiler
@torch.inference_mode()
def test_a_draw_that_cannot_be_told_is_left_to_whole_forwards(
    make_drafter: Callable[[str], SmallLm],
) -> None:
    drafter = make_drafter("stored")
    state, view = started(drafter)
    draws = RoundNoise([1, 2, 3], [0, 0, 0], [8, 13, 10]).chain_draws([torch.inf, 1.0, 1.0])
    codes = draws.codes

    def alike(count: int) -> Tensor:  # every choice has the same number, and the same score
        return torch.zeros_like(codes(count))

    assert state.whole_chain(view, LENGTH, draws._replace(codes=alike)) is None
    assert drawn_stepwise(
        state,
        view,
        SamplingBatch([Sampling(1.0)] * 3, drafter.spec.vocab_size),
        RoundNoise([1, 2, 3], [0, 0, 0], [8, 13, 10]),
        None,
    )[0].shape == (3, LENGTH)


@needs_compiler
@torch.inference_mode()
def test_states_for_stop_rules_are_those_of_whole_forwards(
    make_drafter: Callable[[str], SmallLm], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, found = make_drafter("stored"), []
    for _ in range(2):
        state, view = started(drafter)
        stepwise(state, view, None)
        found.append(state.hidden())
        monkeypatch.setattr(LmState, "_read_next", lambda *given: None)
    assert torch.equal(*found)


@needs_compiler
@pytest.mark.parametrize(
    ("sampling", "is_one_call"),
    [
        ({}, True),
        ({"temperature": 0.9, "seed": 3}, True),
        ({"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 3}, True),
        ({"temperature": 0.9, "logit_bias": {5: 2.0}, "seed": 3}, False),
    ],
)
@pytest.mark.parametrize("kind", ["stored", "trimmed"])
def test_texts_and_rounds_are_the_same_in_a_batch(
    kind: str,
    sampling: dict[str, Any],
    is_one_call: bool,
    make_target: Any,
    make_drafter: Callable[[str], SmallLm],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With caches that have to grow, and rows that come and go."""
    target, drafter, calls = make_target(), make_drafter(kind), []
    chain = LmState.whole_chain

    def counted(state: LmState, *given: Any) -> Any:
        calls.append(found := chain(state, *given))
        return found

    def text() -> Any:
        settings = Sampling(max_new_tokens=24, ignore_eos=True, **sampling)
        policy = make_policy({"policy": "chain", "length": LENGTH})
        made = generate(target, PROMPTS, drafter=drafter, sampling=settings, policy=policy, batch=2)
        return [out.token_ids for out in made.outputs], made.stats.rounds, made.stats.accepted

    monkeypatch.setattr(LmState, "whole_chain", counted)
    mine = text()
    assert all(calls)
    assert bool(calls) == is_one_call, "a bias is applied token by token"
    monkeypatch.setattr(LmState, "whole_chain", lambda *given: None)
    monkeypatch.setattr(LmState, "_read_next", lambda *given: None)
    assert mine == text()


@needs_compiler
@torch.inference_mode()
def test_logits_that_are_no_numbers_are_shown(make_drafter: Callable[[str], SmallLm]) -> None:
    drafter = make_drafter("stored")
    drafter.module.model.norm.weight[3] = torch.nan
    state, view = started(drafter)
    found = state.whole_chain(view, LENGTH)
    assert found is not None
    assert bool(found.logits.isnan().all())
    assert bool((found.token_BN == 0).all()), "as numpy's argmax: the first of them"
