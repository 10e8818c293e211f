"""The MLP speculator (arXiv 2404.19124): small layers that combine a state with token embeddings.

s_0 = f_t, the target's last state; head i reads token t + 1 + i and predicts token t + 2 + i by
    s_{i+1} = GELU(LN_i(P_i s_i + c Z_i[x_{t+1+i}])),   logits = H_i s_{i+1}   (section 3)
with c = w_e / w_s, w_s = 0.5^(1 / 2n), w_e = sqrt((1 - w_s^2) D / 2), so that after all n heads the
first state still carries half of the variance. LN is a root-mean-square norm with scale and shift.
The drafting step has no attention: it costs two small products and the LM head. Training has two
stages (section 4): on text, then on what the target writes; recipes set `stages`.
Letters: D hidden width, K draft vocabulary, X any axes, Y carry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.nets.options import HeadOptions

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MlpOptions(HeadOptions):
    """`num_heads` heads of width `inner` (None: the target's). `tie`: all heads share embedding,
    norm, LM head and, but for the first, projection. `scale_input` norms f_t and divides it by
    sqrt(2). `read_tokens` False leaves the embeddings out, so that heads no longer see what was
    drafted (an ablation)."""

    loss: str = "ce"
    num_heads: int = 3
    inner: int | None = None
    tie: bool = False
    scale_input: bool = False
    read_tokens: bool = True


class ScaleShift(nn.Module):
    """x / sqrt(mean x^2) * weight + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, NORM_EPS) + self.bias


class MlpNet(nn.Module):
    """Parameters under the names of the public format: `emb`, `proj`, `ln` and `head` by index."""

    def __init__(self, options: MlpOptions, width: int, vocab_size: int, rows: int) -> None:
        super().__init__()
        inner = options.inner or width
        count = 1 if options.tie else options.num_heads
        projections = min(2, options.num_heads) if options.tie else options.num_heads
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(count))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else width, inner, bias=False) for i in range(projections)
        )
        self.ln = nn.ModuleList(ScaleShift(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(inner, rows, bias=False) for _ in range(count))
        self.emb.requires_grad_(options.read_tokens)
        for part in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(part.weight, std=inner**-0.5)


class MlpSpeculator(HeadDrafter):
    """The carry is the state s."""

    family = "mlp-speculator"
    splits_rows = True
    module: MlpNet

    def __init__(self, options: MlpOptions, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        keeps = 0.5 ** (0.5 / options.num_heads)
        inner = options.inner or spec.hidden_size
        self.token_weight = math.sqrt((1 - keeps**2) * inner / 2) / keeps

    def make_net(self, rows: int) -> MlpNet:
        return MlpNet(self.options, self.spec.hidden_size, self.spec.vocab_size, rows)

    def own_heads(self) -> list[nn.Linear]:
        return [head for head in self.module.head if isinstance(head, nn.Linear)]

    def start_heads(self, rows_KD: Tensor) -> None:
        """Its states are not the target's: LM heads start at random."""

    @property
    def num_stages(self) -> int:
        return len(self.module.proj)

    def begin(self, state_XD: Tensor) -> Tensor:
        if not self.options.scale_input:
            return state_XD
        return F.rms_norm(state_XD, state_XD.shape[-1:], None, NORM_EPS) / math.sqrt(2)

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        net = self.module
        x = _at(net.proj, depth)(carry_XY)
        if self.options.read_tokens:
            x = torch.add(x, _at(net.emb, depth)(ids_X), alpha=self.token_weight)
        return F.gelu(_at(net.ln, depth)(x))

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        return carry_XY


def _at(parts: nn.ModuleList, depth: int) -> nn.Module:
    return parts[min(depth, len(parts) - 1)]


FAMILY = Family(
    name="mlp-speculator",
    summary=(
        "A few small layers, each of which combines the state of the one before with the embedding "
        "of the token just drafted. No attention and no cache of its own: a draft step costs two "
        "small products and an LM head, and heads know what was drafted before them. Made for "
        "production servers; trained on text first, then on what the target itself writes."
    ),
    paper="https://arxiv.org/abs/2404.19124",
    options=MlpOptions,
    build=MlpSpeculator,
    trainable=True,
    policies=("static-tree", "dynamic-tree", "chain"),
)
