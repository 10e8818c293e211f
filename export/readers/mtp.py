"""How transformers 5 computes a module for multi-token prediction: a model of one layer of the
target's own class, which is given fc(cat(norm(embedding), norm(state))) in place of embeddings and
whose final norm is the module's. Masks, positions and attention are that model's own.
Letters: D hidden width, N nodes, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from specctl.export.formats import ExportSource
from specctl.export.layouts.engines import gate
from specctl.export.readers.trial import Trial, chained, embedding_of, head_of
from specctl.models.foreign_layer import from_published, one_layer, read_config
from specctl.models.mtp_layout import EMBEDDING, HEAD, KINDS, MtpLayout

ENGINE = "transformers 5"


class MtpReader:
    """The module in these tensors of a checkpoint, beside a target, in float64."""

    def __init__(
        self, config: Any, layout: MtpLayout, tensors: Mapping[str, Tensor], source: ExportSource
    ) -> None:
        beside, layer = layout.split(tensors)
        one = read_config(one_layer(config), KINDS)
        one._attn_implementation = "eager"
        self.model = AutoModel.from_config(one).double().eval()
        self.model.set_attn_implementation("eager")
        is_joined = layer.keys() == self.model.layers[0].state_dict().keys()
        block = layer if is_joined else from_published(one, layer)
        self.model.layers[0].load_state_dict(block)
        self.model.norm.weight.data = beside["norm.weight"].double()
        self.norms = {}
        for name in ("enorm", "hnorm"):
            norm = type(self.model.norm)(len(beside["norm.weight"]), eps=source_eps(config))
            norm.weight.data = beside[f"{name}.weight"].double()
            self.norms[name] = norm
        self.fc = beside["fc.weight"].double()
        for name in (EMBEDDING, HEAD):
            beside.pop(name, None)
        if set(beside) != {"enorm.weight", "hnorm.weight", "norm.weight", "fc.weight"}:
            raise gate(f"tensors {sorted(beside)}", "two norms in front, fc, a norm behind")
        self.embedding_VD, self.head_VD = embedding_of(source), head_of(source)
        self.tap = source.manifest.model_spec.num_layers

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        return chained(self._step, trial, trial.states[self.tap])

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        token_TD = self.norms["enorm"](self.embedding_VD[ids_T])
        both = torch.cat([token_TD, self.norms["hnorm"](state_TD)], dim=-1)
        out = self.model(inputs_embeds=(both @ self.fc.T)[None], use_cache=False)
        last_TD = out.last_hidden_state[0]
        return last_TD @ self.head_VD.T, last_TD


def source_eps(config: Any) -> float:
    """Of the target's norms."""
    return float(config.get_text_config(decoder=True).rms_norm_eps)
