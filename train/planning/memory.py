"""What each process of a run holds, on its device and on its host, and what to change where that is
too much.

Three moments can be the fullest: the target writing answers on a CPU, with a second copy of it as
its file packs it; a step; and the first process measuring tau, which needs the whole target. Bytes
of tensors are those that `step_bytes` traced; what CUDA itself takes is reckoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from specctl.core.forward.slot_state import PENDING
from specctl.core.spec import ModelSpec
from specctl.models.llama.llama import PACK_SHARE
from specctl.recipes.schema import DataPart, TargetPart, TrainPart
from specctl.train.data.prompts.suite_prompts import MOST_TOKENS
from specctl.train.data.written.regenerate import HOST_BYTES, HOST_ROWS, rows_within
from specctl.train.data.written.writing_target import packed_copy
from specctl.train.planning.hardware import GPUS, Cluster, machine_bytes
from specctl.train.planning.step_bytes import StepBytes
from specctl.train.planning.target_shape import TargetShape
from specctl.train.step.selective import COMPARING

PROCESS_BYTES = 900_000_000  # python, torch, transformers, the text being read, a heap's gaps
CUDA_HOST_BYTES = 2_500_000_000  # more of a process that uses a GPU: its libraries
CUDA_BYTES = 1_500_000_000  # context, libraries' work space, and what allocation wastes
NCCL_BYTES = 500_000_000  # buffers of the exchange, where there are several processes
PACKED_COPY = "target, as its file packs it"
WRITING = "answers are written"
IN_FLIGHT = 2  # batches of states from elsewhere: that of the step, and the next
MOST_PROCESSES = 64  # that are proposed


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by purpose at the fullest moment, on the fullest device and on the host of one machine;
    `writing`: on the host while the target writes answers, where a second copy of it does."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    moment: str
    writing: Mapping[str, int] = field(default_factory=dict)

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Of a row in the target's cache: keys and values of a `position`, the `states` of recurrent
    layers, and what is `pending` of a token until its path is known."""

    position: int
    states: int = 0
    pending: int = 0

    @classmethod
    def of(cls, shape: TargetShape, dtype: torch.dtype) -> RowBytes:
        spec, row = shape.spec, shape.row
        if row is None:
            heads = 2 * spec.num_layers * spec.num_kv_heads
            return cls(heads * spec.head_dim * dtype.itemsize)
        states, pending = row.state_bytes(dtype), row.pending_bytes(dtype)
        return cls(row.position_bytes(dtype), states, pending)

    def cache(self, rows: int, positions: int) -> dict[str, int]:
        """So many rows, of so many positions together."""
        states = rows * self.states + min(PENDING, positions) * self.pending
        found = {"KV cache": positions * self.position}
        return found | ({"recurrent states": states} if states else {})


def is_spread(part: TargetPart) -> bool:
    """Whether no device holds the whole target, by its device map or by tensor parallelism."""
    return part.device_map is not None or part.tensor_parallel


def resident(part: TargetPart, step: StepBytes, processes: int) -> int:
    """Bytes of the target on a device. By a device map the least that it must be, with a layer that
    is brought there; where the others go is settled, and checked, as it is loaded."""
    if part.tensor_parallel:
        return step.layers // processes + step.beside_layers
    if part.device_map is not None:
        return step.beside_layers + step.largest_layer
    return step.target


