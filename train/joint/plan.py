"""What joint training takes beside the drafter: numbers, bytes, operations. Estimates by shape."""

from __future__ import annotations

from specctl.core.spec import ModelSpec
from specctl.recipes.low_rank import JointPart
from specctl.recipes.schema import Recipe
from specctl.train.planning.target_shape import TargetShape, layer_matrices

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


def joint_memory(recipe: Recipe, shape: TargetShape, wide: int) -> dict[str, int]:
    """Bytes beside the frozen target and the drafter. The weights are added up anew for a batch and
    kept until its gradient is taken, as are some thirty vectors of every token and layer; when all
    is done the changed target is read back from disk."""
    part, spec = recipe.train.joint, shape.spec
    if part is None:
        return {}
    tokens, width = recipe.train.rows * recipe.train.seq_len, spec.hidden_size
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    each = 7 * width + 4 * heads + 6 * spec.intermediate_size
    summed = spec.num_layers * sum(rows * columns for rows, columns in _adapted(part, spec))
    batch = wide * (spec.num_layers * tokens * each + summed)
    return {
        "additions to the target, gradient, optimizer": ADDED_BYTES * num_added(part, spec),
        "the target's weights and activations of a batch": batch,
        "the changed target, read back": max(0, wide * shape.parameters - batch),
    }


def joint_passes(part: JointPart | None) -> float:
    """Operations of a step per number of the target and token, beside reading the batch once: the
    gradient of states and of weights, and the original's own reading."""
    if part is None:
        return 0.0
    return (1.0 - part.warmup) * (4.0 + 2.0 * (part.keep == "kl"))
