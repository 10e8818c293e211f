"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): a module of the checkpoint's
own that predicts one token further, used again on its own output.

h'_i = layer(fc(cat(norm(embedding of token i + 1), norm(h_i)))), eq. 21 and 22; the target's own
LM head reads norm(h'_i) and predicts token i + 2, eq. 23. h is the target's state after its final
norm; drafting goes on with norm(h') in its place (`norm_output`: transformers and SGLang do; vLLM
feeds h' back in the layout of DeepSeek-V3). The layer is the target's own kind (latent attention,
experts, gates), built by transformers from `layer`, or a Llama layer where that is None.

DeepSeek trains each module one step deep. One module that is used k times draws on what it has
never seen, so training unrolls it (`ttt_steps`), step j with the weight `decay`^j (FastMTP, arXiv
2509.18362: 3 steps, 0.6); the rows of later steps attend as a chain does when it is drafted.
Letters: D hidden width, O output width, X any axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family, Space
from specctl.core.kv_cache import KVShape
from specctl.drafters.nets.blocks import Attending, DecoderLayer, LayerShape, RmsNorm, attend
from specctl.drafters.nets.feature_drafter import FeatureDrafter, FeatureOptions, TrunkState
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.option_checks import Count
from specctl.models.foreign_layer import ForeignLayer, LayerCache, read_config
from specctl.models.mtp_layout import KINDS


@dataclass(frozen=True, slots=True)
class MtpOptions(FeatureOptions):
    """`layer`: the configuration of the target's layer, which import and drafter.init: target write
    (None: a Llama layer). `norm_output`: what is fed back is normed. `read_states` False hides the
    target's states (an ablation)."""

    ttt_steps: Count = 3
    decay: float = 0.6
    feature_weight: float = 0.0
    layer: str | None = None
    norm_output: bool = True
    read_states: bool = True


@dataclass(frozen=True, slots=True)
class ForeignShape(LayerShape):
    """The shape of a layer that transformers makes: how it rotates, what its cache keeps."""

    rotations: Callable[[Tensor], Tensor] = field(kw_only=True)
    kept: KVShape = field(kw_only=True)

    @property
    def kv(self) -> KVShape:
        return self.kept

    def rope(self, position: Tensor) -> Tensor:
        return self.rotations(position)


@dataclass(frozen=True, slots=True)
class Cached:
    """Attention to all that stands in an aimed cache, which a foreign layer writes itself."""

    cache: LayerCache
    mask: Tensor | None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, self.mask)


class MtpNet(TrunkNet):
    """The module. Fresh, it passes the target's state through, normed."""

    def __init__(self, shape: LayerShape, options: MtpOptions) -> None:
        self.options = options
        nn.Module.__init__(self)  # the layers follow from `layer`, and say what norm there is
        width = shape.hidden_size
        self.layers = nn.ModuleList()
        if options.layer is None:
            self.shape = shape
            self.layers.append(DecoderLayer(shape))
            norms: list[nn.Module] = [RmsNorm(width, shape.norm_eps) for _ in range(3)]
        else:
            foreign = ForeignLayer(read_config(options.layer, KINDS))
            sizes = {each.name: getattr(shape, each.name) for each in fields(LayerShape)}
            kept = foreign.kept(width)
            self.shape = ForeignShape(**sizes, rotations=foreign.rope, kept=kept)
            self.layers.append(foreign)
            norms = [foreign.new_norm() for _ in range(3)]
        self.enorm, self.hnorm, self.norm = norms
        self.fc = nn.Linear(2 * width, width, bias=False)
        with torch.no_grad():
            self.fc.weight.normal_(std=0.1 * self.fc.in_features**-0.5)
            self.fc.weight[:, width:] += torch.eye(width)

    @property
    def is_foreign(self) -> bool:
        """Whether the layer is of transformers."""
        return self.options.layer is not None

    def mix(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        if not self.options.read_states:
            state_XD = torch.zeros_like(state_XD)
        both = torch.cat([self.enorm(embedding_XD), self.hnorm(state_XD)], dim=-1)
        out_XD: Tensor = self.fc(both)
        return out_XD

    def fed_back(self, out_XO: Tensor) -> Tensor:
        return self.ready(out_XO) if self.options.norm_output else out_XO

    def ready(self, out_XO: Tensor) -> Tensor:
        out_XD: Tensor = self.norm(out_XO)
        return out_XD

    def rope(self, position: Tensor) -> Tensor:
        return self.shape.rope(position)


class Mtp(FeatureDrafter):
    """One module, used as often as there are tokens to draft."""

    family = "mtp"
    splits_rows = True
    module: MtpNet
    options: MtpOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return MtpNet(shape, self.options)

    def open(self, space: Space) -> MtpState:
        return MtpState(self, space)


class MtpState(TrunkState):
    """Memory of one engine."""

    net: Any

    @property
    def is_recordable(self) -> bool:
        """Experts of transformers are chosen by the host."""
        return not self.net.is_foreign and super().is_recordable

    def _attending(self, mask: Tensor | None) -> Callable[[int], Attending]:
        if not self.net.is_foreign:
            return super()._attending(mask)
        return lambda layer: Cached(LayerCache(self.kv, layer), mask)


FAMILY = Family(
    name="mtp",
    summary=(
        "The multi-token-prediction module that DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5 "
        "carry in their checkpoints, used again and again on its own output: taken from there, "
        "tuned for deeper drafts, and written back. Take it where the target has one; for another "
        "target it is EAGLE with norms, and EAGLE-3 reads more."
    ),
    paper="https://arxiv.org/abs/2412.19437",
    options=MtpOptions,
    build=Mtp,
    trainable=True,
    policies=("chain", "dynamic-tree", "static-tree"),
)
