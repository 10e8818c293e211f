"""A recipe derived for a target that no recipe was made for, from its shape, the data, this machine
and the time that there is.

The method is that of the recipe which is begun from: family, loss, optimizer, how it is served.
Sizes follow the target, lengths the data, and numbers of answers and steps the time: the pace of
both is measured here first, and the time is divided so that every row is read `EPOCHS` times. What
the user has set is kept. Each choice has its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from specctl.core.drafter import Family
from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted
from specctl.core.messages.sizes import size_text
from specctl.core.storage.files import Disk
from specctl.drafters.blocks.dflash import DFlashOptions
from specctl.recipes.load import with_fields
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.assemble import (
    attention_only,
    check_answers,
    check_states,
    trainable_family,
)
from specctl.train.data.preparation import Preparation
from specctl.train.data.records.records import Sample
from specctl.train.data.sources.self_source import refusal, refusal_of, uses_self
from specctl.train.data.sources.shipped import is_shipped
from specctl.train.data.sources.sources import SELF, is_corpus, names_of
from specctl.train.data.written.own_answers import is_own
from specctl.train.distributed.run_device import run_device
from specctl.train.planning.amounts import (
    EPOCHS,
    LEAST_ANSWERS,
    LEAST_STEPS,
    MEASURES,
    SAVE_SECONDS,
    AmountCosts,
    TimeLeft,
    minutes,
)
from specctl.train.planning.calibration import calibrate
from specctl.train.planning.capacity import lacking_memory
from specctl.train.planning.data_facts import DataFacts, look_at_data, some_prompts
from specctl.train.planning.derivable import check_derivable
from specctl.train.planning.for_engines import (
    MASK,
    VOCABULARY,
    BesideTarget,
    EngineReading,
    Foresee,
    Said,
    engine_reading,
    whole_vocabulary,
)
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.pace import Pace
from specctl.train.planning.plan import CALIBRATED, build_shape, feature_bytes
from specctl.train.planning.stand_in import now, stand_in
from specctl.train.planning.target_shape import TargetShape, target_shape
from specctl.train.planning.weighing import Weighing
from specctl.train.planning.work import Part
from specctl.train.step.products import FAR, bf16_gain

COVERAGE = 0.95  # of the answers' tokens that the draft vocabulary can say
CPU_TOKENS, GPU_TOKENS = 4096, 16384  # of a step
CPU_ANSWER, GPU_ANSWER = 256, 512  # tokens of an answer, at most
TOGETHER = 3  # answers with their prompts that share a row: 98 % full, 83 % of less than two
ROW_LENGTHS = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)
DISK_SHARE = 0.5  # of what is free that features may take
DERIVED = "derived"  # the origin of a value that was found here
CALIBRATED_PROMPTS, CALIBRATED_STEPS = 1000, 300  # of the recipe whose pieces are measured


@dataclass(frozen=True, slots=True)
class DerivedChoice:
    """A value of a field of the recipe, and why. `replaces`: what the user gave, where the value
    only adds to it."""

    field: str
    value: Any
    reason: str
    replaces: Any = None


@dataclass(frozen=True, slots=True)
class Derived:
    """The recipe, what was chosen for it, the parts of its run, the pace that was measured, the
    seconds that there are, and which engines will read the drafter, of a block drafter."""

    recipe: Recipe
    choices: tuple[DerivedChoice, ...]
    parts: tuple[Part, ...]
    pace: Pace
    seconds: float
    engines: EngineReading | None = None

    def to_json(self) -> dict[str, Any]:
        engines = {} if self.engines is None else {"engines": asdict(self.engines)}
        choices = [asdict(choice) for choice in self.choices]
        return {"seconds": self.seconds, "choices": choices, **engines}


def derive(
    recipe: Recipe,
    seconds: float,
    reporter: Reporter,
    processes: int = 1,
    before: Sequence[Part] = (),
    foresee: Foresee | None = None,
) -> Derived:
    """The recipe for its own target, data and this machine, to be done within `seconds`, of which
    the deriving itself is a part, and what is done `before` the run. `foresee` says which engines
    will read a drafter; without it none is considered."""
    check_derivable(recipe)
    clock = TimeLeft(seconds, now(), sum(sum(part.seconds_range) / 2 for part in before))
    cluster, shape = Cluster.here(processes), target_shape(recipe.target)
    wanted = attention_only(recipe.drafter, recipe.serve)
    check_states(shape.config, wanted, recipe.target.name)
    deriving = _Deriving(recipe, shape, cluster, [])
    deriving.sizes()
    is_here = recipe.data.target_source == "inprocess"
    target = stand_in(recipe.target, is_here, shape, run_device())
    if target is not None:
        check_answers(deriving.recipe.data, target)
    deriving.source(target)
    some = some_prompts(deriving.recipe.data)
    deriving.own_answers(target, some.samples)
    deriving.can_fill = deriving.may_fill(target)
    deriving.check_enough(some.count)
    beside = BesideTarget.of(shape, target)
    data, made = deriving.recipe.data, deriving.preparation(target)
    facts = look_at_data(data, made, some, COVERAGE, reporter, clock.check)
    del target, made
    deriving.lengths(facts)
    engines = deriving.engines(facts, beside, foresee)
    deriving.rows()
    deriving.features(facts)
    deriving.precision()

    def so_far(pace: Pace) -> None:
        clock.check(deriving.least(facts, pace, seconds))

    calibrated = deriving.calibrated(facts)
    pace = calibrate(calibrated, shape, processes, reporter=reporter, so_far=so_far)
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
    if deriving.recipe.data.regenerate and deriving.is_free("data.prompts"):
        pace = replace(pace, stored=None)  # the number of prompts, chosen below, names the rows
    clock.check(deriving.least(facts, pace, seconds), is_all=True)
    deriving.amounts(facts, pace, seconds, clock.left())
    if busy := clock.others.note():
        reporter.warn(f"the pace here is that of a busy machine: {busy}")
    found, tokens = deriving.recipe, deriving.row_tokens(facts)
    parts = [*before, *pace.parts(found.data, found.train, tokens, CALIBRATED)]
    choices = tuple(deriving.choices)
    return Derived(found, choices, tuple(parts), pace, seconds, engines)


@dataclass
class _Deriving:
    """A recipe while it is changed, choice by choice. `can_fill`: the target can write the prompts
    that the data lack; `filled`: the sources that the user gave, once `self` is added to them."""

    recipe: Recipe
    shape: TargetShape
    cluster: Cluster
    choices: list[DerivedChoice]
    can_fill: bool = False
    filled: str | tuple[str, ...] | None = None

    def choose(self, field: str, value: Any, reason: str) -> None:
        """Set a field that the user has not set."""
        if self.is_free(field):
            self.recipe = with_fields(self.recipe, {field: value}, DERIVED)
            self.choices.append(DerivedChoice(field, value, reason))

    def is_free(self, field: str) -> bool:
        """Whether neither the user nor an earlier choice has set a field."""
        origin = self.recipe.origin
        return field not in origin or is_shipped(origin[field])

    def preparation(self, target: Target | None) -> Preparation | None:
        """How the target answers prompts of the data; None without it."""
        recipe = self.recipe
        if target is None:
            return None
        return Preparation(recipe.data, recipe.train.seq_len, target, recipe.target)

    @property
    def family(self) -> Family:
        """That of the drafter."""
        return trainable_family(self.recipe.drafter, self.recipe.train.joint)

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

    def own_answers(self, target: Target | None, samples: Sequence[Sample]) -> None:
        """Data that are answers of this target, all of them, are learned as they are."""
        data = self.recipe.data
        if target is None or not samples or not data.regenerate:
            return
        if all(is_own(sample, target, data) for sample in samples):
            reason = "the data are answers that this target has written"
            self.choose("data.regenerate", False, reason)

    def may_fill(self, target: Target | None) -> bool:
        """Whether the target can write prompts beside those of the data. A user who has said how
        many prompts there shall be wants no others."""
        data = self.recipe.data
        if target is None or uses_self(data.source) or not self.is_free("data.prompts"):
            return False
        is_refused = refusal(data) is not None or refusal_of(target) is not None
        return not is_refused and not is_corpus(data.source)

    def check_enough(self, count: int | None) -> None:
        """RecipeError for data of too few prompts, unless the target writes the others."""
        data = self.recipe.data
        is_filled = uses_self(data.source) or not data.regenerate
        if count is None or count >= LEAST_ANSWERS or is_filled:
            return
        if self.can_fill:
            self.fill()
            return
        raise RecipeError(
            "the data hold too few prompts for a drafter to learn from",
            where="data.source",
            found=f"{count} in {', '.join(names_of(data.source))}",
            expected=f"at least {LEAST_ANSWERS}, better a thousand",
            do="more of them; or a chat model as the target, which writes them itself (leave "
            "data.prompts out)",
        )

    def fill(self) -> None:
        """Have the target write prompts beside those of the data."""
        given = self.recipe.data.source
        self.recipe = with_fields(self.recipe, {"data.source": (*names_of(given), SELF)}, DERIVED)
        self.filled = given

    def lengths(self, facts: DataFacts) -> None:
        """Tokens of a row."""
        positions = self.shape.spec.max_positions
        longest = facts.long_prompt + self.recipe.data.new_tokens
        wanted = max(longest, round(TOGETHER * facts.document_tokens))
        fitting = [n for n in ROW_LENGTHS if n >= min(wanted, positions)] or [ROW_LENGTHS[-1]]
        row = min(fitting[0], positions)
        self.choose(
            "train.seq_len",
            row,
            f"19 of 20 prompts have at most {facts.long_prompt:,} tokens, an answer at most "
            f"{self.recipe.data.new_tokens:,}, both {facts.document_tokens:.0f} on average: "
            f"{TOGETHER} of them fit",
        )

    def engines(
        self, facts: DataFacts, beside: BesideTarget, foresee: Foresee | None
    ) -> EngineReading | None:
        """The vocabulary; of a block drafter also a token as its mask, and which engines will read
        it then."""
        options = self.family.options
        if foresee is None or not issubclass(options, DFlashOptions):
            self.vocabulary(facts)
            return None
        mask = beside.mask()
        if mask is not None:
            reason = f"{mask[1]}, in no text: engines take a mask from the target's embedding"
            self.choose(MASK, mask[0], reason)
        part, train, serve = self.recipe.drafter, self.recipe.train, self.recipe.serve

        def said_of(size: int | None) -> Said:
            return foresee(part, serve, size, beside)

        whole = None
        if self.recipe.vocab.size is not None and self.is_free(VOCABULARY):
            every = beside.spec.vocab_size
            whole = whole_vocabulary(part, train, self.shape, every, facts.ids, said_of)
        if whole is not None and whole.is_worth_it:
            names = ", ".join(whole.gained)
            self.choose(VOCABULARY, None, f"{names} read it over all ids alone; {whole.cost}")
            return engine_reading(whole.whole)
        self.vocabulary(facts)
        if whole is not None:
            return engine_reading(whole.trimmed, whole)
        size = self.recipe.vocab.size
        return engine_reading(said_of(size if isinstance(size, int) else None))

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
        return bool(lacking_memory(Weighing(self.recipe, self.shape, self.cluster), False))

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
        kept = self._without_auto(facts).vocab.size
        drafter = build_shape(self.family, recipe.drafter, kept, self.shape.spec)
        needs = drafter.needs()
        if not (needs.taps or needs.teacher) or not self.is_free("data.features"):
            return
        each = feature_bytes(recipe.target, recipe.data, self.shape, drafter)
        size = facts.document_tokens * each
        count = CALIBRATED_PROMPTS if recipe.data.regenerate else facts.prompts
        free = Disk().free(Path.cwd())
        if size * (count or CALIBRATED_PROMPTS) > DISK_SHARE * free:
            reason = f"the target reads every batch: a thousand answers are {size_text(size * 1e3)}"
            reason += f" of features, and {size_text(free)} are free"
            self.choose("data.features", "online", reason)
            return
        reason = f"the target reads every row once; {size_text(size * 1e3)} a thousand answers"
        self.choose("data.features", "offline", reason)

    def precision(self) -> None:
        """Products in bfloat16 where this machine makes them much faster."""
        gain = bf16_gain(run_device())
        if gain >= FAR:
            reason = f"its products are {gain:.1f} times as fast here; weights are kept in float32"
            self.choose("train.precision", "bf16", reason)

    def _without_auto(self, facts: DataFacts) -> Recipe:
        """The recipe with the vocabulary that its data are expected to need."""
        recipe = self.recipe
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

    def least(self, facts: DataFacts, pace: Pace, seconds: float) -> float:
        """Seconds of the shortest run in a time of so many, by a pace of which some may yet be
        unknown (0); 0 where the user has set how long it is."""
        train, data = self.recipe.train, self.recipe.data
        costs = AmountCosts.of(data, train, facts, pace, seconds)
        prompts, steps = self._set_prompts(facts), train.steps
        if prompts is not None and not self.is_free("train.steps"):
            return 0.0
        if self.is_free("train.steps"):
            steps = LEAST_STEPS
            if prompts is None:
                steps = max(steps, int(EPOCHS * LEAST_ANSWERS / costs.step_answers))
        return costs.fixed + costs.written(prompts or LEAST_ANSWERS) + steps * costs.step

    def amounts(self, facts: DataFacts, pace: Pace, seconds: float, left: float) -> None:
        """Answers and steps for a time of so many seconds, of which some are `left` for the run:
        what measuring and saving leave is divided so that every row is read `EPOCHS` times."""
        data, train = self.recipe.data, self.recipe.train
        costs = AmountCosts.of(data, train, facts, pace, seconds)
        left -= costs.fixed
        prompts = self._prompts(facts, costs, left)
        steps = self._steps(prompts, costs, left)
        if self.can_fill and steps > costs.most_steps(prompts):
            self.fill()
            costs = AmountCosts.of(self.recipe.data, train, facts, pace, seconds)
            prompts = self._prompts(facts, costs, left)
            steps = self._steps(prompts, costs, left)
        if self.filled is not None:
            self._say_filled(facts, prompts, seconds)
        if self.is_free("data.prompts") and self.recipe.data.regenerate:
            written = costs.written(prompts)
            self.choose("data.prompts", prompts, _answers_reason(facts, prompts, written, costs))
        most = costs.most_steps(prompts)
        steps = min(steps, most)
        epochs = steps * costs.step_answers / prompts
        reason = f"{minutes(steps * pace.step)} at {pace.step:.2g} s a step; "
        reason += f"every row is read {epochs:.1f} times"
        if steps == most:
            reason += ", and more would only learn them by heart: give more prompts"
        self.choose("train.steps", steps, reason)
        steps = self.recipe.train.steps
        self.choose("train.tau_every", max(1, -(-steps // MEASURES)), f"{MEASURES} times")
        every = max(1, int(SAVE_SECONDS / pace.step))
        self.choose("train.save_every", min(every, steps), "about every five minutes")

    def _set_prompts(self, facts: DataFacts) -> int | None:
        """How many prompts there are whatever the time: the user's number, or all that are learned
        as they are; None where time decides."""
        data = self.recipe.data
        if not data.regenerate:
            return max(1, facts.prompts or data.prompts)
        return None if self.is_free("data.prompts") else data.prompts

    def _prompts(self, facts: DataFacts, costs: AmountCosts, left: float) -> int:
        """How many prompts there are, or there is time for in the seconds that are left, learned in
        at least as many steps as make a drafter at all."""
        found = self._set_prompts(facts)
        if found is not None:
            return found
        if self.is_free("train.steps"):
            found = costs.prompts(left, EPOCHS / costs.step_answers * costs.step)
            found = min(found, costs.prompts(left - LEAST_STEPS * costs.step))
        else:
            found = costs.prompts(left - self.recipe.train.steps * costs.step)
        is_limited = facts.prompts is not None and not uses_self(self.recipe.data.source)
        return min(found, facts.prompts or 0) if is_limited else found

    def _steps(self, prompts: int, costs: AmountCosts, left: float) -> int:
        """How many steps the user wants, or there is time for beside so many prompts."""
        if not self.is_free("train.steps"):
            return self.recipe.train.steps
        return int((left - costs.written(prompts)) / costs.step)

    def _say_filled(self, facts: DataFacts, prompts: int, seconds: float) -> None:
        have = counted(facts.prompts or 0, "prompt")
        reason = f"{have} are too few for {minutes(seconds)}: the target writes "
        reason += f"{prompts - (facts.prompts or 0):,} more, see --data {SELF}; --set data.prompts="
        reason += f"{facts.prompts or 0} learns yours alone"
        choice = DerivedChoice("data.source", self.recipe.data.source, reason, self.filled)
        self.choices.append(choice)


def _answers_reason(facts: DataFacts, prompts: int, written: float, costs: AmountCosts) -> str:
    how = f"{facts.answer_tokens:.0f} tokens on average in {facts.tried} tried"
    how += "" if facts.ended else ", none of which ended by itself"
    if not facts.tried:
        how = f"{facts.answer_tokens:.0f} tokens, a guess"
    reason = f"{minutes(written)} at {written / prompts:.2g} s an answer ({how})"
    is_all = prompts == facts.prompts and not costs.question
    return reason + (", all prompts that there are" if is_all else "")
