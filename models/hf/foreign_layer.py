"""One decoder layer of any architecture that transformers builds, its attention handed to a caller.

transformers' own class does the arithmetic of the layer (latent attention, gates, experts, whatever
norm it has); what its queries see is decided by whoever calls it, as for a layer of our own. The
layer comes from a configuration of one layer (`one_layer`), which a package keeps as text.
Letters: B rows, D hidden width, E head width (its rotated part), H query heads, L positions, T fed
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel, AutoModelForCausalLM

from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.models.hf.added_kinds import make_known
from specctl.models.hf.hf_spec import field_of
from specctl.models.hf.latent import heads_at_hand, install, running
from specctl.models.hf.quiet import quietly

ATTENTION = "specctl-handed"
FIRST = "model.layers.0."  # what transformers puts before the names of the layer
MOST = 1 << 30  # that a number of such a configuration may be
ONE_LAYER: dict[str, Any] = {  # what says by layer number how a layer is made
    "num_hidden_layers": 1, "layer_types": ["full_attention"], "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"], "mlp_only_layers": [], "decoder_sparse_step": 1,
    "full_attention_interval": 1,
}  # fmt: skip
OF_KIND: dict[str, dict[str, Any]] = {  # where modules are made otherwise
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}
LEFT_OUT = (  # what is no part of a layer, or must not come from a file
    "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "per_layer_config",
    "quantization_config", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id",
    "attn_implementation", "experts_implementation", "model_type",
)  # fmt: skip


def _handed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    attending: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The kernel transformers calls: `attending` attends with scores divided by the root of the
    head width, so queries are scaled to `scaling` first, and heads padded to one width. With sinks
    (`s_aux`: a score of each head for a key without a value) heads are one wider: there each query
    has its head's sink, every key 0, and one more key 1, which `attending`
    adds."""
    assert attending is not None, f"{type(module).__name__} does not pass on what attends"
    sinks_H = kwargs.get("s_aux")
    assert kwargs.get("softcap") is None, "a soft cap of scores"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads = heads_at_hand(module)
    if heads is not None:
        query = heads.queries(query)
    own, wide = value.shape[-1], max(query.shape[-1], value.shape[-1])
    wide += sinks_H is not None
    query = F.pad(query * (scale * wide**0.5), (0, wide - query.shape[-1]))
    key, value = (F.pad(part, (0, wide - part.shape[-1])) for part in (key, value))
    B, H, T, _ = query.shape
    if sinks_H is None:
        out_BTHE = attending(query, key, value).view(B, T, H, wide)
    else:
        sink_BHT1 = (sinks_H * wide**0.5)[None, :, None, None].expand(B, H, T, 1).to(query)
        query = torch.cat([query[..., :-1], sink_BHT1], dim=-1)
        out_BTHE = attending(query, key, value, has_sink=True).view(B, T, H, wide)
    if heads is not None:
        return heads.values(out_BTHE.transpose(1, 2)).transpose(1, 2), None
    return out_BTHE[..., :own], None


AttentionInterface.register(ATTENTION, _handed)


class LayerCache:
    """transformers' word for a cache, over one layer of an aimed `SlotKV`."""

    def __init__(self, kv: SlotKV, layer: int) -> None:
        self.kv, self.layer = kv, layer

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.kv.update(self.layer, key, value)


class _Shapes:
    """A cache that keeps only what shape its entries have."""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.kept = KVShape(key.shape[1], key.shape[-1], value.shape[1], value.shape[-1])
        return key, value


def one_layer(config: Any) -> str:
    """The configuration of a single layer of that model, as text: one with full attention and, in a
    mixture of experts, with experts (DeepSeek-V3 and its followers put them behind the last)."""
    text = config.get_text_config(decoder=True)
    body = {name: value for name, value in text.to_dict().items() if name not in LEFT_OUT}
    made = _made_as(text.model_type)
    body |= {name: value for name, value in made.items() if field_of(text, name) is not None}
    body = {name: value for name, value in body.items() if not name.startswith("_")}
    return json.dumps(body | {"model_type": text.model_type, "vocab_size": 1}, sort_keys=True)


def _made_as(kind: str) -> dict[str, Any]:
    return {**ONE_LAYER, **OF_KIND.get(kind, {})}


def read_config(layer: str, kinds: tuple[str, ...]) -> Any:
    """transformers' configuration of a text by `one_layer`, of one of these model types."""
    try:
        body = json.loads(layer)
        kind = body.pop("model_type")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _refused(f"{type(error).__name__}: {ascii(str(error))[:80]}") from error
    if kind not in kinds:
        raise _refused(f"model_type {ascii(kind)[:60]}")
    make_known(kind)
    wrong = [name for name, value in _made_as(kind).items() if body.get(name, value) != value]
    wrong += [name for name in body if name in LEFT_OUT or name.startswith("_")]
    wrong += [name for name, value in _numbers(body) if not abs(value) <= MOST]
    if wrong or body.get("vocab_size") != 1:
        raise _refused(", ".join(map(ascii, wrong[:3])) or "vocab_size")
    try:
        none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        config = AutoConfig.for_model(kind, **body, **none)
        config._attn_implementation = ATTENTION
        config._experts_implementation = "eager"
    except Exception as error:  # a foreign configuration: any type may come
        raise _refused(f"{type(error).__name__}: {ascii(str(error))[:120]}") from error
    return config


