"""What a run will take, before it is paid for: parameters, disk, memory, time, and on what basis.

Nothing is loaded: target and drafter are built without storage from the target's shape. Memory is
that of a step traced on tensors without content (`step_bytes`). Time is an estimate; a rehearsal
measures it, and after twenty steps of the run itself it is measured there. Disk is counted: it
needs no guess but how many tokens the source holds and how far the rows fill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from specctl.core.drafter import Drafter, Family
from specctl.core.messages.printable import counted
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.shortlist import check_shortlist
from specctl.recipes.schema import DataPart, DrafterPart, Recipe, TargetPart, TrainPart
from specctl.runtime.target.mtp_checkpoint import check_kind
from specctl.train.assemble import (
    attention_only,
    check_states,
    family_options,
    served_family,
    trainable_family,
)
from specctl.train.data.context import check_context
from specctl.train.data.image_checks import planned_images
from specctl.train.data.written.writing_target import is_read_packed
from specctl.train.features.capture import training_needs
from specctl.train.features.kept import Form
from specctl.train.features.remote_shards import is_url
from specctl.train.init.initial import TARGET, carries, completed
from specctl.train.joint.check import check_joint
from specctl.train.lora import attach
from specctl.train.metrics import read_log
from specctl.train.optim import is_hidden_matrix
from specctl.train.planning.capacity import fits
from specctl.train.planning.data_shares import SourceShare, source_shares
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.memory import Held
from specctl.train.planning.pace import Pace
from specctl.train.planning.rehearsal import WITHIN, Rehearsal
from specctl.train.planning.target_shape import TargetShape, shape_of, target_shape
from specctl.train.planning.weighing import ROW_BYTES, Weighing, data_tokens
from specctl.train.planning.work import (
    Part,
    Work,
    WorkSizes,
    num_added,
    num_parameters,
    num_saves,
    parts_elsewhere,
    work_of,
)
from specctl.train.prune.cut import uncuttable
from specctl.train.selective import reference_part

ANSWER_BYTES = 3  # more for a token that the target wrote, kept as it was drawn
FILL = 0.98  # share of a row that holds tokens
STATE_BYTES = 20_000  # of a checkpoint beside its tensors: generators, progress, manifest
MEASURED_STEPS = 20
CALIBRATED = (0.8, 1.25)  # of the seconds that a calibration promises

Before = Callable[[WorkSizes], Sequence[Work]]
Calibrate = Callable[[Recipe, TargetShape], Pace | None]
VocabSize = int | str | None  # of vocab.size: so many ids, those that the data need, all


@dataclass(frozen=True)  # without slots: what it holds is worked out once
class RunPlan:
    """Counts, bytes by purpose, and the parts of the run with the basis of their seconds."""

    parameters: int
    trainable: int
    target_parameters: int
    disk: Mapping[str, int]
    weighing: Weighing
    steps: int
    parts: tuple[Part, ...]
    basis: str
    sources: tuple[SourceShare, ...] = ()
    images: int = 0  # in the data, which the target is shown
    added: int = 0  # numbers that joint training adds to the target, which it changes
    remarks: tuple[str, ...] = ()  # of drafting with what is trained
    features_elsewhere: int = 0  # bytes of all features, in a folder that is not the run's

    @property
    def cluster(self) -> Cluster:
        return self.weighing.cluster

    @cached_property
    def held(self) -> Held:
        """What each process holds; worked out when asked for, which takes seconds."""
        return self.weighing.held()

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, of the host and of the fullest device together."""
        return {**self.held.host, **self.held.device}

    @property
    def gpu_hours(self) -> tuple[float, float]:
        low, high = self.seconds_range
        return low * self.cluster.processes / 3600, high * self.cluster.processes / 3600

    @property
    def seconds_range(self) -> tuple[float, float]:
        low, high = (sum(part.seconds_range[i] for part in self.parts) for i in (0, 1))
        return low, high

    @property
    def disk_bytes(self) -> int:
        return sum(self.disk.values())

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "trainable": self.trainable,
            "target_parameters": self.target_parameters,
            "target_additions": self.added,
            "disk_bytes": self.disk_bytes,
            "disk": dict(self.disk),
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "host_bytes": self.held.host_bytes,
            "device_bytes": self.held.device_bytes,
            "fullest": self.held.moment,
            **({"memory_writing": dict(self.held.writing)} if self.held.writing else {}),
            "hardware": self.cluster.text(),
            **({} if self.cluster.gpu is None else {"gpu_hours_range": list(self.gpu_hours)}),
            "steps": self.steps,
            "seconds_range": list(self.seconds_range),
            "parts": [part.to_json() for part in self.parts],
            "basis": self.basis,
            "data": [source.to_json() for source in self.sources],
            **({"images": self.images} if self.images else {}),
            **({"remarks": list(self.remarks)} if self.remarks else {}),
            **({"features_bytes": self.features_elsewhere} if self.features_elsewhere else {}),
        }


