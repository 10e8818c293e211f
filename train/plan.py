"""What a run will take, before it is paid for: parameters, disk, memory, time, and on what basis.

Nothing is loaded: the drafter is built without storage from the target's shape. Memory and time are
estimates (expect them within a factor of two); after twenty steps time is measured instead.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.drafters.parts.base import Drafter, Family
from specctl.drafters.parts.spec import ModelSpec
from specctl.drafters.parts.vocab import VocabMap
from specctl.recipes.schema import Recipe
from specctl.train.assemble import family_options, trainable_family
from specctl.train.metrics import read_log
from specctl.train.optim import is_hidden_matrix

ROW_BYTES = 13  # of a prepared token: id, document, position (4 each) and its loss mask
EFFICIENCY = (0.7, 0.1)  # share of the matrix speed that training may reach: best, worst
DECODE_EFFICIENCY = (0.3, 0.02)  # the same while the target writes answers
MEASURED_STEPS = 20


@dataclass(frozen=True, slots=True)
class Plan:
    """Counts, bytes by purpose, and a range of seconds with its basis."""

    parameters: int
    trainable: int
    target_parameters: int
    disk: Mapping[str, int]
    memory: Mapping[str, int]
    steps: int
    seconds_range: tuple[float, float]
    basis: str

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
            "disk_bytes": self.disk_bytes,
            "disk": dict(self.disk),
            "memory_bytes": self.memory_bytes,
            "memory": dict(self.memory),
            "steps": self.steps,
            "seconds_range": list(self.seconds_range),
            "basis": self.basis,
        }


def plan(
    recipe: Recipe,
    spec: ModelSpec | None = None,
    *,
    out: Path | None = None,
    flops_per_second: float | None = None,
) -> Plan:
    """The plan of a recipe for a target of shape `spec` (None: looked up by the target's name). If
    `out` holds a run of this recipe with enough steps behind it, the time is measured."""
    spec = spec or target_shape(recipe.target.name)
    family = trainable_family(recipe)
    drafter = build_shape(family, recipe, spec)
    module = drafter.module
    assert module is not None
    parameters = sum(p.numel() for p in module.parameters())
    trainable = drafter.trainable()
    optimizer = 4 * sum(p.numel() * _states(recipe, p, drafter, spec) for p in trainable.values())
    num_trainable = sum(p.numel() for p in trainable.values())
    return Plan(
        parameters=parameters,
        trainable=num_trainable,
        target_parameters=target_parameters(spec),
        disk=_disk(recipe, 4 * parameters, optimizer),
        memory=_memory(recipe, spec, drafter, parameters, num_trainable, optimizer),
        steps=recipe.train.steps,
        **_time(recipe, spec, drafter, parameters, out, flops_per_second),
    )


def target_shape(name: str) -> ModelSpec:
    """The shape of a target by alias, folder or hub id, without loading weights."""
    from specctl.runtime.target import shape_of

    return shape_of(name)


def build_shape(family: Family, recipe: Recipe, spec: ModelSpec) -> Drafter:
    """The recipe's drafter without storage. A vocabulary size of "auto" counts as untrimmed."""
    options = family_options(family, recipe)
    size = recipe.vocab.size
    with torch.device("meta"):
        vocab = VocabMap(torch.arange(size), spec.vocab_size) if isinstance(size, int) else None
        return family.build(options, spec, vocab)


def target_parameters(spec: ModelSpec) -> int:
    """Parameters of a gated decoder of that shape, embedding and head counted apart."""
    query = spec.hidden_size * spec.num_heads * spec.head_dim
    keys = spec.hidden_size * spec.num_kv_heads * spec.head_dim
    layer = 2 * query + 2 * keys + 3 * spec.hidden_size * spec.intermediate_size
    return spec.num_layers * layer + 2 * spec.vocab_size * spec.hidden_size


def _states(recipe: Recipe, parameter: torch.Tensor, drafter: Drafter, spec: ModelSpec) -> int:
    """Numbers that the optimizer keeps per number of a parameter."""
    sizes = {spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab is not None else set())
    is_muon = recipe.train.optimizer == "muon" and is_hidden_matrix(parameter, frozenset(sizes))
    return 1 if is_muon else 2


def _data_tokens(recipe: Recipe) -> int:
    data = recipe.data
    if data.regenerate:
        return data.prompts * (data.prompt_tokens + data.new_tokens)
    source = Path(data.source)
    in_file = source.stat().st_size // 4 if source.is_file() else 10_000_000
    return min(in_file, data.limit_tokens or in_file)


def _disk(recipe: Recipe, weights: int, optimizer: int) -> dict[str, int]:
    held = recipe.train.keep + 2  # kept, best, and the one being written
    return {
        "data": _data_tokens(recipe) * (ROW_BYTES + 4),
        "checkpoints": held * (weights + optimizer),
        "package": weights,
    }


def _memory(
    recipe: Recipe,
    spec: ModelSpec,
    drafter: Drafter,
    parameters: int,
    trainable: int,
    optimizer: int,
) -> dict[str, int]:
    """Bytes on one device while training."""
    tokens, needs = recipe.train.rows * recipe.train.seq_len, drafter.needs()
    wide = 4 if recipe.target.dtype in ("auto", "float32") else 2
    width, passes = spec.hidden_size, _passes(drafter)
    features = tokens * wide * (len(needs.taps) * width + 4 * width + spec.intermediate_size)
    features += tokens * wide * spec.vocab_size if needs.teacher else 0
    head = min(tokens, max(64, 2**24 // spec.vocab_size)) * spec.vocab_size * 4 * 6
    body = tokens * 4 * passes * 2 * min(parameters, 40 * width * width) // width
    return {
        "target": wide * target_parameters(spec),
        "drafter, gradient, optimizer": 4 * parameters + 4 * trainable + optimizer,
        "features of a batch": features,
        "activations": head + body,
    }


def _passes(drafter: Drafter) -> int:
    """Times that the drafter's layers run over a batch."""
    return int(getattr(drafter.options, "ttt_steps", 1))


def _time(
    recipe: Recipe,
    spec: ModelSpec,
    drafter: Drafter,
    parameters: int,
    out: Path | None,
    flops_per_second: float | None,
) -> dict[str, Any]:
    steps = recipe.train.steps
    measured = measured_step_seconds(out) if out is not None else None
    if measured is not None:
        seconds, behind = measured
        left = max(0, steps - behind) * seconds
        return {
            "seconds_range": (0.9 * left, 1.2 * left),
            "basis": f"measured {behind} steps in {out}, for the steps that are left",
        }
    speed = flops_per_second or matrix_speed()
    tokens = recipe.train.rows * recipe.train.seq_len * recipe.train.accumulate
    writing = 2 * target_parameters(spec) * _data_tokens(recipe) if recipe.data.regenerate else 0
    reading = 2 * target_parameters(spec) * tokens * steps if _reads_target(drafter) else 0
    learning = 6 * parameters * _passes(drafter) * tokens * steps
    low, high = (
        (reading + learning) / (share * speed) + writing / (decode * speed)
        for share, decode in zip(EFFICIENCY, DECODE_EFFICIENCY, strict=True)
    )
    return {
        "seconds_range": (low, high),
        "basis": f"estimate from FLOPs at {speed / 1e9:,.0f} GFLOP/s measured in 1 s here",
    }


def _reads_target(drafter: Drafter) -> bool:
    needs = drafter.needs()
    return bool(needs.taps) or needs.teacher


def measured_step_seconds(out: Path) -> tuple[float, int] | None:
    """Seconds per step of the run in `out` and its steps so far, if it has enough of them."""
    log = out / "metrics.jsonl"
    lines = [line for line in read_log(log) if "seconds" in line] if log.exists() else []
    if not lines or lines[-1]["step"] < MEASURED_STEPS:
        return None
    return lines[-1]["seconds"] / lines[-1]["step"], lines[-1]["step"]


def matrix_speed(seconds: float = 1.0) -> float:
    """Floating-point operations per second of large float32 products on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 4096 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    done, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds or done == 0:
        left @ right
        if device.type == "cuda":
            torch.cuda.synchronize()
        done += 1
    return done * 2.0 * size**3 / spent
