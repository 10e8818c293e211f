"""The parts of a run in its plan: nothing that takes time is left out, and they add up."""

from __future__ import annotations

from specctl.core.spec import ModelSpec
from specctl.recipes.load import load_recipe
from specctl.train.planning.plan import RunPlan, plan
from specctl.train.planning.rehearsal import Rehearsal
from specctl.train.planning.work import ANSWERS
from specctl.train.prune.cut import CALIBRATION_TOKENS, Wanted
from specctl.train.prune.run import prune_plans

SPEC = ModelSpec("llama", 4, 32, 88, 4, 2, 8, 64, 1e-5, 1e4, 1024)
SPEED = 1e10


def of(name: str, *sets: str, rehearsal: Rehearsal | None = None) -> RunPlan:
    return plan(load_recipe(name, sets=sets), SPEC, flops_per_second=SPEED, rehearsal=rehearsal)


def amounts(made: RunPlan) -> dict[str, str]:
    return {part.name: part.amount for part in made.parts}


def seconds(made: RunPlan, name: str) -> float:
    (found,) = (part.seconds_range[0] for part in made.parts if part.name == name)
    return found


def adds_up(made: RunPlan) -> bool:
    low, high = (sum(part.seconds_range[i] for part in made.parts) for i in (0, 1))
    return made.seconds_range == (low, high) and all(p.seconds_range[0] > 0 for p in made.parts)


def test_a_plain_run_writes_answers_trains_and_measures() -> None:
    made = of("distill", "train.steps=400", "train.tau_every=150", "data.prompts=1200")
    assert amounts(made) == {
        ANSWERS: "1,200 prompts", "training": "400 steps", "measuring tau": "3 times"
    }  # fmt: skip
    assert adds_up(made)
    assert ANSWERS not in amounts(of("distill", "data.regenerate=false"))
    suite = of("distill", "train.steps=400", "train.tau_every=150", "train.tau_suite=spec-bench")
    assert seconds(suite, "measuring tau") == 2 * seconds(made, "measuring tau")


def test_text_that_the_drafter_writes_is_counted() -> None:
    sets = ["train.steps=100", "train.rows=8", "train.seq_len=64", "train.accumulate=2"]
    fixed, half = (of("distill", *sets, f"data.on_policy={x}") for x in (0.0, 0.5))
    assert "the drafter writes" not in amounts(fixed)
    assert amounts(half)["the drafter writes"] == f"{100 * 8 * 64 * 2 // 2:,} tokens"
    assert half.seconds_range[0] > fixed.seconds_range[0]
    assert adds_up(half)


def test_a_reference_that_is_trained_first_is_counted() -> None:
    made = of("adaspec", "train.steps=400", "train.reference_steps=300")
    found = amounts(made)
    assert found["reference: training"] == "300 steps"
    assert found["training"] == "400 steps"
    assert list(found).index("reference: training") < list(found).index("training")
    assert adds_up(made)
    assert made.disk["reference"] > 0
    assert made.memory["reference"] > 0
    named = of("adaspec", "train.reference=runs/other", "train.reference_steps=null")
    assert "reference: training" not in amounts(named)
    assert "reference" not in named.disk
    assert named.memory["reference"] > 0
    plain = of("adaspec", "train.select=none", "train.reference_steps=null")
    step = [
        p.seconds_range[0] / 400 for m in (named, plain) for p in m.parts if p.name == "training"
    ]
    assert step[0] > step[1], "the reference reads every batch, too"


def test_features_on_disk_are_read_once_however_many_steps_there_are() -> None:
    few, many = (of("eagle3", "data.features=offline", f"train.steps={n}") for n in (100, 10_000))
    once = "the target reads the rows once"
    assert amounts(few)[once] == amounts(many)[once]
    online = of("eagle3", "train.steps=10000")
    assert once not in amounts(online)
    assert many.seconds_range[0] < online.seconds_range[0]


def test_adapting_begins_with_a_measurement_and_moves_few_weights() -> None:
    sets = ["train.steps=200", "train.tau_every=50", "drafter.init=runs/x"]
    made, whole = of("adapt", *sets), of("adapt", *sets, "train.lora=null")
    assert amounts(made)["measuring tau"] == "5 times"
    assert amounts(whole)["measuring tau"] == "4 times"
    assert made.trainable < whole.trainable
    assert adds_up(made)


def test_a_rehearsal_times_every_part() -> None:
    took = Rehearsal(20.0, 0.1, 0.5, 4.0, 1.0, 10**9, 0, 64_000, write=6.0)
    sets = ["train.steps=100", "train.tau_every=50", "train.save_every=50", "data.prompts=200"]
    made = of("adaspec", *sets, "train.reference_steps=40", rehearsal=took)
    assert [(p.name, sum(p.seconds_range) / 2) for p in made.parts] == [
        ("start, text, package", 20),
        (ANSWERS, 20),
        ("reference: training", 20),
        ("reference: measuring tau", 4),
        ("reference: saving", 1),
        ("training", 50),
        ("measuring tau", 8),
        ("saving", 2),
    ]
    mixed = ["data.on_policy=0.5", "data.on_policy_every=20"]
    written = of("distill", *sets, *mixed, rehearsal=took)
    assert {p.name: sum(p.seconds_range) / 2 for p in written.parts}["the drafter writes"] == 30
    assert amounts(written)["the drafter writes"] == "5 times"


def test_a_cut_is_scored_and_measured_before_it_heals() -> None:
    recipe = load_recipe("prune")
    ((part, made),) = prune_plans(recipe, Wanted(layers=2), 120, False, SPEED)
    found = amounts(made)
    scoring = "scoring what matters"
    assert list(found) == [
        ANSWERS, scoring, "measuring tau of the cut", "training", "measuring tau"
    ]  # fmt: skip
    assert found[scoring] == f"{CALIBRATION_TOKENS:,} tokens"
    assert (part.drafter.options["layers"], made.steps) == (2, 120)
    whole = load_recipe("prune", sets=["vocab.size=null"])
    ((_, untrimmed),) = prune_plans(whole, Wanted(layers=2), 120, False, SPEED)
    assert made.disk["cut"] == untrimmed.disk["cut"] == untrimmed.disk["package"]
    assert adds_up(made)
    ((_, unhealed),) = prune_plans(recipe, Wanted(layers=2), 0, False, SPEED)
    assert list(amounts(unhealed)) == list(found)[:3]
    ((_, dear),) = prune_plans(recipe, Wanted(layers=2, importance="alpha"), 120, False, SPEED)
    assert seconds(dear, scoring) > 3 * seconds(made, scoring), "every layer is left out once"


def test_a_cut_in_two_steps_makes_its_text_once() -> None:
    (_, half), (_, rest) = prune_plans(load_recipe("prune"), Wanted(layers=1), 101, True, SPEED)
    assert ANSWERS in amounts(half)
    assert ANSWERS not in amounts(rest)
    assert (half.steps, rest.steps) == (50, 51)
    assert half.parameters > rest.parameters