def plan(
    recipe: Recipe,
    spec: ModelSpec | None = None,
    *,
    out: Path | None = None,
    flops_per_second: float | None = None,
    rehearsal: Rehearsal | None = None,
    before: Before = lambda sizes: (),
    cluster: Cluster | None = None,
    calibrate: Calibrate | None = None,
) -> RunPlan:
    """The plan of a recipe for a target of shape `spec` (None: looked up by the target's name). If
    `out` holds a run of this recipe with enough steps behind it, the time is measured; so is all
    that a rehearsal has measured. Else `calibrate` measures a few pieces of the run, if it shall
    run here and fits; without it, time is estimated from FLOPs. `before`: the work between the text
    and the first step. `cluster`: where it shall run, None for one process here."""
    cluster = cluster or Cluster.here()
    shape = target_shape(recipe.target) if spec is None else shape_of(spec)
    data, train, name = recipe.data, recipe.train, recipe.target.name
    check_states(shape.config, attention_only(recipe.drafter, recipe.serve), name)
    check_context(name, data, train.seq_len, shape.spec)
    if recipe.drafter.init == TARGET and carries(recipe.drafter):
        check_kind(shape.config, name)
    is_cut = recipe.drafter.init == TARGET and not carries(recipe.drafter)
    if is_cut and (recipe.target.inflate or not shape.plain_head):
        raise uncuttable(name, shape.spec.model_type, recipe.target.inflate)
    served_family(recipe.drafter, train.joint, recipe.serve)
    counts = _counts(recipe.drafter, train, recipe.vocab.size, shape)
    drafter = counts.drafter
    check_joint(data, train, recipe.target, drafter)
    weighing = Weighing(recipe, shape, cluster, rehearsal)

    def paced() -> Pace | None:
        if calibrate is None or not cluster.is_here or not fits(weighing.held(), cluster):
            return None
        return calibrate(recipe, shape)

    tokens = data_tokens(data, rehearsal)
    timed = _measured_time(data, train, tokens, out, rehearsal, paced)
    if timed is None:
        sizes = WorkSizes.of(drafter, shape.active, recipe.serve.length)
        work = work_of(data, train, sizes, tokens, before(sizes))
        timed = _estimated_time(work, cluster, flops_per_second)
    elsewhere = tuple(parts_elsewhere(data))
    features = _features(recipe.target, data, shape, drafter, tokens)
    is_apart = data.features_at is not None and not is_url(data.features_at)
    return RunPlan(
        parameters=counts.parameters,
        trainable=counts.trainable,
        target_parameters=shape.parameters,
        disk=_disk(recipe.target, data, train, shape, counts, tokens),
        weighing=weighing,
        steps=train.steps,
        sources=source_shares(data),
        images=planned_images(data, train, recipe.drafter, recipe.target),
        added=counts.added,
        remarks=tuple(drafter.remarks(spec is None and is_read_packed(recipe.target))),
        parts=(*elsewhere, *timed.parts),
        features_elsewhere=features if is_apart else 0,
        basis=timed.basis + (", without the time of servers" if elsewhere else ""),
    )


