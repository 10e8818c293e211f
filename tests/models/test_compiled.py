"""Recorded rounds: the same text as eager, in a bounded number of shapes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.models import compiled
from specctl.models.compiled import SPAN, WIDTHS, CompiledLM
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.llama.llama import Rotary, default_inv_freq
from specctl.runtime.generate import Generated, generate
from specctl.runtime.measure.bench import Contender, bench
from specctl.runtime.measure.timed import Timed
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4])
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"policy": "chain", "length": 4},
    "static-tree": {"policy": "static-tree", "branch": (3, 2, 1)},
}
DEVICES: list[Any] = ["cpu"]
if torch.cuda.is_available():
    DEVICES.append(pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that call the forward itself: fixed buffers and padding without a compiler."""
    monkeypatch.setattr(compiled, "record", lambda forward, device, backend: forward)


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=2, dtype=torch.float64)


def written(target: Target, policy: str, **fields: Any) -> Generated:
    """Continuations of the prompts, of which two rows are alive at once."""
    drafter = None
    if policy != "plain":
        torch.manual_seed(1)
        drafter = SmallLm(SmallLmOptions(layers=1), target.spec).to(target.device, target.dtype)
    settings: dict[str, Any] = {"max_new_tokens": 11, "temperature": 0.8, "seed": 3, **fields}
    return generate(
        target,
        PROMPTS,
        drafter=drafter,
        sampling=Sampling(**settings),
        policy=make_policy(POLICIES[policy]) if drafter is not None else None,
        batch=2,
    )


def texts(made: Generated) -> list[tuple[int, ...]]:
    return [output.token_ids for output in made.outputs]


@pytest.mark.parametrize(
    ("policy", "temperature"),
    [  # every policy, greedily or drawn; the others are proofs
        pytest.param(policy, temperature, marks=[pytest.mark.proof] if (i + j) % 2 else [])
        for i, policy in enumerate(POLICIES)
        for j, temperature in enumerate((0.8, 0.0))
    ],
)
def test_padded_rounds_write_the_same_text(
    target: Target, as_it_is: None, policy: str, temperature: float
) -> None:
    recorded = replace(target, lm=CompiledLM(target.lm))
    wanted = texts(written(target, policy, temperature=temperature))
    assert texts(written(recorded, policy, temperature=temperature)) == wanted
    assert isinstance(recorded.lm, CompiledLM)
    assert recorded.lm.num_shapes > 0


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_windows_and_foreign_modules_are_padded_too(
    make_target: Callable[..., Target], as_it_is: None, model_type: str
) -> None:
    target = make_target(model_type, num_layers=2)
    recorded = replace(target, lm=CompiledLM(target.lm))
    assert isinstance(target.lm, HfLM) == (model_type == "gemma2")
    wanted = texts(written(target, "static-tree", temperature=0.0))
    assert texts(written(recorded, "static-tree", temperature=0.0)) == wanted


def test_the_number_of_recordings_does_not_grow_with_the_text(
    target: Target, as_it_is: None
) -> None:
    lm = CompiledLM(target.lm)
    counts = []
    for tokens in (20, 50, 50):
        written(replace(target, lm=lm), "chain", max_new_tokens=tokens)
        gc.collect()  # recordings belong to a store, which is lent again once its engine is gone
        counts.append(lm.num_shapes)
    rows, whole_or_not, widths = 2, 2, WIDTHS.index(8) + 1
    assert counts[1] <= rows * whole_or_not * widths  # all positions fit into one span
    assert counts[2] == counts[1]


def test_a_finished_engine_hands_on_its_store_and_recordings(
    target: Target, as_it_is: None
) -> None:
    lm = CompiledLM(target.lm)
    first = lm.new_kv(2, 100)
    second = lm.new_kv(2, 100)
    assert first.key_ZJLE is not second.key_ZJLE
    del second
    stores = first.key_ZJLE
    del first
    gc.collect()
    assert lm.new_kv(2, 90).key_ZJLE is stores
    gc.collect()
    assert lm.new_kv(2, SPAN).key_ZJLE is not stores


