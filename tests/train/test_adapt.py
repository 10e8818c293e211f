"""Adapting: only the additions train, for every trained family; merging them changes nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import LoraPart
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import read_adapters
from specctl.train.planning.plan import plan
from specctl.train.step.lora import additions, attach, merge, save_adapter, unnameable

# What no module of its own holds, so that an adapter has no name for it.
NAMELESS = {
    "dflare": {"fusion"},
    "dfly": {"fusion"},
    "domino": {"memory"},
    "falcon": {"lstm"},
    "flash": {"slots"},
    "lilicorr": {"lattice"},
    "uno": {"layers"},
    "jump": {"layers"},
    **{name: {"tokens"} for name in ("k-forcing", "lexical-unit", "pass", "ppd", "s3d")},
}
# A random target is sure of nothing; a correction learns beside the block from the first step on.
# FLASH's queries learn from images alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "lexical-unit": {"unit": 0.01},
    "domino": {"base_weight": 0.5},
    "jump": {"num_heads": 2},
    "flash": {"latents": None},
}
FAMILIES = [name for name, family in families().items() if family.trainable]


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def learn(drafter: Drafter, batch: Any) -> float:
    torch.manual_seed(5)  # of noise and anchors
    out = drafter.loss(batch)
    mean = out.sum / out.count
    if mean.requires_grad:
        mean.backward()
    return float(mean.detach())


def batch_of(target: Target, drafter: Drafter) -> Any:
    """Two packed rows with everything that the family needs."""
    from specctl.core.batch import TrainBatch
    from specctl.train.features.capture import capture

    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(0, 24, (2, 20), generator=generator)
    at_BS = torch.arange(20).expand(2, 20)
    plain = TrainBatch(ids_BS, at_BS >= 2, torch.zeros_like(ids_BS), at_BS)
    return capture(target, plain, drafter.needs())


def make(target: Target, name: str, vocab: VocabMap | None = None) -> Drafter:
    torch.manual_seed(3)
    options = families()[name].options(**OPTIONS.get(name, {}))
    drafter = families()[name].build(options, target.spec, vocab)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    with torch.no_grad():  # a trained drafter has no zero matrices
        for parameter in drafter.trainable().values():
            parameter += 0.05 * torch.randn_like(parameter)
    return drafter


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_additions_learn_and_merged_they_draft_the_same(
    target: Target, name: str, tmp_path: Path
) -> None:
    drafter = make(target, name, VocabMap(torch.arange(0, 24, 2), 24))
    names, before = list(drafter.tensors()), {n: t.clone() for n, t in drafter.tensors().items()}
    batch = batch_of(target, drafter)
    untouched = learn(drafter, batch)
    attach(drafter, LoraPart(rank=4, alpha=8.0))
    trainable = drafter.trainable()
    assert trainable
    assert all(p.shape[0 if n.endswith("down_RI") else 1] <= 4 for n, p in trainable.items())
    assert learn(drafter, batch) == pytest.approx(untouched, abs=1e-6)
    optimizer = torch.optim.Adam(trainable.values(), lr=3e-2)
    for _ in range(5):
        optimizer.zero_grad()
        learn(drafter, batch)
        optimizer.step()
    optimizer.zero_grad()
    adapted = learn(drafter, batch)
    assert adapted < untouched - 0.01
    assert all(a.up_OR.detach().abs().max() > 0 for _, a in additions(drafter.module))
    nameless = set(unnameable(drafter.module))
    assert {n.partition(".")[0] for n in nameless} == NAMELESS.get(name, set())
    if not nameless:
        save_adapter(drafter.module, tmp_path / "adapter", LoraPart(rank=4, alpha=8.0), "base")
    factors = {n: (a.scale * a.up_OR @ a.down_RI).detach() for n, a in additions(drafter.module)}
    merge(drafter.module)
    after = drafter.tensors()
    assert sorted(after) == sorted(names)
    assert learn(drafter, batch) == pytest.approx(adapted, abs=1e-5)
    moved = {n for n in names if not torch.equal(after[n], before[n])}
    assert moved == set(factors)
    for n in moved:
        torch.testing.assert_close(after[n], before[n] + factors[n])
    if not nameless:
        check_format(tmp_path / "adapter", factors)


def check_format(folder: Path, factors: dict[str, Tensor]) -> None:
    """One rank and alpha for all, as engines read them; the products are what was learned."""
    saved = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert 2 * len(factors) == len(saved)
    for n, product in factors.items():
        key = f"base_model.model.{n.removesuffix('.weight')}"
        down, up = saved[f"{key}.lora_A.weight"], saved[f"{key}.lora_B.weight"]
        assert down.shape[0] == up.shape[1] == 4
        torch.testing.assert_close(2.0 * up @ down, product)
    (found,) = read_adapters([str(folder)])
    assert {f"{module}.weight" for module in found.ranks} == set(factors)


@pytest.mark.parametrize("name", ["small-lm", "eagle3", "medusa"])
def test_peft_reads_the_adapter_and_merges_what_we_merge(
    target: Target, name: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    ours, theirs = make(target, name), make(target, name)
    attach(ours, LoraPart(rank=40, alpha=20.0))  # more than some matrices are wide
    torch.manual_seed(6)
    with torch.no_grad():
        for parameter in ours.trainable().values():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_adapter(ours.module, tmp_path / "adapter", LoraPart(rank=40, alpha=20.0), None)
    merge(ours.module)
    batch = batch_of(target, ours)
    untouched = learn(theirs, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a key that peft missed or did not know
        wrapped = peft.PeftModel.from_pretrained(theirs.module, tmp_path / "adapter")
    wrapped.merge_and_unload()
    merged = theirs.tensors()
    for key, tensor in ours.tensors().items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-5, rtol=1e-5)
    assert learn(theirs, batch) == pytest.approx(learn(ours, batch), abs=1e-5)
    assert learn(theirs, batch) != pytest.approx(untouched, abs=1e-3)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapted_drafter_is_saved_and_restored_with_its_additions(
    target: Target, name: str
) -> None:
    """What a checkpoint holds is enough to continue: weights and additions."""
    first, second = make(target, name), make(target, name)
    for drafter in (first, second):
        attach(drafter, LoraPart(rank=2))
    with torch.no_grad():
        for parameter in first.trainable().values():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    second.load_tensors(first.tensors())
    batch = batch_of(target, first)
    assert learn(second, batch) == pytest.approx(learn(first, batch), abs=1e-5)


def test_targets_name_the_weights_that_are_adapted(target: Target) -> None:
    drafter = make(target, "small-lm")
    attach(drafter, LoraPart(targets=("q_proj", "v_proj")))
    names = [name for name, _ in additions(drafter.module)]
    assert sorted(name.split(".")[-2] for name in names) == ["q_proj", "v_proj"]
    with pytest.raises(RecipeError, match="no weight of the drafter"):
        attach(make(target, "medusa"), LoraPart(targets=("q_proj",)))


def test_fresh_weights_are_not_adapted(target: Target) -> None:
    with pytest.raises(RecipeError, match="never trained"):
        attach(make(target, "small-lm"), LoraPart(), is_trained=False)


def test_a_plan_counts_only_the_additions_as_trained() -> None:
    made = plan(load_recipe("adapt", ["drafter.options={layers: 2}"]), flops_per_second=1e9)
    assert 0 < made.trainable < made.parameters / 10
