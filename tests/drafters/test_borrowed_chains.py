"""Chains drafted by the target's own layers, in one call or with a short call a token: the chain of
ordinary forwards bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.drafter import Drafter, RoundView, Space
from specctl.core.forward.exit_states import ExitStates
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.drafters import family
from specctl.drafters.self_speculation.swift import SwiftState
from specctl.drafters.states.borrowed_state import BorrowedState
from specctl.models.llama.llama import LlamaModel
from specctl.models.native import library as built
from specctl.models.native.chain import NextToken
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.gumbel_max import best_token
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants import inflate as module
from specctl.runtime.target.variants.inflate import Size, inflate

LENGTH, LAYERS, WIDTH, CONTEXT = 4, 6, 32, 24
TEXTS = (9, 14, 11)
SLOTS = (2, 0, 3)
PROMPTS = ([3, 1, 4, 1, 5], [7], [9, 2, 6])
OPTIONS: dict[str, dict[str, Any]] = {
    "layer-skip": {"layers": 2},
    "skip-layers": {"skip_attention": (1, 4), "skip_mlp": (2, 3, 5)},
    "depth-decay": {"most": 0.85, "least": 0.3, "over": 3},
    "swift": {"window": 8, "every": 4},
    "quantspec": {},
}
KINDS = ("float32", "bfloat16", "int8", "inflated")
CASES = [(name, "float32") for name in OPTIONS]
CASES += [(name, kind) for kind in KINDS[1:] for name in ("layer-skip", "depth-decay")]
pytestmark = pytest.mark.skipif(
    built.library().functions is None, reason=f"no compiled step: {built.library().missing}"
)


@pytest.fixture(scope="module")
def targets(make_model: Any) -> dict[str, Target]:
    """Layers that differ, in every form that the compiled step reads them in."""
    model = make_model("llama", num_layers=LAYERS, hidden=WIDTH, vocab=96)
    base = Target.from_model(model)
    assert isinstance(base.lm.module, LlamaModel)
    found = {"float32": base, "int8": Target.from_model(model)}
    found["int8"].lm.is_int8 = True  # type: ignore[attr-defined]
    found["bfloat16"] = Target.from_model(
        make_model("llama", num_layers=LAYERS, hidden=WIDTH, vocab=96).bfloat16()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.SIZES, "1m", Size(1_000_000, 4 * WIDTH, 13))
        found["inflated"] = inflate(base, "1m")
    return found


def drafter_of(target: Target, name: str) -> Drafter:
    method = family(name)
    drafter = method.build(method.options(**OPTIONS.get(name, {})), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def started(target: Target, name: str, shared: bool = True) -> tuple[BorrowedState, RoundView]:
    """Three rows of other lengths in slots out of order, whose texts the target has read. The
    target's own cache, or a copy, is one token too short for the chain."""
    lm, drafter = target.lm, drafter_of(target, name)
    kv, max_len = lm.new_kv(4, max(TEXTS) + LENGTH - 2), max(TEXTS) - 4
    space = Space(4, max_len, 0, torch.device("cpu"), lm.dtype, None, kv if shared else None)
    state = drafter.open(space)
    assert isinstance(state, BorrowedState)
    generator = torch.Generator().manual_seed(6)
    texts = tuple(torch.randint(0, 96, (n,), generator=generator).tolist() for n in TEXTS)
    for slot, text in zip(SLOTS, texts, strict=True):
        ids_1S, start_1 = torch.tensor([text[:-1]]), torch.zeros(1, dtype=torch.long)
        S = len(text) - 1
        kv.begin((slot,), start_1 + slot, start_1, S, S, 0)
        masks, at_1S = lm.chain_masks(start_1, S, S), torch.arange(S)[None]
        out = lm.forward(ids_1S, at_1S, masks, kv, drafter.needs().taps)
        state.start(slot, text, {tap: value[0] for tap, value in out.taps.items()})
    host = torch.tensor([SLOTS, [t[-1] for t in texts], [len(t) - 1 for t in texts]])
    return state, RoundView(SLOTS, *host.unbind(), texts)