def disk_needs(recipe: Recipe, spec: ModelSpec) -> dict[str, int]:
    """Bytes on disk by purpose, as the plan of a recipe for that target counts them."""
    shape, data, train = shape_of(spec), recipe.data, recipe.train
    served_family(recipe.drafter, train.joint, recipe.serve)
    counts = _counts(recipe.drafter, train, recipe.vocab.size, shape)
    return _disk(recipe.target, data, train, shape, counts, data_tokens(data))


@dataclass(frozen=True, slots=True)
class _Counts:
    """A drafter without storage, its numbers, those that move, and those added to the target; the
    bytes of its optimizer's state."""

    drafter: Drafter
    parameters: int
    trainable: int
    added: int
    optimizer: int

    @property
    def checkpoint(self) -> int:
        return 4 * self.parameters + self.optimizer + 12 * self.added + STATE_BYTES


def _counts(part: DrafterPart, train: TrainPart, size: VocabSize, shape: TargetShape) -> _Counts:
    drafter = build_shape(trainable_family(part, train.joint), part, size, shape.spec)
    parameters = num_parameters(drafter)
    if train.lora is not None:
        with torch.device("meta"):
            attach(drafter, train.lora)
    moving = drafter.trainable().values()
    return _Counts(
        drafter,
        parameters,
        trainable=sum(p.numel() for p in moving),
        added=num_added(train.joint, shape.spec),
        optimizer=4 * sum(p.numel() * _states(train, p, drafter) for p in moving),
    )


def build_shape(family: Family, part: DrafterPart, size: VocabSize, spec: ModelSpec) -> Drafter:
    """The recipe's drafter without storage. A vocabulary size of "auto" counts as untrimmed."""
    options = family_options(family, completed(part, spec))
    kept = min(size, spec.vocab_size) if isinstance(size, int) else None
    with torch.device("meta"):
        vocab = None if kept is None else VocabMap(torch.arange(kept), spec.vocab_size)
        shape = family.build(options, spec, vocab)
    check_shortlist(shape)
    return shape


def _states(train: TrainPart, parameter: torch.Tensor, drafter: Drafter) -> int:
    """Numbers that the optimizer keeps per number of a parameter."""
    sizes = {drafter.spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab else set())
    is_muon = train.optimizer == "muon" and is_hidden_matrix(parameter, frozenset(sizes))
    return 1 if is_muon else 2


def _disk(
    target: TargetPart,
    data: DataPart,
    train: TrainPart,
    shape: TargetShape,
    counts: _Counts,
    tokens: int,
) -> dict[str, int]:
    """Bytes at the fullest moment: while the last checkpoint is written and none is dropped yet, or
    when the package is written. One checkpoint more where the best is an old one."""
    drafter, checkpoint = counts.drafter, counts.checkpoint
    package = 4 * num_parameters(drafter)
    answers = data.prompts * data.new_tokens if data.regenerate else 0
    saves = num_saves(train)
    found = {
        "data": round(tokens * ROW_BYTES / FILL) + answers * ANSWER_BYTES,
        "checkpoints": min(saves, train.keep) * checkpoint,
        "package": package,
        "while saving": max(0, checkpoint - package) if saves > train.keep else 0,
    }
    first = reference_part(train)
    if first is not None:
        found["reference"] = min(num_saves(first), train.keep) * checkpoint
    if train.joint is not None:
        found["changed target"] = shape.itemsize(target) * shape.parameters
    if data.features == "offline":
        features = _features(target, data, shape, drafter, tokens)
        if data.features_at is None or (is_url(data.features_at) and data.features_gb):
            found["features"] = features  # a cache without a limit takes what is free, no more
    return found


