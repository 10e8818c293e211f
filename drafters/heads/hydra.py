"""Hydra and Hydra++ (arXiv 2402.05109): Medusa's heads, grounded in the tokens drafted before.

Head i reads cat(f_t, e_{t+1}, ..., e_{t+1+i}) and predicts token t + 2 + i (section 3): its first
block maps those i + 2 vectors to one, by a linear skip that begins as "take f_t" beside a branch
that begins as zero; more blocks and an LM head of its own follow. Past the last head the newest
embeddings are taken. Hydra++ (section 4) deepens the heads, learns from the target's distribution
alone and puts a decoder layer over the states of the whole text in front (`prefix`).
Letters: D hidden width, I input width, X any axes, Y carry (k D + D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.core.spec import ModelSpec
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.nets.heads import ResBlock
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.prefix import PrefixNet
from specctl.drafters.option_checks import Count, CountOrZero


@dataclass(frozen=True, slots=True)
class HydraOptions(HeadOptions):
    """`num_heads` heads of `num_blocks` blocks, LM heads begun as the target's. `prefix` decoder
    layers stand in front (Hydra++: 1, with 4 blocks). `grounded` False hides drafted tokens from
    the heads (an ablation: Medusa). `feature_weight` times SmoothL1 to the target's state is
    added."""

    decay: float = 0.8
    num_blocks: Count = 1
    prefix: CountOrZero = 0
    grounded: bool = True
    feature_weight: float = 0.0


class GroundedBlock(nn.Module):
    """skip(x) + SiLU(branch(x)), from `num_inputs` vectors side by side to one."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.skip = nn.Linear(num_inputs * width, width, bias=False)
        self.branch = nn.Linear(num_inputs * width, width)
        nn.init.zeros_(self.branch.weight)
        nn.init.zeros_(self.branch.bias)
        with torch.no_grad():
            self.skip.weight.zero_()[:, :width] = torch.eye(width)

    def forward(self, x_XI: Tensor) -> Tensor:
        out: Tensor = self.skip(x_XI) + F.silu(self.branch(x_XI))
        return out


class HydraNet(nn.Module):
    """Heads by number; `prefix` only where there are such layers."""

    def __init__(self, options: HydraOptions, spec: ModelSpec, rows: int) -> None:
        super().__init__()
        width = spec.hidden_size
        self.heads = nn.ModuleList()
        for i in range(options.num_heads):
            blocks = [ResBlock(width) for _ in range(options.num_blocks - 1)]
            head = nn.Linear(width, rows, bias=False)
            self.heads.append(nn.Sequential(GroundedBlock(i + 2, width), *blocks, head))
        self.prefix = PrefixNet(spec, options.prefix) if options.prefix else None


class Hydra(HeadDrafter):
    """The carry is f_t and the newest embeddings, in order, zero where there is none yet."""

    family = "hydra"
    splits_rows = True
    module: HydraNet

    def make_net(self, rows: int) -> HydraNet:
        return HydraNet(self.options, self.spec, rows)

    def own_heads(self) -> list[nn.Linear]:
        return [cast(nn.Linear, cast(nn.Sequential, head)[-1]) for head in self.module.heads]

    def prefix(self) -> PrefixNet | None:
        return self.module.prefix

    @property
    def num_stages(self) -> int:
        """One more than heads: from there on the oldest embedding is dropped."""
        return int(self.options.num_heads) + 1

    def begin(self, state_XD: Tensor) -> Tensor:
        return F.pad(state_XD, (0, self.options.num_heads * state_XD.shape[-1]))

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        if not self.options.grounded:
            return carry_XY
        width, heads = self.spec.hidden_size, self.options.num_heads
        vectors = list(torch.split(carry_XY, width, dim=-1))
        if depth >= heads:
            vectors = [vectors[0], *vectors[2:], vectors[1]]
        vectors[1 + min(depth, heads - 1)] = self.embed(ids_X)
        return torch.cat(vectors, dim=-1)

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        at = min(depth, self.options.num_heads - 1)
        x: Tensor = carry_XY[..., : (at + 2) * self.spec.hidden_size]
        for block in list(cast(nn.Sequential, self.module.heads[at]))[:-1]:
            x = block(x)
        return x


FAMILY = Family(
    name="hydra",
    summary=(
        "Medusa's heads with the tokens drafted before them as input: later heads no longer guess "
        "blindly, so longer drafts survive. Each level of the tree needs a pass of one small head "
        "instead of one pass for all. Hydra++ (prefix: 1, num_blocks: 4) adds a decoder layer over "
        "the states of the whole text."
    ),
    paper="https://arxiv.org/abs/2402.05109",
    options=HydraOptions,
    build=Hydra,
    trainable=True,
    policies=("hardware-tree", "chain", "dynamic-tree", "static-tree"),
)
