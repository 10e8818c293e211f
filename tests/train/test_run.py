"""train_draft from a recipe to a packaged drafter, on a random target; and two processes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from specctl.core.drafter import Drafter
from specctl.core.errors import (
    Exit,
    FileError,
    IncompatibleError,
    RecipeError,
    ResourceError,
)
from specctl.core.storage.files import Disk
from specctl.recipes.load import load_recipe, with_fields
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.metrics.metrics import read_log
from specctl.train.planning import capacity as room
from specctl.train.run import RunResult, train_draft
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.lock import locked
from specctl.train.saving.state import seed_everything
from specctl.train.stop import Interrupted
from specctl_testing.train import small_runs, toy
from specctl_testing.train.small_runs import Talk

SMALL = {
    "data.text_tokens": 0, "data.prompts": 24, "data.new_tokens": 16, "data.prompt_tokens": 8,
    "train.steps": 8, "train.rows": 4, "train.seq_len": 32, "train.save_every": 3,
    "train.tau_every": 4, "train.tau_prompts": 2, "train.tau_tokens": 6, "train.log_every": 2,
    "vocab.size": "null",
}  # fmt: skip


def small_recipe(name: str = "medusa", text: Path | None = None, **sets: Any) -> Recipe:
    fields = dict(SMALL)
    if text is not None:
        fields |= {"data.source": str(text), "data.format": "text"}
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe(name, sets=[f"{key}={value}" for key, value in fields.items()])


@pytest.fixture(scope="module", autouse=True)
def unplotted() -> None:
    """Runs of this file draw their curve, as those of users do."""


@pytest.fixture(scope="module")
def target() -> Target:
    return small_runs.random_target(seed=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    words = [f"def name_{i}(value):\n    return value + {i} * {i % 7}\n" for i in range(400)]
    path.write_text("\n\n".join(words))
    return path


class Package:
    """Remembers what it was asked to write."""

    def __init__(self) -> None:
        self.digest, self.acceptance = "", {}

    def __call__(
        self, drafter: Drafter, target: Target, out: Path, acceptance: Mapping[str, Any] | None
    ) -> None:
        assert drafter.module is not None
        assert not drafter.module.training
        self.digest, self.acceptance = toy.digest(drafter.tensors()), dict(acceptance or {})
        out.mkdir(exist_ok=True)


def run(
    recipe: Recipe, out: Path, target: Target, **fields: Any
) -> tuple[RunResult, Package, Talk]:
    package, talk = Package(), Talk()
    result = train_draft(
        recipe, out, target=target, package=package, reporter=talk,
        command=["specctl", "train-draft", "--out", "a folder"], **fields,
    )  # fmt: skip
    return result, package, talk


@pytest.mark.fast
@pytest.mark.parametrize("family", ["medusa", "eagle3", "distill"])
def test_a_recipe_becomes_a_drafter_with_everything_on_record(
    tmp_path: Path, target: Target, text: Path, family: str
) -> None:
    recipe = small_recipe(family, text)
    result, package, talk = run(recipe, tmp_path, target)
    assert result.steps == 8
    assert result.tau is not None
    assert result.tau == package.acceptance["tau"] >= 1.0
    best = Checkpoints(tmp_path / "checkpoints", talk).load(package.acceptance["step"])
    assert toy.digest(dict(best.tensors["model"])) == package.digest
    assert (tmp_path / "curve.png").stat().st_size > 1000
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written["command"] == "specctl train-draft --out 'a folder'"
    assert written["origin"]["train.steps"] == "--set"
    assert load_recipe(str(tmp_path)).to_json() == recipe.to_json()
    lines = read_log(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8]
    assert [line["step"] for line in lines if "tau" in line] == [4, 8]
    assert {"lr", "norm", "tokens_per_second", "seconds", "top1"} <= set(lines[0])
    assert any(said.startswith("trains ") for said in talk.said)


@pytest.mark.parametrize(("features", "at", "goes_on"), [("online", 5, 5), ("offline", 1, None)])
def test_a_stopped_run_resumed_by_the_same_call_gives_the_same_drafter(
    tmp_path: Path, target: Target, text: Path, features: str, at: int, goes_on: int | None
) -> None:
    """Stopped in a step, and while the target reads features."""
    recipe = with_fields(small_recipe("eagle3", text), {"data.features": features}, "test")
    _, whole, _ = run(recipe, tmp_path / "whole", target)
    taps = target.lm.dense
    calls: list[int] = []

    def stopping(*args: Any, **fields: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return taps(*args, **fields)

    target.lm.dense = stopping
    try:
        with pytest.raises(Interrupted) as caught:
            run(recipe, tmp_path / "cut", target)
    finally:
        target.lm.dense = taps
    assert caught.value.exit == Exit.INTERRUPTED
    assert caught.value.command == "specctl train-draft --out 'a folder'"
    _, resumed, talk = run(recipe, tmp_path / "cut", target)
    continued = [said for said in talk.said if said.startswith("continuing from step")]
    assert continued == ([] if goes_on is None else [f"continuing from step {goes_on}"])
    assert len(calls) == at  # it stopped there, and began nothing more
    assert resumed.digest == whole.digest
    assert resumed.acceptance == whole.acceptance
    (tmp_path / "cut" / "package").rmdir()
    _, again, _ = run(recipe, tmp_path / "cut", target)  # nothing is left to train
    assert again.digest == whole.digest


def test_a_run_without_room_for_what_it_will_write_is_refused_before_it_begins(
    tmp_path: Path, target: Target, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(Disk):
        def free(self, folder: Path) -> int:
            return 1000

    monkeypatch.setattr(room, "Disk", Small)
    with pytest.raises(ResourceError, match=r"does not fit here.*1.00 kB.*MB") as caught:
        run(small_recipe("medusa", text), tmp_path / "run", target)
    assert caught.value.exit == Exit.RESOURCES == 6
    assert not (tmp_path / "run").exists()


def files(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Every file below a folder, with the moment of its last change."""
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"]
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in found}


