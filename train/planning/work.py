"""The parts of a run, in the order in which they come, and what each of them costs.

A run is more than its steps: the target writes answers, perhaps reads all rows once; a reference is
trained first; the drafter writes text of its own; tau is measured again and again. Each part counts
floating-point operations of two kinds, which run at different speeds: those of whole batches, and
those of writing token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.messages.printable import counted
from specctl.core.spec import ModelSpec
from specctl.recipes.low_rank import JointPart
from specctl.recipes.schema import DataPart, TrainPart
from specctl.train.data.sources.self_source import uses_self
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.target_shape import TargetShape, layer_matrices
from specctl.train.step.selective import COMPARING, reference_part

ADDED_BYTES = 16  # of a number added: itself, its gradient, two of the optimizer's, float32


def _adapted(part: JointPart, spec: ModelSpec) -> list[tuple[int, int]]:
    """Sizes of the matrices of a layer that additions are made to. Names that a gated layer does
    not have (of another architecture) count as all of them."""
    every = layer_matrices(spec)
    endings = ("",) if part.targets is None else part.targets
    return [size for name, size in every.items() if name.endswith(endings)] or [*every.values()]


def num_added(part: JointPart | None, spec: ModelSpec) -> int:
    """Numbers in the additions to a target of that shape."""
    if part is None:
        return 0
    sizes = _adapted(part, spec)
    return spec.num_layers * sum(min(part.rank, *size) * sum(size) for size in sizes)


def joint_memory(train: TrainPart, shape: TargetShape, wide: int) -> dict[str, int]:
    """Bytes beside the frozen target and the drafter. The weights are added up anew for a batch and
    kept until its gradient is taken, as are some thirty vectors of every token and layer; when all
    is done the changed target is read back from disk."""
    part, spec = train.joint, shape.spec
    if part is None:
        return {}
    tokens, width = train.rows * train.seq_len, spec.hidden_size
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    each = 7 * width + 4 * heads + 6 * spec.intermediate_size
    summed = spec.num_layers * sum(rows * columns for rows, columns in _adapted(part, spec))
    batch = wide * (spec.num_layers * tokens * each + summed)
    if part.trajectory is not None:  # the text and a state of it are read with their gradients
        batch *= 2
    return {
        "additions to the target, gradient, optimizer": ADDED_BYTES * num_added(part, spec),
        "the target's weights and activations of a batch": batch,
        "the changed target, read back": max(0, wide * shape.parameters - batch),
    }


def joint_passes(part: JointPart | None) -> float:
    """Operations of a step per number of the target and token, beside reading the batch once: the
    gradient of states and of weights, and the original's own reading; of a trajectory also its
    iterations, and a state of it, read with its gradient."""
    if part is None:
        return 0.0
    more = 0.0 if part.trajectory is None else 6.0 + 2.0 * part.trajectory.most
    return (1.0 - part.warmup) * (4.0 + 2.0 * (part.keep == "kl") + more)


EFFICIENCY = (1.1, 0.25)  # FLOPs as counted here per matrix FLOP of training: best, worst
DECODE_EFFICIENCY = (0.3, 0.02)  # the same while text is written
GPU_EFFICIENCY = (0.45, 0.15)  # of a GPU's bfloat16 products: best, worst
GPU_DECODE_EFFICIENCY = (0.6, 0.1)  # of its memory's speed while text is written
WRITTEN_AT_ONCE = 64  # rows
ANSWERS = "the target writes answers"
QUESTIONS = "the target writes questions"  # of the data source `self`
READING = "the target reads the rows once"  # where features are kept
# Of a question, with the prompt before it and the attempts that are dropped: 24 and 47 were
# measured on SmolLM2-135M.
QUESTION_TOKENS = 71
ROUND_TOKENS = 2  # of a round while tau is measured


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run: what is done, how much of it, and the seconds that it takes at best and at
    worst."""

    name: str
    amount: str
    seconds_range: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "amount": self.amount, "seconds_range": [*self.seconds_range]}


@dataclass(frozen=True, slots=True)
class Work:
    """The same in floating-point operations: of whole batches, and of writing."""

    name: str
    amount: str
    batches: float = 0.0
    writing: float = 0.0

    def timed(self, speed: float) -> Part:
        """At so many operations per second of large products."""
        low, high = (
            self.batches / (share * speed) + self.writing / (decode * speed)
            for share, decode in zip(EFFICIENCY, DECODE_EFFICIENCY, strict=True)
        )
        return Part(self.name, self.amount, (low, high))

    def reckoned(self, cluster: Cluster) -> Part:
        """On GPUs that are not here. Batches are shared by all of them and run at a share of their
        products; text is written by one, `WRITTEN_AT_ONCE` rows for each reading of its memory."""
        gpu = cluster.gpu
        assert gpu is not None
        written = min(gpu.speed, WRITTEN_AT_ONCE * gpu.bandwidth)  # 2 operations for 2 bytes
        low, high = (
            self.batches / (share * gpu.speed * cluster.processes)
            + self.writing / (decode * written)
            for share, decode in zip(GPU_EFFICIENCY, GPU_DECODE_EFFICIENCY, strict=True)
        )
        return Part(self.name, self.amount, (low, high))