def _features(
    target: TargetPart, data: DataPart, shape: TargetShape, drafter: Drafter, tokens: int
) -> int:
    """Bytes of all features that are kept; 0 where none are."""
    if data.features != "offline":
        return 0
    found, most = feature_bytes(target, data, shape, drafter) * tokens, data.features_gb
    return found if most is None else min(found, int(most * 1e9))


def feature_bytes(target: TargetPart, data: DataPart, shape: TargetShape, drafter: Drafter) -> int:
    """Of a token's features on disk."""
    needs, spec, topk = training_needs(drafter), shape.spec, data.teacher_topk or 0
    whole = "state" if shape.plain_head else "logits"
    teacher = ("topk" if topk else whole) if needs.teacher else "none"
    itemsize = shape.itemsize(target)
    dtype = data.feature_dtype
    has_log_z = teacher == "state" and needs.teacher_log_z
    widths = spec.hidden_size, spec.vocab_size
    form = Form(needs.taps, teacher, topk, dtype, *widths, itemsize, has_log_z)
    return form.bytes_per_token


@dataclass(frozen=True, slots=True)
class _Timed:
    parts: tuple[Part, ...]
    basis: str


def _measured_time(
    data: DataPart,
    train: TrainPart,
    tokens: int,
    out: Path | None,
    rehearsal: Rehearsal | None,
    paced: Callable[[], Pace | None],
) -> _Timed | None:
    """By a rehearsal, by the run itself in `out`, or by a calibration; None without any of them."""
    if rehearsal is not None:
        return _Timed(
            tuple(rehearsal.parts(data, train, tokens, WITHIN)),
            f"a rehearsal: {rehearsal.step:.3g} s a step, {rehearsal.answer:.3g} s a prompt, "
            f"{rehearsal.once:.3g} s once",
        )
    measured = measured_step_seconds(out) if out is not None else None
    if measured is not None:
        seconds, behind = measured
        left = max(0, train.steps - behind)
        within = (0.9 * left * seconds, 1.2 * left * seconds)
        return _Timed(
            (Part("training", counted(left, "step"), within),),
            f"measured {behind} steps in {out}, for the steps that are left",
        )
    began = time.perf_counter()
    pace = paced()
    if pace is None:
        return None
    spent = time.perf_counter() - began
    return _Timed(
        tuple(pace.parts(data, train, tokens, CALIBRATED)),
        f"calibrated in {spent:.0f} s here: {pace.step:.3g} s a step, "
        f"{pace.answer:.3g} s a prompt, {pace.tau:.3g} s a measurement of tau",
    )


def _estimated_time(work: Sequence[Work], cluster: Cluster, flops: float | None) -> _Timed:
    """By floating-point operations, so many a second (None: as measured here)."""
    if not cluster.is_here:
        assert cluster.gpu is not None
        return _Timed(
            tuple(part.reckoned(cluster) for part in work),
            f"reckoned from the data sheet of a {cluster.gpu.name}, not measured",
        )
    speed = flops or matrix_speed()
    return _Timed(
        tuple(part.timed(speed) for part in work),
        f"estimate from FLOPs at {speed / 1e9:,.0f} GFLOP/s measured here",
    )


def measured_step_seconds(out: Path) -> tuple[float, int] | None:
    """Seconds per step of the run in `out` and its steps so far, if it has enough of them."""
    log = out / "metrics.jsonl"
    lines = [line for line in read_log(log) if "seconds" in line] if log.exists() else []
    if not lines or lines[-1]["step"] < MEASURED_STEPS:
        return None
    return lines[-1]["seconds"] / lines[-1]["step"], lines[-1]["step"]


@cache  # stages and further plans of a process are estimated by one measurement
def matrix_speed(seconds: float = 0.25) -> float:
    """Floating-point operations per second of large float32 products on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 4096 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    left @ right  # the first one prepares the library
    if device.type == "cuda":
        torch.cuda.synchronize()
    done, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or done == 0:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        done += 1
    return done * 2.0 * size**3 / spent
