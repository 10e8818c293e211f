"""Recorded calls: on buffers of their own and padded spans, a drafter says what it says without.

A graph is stood in for by the call itself, so that every CPU proves it; `gpu` runs the graphs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.device.cuda_graph import CudaGraph
from specctl.core.drafter import Drafter, RoundView
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.vocab import VocabMap
from specctl.drafters.states import recorded, recorded_draws
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.recorded import RecordedCall, RecordedCalls
from specctl.drafters.states.recorded_draws import DRAFT, RecordedDraws
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.noise import RoundNoise
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.drafters.kept_logits import kept_logits

PROMPTS = [[5, 17, 3, 88], [41, 9], [60, 2, 33, 71, 12, 8]]
DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


def recorded_drafter(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    device: str,
    family: str,
    vocab: VocabMap | None = None,
    **options: Any,
) -> Drafter:
    """With other weights than it began with, on that device as its target is, whose rounds are
    taken to be recorded."""
    monkeypatch.setattr(Target, "is_recorded", True)
    drafter = make_heads(target, family, vocab, **options)
    target.lm.module.to(device)
    drafter.to(torch.device(device), torch.float64).bind(target.borrowed())
    for parameter in drafter.module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return drafter


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {"norm_output": True, "qk_norm": True, "heads": 4, "kv_heads": 1}),
        *(
            pytest.param(family, {}, marks=pytest.mark.proof)
            for family in ("eagle3", "eagle", "hass", "mtp")
        ),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_calls_say_the_same(
    family: str,
    options: dict[str, Any],
    temperature: float,
    device: str,
    make_target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_target(num_layers=2, dtype=torch.float64)
    half = VocabMap(torch.arange(0, target.spec.vocab_size, 2), target.spec.vocab_size)
    drafter = recorded_drafter(monkeypatch, target, device, family, half, **options)
    replayed: Counter[str] = Counter()

    def logits(policy: dict[str, Any], batch: int) -> tuple[list[Tensor], list[Any]]:
        sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=24, ignore_eos=True)
        with kept_logits(monkeypatch) as found:
            made = generate(
                target, PROMPTS, drafter=drafter, policy=make_policy(policy), sampling=sampling,
                batch=batch,
            )  # fmt: skip
        best = [(x if x.dim() == 1 else x.amax(-1).flatten()).float() for x in found]
        return best, [output.token_ids for output in made.outputs]

    def counted(self: RecordedCalls, *given: Any, **more: Any) -> Any:
        found = run(self, *given, **more)
        replayed[given[0]] += found is not None
        return found

    run = RecordedCalls.run
    graph: Any = CudaGraph if device == "cuda" else lambda call, device: call
    for policy in ({"policy": "chain", "length": 3}, {"policy": "dynamic-tree", "nodes": 5}):
        for batch in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(FeatureState, "_records", lambda self, slots: False)
                theirs = logits(policy, batch)
            with monkeypatch.context() as patch:
                patch.setattr(FeatureState, "_records", lambda self, slots: self.is_recordable)
                patch.setattr(
                    "specctl.drafters.states.feature_state.RecordedCalls",
                    lambda: RecordedCalls(graph, 2),
                )
                patch.setattr(recorded, "SPAN", 16)  # several spans in a short text
                patch.setattr(RecordedCalls, "run", counted)
                patch.setattr(RecordedDraws, "of", lambda *given: None)  # token by token
                mine = logits(policy, batch)
            torch.testing.assert_close(mine[0], theirs[0])
            assert mine[1] == theirs[1]
    least = {"newest": 10, "node": 10} if temperature else {"newest": 5, "chain of 3": 10}
    assert all(replayed[name] >= times for name, times in least.items()), replayed


def drawn(scores: Tensor, code: Tensor, stream: int, *counted: Tensor, inner: int) -> Tensor:
    """What the kernel finds, on a CPU."""
    seeds, rounds = (each.tolist() for each in counted)
    assert stream == DRAFT
    noise = RoundNoise(seeds, rounds, [0] * len(seeds))
    assert torch.equal(code, noise.chain_draws([1.0]).codes(scores.shape[-1]))
    return noise.draft_draw_BM(scores, inner >> 24)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["eagle3", "mtp"])
@pytest.mark.parametrize(
    "cuts", [{}, {"top_p": 0.7}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.3}, {"top_k": 3}], ids=str
)
def test_a_drawn_chain_is_that_of_token_by_token(
    cuts: dict[str, Any],
    family: str,
    device: str,
    make_target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Temperatures differ from row to row; distributions are those that the rule asks for."""
    target = make_target(num_layers=2, dtype=torch.float64)
    drafter = recorded_drafter(monkeypatch, target, device, family)
    shared: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, **cuts}
    samplings = [Sampling(temperature=t, seed=3 + n, **shared) for n, t in enumerate((0.8, 0.5))]
    if device == "cpu":
        monkeypatch.setattr(recorded_draws, "has_triton", lambda: True)
        kernel = SimpleNamespace(draw=drawn)
        monkeypatch.setitem(sys.modules, "specctl.models.triton.draw_kernel", kernel)
    graph: Any = CudaGraph if device == "cuda" else lambda call, device: call
    monkeypatch.setattr(
        "specctl.drafters.states.feature_state.RecordedCalls", lambda: RecordedCalls(graph, 2)
    )
    made = []
    whole_chain, found = FeatureState.whole_chain, list[Any]()

    def counted(self: FeatureState, view: RoundView, *given: Any) -> Any:
        found.append(whole_chain(self, view, *given))
        return found[-1]

    monkeypatch.setattr(FeatureState, "whole_chain", counted)
    for records in (False, True):
        monkeypatch.setattr(FeatureState, "_records", lambda self, slots, records=records: records)
        engine = Engine(target, drafter, make_policy({"policy": "chain", "length": 3}), num_slots=2)
        engine.open(64)
        requests = [Request(tuple(p), s) for p, s in zip(PROMPTS, samplings, strict=False)]
        done = engine.run(requests)
        made.append([(each.tokens, each.stats.rounds, each.stats.accepted) for each in done])
    assert made[0] == made[1]
    whole = [each.distribution_BNK for each in found if each is not None]
    assert len(whole) > 4
    for distribution_BNK in whole:
        torch.testing.assert_close(
            distribution_BNK.sum(-1), torch.ones_like(distribution_BNK[..., 0])
        )
        if "top_k" in cuts:
            assert int((distribution_BNK > 0).sum(-1).max()) <= cuts["top_k"]


