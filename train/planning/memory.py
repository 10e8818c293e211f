"""What each process of a run holds, on its device and on its host, and what to change where that is
too much.

Two moments can be the fullest: a step, and the first process measuring tau, which needs the whole
target. Bytes of tensors are those that `step_bytes` traced; what CUDA itself takes is reckoned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from specctl.core.spec import ModelSpec
from specctl.models.llama import PACK_SHARE
from specctl.recipes.schema import Recipe, TrainPart
from specctl.train.planning.hardware import GPUS, Cluster, machine_bytes
from specctl.train.planning.step_bytes import StepBytes
from specctl.train.selective import COMPARING

PROCESS_BYTES = 500_000_000  # python, torch, transformers and the text being read
CUDA_HOST_BYTES = 2_500_000_000  # more of a process that uses a GPU: its libraries
CUDA_BYTES = 1_500_000_000  # context, libraries' work space, and what allocation wastes
NCCL_BYTES = 500_000_000  # buffers of the exchange, where there are several processes
MOST_PROCESSES = 64  # that are proposed


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes by purpose on the fullest device, and on the host of one machine."""

    device: Mapping[str, int]
    host: Mapping[str, int]
    moment: str

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def held(
    recipe: Recipe, spec: ModelSpec, step: StepBytes, cluster: Cluster, wide: int,
    joint: Mapping[str, int], is_fast: bool,
) -> Held:  # fmt: skip
    """The fuller of the two moments. `wide`: bytes of a number of the target; `joint`: what joint
    training adds; `is_fast`: the target's forward is our own, which fuses its matrices."""
    fused = _fused(recipe, step, cluster) if is_fast else {}
    moments = {
        "a step": _training(recipe, step, cluster) | dict(joint) | fused,
        "tau is measured": _measuring(recipe, spec, step, cluster, wide) | fused,
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    found, count = moments[moment], cluster.per_node
    if cluster.gpu is None:
        both = {name: count * size for name, size in found.items()}
        return Held({}, {"process": count * PROCESS_BYTES} | both, moment)
    found["CUDA"] = CUDA_BYTES + (NCCL_BYTES if cluster.processes > 1 else 0)
    return Held(found, {"process": count * (PROCESS_BYTES + CUDA_HOST_BYTES)}, moment)


def _fused(recipe: Recipe, step: StepBytes, cluster: Cluster) -> dict[str, int]:
    """Joined copies of the target's matrices, made where there is plenty of room for them."""
    room = machine_bytes() if cluster.gpu is None else cluster.gpu.memory
    if recipe.train.joint is not None or recipe.train.shard_target or room is None:
        return {}
    return {"target, joined matrices": step.layers} if step.target <= PACK_SHARE * room else {}


def _training(recipe: Recipe, step: StepBytes, cluster: Cluster) -> dict[str, int]:
    train, count = recipe.train, cluster.processes
    is_spread = train.parallel == "fsdp" and count > 1
    whole = step.weights + step.gradient + step.optimizer
    target = step.target
    if is_spread and train.shard_target:
        target = step.layers // count + step.beside_layers + 2 * step.largest_layer
    return {
        "target": target,
        "drafter, gradient, optimizer": whole
        if not is_spread
        else whole // count + step.weights + step.gradient,
        **({"reference": step.weights} if train.select in COMPARING else {}),
        "batch": step.batch(
            rows_each(train, count), train.seq_len, min(count, train.sequence_parallel)
        ),
    }


def rows_each(train: TrainPart, processes: int) -> int:
    """Rows of a batch that a process, or a group of them, has."""
    return -(-train.rows // train.groups(processes))


def _measuring(
    recipe: Recipe, spec: ModelSpec, step: StepBytes, cluster: Cluster, wide: int
) -> dict[str, int]:
    train, data, count = recipe.train, recipe.data, cluster.processes
    is_spread = train.parallel == "fsdp" and count > 1
    whole = step.weights + step.gradient + step.optimizer
    position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * wide
    places = train.tau_prompts * min(spec.max_positions, data.prompt_tokens + train.tau_tokens + 64)
    return {
        "target": step.target,
        "drafter, gradient, optimizer": whole // count if is_spread else whole,
        "drafter, prepared for drafting": step.weights,
        "KV cache": position * places,
    }


def ways(recipe: Recipe, cluster: Cluster) -> Iterator[tuple[str, Recipe, Cluster]]:
    """Changes that need less memory of a device, the least first: what to say, and what it makes
    of the run."""
    counts = [cluster.processes]
    if cluster.gpu is not None:
        counts += [2**k for k in range(1, 7) if cluster.processes < 2**k <= MOST_PROCESSES]
    for count in counts:
        more = "" if count == cluster.processes else f"--gpus {count} "
        wider = cluster if not more else cluster.with_processes(count)
        for spread in ({}, {"parallel": "fsdp"}, {"parallel": "fsdp", "shard_target": True}):
            if spread and (count == 1 or recipe.train.lora is not None):
                continue
            for halvings in range(10):
                rows = recipe.train.rows >> halvings
                least = recipe.train.groups(count)
                if rows < least or (halvings and rows << halvings != recipe.train.rows):
                    break
                change = dict(spread)
                if halvings:
                    change |= {"rows": rows, "accumulate": recipe.train.accumulate << halvings}
                told = "".join(f"--set train.{k}={_word(v)} " for k, v in change.items())
                train = recipe.train.model_copy(update=change)
                if told or more:
                    yield (more + told).strip(), recipe.model_copy(update={"train": train}), wider


def way_out(
    recipe: Recipe, cluster: Cluster, fits: Callable[[Recipe, Cluster], bool]
) -> str | None:
    """The first change after which the run fits; None if none of them is enough."""
    tried = (told for told, changed, wider in ways(recipe, cluster) if fits(changed, wider))
    found = next(tried, None)
    if found is not None or cluster.gpu is None:
        return found
    larger = sorted(
        (gpu for gpu in GPUS.values() if gpu.memory > cluster.gpu.memory), key=lambda g: g.memory
    )
    for gpu in larger:
        other = Cluster(cluster.processes, cluster.nodes, gpu, is_here=False)
        if fits(recipe, other):
            return f"--gpu {gpu.name}"
        for told, changed, wider in ways(recipe, other):
            if fits(changed, wider):
                return f"--gpu {gpu.name} {told}"
    return None


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