@dataclass(frozen=True, slots=True)
class WorkSizes:
    """What the work of a run depends on beside its data and steps: parameters, how often the
    drafter's layers run over a batch, the length of a draft."""

    target: int
    drafter: int
    trainable: int
    passes: int
    reads_target: bool
    length: int

    @classmethod
    def of(cls, drafter: Drafter, target: int, length: int) -> WorkSizes:
        needs = drafter.needs()
        trainable = sum(p.numel() for p in drafter.trainable().values())
        reads = bool(needs.taps) or needs.teacher
        return cls(target, num_parameters(drafter), trainable, passes(drafter), reads, length)


def num_parameters(drafter: Drafter) -> int:
    return 0 if drafter.module is None else sum(p.numel() for p in drafter.module.parameters())


def passes(drafter: Drafter) -> int:
    """Times that the drafter's layers run over a batch."""
    return int(getattr(drafter.options, "ttt_steps", 1))


def work_of(
    data: DataPart,
    train: TrainPart,
    sizes: WorkSizes,
    row_tokens: int,
    more: Sequence[Work] = (),
) -> list[Work]:
    """All parts of a run over `row_tokens` tokens of text; `more` comes between making the text and
    learning it."""
    found = list[Work]()
    questions = num_questions(data)
    if questions:
        writing = 2.0 * sizes.target * questions * QUESTION_TOKENS
        found.append(Work(QUESTIONS, counted(questions, "question"), writing=writing))
    if data.regenerate and data.endpoint is None:
        tokens = data.prompts * (data.prompt_tokens + data.new_tokens)
        found.append(
            Work(ANSWERS, counted(data.prompts, "prompt"), writing=2.0 * sizes.target * tokens)
        )
    if data.features == "offline" and sizes.reads_target and data.target_source == "inprocess":
        reading = 2.0 * sizes.target * row_tokens
        found.append(Work(READING, f"{row_tokens:,} tokens", reading))
    found += more
    first = reference_part(train)
    if first is not None:
        found += [replace(w, name=f"reference: {w.name}") for w in _training(data, first, sizes)]
    return [w for w in [*found, *_training(data, train, sizes)] if w.batches or w.writing]


def num_questions(data: DataPart) -> int:
    """Questions that the target writes at most: what other sources hold is not known yet."""
    return data.prompts if uses_self(data.source) else 0


def _training(data: DataPart, train: TrainPart, sizes: WorkSizes) -> Iterable[Work]:
    """The parts of the loop: what the drafter writes, the steps, the measurements of tau."""
    tokens = train.steps * train.rows * train.accumulate * train.seq_len
    if data.on_policy:
        fresh = round(data.on_policy * tokens)
        yield Work("the drafter writes", f"{fresh:,} tokens", writing=2.0 * sizes.drafter * fresh)
    each = sizes.passes * (4.0 * sizes.drafter + 2.0 * sizes.trainable)
    is_here = data.target_source == "inprocess"
    is_alone = train.joint is not None and train.joint.alone is not None
    if (sizes.reads_target or is_alone) and data.features == "online" and is_here:
        each += (2.0 + joint_passes(train.joint)) * sizes.target
    if train.select in COMPARING:
        each += sizes.passes * 2.0 * sizes.drafter  # the reference reads the batch, too
    yield Work("training", counted(train.steps, "step"), each * tokens)
    yield measuring(data, train, sizes, num_measures(train))


def num_measures(train: TrainPart) -> int:
    """Times that a run measures tau; adapting begins with one."""
    return math.ceil(train.steps / train.tau_every) + (train.lora is not None)


def num_saves(train: TrainPart) -> int:
    """Checkpoints that a run writes, if every best one is also due."""
    return math.ceil(train.steps / train.save_every)


def measuring(data: DataPart, train: TrainPart, sizes: WorkSizes, times: int = 1) -> Work:
    """Measurements of tau: rounds of drafting and checking."""
    often = counted(times, "time")
    if data.target_source != "inprocess":  # reckoned from a pass over rows kept back
        places = times * train.tau_prompts * train.seq_len
        return Work("measuring tau", often, 2.0 * sizes.passes * sizes.drafter * places)
    prompts = train.tau_prompts * (1 if train.tau_suite is None else 2)
    rounds = times * prompts * train.tau_tokens / ROUND_TOKENS
    each = 2.0 * sizes.target * (sizes.length + 1) + 2.0 * sizes.drafter * sizes.length
    return Work("measuring tau", often, writing=rounds * each)


def parts_elsewhere(data: DataPart) -> list[Part]:
    """What servers do for a run. How long they take is not known here; where every step waits for
    them, they set its pace."""
    found = list[Part]()
    if data.regenerate and data.endpoint is not None:
        amount = f"{counted(data.prompts, 'prompt')}, by the endpoint: not counted"
        found.append(Part(ANSWERS, amount, (0.0, 0.0)))
    if data.target_source == "endpoint":
        often = "once, before the steps" if data.features == "offline" else "in every step"
        amount = f"by the servers, {often}: not counted"
        found.append(Part("the target reads rows", amount, (0.0, 0.0)))
    return found
