"""A run goes on with more data: what is kept, what is added, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.assemble import measuring_prompts, measuring_rows
from specctl.train.data.rows.growth import ids_key
from specctl.train.data.rows.rows import TokenData
from specctl.train.metrics.metrics import read_log
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.step.optim import learning_rate
from specctl.train.stop import Interrupted
from specctl_testing.train import small_runs
from specctl_testing.train.small_runs import Ran, Talk, run

WORDS = [f"def name_{i}(value):\n    return value + {i} * {i % 7}\n" for i in range(120)]


@pytest.fixture(scope="module")
def target() -> Target:
    return small_runs.random_target(seed=0)


def prompts(path: Path, numbers: range) -> Path:
    """A file of that many prompts."""
    path.write_text("".join(json.dumps({"text": WORDS[i]}) + "\n" for i in numbers))
    return path


def recipe_of(source: Path | list[Path], family: str = "medusa", **sets: Any) -> Recipe:
    files = [str(file) for file in (source if isinstance(source, list) else [source])]
    fields = small_runs.SMALL | {
        "data.source": json.dumps(files), "data.format": "auto", "data.prompts": 24,
        "train.tau_every": 4,
    }  # fmt: skip
    fields |= {key.replace("__", "."): value for key, value in sets.items()}
    return load_recipe(family, sets=[f"{key}={value}" for key, value in fields.items()])


def answered(data: TokenData, rows: range | list[int]) -> dict[int, bytes]:
    """Key of the prompt of every document in the rows -> its tokens."""
    batch, found = data.batch(list(rows)), dict[int, bytes]()
    for ids_S, mask_S, document_S in zip(
        batch.ids_BS, batch.loss_mask_BS, batch.document_BS, strict=True
    ):
        for number in document_S[document_S >= 0].unique().tolist():
            ids = ids_S[document_S == number]
            first = int(mask_S[document_S == number].int().argmax())
            found[ids_key(ids[:first].tolist())] = ids.numpy().tobytes()
    return found


def held_out(recipe: Recipe, data: TokenData) -> range:
    return measuring_rows(recipe.data, data)


def journals(out: Path) -> dict[str, bytes]:
    return {file.parent.name: file.read_bytes() for file in out.glob("data/answers-*/*.bin")}


def test_more_prompts_are_answered_and_learned_and_nothing_is_done_twice(
    tmp_path: Path, target: Target
) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    small = recipe_of(file, "eagle3", data__features="offline", vocab__size="auto")
    run(small, out, target)
    before, kept = TokenData.open(out / "data"), journals(out)
    shards = {path: path.read_bytes() for path in out.glob("features/*/*.safetensors")}
    state = Checkpoints(out / "checkpoints", Talk()).newest()
    assert state is not None
    larger = recipe_of(
        file, "eagle3", data__features="offline", vocab__size="auto", data__prompts=48,
        train__steps=16,
    )  # fmt: skip
    with pytest.raises(IncompatibleError) as refused:
        run(larger, out, target)
    assert "data.prompts: 24 -> 48" in refused.value.found
    assert "--allow data" in refused.value.do
    assert journals(out) == kept
    ran = run(larger, out, target, allow=["data"])
    after = TokenData.open(out / "data")
    rows, held = before.num_rows, before.manifest.held
    assert f"more data: 24 answers in {rows} rows are kept, {held} of them held out; 24 more" in (
        said(ran, "are kept")
    )
    assert "8 steps are made, 8 to come, from the weights of step 8" in said(ran, "to come")
    assert ran.result.steps == 16
    assert after.manifest.answered == 48
    now = journals(out)
    assert len(now) == 2
    assert {name: now[name] for name in kept} == kept  # byte for byte
    assert {path: path.read_bytes() for path in shards} == shards
    assert sum(1 for _ in out.glob("features/*/*.safetensors")) > len(shards)
    trained, old = range(before.num_rows - 1), answered(before, range(before.num_rows))
    assert answered(after, list(trained)).items() <= old.items()
    assert len(answered(after, range(after.num_rows))) == 48
    lines = [line for line in read_log(out / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12, 14, 16]
    later = larger.train.model_copy(update={"steps": 8})
    assert lines[4]["lr"] == learning_rate(1, later)
    grown = Checkpoints(out / "checkpoints", Talk()).newest()
    assert grown is not None
    assert grown.fingerprint["vocab"] == state.fingerprint["vocab"]
    assert run(larger, out, target).result.steps == 16  # nothing is left that must be allowed


def said(ran: Ran, part: str) -> str:
    return next(line for line in ran.said if part in line)


def test_held_out_prompts_stay_held_out_and_tau_is_measured_on_the_same_ones(
    tmp_path: Path, target: Target
) -> None:
    first, second = prompts(tmp_path / "a.jsonl", range(40)), tmp_path / "b.jsonl"
    prompts(second, range(20, 120))  # half of the first file is in the second as well
    out, wanted, held, trained = tmp_path / "run", 30, set[int](), set[int]()
    measured = list[Any]()
    sources: list[Path] = [first]
    for steps in (4, 8, 12):
        recipe = recipe_of(sources, data__prompts=wanted, train__steps=steps, train__rows=2)
        run(recipe, out, target, allow=["data"])
        data = TokenData.open(out / "data")
        rows = held_out(recipe, data)
        held |= answered(data, rows).keys()
        trained |= answered(data, range(rows.start)).keys()
        measured.append(measuring_prompts(recipe.data, recipe.train.tau_prompts, target, data))
        assert data.manifest.answered == wanted
        sources, wanted = [first, second], wanted + 25
    assert not held & trained
    assert measured[0] == measured[1] == measured[2]
    assert len(held | trained) == 80


def test_a_run_that_is_killed_while_more_answers_are_written_goes_on(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.train.data.written import regenerate as module

    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    run(recipe_of(file), out, target)
    larger = recipe_of(file, data__prompts=48, train__steps=16)
    whole = tmp_path / "whole"
    run(recipe_of(file), whole, target)
    expected = run(larger, whole, target, allow=["data"])
    append, written = module.AnswerJournal.append, []

    def dying(*given: Any) -> None:
        append(*given)
        written.append(1)
        if len(written) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.AnswerJournal, "append", dying)
        with pytest.raises(KeyboardInterrupt):
            run(larger, out, target, allow=["data"])
    with pytest.raises(IncompatibleError, match="--allow data"):
        run(larger, out, target)
    ran = run(larger, out, target, allow=["data"])
    assert "regenerate: 5 of 24 prompts are answered, 19 are left to write" in ran.said
    assert ran.digest == expected.digest
    assert ran.result.tau == expected.result.tau


def test_a_run_that_is_stopped_among_the_steps_over_more_data_ends_as_if_it_were_not(
    tmp_path: Path, target: Target
) -> None:
    file = prompts(tmp_path / "a.jsonl", range(120))
    larger = recipe_of(file, "eagle3", data__prompts=48, train__steps=16)
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    run(recipe_of(file, "eagle3"), whole, target)
    expected = run(larger, whole, target, allow=["data"])
    run(recipe_of(file, "eagle3"), out, target)
    with small_runs.stopped_before(target, 3), pytest.raises(Interrupted):
        run(larger, out, target, allow=["data"])
    assert run(larger, out, target).digest == expected.digest


def test_more_data_without_more_steps_is_refused_before_anything_is_written(
    tmp_path: Path, target: Target
) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    run(recipe_of(file), out, target)
    before = journals(out), (out / "run.yaml").read_bytes(), (out / "finished.json").read_bytes()
    with pytest.raises(RecipeError) as caught:
        run(recipe_of(file, data__prompts=48), out, target, allow=["data"])
    assert "--steps 16" in caught.value.do
    now = journals(out), (out / "run.yaml").read_bytes(), (out / "finished.json").read_bytes()
    assert now == before


def test_rows_of_another_length_or_target_are_not_added(tmp_path: Path, target: Target) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    run(recipe_of(file), out, target)
    before = journals(out)
    longer = recipe_of(file, train__seq_len=48, train__steps=16)
    with pytest.raises(IncompatibleError, match="seq_len: 32 -> 48"):
        run(longer, out, target, allow=["data", "config"])
    more = recipe_of(file, data__prompts=48, train__steps=16)
    with pytest.raises(IncompatibleError, match="written by target"):
        run(more, out, small_runs.random_target(seed=1), allow=["data", "target"])
    assert journals(out) == before


@pytest.mark.parametrize(
    "selector", ["vocab-trim", pytest.param("fr-spec", marks=pytest.mark.proof)]
)
def test_the_draft_vocabulary_stays_however_it_was_counted(
    tmp_path: Path, target: Target, selector: str
) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(40)), tmp_path / "run"
    sets = {"vocab__size": 128, "vocab__selector": selector}
    run(recipe_of(file, "eagle3", **sets), out, target)
    before = Checkpoints(out / "checkpoints", Talk()).newest()
    prompts(file, range(120))
    larger = recipe_of(file, "eagle3", data__prompts=48, train__steps=16, **sets)
    run(larger, out, target, allow=["data"])
    after = Checkpoints(out / "checkpoints", Talk()).newest()
    assert before is not None
    assert after is not None
    assert after.step == 16
    assert before.fingerprint["vocab"] == after.fingerprint["vocab"]


def test_a_drafter_that_writes_itself_goes_on_with_more_prompts(
    tmp_path: Path, target: Target
) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    sets = {"data__on_policy": 0.5, "data__on_policy_every": 3}
    run(recipe_of(file, "distill", **sets), out, target)
    larger = recipe_of(file, "distill", data__prompts=48, train__steps=16, **sets)
    assert run(larger, out, target, allow=["data"]).result.steps == 16


def test_rows_that_came_and_were_not_learned_are_not_taken_for_those_of_the_run(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = prompts(tmp_path / "a.jsonl", range(120)), tmp_path / "run"
    small, larger = recipe_of(file), recipe_of(file, data__prompts=48, train__steps=16)
    run(small, out, target)

    def dying(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("specctl.train.run.make_job", dying)
        with pytest.raises(KeyboardInterrupt):
            run(larger, out, target, allow=["data"])
    assert TokenData.open(out / "data").manifest.answered == 48
    for recipe in (small, larger):
        with pytest.raises(IncompatibleError, match="--allow data"):
            run(recipe, out, target)
    ran = run(larger, out, target, allow=["data"])
    assert "continuing from step 8" in ran.said
    assert ran.result.steps == 16