def test_a_finished_run_that_is_asked_for_again_is_left_alone(
    tmp_path: Path, target: Target, text: Path
) -> None:
    recipe, out = small_recipe("medusa", text), tmp_path / "run"
    first, _, _ = run(recipe, out, target)
    shutil.rmtree(out / "data")  # to make room; what was finished does not need it
    before = files(out)
    often = small_recipe("medusa", text, train__log_every=1, train__save_every=2)
    for same in (recipe, often):
        again, package, talk = run(same, out, target)
        assert again == first
        assert package.digest == ""
        assert files(out) == before
        assert any("is left as it is" in said for said in talk.said)
    shutil.rmtree(out / "checkpoints")
    assert run(recipe, out, target)[0] == first
    with pytest.raises(FileError, match="already holds a run"):
        run(recipe, out, target, resume=False)


def test_a_finished_run_is_not_taken_for_that_of_another_target_text_or_package(
    tmp_path: Path, target: Target, text: Path
) -> None:
    out = tmp_path / "run"
    source = tmp_path / "text.txt"
    source.write_text(text.read_text())
    recipe = small_recipe("medusa", source, data__regenerate="false")
    run(recipe, out, target)
    before = files(out)
    with pytest.raises(IncompatibleError, match="--allow target"):
        run(recipe, out, small_runs.random_target(seed=1))
    with pytest.raises(IncompatibleError, match=r"serve\.length"):
        run(small_recipe("medusa", source, data__regenerate="false", serve__length=2), out, target)
    source.write_text(text.read_text()[200:])
    with pytest.raises(IncompatibleError, match="--allow data"):
        run(recipe, out, target)
    assert files(out) == before
    with pytest.raises(RecipeError, match="all its steps"):
        run(recipe, out, target, allow=["data"])
    assert files(out) == before
    more = small_recipe("medusa", source, data__regenerate="false", train__steps=10)
    _, package, _ = run(more, out, target, allow=["data"])  # on purpose
    assert package.digest


