"""A recipe derived for a target: what is chosen, from what, and what is left as it was given."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.api.derive import (
    derive_recipe,
    keep,
    seconds_of,
)
from specctl.core.errors import RecipeError
from specctl.core.storage.files import Disk
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.targets import resolve
from specctl.recipes.written import recipe_text
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.target import Target, load_part
from specctl.train.data.prepare import write_answers_alone
from specctl.train.data.written.answers_file import write_answers
from specctl.train.planning import data_facts
from specctl.train.planning import derive as deriving
from specctl.train.planning.amounts import EPOCHS, FILL, LEAST_STEPS, MOST_EPOCHS
from specctl.train.planning.data_facts import DataFacts, SomePrompts
from specctl.train.planning.derive import Derived, derive
from specctl.train.planning.other_programs import OtherPrograms
from specctl.train.planning.pace import Pace
from specctl.train.planning.work import QUESTION_TOKENS
from specctl.train.step.products import bf16_gain
from specctl_testing.runtime.chat_targets import spoken_with
from specctl_testing.train.known_pace import is_idle
from specctl_testing.train.of_recipe import digest_of, foreign, kept_by, preparation_of

PACE = Pace(once=5.0, answer=0.5, step=2.0, tau=1.0, save=0.1, read=0.001)
# A million prompts of 20 tokens; answers of 40 tokens, where 48 are the most.
FACTS = DataFacts(10**6, 20.0, 24, 40.0, 16, 0.5, 900, 0.95)
SMALL = ("data.new_tokens=48", "data.prompt_tokens=24")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target as somebody's own folder."""
    folder = tmp_path_factory.mktemp("targets") / "other"
    shutil.copytree(str(resolve("tiny").path), folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "words.jsonl"
    texts = (f"def function_{i}(value):\n    return value + {i}\n" for i in range(60))
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(autouse=True)
def known_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    is_idle(monkeypatch)
    monkeypatch.setattr(deriving, "calibrate", lambda *given, **more: PACE)


@pytest.fixture(autouse=True)
def known_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose products of bfloat16 are not faster."""
    monkeypatch.setattr(deriving, "bf16_gain", lambda device: 1.0)


@pytest.fixture
def known_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts of data that are not looked at, for a target that is not loaded."""
    facts_are(monkeypatch, FACTS)
    monkeypatch.setattr(deriving, "stand_in", lambda *given: None)


def seconds_named(error: RecipeError) -> float:
    """The time that an error names as long enough."""
    found = re.match(r"--time (\d+m)", str(error.do))
    assert found is not None, error.do
    return seconds_of(found[1])


def facts_are(monkeypatch: pytest.MonkeyPatch, facts: DataFacts) -> None:
    some = SomePrompts(facts.prompts, ())
    monkeypatch.setattr(deriving, "some_prompts", lambda data: some)
    monkeypatch.setattr(deriving, "look_at_data", lambda *given: facts)


def recipe_of(other: Path, prompts: Path, *sets: str, name: str = "eagle3") -> Recipe:
    flags = {"target.name": str(other), "data.source": str(prompts)}
    return load_recipe(name, [*SMALL, *sets], flags=flags)


def derived(recipe: Recipe, seconds: float = 600.0) -> Derived:
    return derive(recipe, seconds, SilentReporter())


def reasons(made: Derived) -> dict[str, str]:
    return {choice.field: choice.reason for choice in made.choices}


def spent(recipe: Recipe) -> float:
    """Seconds of answers, of reading them and of steps, by the pace above."""
    each = PACE.answer * 40 / 48 + PACE.read * 60
    return recipe.data.prompts * each + recipe.train.steps * PACE.step


@pytest.mark.usefixtures("known_data")
def test_time_is_divided_between_answers_and_steps(other: Path, prompts: Path) -> None:
    found = [derived(recipe_of(other, prompts), seconds).recipe for seconds in (600.0, 1200.0)]
    for recipe, seconds in zip(found, (600.0, 1200.0), strict=True):
        assert 0.85 * seconds < spent(recipe) < 0.95 * seconds
        read = recipe.train.steps * recipe.train.rows * recipe.train.seq_len * FILL
        assert read / (recipe.data.prompts * 60) == pytest.approx(EPOCHS, rel=0.1)
    shorter, longer = found
    assert longer.data.prompts / shorter.data.prompts == pytest.approx(2.0, rel=0.05)
    assert longer.train.steps / shorter.train.steps == pytest.approx(2.0, rel=0.1)


def test_sizes_are_those_of_the_target_and_its_data(other: Path, prompts: Path) -> None:
    made = derived(recipe_of(other, prompts))
    recipe, why = made.recipe, reasons(made)
    assert recipe.drafter.options["intermediate"] is None
    assert recipe.drafter.options["ttt_steps"] == 3  # the method stays
    assert recipe.train.seq_len == 256
    assert recipe.train.rows * recipe.train.seq_len == 4096
    assert (recipe.vocab.size, recipe.vocab.min_coverage) == ("auto", 0.95)
    assert "about " in why["vocab.min_coverage"]
    assert "of 6,144 ids" in why["vocab.min_coverage"]
    assert "in 16 tried" in why["data.prompts"]
    assert recipe.data.features == "offline"
    assert all(recipe.origin[field] == "derived" for field in why if "options" not in field)


@pytest.mark.usefixtures("known_data")
def test_what_was_set_by_hand_is_kept(other: Path, prompts: Path) -> None:
    sets = ("train.steps=77", "train.rows=4", "vocab.size=512", "data.features=online")
    made = derived(recipe_of(other, prompts, *sets))
    recipe, why = made.recipe, reasons(made)
    assert (recipe.train.steps, recipe.train.rows, recipe.vocab.size) == (77, 4, 512)
    assert recipe.data.features == "online"
    assert not {"train.steps", "train.rows", "vocab.size", "data.new_tokens"} & {*why}
    assert recipe.data.new_tokens == 48


@pytest.mark.usefixtures("known_data")
def test_few_prompts_are_not_learned_by_heart(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts_are(monkeypatch, replace(FACTS, prompts=2000))
    made = derived(recipe_of(other, prompts), 7200.0)
    recipe, why = made.recipe, reasons(made)
    assert recipe.data.prompts == 2000
    assert "all prompts that there are" in why["data.prompts"]
    most = 2000 * 60 * MOST_EPOCHS / (FILL * recipe.train.rows * recipe.train.seq_len)
    assert recipe.train.steps == int(most)
    assert "give more prompts" in why["train.steps"]


@pytest.fixture
def chatty(chat_target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A chat model, whatever the recipe names; it writes the questions that the data lack."""
    target = spoken_with(chat_target)
    monkeypatch.setattr(deriving, "stand_in", lambda *given: target)
    return target


@pytest.mark.usefixtures("known_data", "chatty")
def test_a_chat_model_writes_the_prompts_that_the_data_lack(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts_are(monkeypatch, replace(FACTS, prompts=200))
    made = derived(recipe_of(other, prompts), 1200.0)
    recipe, why = made.recipe, reasons(made)
    assert recipe.data.source == (str(prompts), "self")
    more = recipe.data.prompts - 200
    assert more > 200
    assert (
        f"200 prompts are too few for 20 min: the target writes {more:,} more"
        in (why["data.source"])
    )
    assert "every row is read 4.0 times" in why["train.steps"]
    questions = more * PACE.answer * 40 / 48 * QUESTION_TOKENS / 40
    assert 0.85 * 1200 < spent(recipe) + questions < 0.95 * 1200


@pytest.mark.usefixtures("known_data", "chatty")
def test_enough_prompts_and_a_number_of_your_own_stay_alone(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = derived(recipe_of(other, prompts), 600.0)
    assert made.recipe.data.source == str(prompts)
    facts_are(monkeypatch, replace(FACTS, prompts=200))
    mine = derived(recipe_of(other, prompts, "data.prompts=200"), 1200.0)
    assert mine.recipe.data.source == str(prompts)
    assert "more would only learn them by heart" in reasons(mine)["train.steps"]


@pytest.mark.usefixtures("chatty")
def test_three_prompts_are_no_error_where_the_target_writes_the_others(
    other: Path, tmp_path: Path
) -> None:
    file = tmp_path / "few.jsonl"
    texts = ("What is a drafter?", "Name two rivers of Asia.", "Write a short poem on rain.")
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    made = derived(recipe_of(other, file), 1200.0)
    assert made.recipe.data.source == (str(file), "self")
    assert reasons(made)["data.source"].startswith("3 prompts are too few for 20 min")
    assert "in 16 tried" in reasons(made)["data.prompts"]
    keep(made, tmp_path / "run", digest_of(recipe_of(other, file)))
    (tmp_path / "run" / "run.yaml").write_text("recipe: {}")
    again = kept_by(recipe_of(other, file), tmp_path / "run", 1200.0)
    assert again is not None
    assert (again.to_json(), again.origin) == (made.recipe.to_json(), made.recipe.origin)
    another = recipe_of(other, shutil.copy(file, tmp_path / "b.jsonl"))
    assert kept_by(another, tmp_path / "run", 1200.0) is None
    (tmp_path / "run" / "checkpoints" / "step000003").mkdir(parents=True)
    mine = kept_by(another, tmp_path / "run", 1200.0)
    assert mine is not None
    assert mine.data.source == str(tmp_path / "b.jsonl")
    with pytest.raises(RecipeError, match="too few prompts"):
        derived(recipe_of(other, file, "data.prompts=3"), 1200.0)


@pytest.mark.usefixtures("known_data")
def test_a_time_that_is_too_short_names_one_that_is_not(other: Path, prompts: Path) -> None:
    with pytest.raises(RecipeError, match="too short") as caught:
        derived(recipe_of(other, prompts), 20.0)
    enough = seconds_named(caught.value)
    assert derived(recipe_of(other, prompts), enough).recipe.train.steps >= LEAST_STEPS


@pytest.mark.usefixtures("known_data")
def test_a_calibration_ends_where_its_pieces_need_more_than_the_time(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def known_so_far(*given: Any, so_far: Any, **more: Any) -> Pace:
        so_far(replace(PACE, once=0.0, answer=0.0, tau=0.0, save=0.0))
        return PACE

    monkeypatch.setattr(deriving, "calibrate", known_so_far)
    with pytest.raises(RecipeError, match="too short") as caught:
        derived(recipe_of(other, prompts), 80.0)
    assert str(caught.value.expected).startswith("more than ")
    assert caught.value.do == "--time 42m, to leave room for the others"
    with pytest.raises(RecipeError, match="too short") as caught:
        derived(recipe_of(other, prompts), 100.0)
    assert str(caught.value.expected).startswith("at least ")
    monkeypatch.setattr(OtherPrograms, "share", lambda counted: 0.6)
    with pytest.raises(RecipeError) as caught:
        derived(recipe_of(other, prompts), 100.0)
    assert "other programs kept 60% of the processors busy" in str(caught.value.found)
    assert "when those have ended" in str(caught.value.do)


@pytest.mark.usefixtures("known_data")
def test_what_is_known_so_far_refuses_no_time_that_is_enough(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RecipeError) as caught:
        derived(recipe_of(other, prompts), 20.0)
    enough = seconds_named(caught.value)

    def piece_by_piece(*given: Any, so_far: Any, **more: Any) -> Pace:
        for known in (replace(PACE, once=0.0, tau=0.0, answer=0.0), replace(PACE, answer=0.0)):
            so_far(known)
        return PACE

    monkeypatch.setattr(deriving, "calibrate", piece_by_piece)
    assert derived(recipe_of(other, prompts), enough).recipe.train.steps >= LEAST_STEPS


@pytest.mark.usefixtures("known_data")
def test_features_stay_with_the_target_where_the_disk_is_full(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(Disk):
        def free(self, folder: Path) -> int:
            return 1_000_000

    monkeypatch.setattr(deriving, "Disk", Full)
    made = derived(recipe_of(other, prompts))
    assert made.recipe.data.features == "online"
    assert "1.00 MB are free" in reasons(made)["data.features"]


@pytest.mark.usefixtures("known_data")
def test_a_model_that_learns_logits_has_the_last_state_on_disk(other: Path, prompts: Path) -> None:
    made = derived(recipe_of(other, prompts, name="distill"))
    assert made.recipe.data.features == "offline"
    assert made.recipe.drafter.options["layers"] == 2
    ce = derived(recipe_of(other, prompts, "drafter.options.loss=ce", name="distill"))
    assert "data.features" not in reasons(ce)


def test_answers_that_end_at_once_are_refused(
    other: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def __init__(self, *given: Any) -> None: ...

        def write(self, jobs: Any, done: Any) -> None:
            for job in jobs:
                done(job, [0], "eos")

    monkeypatch.setattr(data_facts, "EngineWriter", Silent)
    with pytest.raises(RecipeError, match="ends its answers at once") as caught:
        derived(recipe_of(other, prompts))
    assert "16 answers of 1.0 tokens" in str(caught.value.found)


def test_answers_of_the_data_are_learned_as_they_are(other: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    pair = {"text": "def f(x):\n    return x + 1\n" * 6}
    file.write_text("".join(json.dumps(pair | {"n": i}) + "\n" for i in range(50)))
    made = derived(recipe_of(other, file, "data.regenerate=false"))
    assert "data.prompts" not in reasons(made)
    assert made.recipe.train.steps >= LEAST_STEPS


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mlp-speculator", "has several stages"),
        ("medusa-2", "also trains the target"),
        ("distill-on-policy", "learns from text that the drafter writes"),
    ],
)
def test_what_time_does_not_decide_is_refused(
    other: Path, prompts: Path, name: str, why: str
) -> None:
    with pytest.raises(RecipeError, match=f"--time cannot derive a recipe that {why}"):
        derived(recipe_of(other, prompts, name=name))


def test_no_prompt_at_all_is_an_error_of_the_data(other: Path, tmp_path: Path) -> None:
    file = tmp_path / "empty.jsonl"
    for text, error in (
        ((json.dumps({"text": "x"}) + "\n") * 40, "no prompt of the data can be answered"),
        ("", "the data hold nothing to learn from"),
    ):
        file.write_text(text)
        with pytest.raises(RecipeError, match=error):
            derived(recipe_of(other, file))


@pytest.mark.usefixtures("known_data")
def test_a_run_that_goes_on_has_the_same_recipe(other: Path, prompts: Path, tmp_path: Path) -> None:
    prompts = Path(shutil.copy(prompts, tmp_path))
    recipe = recipe_of(other, prompts)
    made = derived(recipe)
    assert kept_by(recipe, tmp_path / "run", None) is None
    keep(made, tmp_path / "run", digest_of(recipe))
    (tmp_path / "run" / "run.yaml").write_text("recipe: {}")
    assert kept_by(recipe, tmp_path / "run", None) == made.recipe
    assert kept_by(recipe, tmp_path / "run", 600.0) == made.recipe
    with pytest.raises(RecipeError, match="derived for another time") as caught:
        kept_by(recipe, tmp_path / "run", 1200.0)
    assert "--time 600s" in str(caught.value.do)
    (tmp_path / "run" / "run.yaml").unlink()  # derived, but never begun
    assert kept_by(recipe, tmp_path / "run", 1200.0) is None
    changed = kept_by(recipe_of(other, prompts, "train.steps=9"), tmp_path / "run", None)
    assert changed is not None
    assert changed.train.steps == 9
    other_size = recipe_of(other, prompts, "drafter.options.intermediate=64")
    assert kept_by(other_size, tmp_path / "run", None) is None
    with prompts.open("a") as file:
        file.write(json.dumps({"text": "one more line of text to learn"}) + "\n")
    assert kept_by(recipe, tmp_path / "run", None) is None
    (tmp_path / "run" / "checkpoints" / "step000003").mkdir(parents=True)
    assert (
        kept_by(recipe, tmp_path / "run", None) == made.recipe
    )  # whether it may is the run's to say
    (tmp_path / "run" / "derived.json").write_text("{")
    with pytest.raises(Exception, match=r"derived\.json cannot be read"):
        kept_by(recipe, tmp_path / "run", None)


@pytest.mark.usefixtures("known_data")
def test_the_file_of_a_recipe_reads_back_as_the_recipe(
    other: Path, prompts: Path, tmp_path: Path
) -> None:
    made = derived(recipe_of(other, prompts))
    file = tmp_path / "mine.yaml"
    file.write_text(recipe_text(made.recipe.to_json(), reasons(made), "For a test.\nOf two lines."))
    read = load_recipe(file)
    assert read.to_json() == made.recipe.to_json()
    text = file.read_text()
    assert text.startswith("# For a test.\n# Of two lines.\n")
    for reason in reasons(made).values():
        assert reason in text


@pytest.mark.usefixtures("known_data")
def test_derive_recipe_takes_settings_as_train_does(other: Path, prompts: Path) -> None:
    made = derive_recipe(other, "eagle3", time="10m", data=prompts, steps=50, new_tokens=48)
    assert made.recipe.train.steps == 50
    assert made.seconds == 600.0


@pytest.mark.parametrize(("text", "seconds"), [("40m", 2400), ("1h30m", 5400), ("90s", 90), (7, 7)])
def test_times(text: str | float, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "40", "4x", "40m!", "0m", -3, "m40"])
def test_what_is_no_time(text: str | float) -> None:
    with pytest.raises(RecipeError, match="no time"):
        seconds_of(text)


def test_only_a_demonstration_for_another_target_here_is_foreign(
    other: Path, prompts: Path
) -> None:
    assert foreign(recipe_of(other, prompts), "eagle3")
    assert not foreign(load_recipe("eagle3"), "eagle3")
    assert not foreign(recipe_of(other, prompts, "train.steps=5"), "eagle3")
    assert not foreign(load_recipe("eagle3", target="llama3-8b"), "eagle3")
    assert not foreign(load_recipe("llama3-8b-eagle3", target=str(other)), "llama3-8b-eagle3")


@pytest.mark.parametrize(("gain", "expected"), [(2.4, "bf16"), (1.2, "no"), (0.02, "no")])
def test_products_are_made_in_bfloat16_where_that_is_much_faster(
    other: Path,
    prompts: Path,
    known_data: None,
    monkeypatch: pytest.MonkeyPatch,
    gain: float,
    expected: str,
) -> None:
    monkeypatch.setattr(deriving, "bf16_gain", lambda device: gain)
    made = derived(recipe_of(other, prompts))
    assert made.recipe.train.precision == expected
    assert ("2.4 times" in reasons(made).get("train.precision", "")) == (gain > 2)
    fixed = derived(recipe_of(other, prompts, "train.precision=no"))
    assert fixed.recipe.train.precision == "no"


def test_the_gain_of_bfloat16_is_measured() -> None:
    assert 0.0 < bf16_gain(torch.device("cpu")) < 100.0


def test_prompts_that_the_target_cannot_predict_are_pointed_out(
    other: Path, prompts: Path, tmp_path: Path
) -> None:
    console = SilentReporter()
    derive(recipe_of(other, prompts), 600.0, console)
    assert console.warnings == []
    file = tmp_path / "asked.jsonl"
    file.write_text((json.dumps({"prompt": "def f(x):\n    return x + 1\n"}) + "\n") * 60)
    derive(recipe_of(other, file), 600.0, console)
    assert "is no chat model" in console.warnings.pop(0)
    file = tmp_path / "finnish.jsonl"
    text = "Kirjoita lyhyt runo sateisesta syksystä, jossa yöt ovat pitkiä ja pimeitä."
    file.write_text("".join(json.dumps({"text": f"{text} {i}"}) + "\n" for i in range(60)))
    derive(recipe_of(other, file), 600.0, console)
    assert "bits for a byte of your prompts" in console.warnings[0]


def test_answers_that_the_target_has_written_are_learned_as_they_are(
    other: Path, prompts: Path, tmp_path: Path
) -> None:
    console, target = SilentReporter(), load_part(recipe_of(other, prompts).target)
    few = recipe_of(other, prompts, "data.prompts=45", "data.new_tokens=8")
    written = write_answers_alone(preparation_of(few, target), tmp_path, console)
    file = tmp_path / "answers.jsonl"
    write_answers(file, written, target)
    made = derive(recipe_of(other, file), 600.0, console)
    assert made.recipe.data.regenerate is False
    assert "this target has written" in reasons(made)["data.regenerate"]
    assert "data.prompts" not in reasons(made), "nothing is to be written"
    lines = file.read_text().splitlines() + prompts.read_text().splitlines()
    file.write_text("\n".join(lines) + "\n")
    assert derive(recipe_of(other, file), 600.0, console).recipe.data.regenerate
