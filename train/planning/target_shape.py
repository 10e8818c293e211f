"""The shape of a target that nobody has loaded: by alias, folder or the hub's configuration."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.errors import NetworkError
from specctl.core.forward.slot_state import RowShape
from specctl.core.spec import ModelSpec
from specctl.core.storage.gguf_header import read_header
from specctl.core.storage.hub_access import forbidden_by, way_online
from specctl.models.hf.hf_probe import row_shape_of
from specctl.models.hf.hf_spec import holds_states, spec_of
from specctl.models.llama.fast_llama import fast_llama_from_hf
from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import ResolvedTarget, aliases, resolve
from specctl.runtime.target.checkpoint import UNBUILDABLE, check_config
from specctl.runtime.target.folders.checkpoint_folder import foreign_config
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.gguf.model import config_in
from specctl.runtime.target.multimodal import is_multimodal, text_config
from specctl.runtime.target.placement.device import LARGE, choose_dtype
from specctl.train.distributed.run_device import run_device

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configurations


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What a plan needs to know of a target. A token meets `active` of its parameters: fewer than
    all where experts share the work. `stored`: the dtype that the checkpoint is published in;
    `plain_head`: logits are the last state times the head, with nothing after it; `row`: what it
    keeps of a row, where layers are recurrent (None: keys and values in all layers)."""

    spec: ModelSpec
    parameters: int
    active: int
    stored: torch.dtype | None = None
    plain_head: bool = True
    config: Any = None
    row: RowShape | None = None

    def dtype(self, part: TargetPart, device: torch.device | None = None) -> torch.dtype:
        """The dtype of the target once it is loaded, here or on such a device."""
        stored, count = self.stored, self.parameters
        if part.inflate is not None:
            stored, count = None, LARGE
        return choose_dtype(part.dtype, device or run_device(), stored, count)

    def itemsize(self, part: TargetPart, device: torch.device | None = None) -> int:
        """Bytes of a number of the target in that dtype."""
        return self.dtype(part, device).itemsize


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
        config = config_of(spec, known.model_type, known.tied)
        count = known.parameters
        shape = TargetShape(spec, count, count, torch.bfloat16, config=config)
    else:
        shape = _counted(_config(resolved))
    if part.inflate is not None:
        unit = 10**9 if part.inflate[-1] in "bB" else 10**6
        count = round(float(part.inflate[:-1]) * unit)
        shape = TargetShape(shape.spec, count, count, config=shape.config)
    return shape


def is_multimodal_target(part: TargetPart) -> bool:
    """Whether a recipe's target reads more than text, by its configuration."""
    resolved = resolve(part.name, part.revision)
    return resolved.shape is None and is_multimodal(_config(resolved))


def shape_of(spec: ModelSpec) -> TargetShape:
    """What a spec alone says: a gated decoder, each of whose numbers every token meets."""
    count = parameters_of(spec)
    return TargetShape(spec, count, count, config=config_of(spec))


def config_of(spec: ModelSpec, model_type: str = "llama", is_tied: bool = False) -> Any:
    """A transformers configuration of that shape."""
    return AutoConfig.for_model(
        model_type,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=is_tied,
    )


def _counted(config: Any) -> TargetShape:
    """The shape of a configuration, its parameters counted in a model without storage."""
    text = text_config(config) if is_multimodal(config) else config
    with foreign_config(UNBUILDABLE, "config.json"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    named = dict(model.named_parameters())
    count = sum(p.numel() for p in named.values())
    experts = sum(p.numel() for name, p in named.items() if ".experts." in name)
    inner = config.get_text_config()
    there = next((n for name in EXPERTS if (n := getattr(inner, name, None))), 0)
    met = getattr(inner, "num_experts_per_tok", None) or there
    idle = round(experts * (1 - met / there)) if there else 0
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else None
    is_plain = fast_llama_from_hf(model) is not None
    row = None
    if holds_states(type(model), text):
        with foreign_config(UNBUILDABLE, "config.json"):
            row = row_shape_of(model.bfloat16())
    elif getattr(text, "kv_lora_rank", None):  # latents; else all heads count, which is more
        with suppress(Exception):  # experts of some need the content of tensors
            row = row_shape_of(model.bfloat16())
    return TargetShape(spec_of(config), count, count - idle, stored, is_plain, text, row)


def _config(resolved: ResolvedTarget) -> Any:
    resolved = with_file(resolved, offline=False)
    if resolved.file is not None:
        return config_in(read_header(resolved.file))
    return check_config(resolved.path, True) if resolved.path else _hub_config(resolved)


def _hub_config(resolved: ResolvedTarget) -> Any:
    """The configuration alone, from the hub."""
    from huggingface_hub import snapshot_download

    assert resolved.repo is not None
    try:
        folder = snapshot_download(
            resolved.repo, revision=resolved.revision, allow_patterns=["config.json"]
        )
    except (OSError, ValueError) as error:
        forbidden = forbidden_by()
        raise NetworkError(
            f"cannot read the configuration of {resolved.name}",
            found=str(error).splitlines()[0],
            expected="a hub repository that can be reached",
            do=(f"{way_online(forbidden)}, or " if forbidden else "")
            + "plan for an alias of the same size: specctl plan --target "
            + aliases()[1],
        ) from error
    return check_config(Path(folder), True)


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
