"""The shape of a target that nobody has loaded: by alias, folder or the hub's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from specctl.drafters.parts.hf_spec import spec_of
from specctl.drafters.parts.spec import ModelSpec
from specctl.recipes.errors import NetworkError
from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import ResolvedTarget, aliases, resolve
from specctl.runtime.hf import check_config


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a plan needs to know of a target."""

    spec: ModelSpec
    parameters: int


def target_shape(part: TargetPart) -> TargetShape:
    """The shape of a recipe's target by alias, folder or hub id; weights are not needed."""
    resolved = resolve(part.name, part.revision)
    if resolved.shape is not None:
        known = resolved.shape
        spec = ModelSpec(
            model_type=known.model_type,
            num_layers=known.layers,
            hidden_size=known.hidden,
            vocab_size=known.vocab,
            num_heads=known.heads,
            num_kv_heads=known.kv_heads,
            head_dim=known.head_dim,
            intermediate_size=known.intermediate,
            norm_eps=1e-5,
            rope_theta=1e4,
            max_positions=known.positions,
        )
        shape = TargetShape(spec, known.parameters)
    else:
        spec = spec_of(check_config(resolved.path) if resolved.path else _hub_config(resolved))
        shape = TargetShape(spec, parameters_of(spec))
    if part.inflate is not None:
        unit = 10**9 if part.inflate[-1] in "bB" else 10**6
        shape = TargetShape(shape.spec, round(float(part.inflate[:-1]) * unit))
    return shape


def _hub_config(resolved: ResolvedTarget) -> Any:
    """The configuration alone, from the hub."""
    try:
        return AutoConfig.from_pretrained(resolved.repo, revision=resolved.revision)
    except (OSError, ValueError) as error:
        raise NetworkError(
            f"cannot read the configuration of {resolved.name}",
            found=str(error).splitlines()[0],
            expected="a hub repository that can be reached",
            do="plan for an alias of the same size: specctl plan --target " + aliases()[1],
        ) from error


def parameters_of(spec: ModelSpec) -> int:
    """Parameters of a gated decoder of that shape, embedding and head counted apart."""
    layer = sum(rows * columns for rows, columns in layer_matrices(spec).values())
    return spec.num_layers * layer + 2 * spec.vocab_size * spec.hidden_size


def layer_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Name -> (outputs, inputs) of the matrices of one gated layer."""
    width, inner = spec.hidden_size, spec.intermediate_size
    query, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "self_attn.q_proj": (query, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, query),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
