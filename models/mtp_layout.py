"""Where checkpoints keep a multi-token-prediction module, and under which names.

`nextn`   DeepSeek-V3, GLM-4.5: behind the last layer, model.layers.N.{enorm, hnorm, eh_proj,
          shared_head.norm} beside a layer's own tensors, with copies of embedding and LM head
`mtp`     Qwen3-Next, Qwen3.5: mtp.{pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm} and
          mtp.layers.0

Both read cat(norm(embedding), norm(state)). Ours are `enorm`, `hnorm`, `fc`, `norm` and the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specctl.models.hf_spec import field_of

OURS = "layers.0.block."
EMBEDDING, HEAD = "embedding", "head"  # copies of the target's


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Names of one checkpoint. `named`: ours -> theirs, of what is beside the layer; `layer`: what
    stands before the names of the layer; `copies`: copies of the target's matrices that may be
    there; `count_key` says in config.json how many modules there are, `count` says how many."""

    name: str
    prefix: str
    named: Mapping[str, str]
    layer: str
    copies: Mapping[str, str]
    count_key: str
    count: int | None

    def of(self, names: Iterable[str]) -> list[str]:
        """Those of the module."""
        return sorted(name for name in names if name.startswith(self.prefix))

    def split(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What is beside the layer by our names and the copies by theirs (`EMBEDDING`, `HEAD`);
        and the layer's own, without what stands before them."""
        ours = {theirs: our for our, theirs in {**self.named, **self.copies}.items()}
        beside, layer = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in tensors.items():
            if name in ours:
                beside[ours[name]] = tensor
            else:
                layer[name.removeprefix(self.layer)] = tensor
        return beside, layer

    def joined(
        self, beside: Mapping[str, Tensor], layer: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The reverse of `split`."""
        names = {**self.named, **self.copies}
        found = {names[our]: tensor for our, tensor in beside.items()}
        return found | {self.layer + name: tensor for name, tensor in layer.items()}


NEXTN = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MTP = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
KINDS = NEXTN + MTP


def layout_of(config: Any) -> MtpLayout | None:
    """The layout of checkpoints of that transformers configuration; None where none is known."""
    text = config.get_text_config(decoder=True)
    if text.model_type in NEXTN:
        own = f"model.layers.{text.num_hidden_layers}."
        named = {
            "enorm.weight": "enorm.weight",
            "hnorm.weight": "hnorm.weight",
            "fc.weight": "eh_proj.weight",
            "norm.weight": "shared_head.norm.weight",
        }
        copies = {EMBEDDING: "embed_tokens.weight", HEAD: "shared_head.head.weight"}
        return MtpLayout(
            "nextn",
            own,
            {our: own + theirs for our, theirs in named.items()},
            own,
            {our: own + theirs for our, theirs in copies.items()},
            "num_nextn_predict_layers",
            field_of(text, "num_nextn_predict_layers"),
        )
    if text.model_type in MTP:
        named = {
            "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "fc.weight": "mtp.fc.weight",
            "norm.weight": "mtp.norm.weight",
        }
        key = "num_nextn_predict_layers"
        if text.model_type != "qwen3_next":
            key = "mtp_num_hidden_layers"
        return MtpLayout("mtp", "mtp.", named, "mtp.layers.0.", {}, key, field_of(text, key))
    return None
