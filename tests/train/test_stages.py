"""Pipelines: stages are ordinary runs that hand on their weights, and stop and resume as one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import stages_of
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.sources.corpus import part_of
from specctl.train.run import train_draft
from specctl.train.runs.stages import plans, stages, train_recipe
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.stop import Interrupted
from specctl_testing.train.small_runs import Talk

TWO = """
name: two
drafter: {options: {layers: 1, width: 16, head_dim: 8, loss: ce}}
data: {format: text, regenerate: false}
train: {rows: 4, seq_len: 32, steps: 4, save_every: 2, tau_every: 2, tau_prompts: 2, tau_tokens: 4}
vocab: {size: 40}
stages:
  first: {train: {learning_rate: 1e-2}}
  second: {drafter: {options: {loss: kl}}, train: {steps: 2, seed: 1}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "two.yaml").write_text(TWO)
    text = tmp_path / "words.txt"
    text.write_text("\n\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(200)))
    return load_recipe(str(tmp_path / "two.yaml"), [f"data.source={text}"])


def write(
    drafter: Drafter, target: Target, folder: Path, acceptance: Mapping[str, Any] | None
) -> None:
    """A packager in four lines."""
    del target, acceptance
    folder.mkdir(parents=True, exist_ok=True)
    assert drafter.vocab is not None
    save_file({**drafter.tensors(), "ids": drafter.vocab.ids_K}, folder / "model.safetensors")


def read(folder: str, target: Target) -> Drafter:
    """And its loader."""
    from specctl.core.vocab import VocabMap

    tensors = load_file(Path(folder, "package", "model.safetensors"))
    options = SmallLmOptions(layers=1, width=16, head_dim=8)
    drafter = SmallLm(options, target.spec, VocabMap(tensors.pop("ids"), target.spec.vocab_size))
    drafter.load_tensors(tensors)
    return drafter


def run(recipe: Recipe, out: Path, target: Target, **given: Any) -> Any:
    talk = given.pop("reporter", Talk())
    result = train_recipe(
        recipe, out, target=target, package=write, load=read, reporter=talk, **given
    )
    return result, talk


def model(folder: Path, step: int) -> dict[str, Tensor]:
    return dict(Checkpoints(folder / "checkpoints", SilentReporter()).load(step).tensors["model"])


def test_each_stage_starts_from_the_weights_of_the_one_before(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    result, talk = run(recipe, out, chat_target)
    assert [p.name for p in sorted(out.glob("stage-*"))] == ["stage-1-first", "stage-2-second"]
    assert result.out == out
    assert result.package == out / "package"
    assert result.steps == 6
    assert load_recipe(str(out)).to_json() == recipe.to_json()
    handed = load_file(out / "stage-1-first" / "package" / "model.safetensors")
    best = json.loads((out / "stage-1-first" / "finished.json").read_text())["best"]
    del handed["ids"]
    trained = model(out / "stage-1-first", int(Path(best).name[4:]))
    assert all(torch.equal(handed[name], trained[name]) for name in trained)
    assert any("starts from" in line and "stage-1-first" in line for line in talk.said)
    alone = stages(stages_of(recipe), out)[1].recipe
    assert alone.drafter.init == str(out / "stage-1-first")
    assert alone.drafter.options["loss"] == "kl"
    assert alone.train.seed == 1
    assert alone.origin["train.steps"] == "stage second"


def test_a_second_call_keeps_finished_stages_as_they_are(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    first, _ = run(recipe, out, chat_target)
    files = {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    again, talk = run(recipe, out, chat_target)
    assert again == first
    assert files == {p: p.stat().st_mtime_ns for p in out.rglob("*.safetensors")}
    assert sum("finished before" in line for line in talk.said) == 2


class StopAt(Talk):
    """Asks the run to stop when its second stage has begun to train."""

    def task(self, title: str, total: int, unit: str) -> Any:
        import os
        import signal
        from contextlib import contextmanager

        whole = super().task(title, total, unit)

        @contextmanager
        def watched() -> Any:
            with whole as advance:

                def tell(count: int = 1, note: str = "") -> None:
                    advance(count, note)
                    if title == "train" and total == 2 and count == 1:
                        os.kill(os.getpid(), signal.SIGTERM)

                yield tell

        return watched()


def test_a_stopped_pipeline_resumes_in_the_stage_that_was_running(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "cut"
    run(recipe, whole, chat_target)
    with pytest.raises(Interrupted):
        run(recipe, out, chat_target, reporter=StopAt())
    assert (out / "stage-1-first" / "finished.json").exists()
    assert not (out / "stage-2-second" / "finished.json").exists()
    _, talk = run(recipe, out, chat_target)
    assert "continuing from step 1" in talk.said
    straight, resumed = (model(o / "stage-2-second", 2) for o in (whole, out))
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_stage_finished_under_another_recipe_is_refused(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(recipe, out, chat_target)
    first = recipe.stages["first"].model_copy(update={"train": {"learning_rate": 0.5}})
    other = recipe.model_copy(update={"stages": {**recipe.stages, "first": first}})
    with pytest.raises(IncompatibleError, match="started differently"):
        run(other, out, chat_target)


def test_a_stage_whose_package_was_lost_runs_again(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(recipe, out, chat_target)
    shutil.rmtree(out / "package")
    _, talk = run(recipe, out, chat_target)
    assert (out / "package").exists()
    assert sum("finished before" in line for line in talk.said) == 1


def test_a_stage_may_name_any_earlier_one(recipe: Recipe, tmp_path: Path) -> None:
    second = recipe.stages["second"]
    third = second.model_copy(update={"drafter": {"init": "stage:first"}})
    longer = recipe.model_copy(update={"stages": {**recipe.stages, "third": third}})
    assert stages(stages_of(longer), tmp_path)[2].recipe.drafter.init == str(
        tmp_path / "stage-1-first"
    )
    fresh = second.model_copy(update={"drafter": {"init": None}})
    alone = recipe.model_copy(update={"stages": {**recipe.stages, "second": fresh}})
    assert stages(stages_of(alone), tmp_path)[1].recipe.drafter.init is None
    later = recipe.model_copy(update={"stages": {"third": third, **recipe.stages}})
    with pytest.raises(RecipeError, match="not run before"):
        stages_of(later)


def test_a_later_stage_of_too_long_rows_is_refused_before_the_first_begins(
    recipe: Recipe, chat_target: Target, tmp_path: Path
) -> None:
    second = recipe.stages["second"].model_copy(update={"train": {"seq_len": 1_000_000}})
    longer = recipe.model_copy(update={"stages": {**recipe.stages, "second": second}})
    with pytest.raises(RecipeError, match=r"train\.seq_len.*1,000,000"):
        run(longer, tmp_path / "run", chat_target)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("field", "value"), [("train", {"stepz": 3}), ("data", {"prompts": 0}), ("vocab", {"size": 1})]
)
def test_a_stage_is_checked_like_a_recipe(recipe: Recipe, field: str, value: Any) -> None:
    wrong = recipe.stages["first"].model_copy(update={field: value})
    with pytest.raises(RecipeError) as caught:
        stages_of(recipe.model_copy(update={"stages": {"first": wrong}}), "my.yaml")
    assert caught.value.where.startswith("my.yaml:stages.first:" + field)


def test_the_order_of_stages_is_part_of_the_digest(recipe: Recipe) -> None:
    turned = recipe.model_copy(update={"stages": dict(reversed(recipe.stages.items()))})
    assert turned.digest != recipe.digest


def test_fastdraft_plans_three_stages_and_set_reaches_into_them(tmp_path: Path) -> None:
    fast = load_recipe("fastdraft", ["stages.align.train.steps=7"])
    runs = [(stage.recipe, stage.folder) for stage in stages(stages_of(fast), tmp_path)]
    made = plans(runs)
    assert [part.name for part, _ in made] == [
        "fastdraft-pretrain", "fastdraft-continue", "fastdraft-align",
    ]  # fmt: skip
    assert made[2][1].steps == 7
    assert [part.data.regenerate for part, _ in made] == [False, False, True]
    assert made[0][0].data.source == "corpus:docstring"


def test_a_plain_recipe_is_one_run(recipe: Recipe, chat_target: Target, tmp_path: Path) -> None:
    plain = recipe.model_copy(update={"stages": {}})
    result, _ = run(plain, tmp_path / "a", chat_target)
    same = train_draft(plain, tmp_path / "b", target=chat_target)
    assert result.tau == same.tau
    assert not list((tmp_path / "a").glob("stage-*"))


def test_the_corpus_falls_into_docstrings_and_code() -> None:
    doc = '    """Says what the function returns, at some length.\n\n    And why."""\n'
    text = f'def f(x):\n{doc}    return x\n\nNAME = \'"""\'\n'
    assert part_of(text, "docstring") == doc
    assert part_of(text, "code") == text.replace(doc, "")
    assert part_of(text, "") == text
    with pytest.raises(RecipeError, match="no such part"):
        part_of(text, "docstrings")