def test_a_run_killed_before_its_first_save_begins_its_log_anew(
    tmp_path: Path, target: Target, text: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0}\n{"step": 4, "lo')
    run(small_recipe("medusa", text), tmp_path, target)
    lines = read_log(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [2, 4, 6, 8]


def test_a_run_that_goes_on_keeps_the_record_of_its_beginning(
    tmp_path: Path, target: Target, text: Path
) -> None:
    recipe = small_recipe("medusa", text)
    run(recipe, tmp_path, target)
    before = (tmp_path / "run.yaml").read_text()
    again = load_recipe(str(tmp_path))  # origins and command are others now
    train_draft(again, tmp_path, target=target, command=["specctl", "runs", "resume"])
    assert (tmp_path / "run.yaml").read_text() == before


def test_a_target_in_a_slow_dtype_is_said(
    tmp_path: Path, target: Target, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specctl.train.run.slow_dtype", lambda dtype, device: f"slow in {dtype}")
    _, _, talk = run(small_recipe("medusa", text, train__steps=2), tmp_path, target)
    said = "slow in torch.float32: --set target.dtype=auto computes in float32"
    assert talk.warnings.count(said) == 1


def test_a_run_is_not_continued_when_what_it_is_made_of_has_changed(
    tmp_path: Path, target: Target, text: Path
) -> None:
    run(small_recipe("medusa", text), tmp_path, target)
    with pytest.raises(IncompatibleError) as caught:
        run(small_recipe("medusa", text, train__learning_rate=0.001), tmp_path, target)
    assert "train.learning_rate: " in caught.value.found
    assert "--allow config" in caught.value.do
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written["recipe"]["train"]["learning_rate"] != 0.001  # a refused run changes nothing
    free = small_recipe("medusa", text, train__log_every=1, train__save_every=2)
    assert run(free, tmp_path, target)[0].steps == 8
    longer = small_recipe("medusa", text, train__steps=10)
    result, _, talk = run(longer, tmp_path, target, allow=["config"])
    assert result.steps == 10
    assert "continuing although train.steps: 8 -> 10" in talk.warnings
    text2 = tmp_path / "other.txt"
    text2.write_text(text.read_text()[200:])
    other = small_recipe("medusa", text2)
    with pytest.raises(IncompatibleError, match="--allow data"):
        run(other, tmp_path, target, allow=["config"])


def test_when_the_best_checkpoint_is_damaged_the_last_weights_are_packaged_and_measured(
    tmp_path: Path, target: Target, text: Path
) -> None:
    recipe = small_recipe("medusa", text, train__learning_rate=1e-7)  # too small to move tau
    result, first, _ = run(recipe, tmp_path, target)
    assert first.acceptance["step"] == 4  # a later equal tau does not replace it
    assert result.best_checkpoint is not None
    os.truncate(result.best_checkpoint / "model.safetensors", 100)
    (tmp_path / "package").rmdir()
    _, second, talk = run(recipe, tmp_path, target)
    assert second.acceptance["step"] == 8
    assert second.digest != first.digest
    assert any("model.safetensors has 100 bytes" in warning for warning in talk.warnings)


def test_another_target_is_refused(tmp_path: Path, target: Target, text: Path) -> None:
    recipe = small_recipe("medusa", text, data__regenerate="false")
    run(recipe, tmp_path, target)
    with pytest.raises(IncompatibleError, match="--allow target"):
        run(recipe, tmp_path, small_runs.random_target(seed=1))


def test_a_vocabulary_is_cut_before_training_and_pinned(
    tmp_path: Path, target: Target, text: Path
) -> None:
    recipe = small_recipe("medusa", text, vocab__size=256)
    run(recipe, tmp_path, target)
    found = Checkpoints(tmp_path / "checkpoints", SilentReporter()).newest()
    assert found is not None
    assert isinstance(found.fingerprint["vocab"], str)
    smaller = small_recipe("medusa", text, vocab__size=128)
    with pytest.raises(IncompatibleError, match="--allow vocab"):
        run(smaller, tmp_path, target, allow=["config"])


def test_a_locked_folder_and_a_folder_with_a_run_are_refused(
    tmp_path: Path, target: Target, text: Path
) -> None:
    recipe = small_recipe("medusa", text)
    with locked(tmp_path, SilentReporter()), pytest.raises(FileError) as caught:
        run(recipe, tmp_path, target)
    assert caught.value.exit == Exit.FILE == 4
    run(recipe, tmp_path, target)
    with pytest.raises(FileError, match="already holds a run"):
        run(recipe, tmp_path, target, resume=False)


@pytest.mark.parametrize(
    ("sets", "where"),
    [
        ({"drafter__options": "{headz: 3}"}, "drafter.options.headz"),
        ({"serve__policy": "direct"}, "serve.policy"),
        ({"vocab__size": 64, "vocab__selector": "drafted"}, "vocab.selector"),
        ({"train__trackers": "[nosuchtracker]"}, "train.trackers"),
    ],
)
def test_a_recipe_that_cannot_be_run_says_which_field(
    tmp_path: Path, target: Target, text: Path, sets: dict[str, Any], where: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        run(small_recipe("eagle3", text, **sets), tmp_path, target)
    assert caught.value.where == where
    assert caught.value.do


def test_a_family_without_weights_says_how_it_is_used(tmp_path: Path, target: Target) -> None:
    with pytest.raises(RecipeError, match="specctl generate --draft prompt-lookup"):
        run(small_recipe("prompt-lookup"), tmp_path, target)


def test_training_in_bf16_and_with_a_tracker_works(
    tmp_path: Path, target: Target, text: Path
) -> None:
    pytest.importorskip("tensorboard")
    sets = {"train__precision": "bf16", "train__trackers": "[tensorboard]"}
    run(small_recipe("eagle3", text, **sets), tmp_path, target)
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_the_same_seed_gives_the_same_numbers_everywhere() -> None:
    seed_everything(3)
    first = torch.rand(2)
    seed_everything(3)
    assert torch.equal(torch.rand(2), first)
    seed_everything(3, rank=1)
    assert not torch.equal(torch.rand(2), first)


def test_a_run_has_its_folders_name_and_one_curve_at_wandb(tmp_path: Path) -> None:
    from specctl.train.run import tracker_names

    (tmp_path / "link").symlink_to(tmp_path)
    names = [tracker_names(path)["wandb"] for path in (tmp_path / "a", tmp_path / "link" / "a")]
    assert names[0] == names[1]  # wherever a shared disk is mounted from, resumed or not
    assert names[0]["name"] == "a"
    assert names[0]["id"] != tracker_names(tmp_path / "b")["wandb"]["id"]