def _numbers(body: object) -> list[tuple[str, float]]:
    found, stack = list[tuple[str, float]](), [("layer", body)]
    while stack:
        name, item = stack.pop()
        if isinstance(item, Mapping):
            stack += [(str(key), inner) for key, inner in item.items()]
        elif isinstance(item, list):
            stack += [(name, inner) for inner in item]
        elif isinstance(item, (int, float)):
            found.append((name, item))
    return found


def _refused(found: str) -> IncompatibleError:
    return IncompatibleError(
        "the configuration of the drafter's layer cannot be built",
        found=found,
        expected="one layer, as specctl writes it for a model that transformers knows",
        do="import the module again, or pip install -U transformers",
        where="options:layer",
    )


class ForeignLayer(nn.Module):
    """The layer, with the parameter names that transformers gives it. What is beside it in such a
    model is here as well, outside the module: `norm` to be copied, `rotary` to be called."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        base = AutoModel.from_config(config)
        base.set_attn_implementation(ATTENTION)
        install(base)
        self.block = base.layers[0]
        self._beside: tuple[Any, Any] = (base.norm, base.rotary_emb)  # no parts of this module
        # one that rotates by the kind of layer must be given it
        self._rotated_as = tuple(config.layer_types) if config.model_type in OF_KIND else ()
        self.window: int | None = None  # how far back it sees, itself counted
        if self._rotated_as == ("sliding_attention",):
            self.window = int(config.sliding_window)

    def new_norm(self) -> nn.Module:
        """A fresh norm of the architecture's kind, which passes a normed state as it is."""
        norm: nn.Module = deepcopy(self._beside[0])
        return norm

    def rope(self, position: Tensor) -> Tensor:
        """[..., 2, E] float32: cosines and sines as the architecture rotates."""
        flat_1L = position.reshape(1, -1)
        rotary = self._beside[1].to(position.device)
        like = torch.zeros(1, device=position.device)
        cos_1LE, sin_1LE = rotary(like, flat_1L, *self._rotated_as)
        rope_L2E = torch.stack([cos_1LE[0], sin_1LE[0]], dim=-2)
        return rope_L2E.view(*position.shape, *rope_L2E.shape[1:])

    def kept(self, width: int) -> KVShape:
        """What a cache keeps of a token."""
        like = next(self.block.parameters())
        x_11D = torch.zeros(1, 1, width, device=like.device, dtype=like.dtype)
        position_11 = torch.zeros(1, 1, dtype=torch.long, device=self._placed(like))
        cache = _Shapes()
        with torch.no_grad():
            self.block.self_attn(
                hidden_states=x_11D,
                position_embeddings=self._turned(self.rope(position_11).to(like.device), x_11D),
                attention_mask=None,
                past_key_values=cache,
                attending=lambda query, *_, has_sink=False: query.transpose(1, 2).flatten(2),
            )
        return cache.kept

    def _placed(self, like: Tensor) -> torch.device:
        """Where the frequencies lie: beside the weights when they were made."""
        return next((b.device for b in self._beside[1].buffers()), like.device)

    def _turned(self, rope_BT2E: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return rope_BT2E[..., 0, :].to(x.dtype), rope_BT2E[..., 1, :].to(x.dtype)

    def forward(
        self,
        x_BTD: Tensor,
        rope_BT2E: Tensor,
        attending: Callable[..., Tensor],
    ) -> Tensor:
        """As a layer of ours: `attending` says what the queries see. One with a `cache` is given
        to the layer to write what it keeps, and is shown all that stands there."""
        cache = getattr(attending, "cache", None)
        with nullcontext() if cache is None else running(x_BTD.shape[1]):
            out: Any = self.block(
                x_BTD,
                attention_mask=None,
                position_ids=None,
                past_key_values=cache,
                position_embeddings=self._turned(rope_BT2E, x_BTD),
                attending=attending,
            )
        state_BTD: Tensor = out[0] if isinstance(out, tuple) else out
        return state_BTD


def as_published(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a `ForeignLayer`'s block under the names, and in the shapes, in which
    checkpoints of the architecture hold those of a layer (every expert by itself)."""
    from transformers.core_model_loading import revert_weight_conversion

    named = {FIRST + name: tensor for name, tensor in tensors.items()}
    found = revert_weight_conversion(_meta_model(config), named)
    return {name.removeprefix(FIRST): tensor.contiguous() for name, tensor in found.items()}


def from_published(config: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse: the block's own tensors, each in the dtype in which it was."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    widest = kinds.pop() if len(kinds) == 1 else torch.float32
    named = {FIRST + name: tensor for name, tensor in tensors.items()}
    kind = type(_meta_model(config))
    with quietly():  # it has no embedding and no head, which nothing needs
        model = kind.from_pretrained(
            None,
            config=config,
            state_dict=named,
            dtype=widest,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    return dict(model.model.layers[0].state_dict())


def _meta_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
