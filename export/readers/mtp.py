"""How transformers 5 computes modules for multi-token prediction: each is a model of one layer of
the target's own class, which is given fc(cat(norm(embedding), norm(state))) in place of embeddings
and whose final norm is the module's. Masks, positions and attention are that model's own. Module k
reads what module k - 1 made, and the text one token later than that does.
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
from specctl.models.hf.foreign_layer import from_published, one_layer, read_config
from specctl.models.weights.fused_qkv import unfused
from specctl.models.weights.mtp_layout import KINDS, MtpLayout
from specctl.runtime.target.mtp_checkpoint import last_norm

ENGINE = "transformers 5"


FED_BACK = 3  # states of the drafter's own that the proof compares, of a single module


def fed_back(num: int) -> int:
    """How many tokens a proof drafts: engines use a single module again; several once each."""
    return FED_BACK if num == 1 else num - 1


class ModuleReader:
    """One module, in float64."""

    def __init__(self, config: Any, beside: Mapping[str, Tensor], layer: dict[str, Tensor]) -> None:
        one = read_config(one_layer(config), KINDS)
        one._attn_implementation = "eager"
        self.model = AutoModel.from_config(one).double().eval()
        self.model.set_attn_implementation("eager")
        layer = unfused(config, layer, self.model.layers[0].state_dict())
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

    def __call__(self, token_TD: Tensor, state_TD: Tensor) -> Tensor:
        """[T, D]: what the LM head, and whatever follows, reads."""
        both = torch.cat([self.norms["enorm"](token_TD), self.norms["hnorm"](state_TD)], dim=-1)
        out = self.model(inputs_embeds=(both @ self.fc.T)[None], use_cache=False)
        last_TD: Tensor = out.last_hidden_state[0]
        return last_TD


class MtpReader:
    """The modules in these tensors of a checkpoint, beside a target, in float64. `before_norm`:
    they read its states without the weights of its last norm."""

    def __init__(
        self,
        config: Any,
        layout: MtpLayout,
        tensors: Mapping[str, Tensor],
        source: ExportSource,
        before_norm: bool = False,
    ) -> None:
        parts = layout.split(tensors)
        if set(parts.beside) != set(layout.named):
            found = f"tensors {sorted(parts.beside)}"
            raise gate(found, "two norms in front, fc, a norm behind")
        self.modules = []
        for module, layer in enumerate(parts.layers):
            own = "" if layout.is_shared or module == 0 else f"beside.{module - 1}."
            names = ("enorm.weight", "hnorm.weight", "norm.weight", "fc.weight")
            beside = {name: parts.beside[own + name] for name in names}
            self.modules.append(ModuleReader(config, beside, layer))
        self.embedding_VD, self.head_VD = embedding_of(source), head_of(source)
        self.tap = source.manifest.model_spec.num_layers
        self.last_norm_D = torch.ones(()).double()
        if before_norm:
            stored = getattr(torch, source.manifest.dtype)
            self.last_norm_D = last_norm(source.target).to(stored).double()

    @torch.no_grad()
    def drafted_logits(self, trial: Trial) -> Tensor:
        """[N + 1, V]."""
        state_TD = trial.states[self.tap] / self.last_norm_D
        if len(self.modules) == 1:
            return chained(self._step, trial, state_TD)
        ids_T = torch.tensor([*trial.ids[1:], *trial.drafted])
        said = []
        for module in self.modules[: len(trial.drafted) + 1]:  # each reads one token later
            state_TD = module(self.embedding_VD[ids_T[: len(state_TD)]], state_TD)
            said.append(state_TD[-1] @ self.head_VD.T)
            ids_T = ids_T[1:]
        return torch.stack(said)

    def _step(self, ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        last_TD = self.modules[0](self.embedding_VD[ids_T], state_TD)
        return last_TD @ self.head_VD.T, last_TD


def source_eps(config: Any) -> float:
    """Of the target's norms."""
    return float(config.get_text_config(decoder=True).rms_norm_eps)