def test_recordings_that_return_much_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was longest not asked for goes, never the newest."""
    monkeypatch.setattr(recorded, "MOST_BYTES", 100)
    monkeypatch.setattr(recorded, "MOST", 4)
    kv = one_slot()
    calls, owner = RecordedCalls(lambda call, device: call, patience=1), Owner()

    def kept(name: str, width: int) -> str:
        kv.begin((0,), torch.tensor([0]), torch.tensor([0]), width, width, 0)
        ids = torch.arange(width)[None]
        found = calls.run(name, kv, owner.more, ids, more=(1,))
        assert found is not None
        assert torch.equal(found[0], ids + 1)
        return "".join(key[0] for key in calls._recorded)

    given = [("a", 5), ("b", 5), ("a", 5), ("c", 6), ("d", 20), ("a", 5)]
    assert [kept(*each) for each in given] == ["a", "ab", "ba", "ac", "d", "a"]
    assert [kept(name, 1) for name in "bcdef"] == ["ab", "abc", "abcd", "bcde", "cdef"]


class Owner:
    """Of a call that is recorded."""

    def more(self, amount: int, kv: SlotKV, own: RecordedCall) -> tuple[Tensor, ...]:
        return (own.inputs[0] + amount,)

    def fails(self, kv: SlotKV, own: RecordedCall) -> tuple[Tensor, ...]:
        raise RuntimeError("CUDA error: out of memory")


def one_slot() -> SlotKV:
    kv = SlotKV.of([KVShape(1, 4, 1, 4)], 1, 64, torch.float32, torch.device("cpu"))
    kv.begin((0,), torch.tensor([0]), torch.tensor([0]), 1, 1, 0)
    return kv


def test_recordings_go_with_their_state_and_when_they_are_forgotten() -> None:
    """At once: a cache of gigabytes does not wait for the garbage collector."""

    class Graph:
        def __init__(self, call: Any, device: Any) -> None:
            self.call = call

        def __call__(self) -> Any:
            return self.call()

    kv, owner = one_slot(), Owner()
    owner.calls = RecordedCalls(Graph, patience=1)  # type: ignore[attr-defined]
    calls, ids = owner.calls, torch.zeros(1, 1, dtype=torch.long)  # type: ignore[attr-defined]
    gc.disable()
    try:
        assert calls.run("a", kv, owner.more, ids, more=(1,)) is not None
        (recording,) = calls._recorded.values()
        graph = weakref.ref(recording.replay)
        del recording
        calls.forget()
        assert graph() is None
        assert calls.run("a", kv, owner.more, ids, more=(1,)) is not None
        state, graph = weakref.ref(owner), weakref.ref(next(iter(calls._recorded.values())).replay)
        del owner, calls
        assert state() is None
        assert graph() is None
    finally:
        gc.enable()


def test_what_a_gpu_cannot_record_is_said_once() -> None:
    def record(call: Any, device: Any) -> Any:
        call()
        return call

    calls, owner, kv = RecordedCalls(record, patience=1), Owner(), one_slot()
    ids = torch.zeros(1, 1, dtype=torch.long)
    with pytest.warns(UserWarning, match="not recorded, and slower: CUDA error: out of memory"):
        assert calls.run("a", kv, owner.fails, ids) is None
    assert calls.run("a", kv, owner.more, ids, more=(1,)) is None
