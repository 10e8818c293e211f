"""Block drafters are derived so that engines read them, and the plan says which do."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specctl.api.derive import engines_of
from specctl.core.errors import IncompatibleError
from specctl.core.vocab import VocabMap
from specctl.export.formats import export, format_for
from specctl.recipes.load import load_recipe
from specctl.recipes.targets import resolve
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import load_part
from specctl.train.assemble import family_options, trainable_family
from specctl.train.features.stored_rows import StoredRows
from specctl.train.init.initial import completed
from specctl.train.planning import derive as deriving
from specctl.train.planning import for_engines
from specctl.train.planning.derive import Derived, derive
from specctl.train.planning.for_engines import Whole, engine_reading
from specctl.train.planning.loss_flops import LossFlops, loss_flops
from specctl.train.planning.target_shape import target_shape
from specctl_testing.export.engine_cases import packaged
from specctl_testing.train.known_pace import SMALL_PACE, is_known

NO = IncompatibleError("no", found="x", expected="y", do="--to specctl")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as somebody's own folder."""
    folder = tmp_path_factory.mktemp("targets") / "other"
    shutil.copytree(str(resolve("tiny").path), folder)
    return folder


def derived(monkeypatch: pytest.MonkeyPatch, other: Path, family: str, times: float) -> Derived:
    """By a known pace; a step over the whole vocabulary is so many times as dear."""
    is_known(monkeypatch)
    each = (times - 1) / (6144 - 900 * times)  # so that all ids are `times` as dear as 900
    monkeypatch.setattr(for_engines, "loss_flops", lambda *given: LossFlops(1, each))
    recipe = load_recipe(family, flags={"target.name": str(other)})
    return derive(recipe, 600.0, SilentReporter(), foresee=engines_of)


@pytest.mark.parametrize(
    ("family", "times", "reads"),
    [
        ("dflash2", 1.9, ("vllm", "sglang")),  # else no engine reads it
        ("dflash2", 2.1, ()),
        ("dspark", 1.9, ("vllm", "llama.cpp")),  # as two do anyhow
        ("xpress", 1.9, ("vllm",)),
    ],
)
def test_the_engines_that_the_plan_names_read_the_drafter(
    family: str,
    times: float,
    reads: tuple[str, ...],
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = derived(monkeypatch, other, family, times)
    recipe, said = made.recipe, made.engines
    assert said is not None
    assert said.reads == reads
    chosen = {choice.field: choice for choice in made.choices}
    assert recipe.drafter.options["mask_id"] == chosen["drafter.options.mask_id"].value
    assert recipe.vocab.size == (None if reads and family != "dspark" else "auto")
    if recipe.vocab.size is None:
        assert f"a step costs {times} times as much" in chosen["vocab.size"].reason
    elif family == "dflash2":
        assert said.text().startswith("specctl alone serves it; vllm, sglang: --set vocab.size")
        # A width of 160 does not hold the scores of 16 candidates.
        more = r"vocab.size=null \(a step.* times as much\) and train with fewer candidates"
        assert re.search(more, said.others["llama.cpp"])
    target = load_part(recipe.target, device="cpu", is_read_only=True)
    vocab = None if recipe.vocab.size is None else VocabMap(torch.arange(900), 6144)
    method = trainable_family(recipe.drafter, None)
    options = family_options(method, completed(recipe.drafter, target.spec))
    drafter = method.build(options, target.spec, vocab)
    drafter.bind(target.borrowed())
    package = packaged(drafter, target, tmp_path / "package")
    for engine in reads:
        export(package, format_for(engine, family), tmp_path / engine, target)
    for engine in said.others:
        with pytest.raises(IncompatibleError):
            export(package, format_for(engine, family), tmp_path / engine, target)


def test_what_a_user_sets_stays_and_the_plan_says_what_it_costs(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_known(monkeypatch)
    recipe = load_recipe("dflash2", ["vocab.size=300"], flags={"target.name": str(other)})
    made = derive(recipe, 600.0, SilentReporter(), foresee=engines_of)
    assert made.recipe.vocab.size == 300
    assert made.engines is not None
    assert made.engines.reads == ()
    assert "--set vocab.size=null" in made.engines.others["sglang"]
    assert made.to_json()["engines"]["reads"] == ()


def test_families_without_blocks_name_no_engines(
    other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_known(monkeypatch)
    monkeypatch.setattr(deriving, "stand_in", lambda *given: None)
    recipe = load_recipe("medusa", flags={"target.name": str(other)})
    assert derive(recipe, 600.0, SilentReporter(), foresee=engines_of).engines is None


@pytest.mark.parametrize(("sets", "is_counted"), [([], False), (["data.prompts=60"], True)])
def test_features_of_another_number_of_prompts_are_not_counted(
    sets: list[str], is_counted: bool, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was calibrated has no amount in particular; the number that is chosen names the rows."""
    is_known(monkeypatch)
    monkeypatch.setattr(deriving, "stand_in", lambda *given: None)
    pace = replace(SMALL_PACE, stored=StoredRows(9, 9))
    monkeypatch.setattr(deriving, "calibrate", lambda *given, **more: pace)
    recipe = load_recipe("medusa", sets, flags={"target.name": str(other)})
    assert recipe.data.regenerate
    made = derive(recipe, 600.0, SilentReporter())
    assert (made.pace.stored is not None) is is_counted


def test_the_cost_of_a_vocabulary_is_that_of_its_products() -> None:
    recipe = load_recipe("dflash", ["train.seq_len=64", "drafter.options.anchors=10"])
    shape = target_shape(recipe.target)
    found = loss_flops(recipe.drafter, recipe.train, shape)
    assert found is not None
    # Of each place the logits, their gradient and the target's own logits: 6 D.
    places = (10 + 5 + 1) * 5
    assert found.each_id / (6 * shape.spec.hidden_size) == pytest.approx(places, rel=0.1)
    train = recipe.train.model_copy(update={"seq_len": 128})
    longer = loss_flops(recipe.drafter, train, shape)
    assert longer is not None
    assert longer.each_id == found.each_id  # as many anchors
    assert 1.2 * found.beside < longer.beside < 2 * found.beside


def test_a_vocabulary_is_chosen_by_what_it_gains() -> None:
    none = {"vllm": NO, "sglang": NO}
    whole = Whole(none, {"vllm": None, "sglang": NO}, 1.9)
    assert whole.is_worth_it
    assert whole.gained == ("vllm",)
    assert not replace(whole, times=2.1).is_worth_it
    assert not replace(whole, times=None).is_worth_it
    one = {"vllm": None, "sglang": NO}
    assert Whole(one, {"vllm": None, "sglang": None}, 1.2).is_worth_it
    assert not Whole(one, {"vllm": None, "sglang": None}, 1.3).is_worth_it
    said = engine_reading(none, whole)
    assert said.others["vllm"] == "--set vocab.size=null (a step costs 1.9 times as much)"
    assert said.others["sglang"] == "--to specctl"