def stepwise(state: BorrowedState, view: RoundView) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and their logits."""
    logits_BV, tokens, best = state.root(view), list[Tensor](), list[Tensor]()
    for step in range(LENGTH):
        tokens.append(best_token(logits_BV))
        best.append(logits_BV.gather(1, tokens[-1][:, None])[:, 0].float())
        if step + 1 < LENGTH:
            parent_B1 = torch.full_like(tokens[-1][:, None], step - 1)
            logits_BV = state.expand(tokens[-1][:, None], parent_B1)[:, 0]
    return torch.stack(tokens, 1), torch.stack(best, 1)


def written(kv: SlotKV) -> list[Tensor]:
    return [store[:, :, : max(TEXTS) + LENGTH] for store in (*kv.key_ZJLE, *kv.value_ZJLE)]


def nothing(*given: object) -> None:
    """In place of a call for chains."""


@pytest.mark.parametrize(("name", "kind"), CASES)
@torch.inference_mode()
def test_it_is_the_chain_of_ordinary_forwards(
    name: str, kind: str, targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shared in (True, False):
        short, view = started(targets[kind], name, shared)
        by_token = stepwise(short, view)
        assert (short._next_token is not None) == (kind != "inflated")
        whole, view = started(targets[kind], name, shared)
        found = whole.whole_chain(view, LENGTH)
        assert found is not None
        with monkeypatch.context() as patch:
            patch.setattr(BorrowedState, "_read_next", nothing)
            slow, view = started(targets[kind], name, shared)
            tokens, best = stepwise(slow, view)
        assert len(tokens.unique()) > 4, "no chain of one token"
        for mine in (by_token, (found.token_BN, found.logits)):
            assert torch.equal(mine[0], tokens)
            assert torch.equal(mine[1], best)
        exits = slow.exit_states()
        assert (exits is not None) == (shared and name == "layer-skip")
        for state in (short, whole):
            assert all(map(torch.equal, written(state.kv), written(slow.kv)))
            assert (state.growth.num_nodes, state.growth.is_chain) == (LENGTH, True)
            own = state.exit_states()
            if isinstance(exits, ExitStates):
                assert own is not None
                assert torch.equal(own.residual_BMD, exits.residual_BMD)
                assert (own.layer, own.residual_BMD.dtype) == (2, slow.lm.dtype)
        assert torch.equal(short.hidden(), slow.hidden())


@pytest.mark.parametrize("name", ["layer-skip", "skip-layers", "depth-decay", "swift"])
@pytest.mark.parametrize("how", ["greedy", "sampled", "cut", "biased", "stopped", "scheduled"])
def test_texts_and_rounds_are_the_same_in_a_batch(
    name: str, how: str, targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that come and go; `scheduled`: a stop rule that looks at no token."""
    target, chains, tokens = targets["float32"], list[Any](), list[bool]()
    chain, read = BorrowedState.whole_chain, NextToken.read
    stop = {"stopped": "draft-verify", "scheduled": "heuristic"}.get(how)
    serve = {"policy": "chain", "length": LENGTH, "stop": stop}
    heat: dict[str, Any] = {"temperature": 0.9 * (how in ("sampled", "cut", "biased"))}
    heat |= {"cut": {"top_k": 20, "top_p": 0.95}, "biased": {"logit_bias": {5: 2.0}}}.get(how, {})

    def counted(state: BorrowedState, *given: Any) -> Any:
        chains.append(found := chain(state, *given))
        return found

    def noted(self: NextToken, *given: Any, **more: Any) -> Any:
        tokens.append(True)
        return read(self, *given, **more)

    def text() -> Any:
        settings = Sampling(max_new_tokens=20, ignore_eos=True, seed=3, **heat)
        drafter, policy = drafter_of(target, name), make_policy(serve)
        made = generate(target, PROMPTS, drafter=drafter, sampling=settings, policy=policy, batch=2)
        return [out.token_ids for out in made.outputs], made.stats.rounds, made.stats.accepted

    monkeypatch.setattr(BorrowedState, "whole_chain", counted)
    monkeypatch.setattr(NextToken, "read", noted)
    mine = text()
    if how not in ("biased", "stopped"):
        assert any(found is not None for found in chains)
    else:
        assert not chains
        assert tokens
    monkeypatch.setattr(BorrowedState, "whole_chain", nothing)
    monkeypatch.setattr(BorrowedState, "_read_next", nothing)
    assert mine == text()


@torch.inference_mode()
def test_where_there_is_no_such_call_nothing_is_done(
    targets: dict[str, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Families that read nodes in their own way, rows that run other layers, no compiled step."""
    target = targets["float32"]
    for name in ("calm", "del", "easyspec"):
        state, view = started(target, name, shared=name != "easyspec")
        assert state.whole_chain(view, LENGTH) is None
    state, view = started(target, "swift", shared=False)
    assert isinstance(state, SwiftState)
    state.stores.at(SLOTS[1]).best = SubLayers.span(0, LAYERS)
    assert state.whole_chain(view, LENGTH) is None
    tokens, _ = stepwise(state, view)
    assert tokens.shape == (3, LENGTH)
    monkeypatch.setattr(LlamaModel, "native", nothing)
    state, view = started(target, "skip-layers")
    assert state.whole_chain(view, LENGTH) is None
    stepwise(state, view)
    assert state._next_token is None


@torch.inference_mode()
def test_logits_that_are_no_numbers_are_shown(make_model: Any) -> None:
    target = Target.from_model(make_model("llama", num_layers=LAYERS, hidden=WIDTH, vocab=96))
    state, view = started(target, "layer-skip")
    assert isinstance(target.lm.module, LlamaModel)
    target.lm.module.model.norm.weight[3] = torch.nan
    found = state.whole_chain(view, LENGTH)
    assert found is not None
    assert bool(found.logits.isnan().all())
