"""Recorded calls: on buffers of their own and padded spans, a drafter says what it says without.

A graph is stood in for by the call itself, so that every CPU proves it; `gpu` runs the graphs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.cuda_graph import CudaGraph
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.vocab import VocabMap
from specctl.drafters.states import recorded
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.recorded import RecordedCall, RecordedCalls
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.drafters.kept_logits import kept_logits

PROMPTS = [[5, 17, 3, 88], [41, 9], [60, 2, 33, 71, 12, 8]]
DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_output": True, "qk_norm": True, "heads": 4, "kv_heads": 1}),
        ("eagle", {}),
        ("hass", {}),
        ("mtp", {}),
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
    drafter = make_heads(target, family, half, **options)
    target.lm.module.to(device)
    drafter.to(torch.device(device), torch.float64).bind(target.borrowed())
    for parameter in drafter.module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
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

    def counted(self: RecordedCalls, *given: Any) -> Any:
        found = run(self, *given)
        replayed[given[0]] += found is not None
        return found

    run = RecordedCalls.run
    graph: Any = CudaGraph if device == "cuda" else lambda call, device: call
    for policy in ({"policy": "chain", "length": 3}, {"policy": "dynamic-tree", "nodes": 5}):
        for batch in (1, 2):
            with monkeypatch.context() as patch:
                patch.setattr(FeatureState, "_records", lambda self: False)
                theirs = logits(policy, batch)
            with monkeypatch.context() as patch:
                patch.setattr(FeatureState, "_records", lambda self: self.is_recordable)
                patch.setattr(
                    "specctl.drafters.states.feature_state.RecordedCalls",
                    lambda: RecordedCalls(graph, 2),
                )
                patch.setattr(recorded, "SPAN", 16)  # several spans in a short text
                patch.setattr(RecordedCalls, "run", counted)
                mine = logits(policy, batch)
            torch.testing.assert_close(mine[0], theirs[0])
            assert mine[1] == theirs[1]
    is_drawn = device == "cpu" and temperature > 0  # drawn by a kernel, or token by token
    least = {"newest": 10, "node": 10} if is_drawn else {"newest": 5, "chain of 3": 10}
    assert all(replayed[name] >= times for name, times in least.items()), replayed


def test_recordings_that_return_much_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was longest not asked for goes, never the newest."""
    monkeypatch.setattr(recorded, "MOST_BYTES", 100)
    kv = SlotKV.of([KVShape(1, 4, 1, 4)], 1, 64, torch.float32, torch.device("cpu"))
    calls, made = RecordedCalls(lambda call, device: call, patience=1), list[str]()

    def said(name: str, width: int) -> None:
        kv.begin((0,), torch.tensor([0]), torch.tensor([0]), width, width, 0)

        def call(kv: SlotKV, own: RecordedCall) -> tuple[Tensor, ...]:
            return (own.inputs[0] + 1,)

        ids = torch.arange(width)[None]
        found = calls.run(name, kv, call, ids)
        assert found is not None
        assert torch.equal(found[0], ids + 1)
        made[:] = [key[0] for key in calls._recorded]

    for name, width, kept in (
        ("a", 5, ["a"]), ("b", 5, ["a", "b"]), ("a", 5, ["b", "a"]), ("c", 6, ["a", "c"]),
        ("d", 20, ["d"]), ("a", 5, ["a"]),
    ):  # fmt: skip
        said(name, width)
        assert made == kept