@pytest.mark.parametrize("policy", POLICIES)
def test_the_store_comes_back_with_its_engine_at_once(
    target: Target, as_it_is: None, policy: str
) -> None:
    """Not when the garbage collector runs: until then a second engine would run unrecorded."""
    lm = CompiledLM(target.lm)
    gc.collect()
    gc.disable()
    try:
        written(replace(target, lm=lm), policy)
        again = lm.new_kv(2, 20)
        assert lm.is_recorded_upon(again)
    finally:
        gc.enable()


def test_a_copy_of_a_model_that_was_recorded_records_for_itself(target: Target) -> None:
    lm = copy.deepcopy(target.lm)
    assert isinstance(lm, FastLlama)
    lm.recorded = CompiledLM(lm)  # as `for_drafting` leaves it on a GPU
    for other in (copy.copy(lm), copy.deepcopy(lm), copy.deepcopy(lm.recorded).lm):
        assert isinstance(other, FastLlama)
        assert other.recorded is None
        assert other.spec == lm.spec
    assert lm.recorded is not None


@pytest.mark.parametrize(("is_recorded", "warming"), [(True, 3), (False, 1)])
def test_a_benchmark_warms_up_with_all_texts_that_it_records(
    target: Target, is_recorded: bool, warming: int
) -> None:
    given: list[int] = []

    def run(prompts: Any, sampling: Sampling, on_answers: Any) -> Timed:
        given.append(len(prompts))
        return Timed(len(prompts), 1.0, ((1,),) * len(prompts), 1.0)

    lm = CompiledLM(target.lm) if is_recorded else target.lm
    samplings = [Sampling(max_new_tokens=1)]
    bench(replace(target, lm=lm), [Contender("plain", run)], PROMPTS, samplings, repeats=2)
    assert given == [warming, 3, 3]


def test_recordings_of_weights_that_have_changed_are_not_replayed(
    make_target: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph reads joined copies, which are gone then."""

    def frozen(forward: Any, device: Any, backend: str) -> Any:
        out = forward()
        return lambda: out

    monkeypatch.setattr(compiled, "record", frozen)
    target = make_target("qwen3", num_layers=1, dtype=torch.float64)
    lm = CompiledLM(target.lm)
    kv, slot = lm.new_kv(1, 8), torch.zeros(1, dtype=torch.long)

    def logits(which: Any) -> torch.Tensor:
        kv.begin((0,), slot, slot, 1, 1, 0)
        masks = lm.chain_masks(slot, 1, 1)
        out = which.forward(torch.tensor([[3]]), torch.zeros(1, 1, dtype=torch.long), masks, kv)
        assert out.logits_BTV is not None
        return out.logits_BTV.clone()

    before = logits(lm)
    with torch.no_grad():
        for parameter in target.lm.module.parameters():
            parameter.mul_(1.5)
    after = logits(lm)
    assert not after.equal(before)
    torch.testing.assert_close(after, logits(target.lm))


def test_a_grown_table_of_positions_leaves_what_graphs_read(monkeypatch: Any) -> None:
    rotary = Rotary(default_inv_freq(8, 10_000.0))
    monkeypatch.setattr(Rotary, "_table", lambda self, rows, device: torch.zeros(rows, 16))
    cuda = torch.device("cuda")
    small = rotary.table(200, cuda, torch.float32)
    assert rotary.table(300, cuda, torch.float32).shape[0] == 512
    assert [table is small for table in rotary.outgrown] == [True]


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_forward_equals_eager(make_target: Callable[..., Target], device: str) -> None:
    target = make_target(num_layers=1, dtype=torch.float64)
    target.lm.module.to(device)
    recorded = replace(target, lm=CompiledLM(target.lm, backend="eager"))
    assert texts(written(recorded, "plain")) == texts(written(target, "plain"))


@pytest.mark.proof  # a compiler of half a minute; the same recordings by backends above
def test_inductor_writes_the_same_text(make_target: Callable[..., Target]) -> None:
    target = make_target(num_layers=1, dtype=torch.float64)
    recorded = replace(target, lm=CompiledLM(target.lm))
    sampling = Sampling(max_new_tokens=8)
    wanted = texts(generate(target, PROMPTS[:1], sampling=sampling))
    assert texts(generate(recorded, PROMPTS[:1], sampling=sampling)) == wanted
