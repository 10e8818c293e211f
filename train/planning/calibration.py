"""A calibration: seconds of the pieces of a run, from a few of each on this machine.

The recipe's own job is set up in a folder that is thrown away: the loop's steps on rows of its
length, the engine's rounds as answers are written and tau is measured, a checkpoint. A batch that
takes long is measured with fewer rows and reckoned up. The network is not used,
but for a suite of the hub that the recipe measures tau on.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, Needs
from specctl.core.errors import SpecctlError
from specctl.core.storage.files import Disk
from specctl.recipes.schema import Recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.reporter import Advance, Reporter, SilentReporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.assemble import decoder, measuring_prompts, measuring_rows
from specctl.train.data.preparation import Preparation
from specctl.train.data.prompts.suite_prompts import suite_prompts
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.written.regenerate import slots_for
from specctl.train.data.written.writing_target import writing_target
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.run_device import run_device
from specctl.train.features.capture import to_device, training_needs
from specctl.train.features.kept import Form, Tensors, decode, encode, read_target, with_features
from specctl.train.features.reading import reading_target
from specctl.train.features.stored_rows import StoredRows, stored_rows
from specctl.train.job import RunInputs, make_job
from specctl.train.loop import Job, TrainProgress, save, take_step
from specctl.train.planning.pace import Pace
from specctl.train.planning.stand_in import (
    SourceText,
    encoding_seconds,
    now,
    rows_of,
    source_text,
    stand_in,
    states_from_elsewhere,
    token_stream,
)
from specctl.train.planning.target_shape import TargetShape
from specctl.train.planning.weighing import data_tokens
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.state import untouched_random_state
from specctl.train.step.products import faster_products
from specctl.train.step.selective import COMPARING
from specctl.train.stop import Stop

PIECES = 6  # that are measured one after another
START = 6.0  # seconds, where the age of this process says nothing: imports
MORE_START = 1.5  # times that: with the imports that come later, and the picture of the curve
STEP_SECONDS = 6.0  # an optimizer step of more is measured in pieces
SLOW_START = 30.0  # seconds of a first step that is not yet taken for the pace of all
ROUNDS = 8  # of the engine that are timed
TAU = 1.7  # tokens of a round of a trained drafter's slowest rows, while tau is measured
SPARE_ROWS, MOST_ROWS_TIMES = 64, 3  # more than there are by a guess of the data's tokens
GATE = (4, 32)  # prompts and tokens that a package is tried with, twice
MOST_SAVED = 500_000_000  # bytes of a checkpoint that is written to see how long that takes

Clock = Callable[[], float]
SoFar = Callable[[Pace], None]


def calibrate(
    recipe: Recipe,
    shape: TargetShape,
    processes: int = 1,
    start: float | None = None,
    clock: Clock = now,
    reporter: Reporter | None = None,
    so_far: SoFar = lambda pace: None,
) -> Pace | None:
    """The pace of a recipe's run here, for a target of that shape, on so many processes. `start`:
    seconds from the command to its first work. `so_far` gets what is known as the pieces are
    measured, 0 for the others, and may end the calibration by an error. None where the pace cannot
    be known within seconds: a target that a CPU would need minutes to make, or one spread over
    several devices."""
    device = run_device()
    if recipe.train.shard_target:
        return None
    reporter = reporter if reporter is not None else SilentReporter()
    with (
        untouched_random_state(device),
        tempfile.TemporaryDirectory(prefix="specctl-") as folder,
        reporter.task("calibrating", PIECES, "pieces") as advance,
    ):
        began = clock()
        is_here = recipe.data.target_source == "inprocess"
        target = stand_in(recipe.target, is_here, shape, device)
        if target is None:
            return None
        loading = clock() - began
        advance(1, "target")
        text = source_text(recipe.data, clock)
        advance(1, "text")
        rows = -(-recipe.train.rows // processes)
        train = recipe.train.model_copy(update={"rows": rows, "trackers": ()})
        mine = recipe.model_copy(update={"train": train})
        pieces = _Pieces(mine, target, text, Path(folder), clock, advance, so_far)
        made = pieces.pace(START if start is None else start)
        return replace(made, once=made.once + loading, answer=made.answer / processes)


@dataclass(frozen=True, slots=True)
class _Pieces:
    recipe: Recipe
    target: Target
    text: SourceText
    folder: Path
    clock: Clock
    advance: Advance
    so_far: SoFar

    def pace(self, start: float) -> Pace:
        recipe, target = self.recipe, self.target
        data = recipe.data
        train = recipe.train
        rows = self._rows(4 + 2 * train.rows)
        job = self._job(rows)
        progress = TrainProgress()
        write, read, stored = self._written(job, progress), 0.0, None
        if data.features == "offline":
            stored = self._stored(training_needs(job.drafter))
            features = self._features(job, rows)
            job.batch(list(range(train.rows)))
            read = self._timed(lambda: features.kept(train.rows)) / (train.rows * train.seq_len)
            job = replace(job, batch=features.batch)
        step = self._step(job, progress)
        if train.joint is not None:  # so far the drafter learned alone
            alone = train.joint.warmup
            progress.step = round(alone * train.steps)
            step = alone * step + (1.0 - alone) * self._step(job, progress)
        self.advance(1, "a step")
        known = Pace(once=0.0, answer=0.0, step=step, tau=0.0, save=0.0, read=read, stored=stored)
        self.so_far(known)
        saved = self._saved(job, progress)
        self.advance(1, "a checkpoint")
        with job.drafter.whole() as drafter:
            tau, gate = self._decoding(drafter, rows, step)
        self.advance(1, "tau")
        self.so_far(replace(known, once=gate, tau=tau, save=saved))
        tokens = data.text_tokens if data.regenerate else data.limit_tokens or 10**7
        encoding = encoding_seconds(target, self.text.samples, tokens, self.clock)
        answer = self._answer()
        self.advance(1, "answers")
        return Pace(
            once=MORE_START * start + self.text.seconds + encoding + gate,
            answer=answer,
            step=step,
            tau=tau,
            save=saved,
            write=write,
            read=read,
            stored=stored,
        )

    def _stored(self, needs: Needs) -> StoredRows | None:
        """Of the run's own rows, in the folder of features that it shares."""
        recipe, train = self.recipe, self.recipe.train
        most = SPARE_ROWS + MOST_ROWS_TIMES * data_tokens(recipe.data) // train.seq_len
        made = Preparation(recipe.data, train.seq_len, self.target, recipe.target)
        return stored_rows(made, train, needs, self.folder / "no run", most)

    @property
    def is_elsewhere(self) -> bool:
        return self.recipe.data.target_source != "inprocess"

    def _small(self) -> Recipe:
        """The recipe whose job is set up: features as they come, all of them in this process; a
        vocabulary that is yet to be found counts whole."""
        recipe = self.recipe
        fresh: dict[str, object] = {"features": "online", "teacher_topk": None, "features_gb": None}
        fresh |= {"target_source": "inprocess", "states": None, "on_policy_every": self._every()}
        vocab = recipe.vocab
        if vocab.size == "auto" or vocab.selector != "vocab-trim":
            size = vocab.size if isinstance(vocab.size, int) else None
            vocab = vocab.model_copy(update={"size": size, "selector": "vocab-trim"})
        data = recipe.data.model_copy(update=fresh)
        train = recipe.train.model_copy(update={"tau_suite": None})
        return recipe.model_copy(update={"data": data, "vocab": vocab, "train": train})

    def _rows(self, count: int) -> TokenData:
        """At least so many, like those of the run."""
        data, seq_len, size = self.recipe.data, self.recipe.train.seq_len, self.recipe.vocab.size
        spec = self.target.spec
        kept = min(size, spec.vocab_size) if isinstance(size, int) else spec.vocab_size
        stream = token_stream(self.target, self.text.samples, count * seq_len, kept)
        return rows_of(data, seq_len, stream, spec.pad_id or 0, self.folder / "data")

    def _job(self, data: TokenData) -> Job:
        target, recipe = self.target, self._small()
        accelerator = Accelerator()
        ranks = Ranks(device=target.device)
        checkpoints = Checkpoints(self.folder / "checkpoints", SilentReporter(), ranks=ranks)
        inputs = RunInputs(target, data, None, Stop(""), accelerator, None)
        reference = None
        if recipe.train.select in COMPARING:
            plain = recipe.train.model_copy(update={"select": "none"})
            other = make_job(recipe.model_copy(update={"train": plain}), inputs, checkpoints, None)
            reference = copy.deepcopy(other.drafter)
        job = make_job(recipe, inputs, checkpoints, reference)
        if not self.is_elsewhere:
            return job
        needs = training_needs(job.drafter)

        def batch(rows: list[int]) -> TrainBatch:
            return states_from_elsewhere(target, data.batch(rows, target.device), needs)

        return replace(job, batch=batch)

    def _every(self) -> int:
        """Steps for which the drafter writes: enough to fill the engine."""
        data, train = self.recipe.data, self.recipe.train
        each = max(1, train.seq_len // (data.prompt_tokens + data.new_tokens))
        fresh = data.on_policy * train.rows * train.accumulate * each
        return min(data.on_policy_every, max(1, round(32 / fresh))) if fresh else 1

    # -- pieces -----------------------------------------------------------------------------------

    def _timed(self, work: Callable[[], object]) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        began = self.clock()
        work()
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        return self.clock() - began

    def _take(self, job: Job, progress: TrainProgress, rows: int, batches: int) -> float:
        changed = job.settings.model_copy(update={"rows": rows, "accumulate": batches})
        other = replace(job, settings=changed)
        with faster_products(job.ranks):
            return self._timed(lambda: take_step(other, progress, lambda amount, note="": None))

    def _written(self, job: Job, progress: TrainProgress) -> float:
        """Seconds in which the drafter writes the text of its recipe's steps."""
        data = self.recipe.data
        if not data.on_policy:
            return 0.0
        found = self._timed(lambda: job.text.refresh(progress.step, progress.position))
        return found * data.on_policy_every / self._every()

    def _step(self, job: Job, progress: TrainProgress) -> float:
        """Seconds of an optimizer step. The first one is slower and left out, however long it
        takes where kernels are compiled in it; a long one is reckoned from fewer rows and from one
        batch more."""
        train = self.recipe.train
        compiles = train.compile or self.target.device.type == "cuda"

        def taken(rows: int, batches: int) -> float:
            if self.recipe.data.on_policy:
                job.text.refresh(progress.step, progress.position)
            return self._take(job, progress, rows, batches)

        def twice(rows: int, batches: int) -> float:
            return (taken(rows, batches) + taken(rows, batches)) / 2

        one = taken(1, 1)
        if compiles or one <= SLOW_START:
            one = min(one, taken(1, 1))
        batches = train.accumulate
        if one * train.rows * batches <= STEP_SECONDS:
            taken(train.rows, batches)
            return twice(train.rows, batches)
        rows = max(1, min(train.rows, int(STEP_SECONDS / 4 / one)))
        if one > STEP_SECONDS:
            return one * train.rows * batches
        taken(rows, 1)
        short = twice(rows, 1)
        if rows == train.rows and batches == 1:
            return short
        long = twice(rows, 2)
        return short + (train.rows * batches / rows - 1) * max(0.0, long - short)

    def _features(self, job: Job, data: TokenData) -> _Features:
        needs, target = training_needs(job.drafter), reading_target(self.target, self.recipe.train)
        if self.is_elsewhere:
            return _Features(lambda rows: (job.batch(rows), ()), lambda batch, kept: batch)
        form = Form.of(self.recipe.data, target, needs)

        def keep(rows: list[int]) -> tuple[TrainBatch, Sequence[Tensors]]:
            batch = to_device(data.batch(rows), target.device)
            return batch, [encode(raw, form) for raw in read_target(target, batch, form)]

        def lay(batch: TrainBatch, kept: Sequence[Tensors]) -> TrainBatch:
            raw = [decode(each, form) for each in kept]
            return with_features(target, batch, raw, needs, form)

        return _Features(keep, lay)

    def _saved(self, job: Job, progress: TrainProgress) -> float:
        """Seconds of a checkpoint; one that is too large to try takes as long by the byte."""
        size = sum(4 * each.numel() for each in job.drafter.trainable().values())
        if 3 * size > min(MOST_SAVED, Disk().free(self.folder) // 2):
            return 3 * size / 3e8  # bytes a second that are hashed and written
        return self._timed(lambda: save(job, progress))

    def _answer(self) -> float:
        """Seconds of an answer of full length, with the engine as full as it will be."""
        data, target = self.recipe.data, self.target
        if not data.regenerate or data.endpoint is not None or not target.can_run:
            return 0.0
        longest = min(data.prompt_tokens + data.new_tokens, target.spec.max_positions)
        slots = min(slots_for(target, longest), data.prompts)
        ids = token_stream(target, self.text.samples, slots * longest, target.spec.vocab_size)
        writer = writing_target(self.recipe.target, target)
        middle = min(data.prompt_tokens + data.new_tokens // 2, longest - ROUNDS - 4)
        read = self._rounds(writer, ids, slots, max(1, middle))
        waves = -(-data.prompts // slots) if data.prompts < 8 * slots else data.prompts / slots
        prefill = read.prefill * data.prompt_tokens / max(1, middle)
        return prefill / slots + waves * data.new_tokens * read.round / data.prompts

    def _rounds(
        self, writer: Target, ids: Sequence[int], slots: int, length: int
    ) -> _EngineSeconds:
        data = self.recipe.data
        engine = Engine(writer, num_slots=slots)
        engine.open(length + ROUNDS + 4)
        greedy = round(data.greedy_share * slots)
        for index in range(slots):
            sampling = Sampling(
                temperature=0.0 if index < greedy else data.temperature,
                top_p=None if index < greedy else data.top_p,
                top_k=None if index < greedy else data.top_k,
                seed=index,
                max_new_tokens=ROUNDS + 4,
                ignore_eos=True,
            )
            prompt = tuple(ids[index * length : (index + 1) * length])
            engine.submit(index, Request(prompt, sampling))
        first = self._timed(engine.step)
        engine.step()
        each = sum(self._timed(engine.step) for _ in range(ROUNDS)) / ROUNDS
        return _EngineSeconds(max(0.0, first - each), each)

    def _decoding(self, drafter: Drafter, data: TokenData, step: float) -> tuple[float, float]:
        """Seconds of a measurement of tau, and of trying the package."""
        train, target = self.recipe.train, self.target
        if self.is_elsewhere or not target.can_run:  # a pass over rows that were kept back
            return step / 3 * train.tau_prompts / (train.rows * train.accumulate), 0.0
        if drafter.module is not None:
            drafter.module.eval()
        recipe, count = self.recipe, train.tau_prompts
        if target.tokenizer is not None:
            held = measuring_prompts(recipe.data, count, target, data)
        else:
            ids = data.batch(measuring_rows(recipe.data, data) or [0]).ids_BS[0].tolist()
            held = [ids[:24]] * count

        def per_tokens(prompts: Sequence[Sequence[int]], tokens: int) -> float:
            short = train.model_copy(update={"tau_tokens": tokens})
            return self._timed(decoder(recipe.serve, short, target, drafter, prompts))

        def reckoned(prompts: Sequence[Sequence[int]], tokens: int) -> float:
            few, more = per_tokens(prompts, 3), per_tokens(prompts, 3 + ROUNDS)
            each = max(0.0, more - few) / ROUNDS
            return max(0.0, few - 3 * each) + each * tokens / TAU

        with torch.inference_mode():
            per_tokens(held[:1], 2)
            tau = reckoned(held, train.tau_tokens)
            if train.tau_suite is not None:
                tau += reckoned(self._suite(held), train.tau_tokens)
            gate = 2 * reckoned(held[: GATE[0]], GATE[1])
        return tau, gate

    def _suite(self, held: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The suite's prompts; the held-out ones in the place of those that cannot be read now."""
        if self.target.tokenizer is None:
            return held
        try:
            suite = suite_prompts(self.recipe.train, self.target)
        except SpecctlError:  # for the checks of the run to say
            return held
        return held if suite is None else suite.prompts


@dataclass(frozen=True, slots=True)
class _Features:
    """Batches of so many rows whose features are kept, as those on disk are: read once, and laid
    out whenever they are wanted. In memory, for a disk keeps what was just written there, too."""

    keep: Callable[[list[int]], tuple[TrainBatch, Sequence[Tensors]]]
    lay: Callable[[TrainBatch, Sequence[Tensors]], TrainBatch]
    there: dict[int, tuple[TrainBatch, Sequence[Tensors]]] = field(default_factory=dict)

    def kept(self, count: int) -> tuple[TrainBatch, Sequence[Tensors]]:
        if count not in self.there:
            self.there[count] = self.keep(list(range(count)))
        return self.there[count]

    def batch(self, rows: list[int]) -> TrainBatch:
        return self.lay(*self.kept(len(rows)))


@dataclass(frozen=True, slots=True)
class _EngineSeconds:
    prefill: float
    round: float