def rows_each(train: TrainPart, processes: int) -> int:
    """Rows of a batch that a process, or a group of them, has."""
    return -(-train.rows // train.groups(processes))


@dataclass(frozen=True, slots=True)
class Moments:
    """What the bytes of each moment of a run follow from: the recipe's parts, the shape of the
    target and of a row of its cache, a traced step, the hardware."""

    target: TargetPart
    data: DataPart
    train: TrainPart
    spec: ModelSpec
    step: StepBytes
    cluster: Cluster
    row: RowBytes

    @property
    def is_elsewhere(self) -> bool:
        """Whether the target's layers are not in this process."""
        return self.data.target_source != "inprocess"

    def held(self, joint: Mapping[str, int], is_fast: bool) -> Held:
        """The fullest of the moments. `joint`: what joint training adds; `is_fast`: the target's
        forward is our own, which fuses its matrices."""
        cluster, data, is_elsewhere = self.cluster, self.data, self.is_elsewhere
        fused = self._fused() if is_fast and not is_elsewhere else {}
        moments = {"a step": self._training() | dict(joint) | fused}
        if not is_elsewhere:  # else tau is reckoned from a batch like those of the steps
            moments["tau is measured"] = self._measuring() | fused
        if cluster.gpu is None and data.regenerate and data.endpoint is None:
            moments[WRITING] = self._writing() | fused
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        found, count = moments[moment], cluster.per_node
        coming = IN_FLIGHT * self.step.states
        states = {"states as they come in": coming} if is_elsewhere else {}
        if cluster.gpu is None:

            def of_all(parts: Mapping[str, int]) -> dict[str, int]:
                process = {"process": PROCESS_BYTES, **parts}
                return {name: count * size for name, size in process.items()}

            written = moments.get(WRITING, {})
            written = of_all(written) if PACKED_COPY in written else {}
            return Held({}, of_all({**found, **states}), moment, written)
        found["CUDA"] = CUDA_BYTES + (NCCL_BYTES if cluster.processes > 1 else 0)
        host = {"process": PROCESS_BYTES + CUDA_HOST_BYTES, **states}
        return Held(found, {name: count * size for name, size in host.items()}, moment)

    def _fused(self) -> dict[str, int]:
        """Joined copies of the target's matrices, made on a host with plenty of room for them; on a
        GPU they are joined in place."""
        step, room = self.step, machine_bytes() if self.cluster.gpu is None else None
        is_joined = not (self.train.shard_target or is_spread(self.target))
        if self.train.joint is not None or not is_joined or room is None:
            return {}
        fits = step.target <= PACK_SHARE * room
        return {"target, joined matrices": step.layers} if fits else {}

    def _training(self) -> dict[str, int]:
        train, step, count = self.train, self.step, self.cluster.processes
        is_sharded = train.parallel == "fsdp" and count > 1
        whole = step.weights + step.gradient + step.optimizer
        target = resident(self.target, step, count)
        if is_sharded and train.shard_target:
            target = step.layers // count + step.beside_layers + 2 * step.largest_layer
        name = "target's embedding, norm, head" if self.is_elsewhere else "target"
        return {
            name: target,
            "drafter, gradient, optimizer": whole
            if not is_sharded
            else whole // count + step.weights + step.gradient,
            **({"reference": step.weights} if train.select in COMPARING else {}),
            "batch": step.batch,
        }

    def _measuring(self) -> dict[str, int]:
        train, step, count = self.train, self.step, self.cluster.processes
        is_sharded = train.parallel == "fsdp" and count > 1
        whole = step.weights + step.gradient + step.optimizer
        longest = self.data.prompt_tokens if train.tau_suite is None else MOST_TOKENS
        places = train.tau_prompts * min(self.spec.max_positions, longest + train.tau_tokens + 64)
        return {
            "target": resident(self.target, step, count),
            "drafter, gradient, optimizer": whole // count if is_sharded else whole,
            "drafter, prepared for drafting": step.weights,
            **self.row.cache(train.tau_prompts, places),
        }

    def _writing(self) -> dict[str, int]:
        """On a CPU, before there is a drafter."""
        row, length = self.row, min(self.spec.max_positions, self.train.seq_len)
        rows = rows_within(HOST_BYTES, HOST_ROWS, row.position * length, row.states, row.pending)
        rows = min(rows, self.data.prompts)
        found = {"target": self.step.target, **row.cache(rows, rows * length)}
        packed = packed_copy(self.target)
        return found | ({PACKED_COPY: packed} if packed else {})


@dataclass(frozen=True, slots=True)
class Way:
    """A change of a run: the words that say it, and what it makes of training and hardware."""

    words: str
    train: TrainPart
    cluster: Cluster


def ways(train: TrainPart, is_here: bool, cluster: Cluster) -> Iterator[list[Way]]:
    """Changes that need less memory of a device, the least first; in each list they differ by the
    rows of a batch alone, so that if the last is not enough none of them is. `is_here`: the
    target's layers are in this process."""
    counts = [cluster.processes]
    if cluster.gpu is not None:
        most = cluster.most_processes(MOST_PROCESSES)
        counts += [2**k for k in range(1, 7) if cluster.processes < 2**k <= most]
    for count in counts:
        wider = cluster if count == cluster.processes else cluster.with_processes(count)
        for spread in _spreads(train, is_here, count):
            found = list[Way]()
            for halvings in range(10):
                rows = train.rows >> halvings
                least = train.groups(count)
                if rows < least or (halvings and rows << halvings != train.rows):
                    break
                change = dict(spread)
                if halvings:
                    change |= {"rows": rows, "accumulate": train.accumulate << halvings}
                flags = [f"--gpus {count}"] if wider is not cluster else []
                flags += [f"--set train.{k}={_word(v)}" for k, v in change.items()]
                if flags:
                    changed = train.model_copy(update=change)
                    found.append(Way(" ".join(flags), changed, wider))
            if found:
                yield found


def _spreads(train: TrainPart, is_here: bool, count: int) -> Iterator[dict[str, object]]:
    """Settings of the train part that spread what a process holds over several."""
    yield {}
    if count > 1 and train.lora is None:
        yield {"parallel": "fsdp"}
        if is_here:
            yield {"parallel": "fsdp", "shard_target": True}


def way_out(
    train: TrainPart, is_here: bool, cluster: Cluster, fits: Callable[[TrainPart, Cluster], bool]
) -> str | None:
    """The first change after which the run fits; None if none of them is enough. A machine that is
    here gets no other GPUs than it has."""
    found = _first(train, is_here, cluster, fits)
    if found is not None or cluster.gpu is None or cluster.is_here:
        return found
    larger = sorted(
        (gpu for gpu in GPUS.values() if gpu.memory > cluster.gpu.memory), key=lambda g: g.memory
    )
    for gpu in larger:
        other = Cluster(cluster.processes, cluster.nodes, gpu, is_here=False)
        if fits(train, other):
            return f"--gpu {gpu.name}"
        flags = _first(train, is_here, other, fits)
        if flags is not None:
            return f"--gpu {gpu.name} {flags}"
    return None


def _first(
    train: TrainPart, is_here: bool, cluster: Cluster, fits: Callable[[TrainPart, Cluster], bool]
) -> str | None:
    for tried in ways(train, is_here, cluster):
        if fits(tried[-1].train, tried[-1].cluster):
            return next(way.words for way in tried if fits(way.train, way.cluster))
    return None


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
