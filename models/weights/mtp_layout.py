"""Where checkpoints keep modules for multi-token prediction, and under which names.

`nextn`   DeepSeek-V3, GLM-4.5: module k behind the last layer, model.layers.{N + k}.{enorm, hnorm,
          eh_proj, shared_head.norm} beside a layer's own tensors, with copies of embedding and LM
          head
`mtp`     Qwen3-Next, Qwen3.5: mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm}, which all
          modules share, and mtp.layers.k
`mimo`    MiMo-V2: model.mtp.layers.k.{enorm, hnorm, eh_proj, final_layernorm} beside the layer,
          whose second norm is pre_mlp_layernorm there
`mimo-7b` MiMo-7B: model.mtp_layers.k.{token_layernorm, hidden_layernorm, input_proj,
          final_layernorm} beside the layer

All read cat(norm(embedding), norm(state)), and MiMo-7B's cat(norm(state), norm(embedding)): the
halves of its `input_proj` change places on the way. Its authors' code in vLLM gives it the state in
front of the target's last norm. Ours are `enorm`, `hnorm`, `fc`, `norm` (behind `beside.{k - 1}.`
of the modules behind the first) and the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from specctl.models.hf.hf_spec import field_of

EMBEDDING, HEAD = "embedding", "head"  # the target's, of which there may be copies
MOST_MODULES = 64


def ours(module: int) -> str:
    """What stands before our names of the layer of that module."""
    return f"layers.{module}.block."


@dataclass(frozen=True, slots=True)
class MtpParts:
    """The modules' tensors: what is beside the layers by our names, each layer's own without what
    stands before them, and copies of the target's matrices by the checkpoint's names."""

    beside: dict[str, Tensor]
    layers: tuple[dict[str, Tensor], ...]
    copies: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of one checkpoint. `named`: ours -> theirs, of what is beside the layers; `layers`:
    what stands before the names of each module's layer; `copies`: names of copies of the target's
    matrices -> which one it is; `is_shared`: all modules have what is beside the layer in common;
    `first`: the number of the first module's layer; `count_key` says in config.json how many
    modules there are (None: nothing does), `count` says how many; `renamed`: names within a layer,
    transformers' -> theirs; `state_first`: its `fc` reads the state, then the embedding;
    `before_norm`: its state is that in front of the target's last norm."""

    name: str
    prefix: str
    named: Mapping[str, str]
    layers: tuple[str, ...]
    copies: Mapping[str, str]
    is_shared: bool
    first: int
    count_key: str | None
    count: int | None
    renamed: Mapping[str, str] = field(default_factory=dict)
    state_first: bool = False
    before_norm: bool = False

    @property
    def num(self) -> int:
        """How many modules these names are of."""
        return len(self.layers)

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of modules, of however many."""
        mine = [name for name in names if name.startswith(self.prefix)]
        if not self.is_shared:  # the model's own layers have such names, too
            mine = [name for name in mine if (number_of(name) or 0) >= self.first]
        return sorted(mine)

    def held(self, names: Iterable[str]) -> int:
        """Of how many modules there are names; 0: of none."""
        at = [number_of(name) for name in self.of(names)]
        return max((number - self.first + 1 for number in at if number is not None), default=0)

    def split(self, tensors: Mapping[str, Tensor]) -> MtpParts:
        our_names = {theirs: our for our, theirs in self.named.items()}
        plain = {theirs: our for our, theirs in self.renamed.items()}
        parts = MtpParts({}, tuple({} for _ in self.layers), {})
        for name, tensor in tensors.items():
            at = [i for i, before in enumerate(self.layers) if name.startswith(before)]
            if name in our_names:
                parts.beside[our_names[name]] = self._turned(our_names[name], tensor)
            elif name in self.copies:
                parts.copies[name] = tensor
            elif at:
                own = name.removeprefix(self.layers[at[0]])
                parts.layers[at[0]][plain.get(own, own)] = tensor
            else:
                parts.beside[name] = tensor  # of nothing known
        return parts

    def joined(
        self, beside: Mapping[str, Tensor], layers: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The reverse of `split`, without copies."""
        found = {self.named[our]: self._turned(our, tensor) for our, tensor in beside.items()}
        for before, layer in zip(self.layers, layers, strict=True):
            found |= {before + self.renamed.get(n, n): tensor for n, tensor in layer.items()}
        return found

    def _turned(self, our: str, tensor: Tensor) -> Tensor:
        """From our order of an `fc`'s columns to theirs, or back."""
        if not (self.state_first and our.endswith(FC) and tensor.dim() == 2):
            return tensor
        return tensor.roll(tensor.shape[1] // 2, dims=1)


NEXTN = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MIMO = ("mimo_v2_flash",)
MIMO_7B = ("mimo",)
KINDS = NEXTN + MTP + MIMO + MIMO_7B
FC = "fc.weight"
_NUMBER = re.compile(r"^(?:(?:model|mtp|model\.mtp)\.layers|model\.mtp_layers)\.(\d{1,9})\.")
_BEHIND = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "fc.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_IN_MIMO = {**_BEHIND, "norm.weight": "final_layernorm.weight"}
_NORMS_IN_MIMO = {"post_attention_layernorm.weight": "pre_mlp_layernorm.weight"}
_IN_MIMO_7B = {
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "fc.weight": "input_proj.weight",
    "norm.weight": "final_layernorm.weight",
}
_COPIES = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
_OF_ALL = {
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "fc.weight": "mtp.fc.weight",
    "norm.weight": "mtp.norm.weight",
}


def number_of(name: str) -> int | None:
    """The number of the layer that a tensor is named after."""
    found = _NUMBER.match(name)
    return None if found is None else int(found[1])


def layout_of(config: Any, num: int | None = None) -> MtpLayout | None:
    """The layout of checkpoints of that transformers configuration with `num` modules (None: as
    many as it says, else one); None where none is known."""
    text = config.get_text_config(decoder=True)
    if text.model_type in NEXTN:
        key, first = "num_nextn_predict_layers", text.num_hidden_layers
        count = field_of(text, key)
        layers = tuple(f"model.layers.{first + k}." for k in range(num or count or 1))
        copies = {b + theirs: matrix for b in layers for theirs, matrix in _COPIES.items()}
        named = _each(layers, _BEHIND)
        return MtpLayout("nextn", "model.layers.", named, layers, copies, False, first, key, count)
    if text.model_type in MTP:
        is_next = text.model_type == "qwen3_next"
        key = "num_nextn_predict_layers" if is_next else "mtp_num_hidden_layers"
        count = field_of(text, key)
        layers = tuple(f"mtp.layers.{k}." for k in range(num or count or 1))
        return MtpLayout("mtp", "mtp.", _OF_ALL, layers, {}, True, 0, key, count)
    if text.model_type in MIMO:
        layers = tuple(f"model.mtp.layers.{k}." for k in range(num or 1))
        named, prefix = _each(layers, _IN_MIMO), "model.mtp.layers."
        return MtpLayout("mimo", prefix, named, layers, {}, False, 0, None, None, _NORMS_IN_MIMO)
    if text.model_type in MIMO_7B:
        key, prefix = "num_nextn_predict_layers", "model.mtp_layers."
        count = field_of(text, key)
        layers = tuple(f"{prefix}{k}." for k in range(num or count or 1))
        named = _each(layers, _IN_MIMO_7B)
        found = MtpLayout("mimo-7b", prefix, named, layers, {}, False, 0, key, count)
        return replace(found, state_first=True, before_norm=True)
    return None


def _each(layers: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Ours -> theirs, where every module has its own."""
    found = dict[str, str]()
    for module, before in enumerate(layers):
        own = f"beside.{module - 1}." if module else ""
        found |= {own + our: before + theirs for our, theirs in names.items()}
    return found
