"""A recipe derived for a target that no recipe was made for, from its shape, the data, this machine
and the time that there is.

The method is that of the recipe which is begun from: family, loss, optimizer, how it is served.
Sizes follow the target, lengths the data, and numbers of answers and steps the time: the pace of
both is measured here first, and the time is divided so that every row is read `EPOCHS` times. What
the user has set is kept. Each choice has its reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specctl.core.errors import RecipeError
from specctl.core.files import Disk
from specctl.recipes.load import with_fields
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.assemble import check_answers, trainable_family
from specctl.train.data.shipped import is_shipped
from specctl.train.data.sources import SELF, names_of
from specctl.train.data.written.self_source import uses_self
from specctl.train.distributed.run_device import run_device
from specctl.train.planning.calibration import calibrate
from specctl.train.planning.capacity import lacking_memory
from specctl.train.planning.data_facts import DataFacts, look_at_data
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.pace import Pace
from specctl.train.planning.plan import CALIBRATED, build_shape, disk_needs
from specctl.train.planning.stand_in import now, stand_in
from specctl.train.planning.target_shape import TargetShape, target_shape
from specctl.train.planning.weighing import Weighing
from specctl.train.planning.work import QUESTION_TOKENS, Part

USUAL_SECONDS = 40 * 60.0
EPOCHS = 4.0  # times that a row is read, see docs/training.md
MOST_EPOCHS = 10.0  # where there are too few prompts for the time
COVERAGE = 0.95  # of the answers' tokens that the draft vocabulary can say
CPU_TOKENS, GPU_TOKENS = 4096, 16384  # of a step
CPU_ANSWER, GPU_ANSWER = 256, 512  # tokens of an answer, at most
ROW_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
FILL = 0.95  # of a row that holds tokens
SPENT = 0.92  # of the time; the rest is for what no calibration sees
LEAST_ANSWERS, LEAST_STEPS = 40, 40
MEASURES = 4  # of tau, before the last one
SAVE_SECONDS = 300.0
DISK_SHARE = 0.5  # of what is free that features may take
DERIVED = "derived"  # the origin of a value that was found here
CALIBRATED_PROMPTS, CALIBRATED_STEPS = 1000, 300  # of the recipe whose pieces are measured


@dataclass(frozen=True, slots=True)
class DerivedChoice:
    """A value of a field of the recipe, and why."""

    field: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Derived:
    """The recipe, what was chosen for it, the parts of its run, the pace that was measured, and the
    seconds that there are."""

    recipe: Recipe
    choices: tuple[DerivedChoice, ...]
    parts: tuple[Part, ...]
    pace: Pace
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "choices": [asdict(choice) for choice in self.choices]}


def derive(recipe: Recipe, seconds: float, reporter: Reporter, processes: int = 1) -> Derived:
    """The recipe for its own target, data and this machine, to be done within `seconds`, of which
    the deriving itself is a part."""
    check_derivable(recipe)
    began = now()
    cluster, shape = Cluster.here(processes), target_shape(recipe.target)
    deriving = _Deriving(recipe, shape, cluster, [])
    deriving.sizes()
    target = stand_in(recipe, shape, run_device())
    if target is not None:
        check_answers(deriving.recipe, target)
    deriving.source(target)
    facts = look_at_data(deriving.recipe, target, COVERAGE, reporter)
    del target
    _check_enough(facts, deriving.recipe.data)
    deriving.lengths(facts)
    deriving.vocabulary(facts)
    deriving.rows()
    deriving.features(facts)
    pace = calibrate(deriving.calibrated(facts), shape, processes, reporter=reporter)
    if pace is None:
        raise RecipeError(
            "the pace of this target cannot be measured within seconds here",
            where="--time",
            found=f"{recipe.target.name}, {shape.parameters / 1e9:.1f}B parameters",
            expected="a target that this machine reads within seconds",
            do="a recipe of your own (specctl recipes show llama3-8b-eagle3); --allow recipe takes "
            f"the numbers of {recipe.name} as they are",
        )
    share = facts.answer_tokens / deriving.recipe.data.new_tokens
    pace = replace(pace, answer=share * pace.answer)  # it was measured on the longest answers
    deriving.amounts(facts, pace, seconds - (now() - began))
    parts = pace.parts(deriving.recipe, deriving.row_tokens(facts), CALIBRATED)
    return Derived(deriving.recipe, tuple(deriving.choices), tuple(parts), pace, seconds)


def check_derivable(recipe: Recipe) -> None:
    """RecipeError for a recipe whose numbers cannot be found by its time: a pipeline, or one that
    changes the target."""
    trainable_family(recipe)
    for is_so, what in (
        (bool(recipe.stages), "a recipe of several stages"),
        (recipe.train.joint is not None, "a recipe that trains the target, too"),
        (recipe.train.lora is not None, "a recipe that adapts a drafter"),
        (recipe.data.on_policy > 0, "a recipe whose drafter writes its own text"),
        (recipe.data.target_source != "inprocess", "a target whose states are elsewhere"),
    ):
        if is_so:
            raise RecipeError(
                f"{what} is not derived by time",
                where="--time",
                found=recipe.name,
                expected="a recipe of one stage, of a drafter that learns the target's answers",
                do="--recipe eagle3 --time 40m; or leave --time out and set what differs by --set",
            )


@dataclass
class _Deriving:
    """A recipe while it is changed, choice by choice."""

    recipe: Recipe
    shape: TargetShape
    cluster: Cluster
    choices: list[DerivedChoice]

    def choose(self, field: str, value: Any, reason: str) -> None:
        """Set a field that the user has not set."""
        if self.is_free(field):
            self.recipe = with_fields(self.recipe, {field: value}, DERIVED)
            self.choices.append(DerivedChoice(field, value, reason))

    def is_free(self, field: str) -> bool:
        """Whether neither the user nor an earlier choice has set a field."""
        origin = self.recipe.origin
        return field not in origin or is_shipped(self.recipe, field)

    def sizes(self) -> None:
        """Sizes of the drafter that a recipe sets for its own target are this target's here; and
        the longest answer, by what this machine writes in the time."""
        own = {"intermediate": "feed-forward", "layer": "depth"}
        for name, what in own.items():
            if self.recipe.drafter.options.get(name) is not None:
                field = f"drafter.options.{name}"
                self.choose(field, None, f"the target's own {what} decides")
        is_cpu = self.cluster.gpu is None
        most = CPU_ANSWER if is_cpu else GPU_ANSWER
        place = "a CPU" if is_cpu else "a GPU"
        self.choose("data.new_tokens", most, f"of an answer at most, on {place}")

    def source(self, target: Target | None) -> None:
        """Questions of the target, where nobody brings data and it can write them."""
        if target is not None and target.is_chat and self.recipe.data.endpoint is None:
            self.choose("data.source", SELF, "no --data: the target writes the questions, too")

    def lengths(self, facts: DataFacts) -> None:
        """Tokens of a row."""
        positions = self.shape.spec.max_positions
        wanted = facts.long_prompt + self.recipe.data.new_tokens
        fitting = [n for n in ROW_LENGTHS if n >= min(wanted, positions)] or [ROW_LENGTHS[-1]]
        row = min(fitting[0], positions)
        self.choose(
            "train.seq_len",
            row,
            f"19 of 20 prompts have at most {facts.long_prompt:,} tokens, and an answer at most "
            f"{self.recipe.data.new_tokens:,}",
        )

    def vocabulary(self, facts: DataFacts) -> None:
        """A draft vocabulary by coverage, where the method trims it."""
        if self.recipe.vocab.size is None:
            return
        self.choose("vocab.size", "auto", "counted over the answers once they are written")
        seen = f": about {facts.ids:,} of {self.shape.spec.vocab_size:,} ids" if facts.ids else ""
        self.choose("vocab.min_coverage", COVERAGE, f"{COVERAGE:.0%} of what the target says{seen}")

    def rows(self) -> None:
        """Rows of a batch, fewer at a time where memory does not hold them."""
        train = self.recipe.train
        tokens = CPU_TOKENS if self.cluster.gpu is None else GPU_TOKENS
        wanted = max(1, tokens // train.seq_len // self.cluster.processes) * self.cluster.processes
        self.choose("train.rows", wanted, f"about {tokens:,} tokens a step")
        while self.recipe.train.rows > self.cluster.processes and self._lacks_memory():
            rows, batches = self.recipe.train.rows // 2, self.recipe.train.accumulate * 2
            if not self._again("train.rows", rows, "as many as memory holds at a time"):
                return
            self._again("train.accumulate", batches, "for the same tokens a step")

    def _lacks_memory(self) -> bool:
        weighing = Weighing(self.recipe, self.shape, self.cluster)
        return bool(lacking_memory(weighing, False, self.recipe))

    def _again(self, field: str, value: Any, reason: str) -> bool:
        """Choose anew what was chosen here; False for what the user has set."""
        if self.recipe.origin.get(field) != DERIVED and not self.is_free(field):
            return False
        self.choices = [choice for choice in self.choices if choice.field != field]
        self.recipe = with_fields(self.recipe, {field: value}, DERIVED)
        self.choices.append(DerivedChoice(field, value, reason))
        return True

    def features(self, facts: DataFacts) -> None:
        """Features of the target on disk where they fit: then it reads every row once."""
        recipe = self.recipe
        drafter = build_shape(trainable_family(recipe), self._without_auto(facts), self.shape.spec)
        needs = drafter.needs()
        if not (needs.taps or needs.teacher) or not self.is_free("data.features"):
            return
        fields = {"data.features": "offline", "data.prompts": CALIBRATED_PROMPTS}
        kept = with_fields(recipe, fields, DERIVED)
        each = disk_needs(self._without_auto(facts, kept), self.shape.spec).get("features", 0)
        size = each / CALIBRATED_PROMPTS
        free = Disk().free(Path.cwd())
        if size * CALIBRATED_PROMPTS > DISK_SHARE * free:
            reason = f"the target reads every batch: a thousand answers are {size * 1e3 / 1e9:.1f}"
            reason += f" GB of features, and {free / 1e9:.1f} GB are free"
            self.choose("data.features", "online", reason)
            return
        reason = f"the target reads every row once; {size * 1e3 / 1e9:.2g} GB a thousand answers"
        self.choose("data.features", "offline", reason)

    def _without_auto(self, facts: DataFacts, recipe: Recipe | None = None) -> Recipe:
        """The recipe with the vocabulary that its data are expected to need."""
        recipe = self.recipe if recipe is None else recipe
        if recipe.vocab.size != "auto":
            return recipe
        most = self.shape.spec.vocab_size
        size = min(most, max(2, facts.ids)) if facts.ids else most
        return with_fields(recipe, {"vocab.size": size}, DERIVED)

    def calibrated(self, facts: DataFacts) -> Recipe:
        """The recipe whose pieces are measured: of no amount in particular."""
        amounts = {"data.prompts": CALIBRATED_PROMPTS, "train.steps": CALIBRATED_STEPS}
        free = {field: value for field, value in amounts.items() if self.is_free(field)}
        return with_fields(self._without_auto(facts), free, DERIVED)

    def row_tokens(self, facts: DataFacts) -> int:
        """Tokens of all rows."""
        data = self.recipe.data
        count = data.prompts if data.regenerate else facts.prompts or data.prompts
        return round(count * facts.document_tokens)

    def amounts(self, facts: DataFacts, pace: Pace, seconds: float) -> None:
        """Answers and steps: the time that measuring and saving leave, divided so that every row is
        read `EPOCHS` times."""
        data, train = self.recipe.data, self.recipe.train
        saves = max(1, round(seconds / SAVE_SECONDS))
        fixed = pace.once + (MEASURES + 1) * pace.tau + saves * pace.save
        left = SPENT * seconds - fixed
        each = answer_seconds(facts, pace, self.recipe)
        step_rows = FILL * train.rows * train.accumulate * train.seq_len / facts.document_tokens
        prompts = self._prompts(facts, each, EPOCHS / step_rows * pace.step, left, pace)
        written = prompts * each
        if self.is_free("data.prompts") and data.regenerate:
            self.choose("data.prompts", prompts, _answers_reason(facts, prompts, written, each))
        elif not self.is_free("data.prompts"):
            prompts, written = data.prompts, data.prompts * each
        most = max(LEAST_STEPS, int(prompts * MOST_EPOCHS / step_rows))
        steps = min(most, int((left - written) / pace.step))
        if steps < LEAST_STEPS and self.is_free("train.steps"):
            raise self._too_short(seconds, fixed + LEAST_ANSWERS * each + LEAST_STEPS * pace.step)
        epochs = steps * step_rows / prompts
        reason = f"{minutes(steps * pace.step)} at {pace.step:.2g} s a step; "
        reason += f"every row is read {epochs:.1f} times"
        if steps == most:
            reason += ", and more would only learn them by heart: give more prompts, or --data self"
        self.choose("train.steps", steps, reason)
        steps = self.recipe.train.steps
        self.choose("train.tau_every", max(1, -(-steps // MEASURES)), f"{MEASURES} times")
        every = max(1, int(SAVE_SECONDS / pace.step))
        self.choose("train.save_every", min(every, steps), "about every five minutes")

    def _prompts(
        self, facts: DataFacts, each: float, learned: float, left: float, pace: Pace
    ) -> int:
        """How many prompts there is time for in the seconds that are left: `each` is answered in so
        many and `learned` in so many, in at least as many steps as make a drafter at all."""
        if not self.recipe.data.regenerate:
            return max(1, facts.prompts or self.recipe.data.prompts)
        if self.is_free("train.steps"):
            most = (left - LEAST_STEPS * pace.step) / max(each, 1e-6)
            found = int(min(most, left / max(each + learned, 1e-6)))
        else:
            found = int((left - self.recipe.train.steps * pace.step) / max(each, 1e-6))
        if found < LEAST_ANSWERS:
            raise self._too_short(left, LEAST_ANSWERS * each + LEAST_STEPS * pace.step)
        return found if facts.prompts is None else min(found, facts.prompts)

    def _too_short(self, have: float, need: float) -> RecipeError:
        return RecipeError(
            "the time is too short for a drafter of this target",
            where="--time",
            found=minutes(max(0.0, have)),
            expected=f"at least {minutes(need / SPENT + 60)}",
            do=f"--time {int(need / SPENT / 60) + 2}m",
        )


def _check_enough(facts: DataFacts, data: DataPart) -> None:
    if facts.prompts is None or facts.prompts >= LEAST_ANSWERS or not data.regenerate:
        return
    raise RecipeError(
        "the data hold too few prompts for a drafter to learn from",
        where="data.source",
        found=f"{facts.prompts} in {', '.join(names_of(data.source))}",
        expected=f"at least {LEAST_ANSWERS}, better a thousand",
        do="more of them; or let a chat model write some: add --data self",
    )


def answer_seconds(facts: DataFacts, pace: Pace, recipe: Recipe) -> float:
    """Of a prompt: it is written where the target writes it, its answer is written, and both are
    read once where features are kept."""
    data = recipe.data
    questions = QUESTION_TOKENS / facts.answer_tokens if uses_self(data.source) else 0.0
    written = (1 + questions) * pace.answer if data.regenerate and data.endpoint is None else 0.0
    return written + (pace.read * facts.document_tokens if data.features == "offline" else 0.0)


def _answers_reason(facts: DataFacts, prompts: int, written: float, each: float) -> str:
    how = f"{facts.answer_tokens:.0f} tokens on average in {facts.tried} tried"
    if not facts.tried:
        how = f"{facts.answer_tokens:.0f} tokens, a guess"
    reason = f"{minutes(written)} at {each:.2g} s an answer ({how})"
    return reason + (", all prompts that there are" if prompts == facts.prompts else "")


def minutes(seconds: float) -> str:
    """A time in words: "45 s", "13 min", "2.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
