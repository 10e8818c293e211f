"""Recurrent Drafter (arXiv 2403.09919): one head with a recurrent state instead of many heads.

s_{i+1} = SiLU(W e_{t+1+i} + b + U s_i) from s_0 = 0 (section 3.1); what the LM head reads is
cat(f_t, s_{i+1}) after residual blocks, where f_t, the target's last state, stays the same for the
whole draft. Embeddings are the target's. Every step uses the same weights, so a draft may be longer
than any seen in training. The paper drafts by beam search and verifies the beams merged by their
common prefixes (policy merged-beams).
Letters: D hidden width, K draft vocabulary, X any axes, Y carry (2 D).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.drafter import Family
from specctl.drafters.frames.head_drafter import HeadDrafter
from specctl.drafters.nets.cells import ElmanCell, SumCell
from specctl.drafters.nets.heads import ResBlock
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.option_checks import OneOf

CELLS = ("rnn", "sum")


@dataclass(frozen=True, slots=True)
class RecurrentOptions(HeadOptions):
    """Trained `num_heads` steps deep; `num_blocks` residual blocks stand before the LM head, which
    starts from the target's rows. `cell`: "rnn", or "sum" without a recurrence (an ablation): the
    embeddings are only added up."""

    num_blocks: int = 2
    cell: Annotated[str, OneOf(CELLS)] = "rnn"


class RecurrentNet(nn.Module):
    """The cell, the blocks, the head."""

    def __init__(self, options: RecurrentOptions, width: int, rows: int) -> None:
        super().__init__()
        self.cell: nn.Module = ElmanCell(width) if options.cell == "rnn" else SumCell()
        self.blocks = nn.Sequential(*(ResBlock(2 * width) for _ in range(options.num_blocks)))
        self.lm_head = nn.Linear(2 * width, rows, bias=False)


class Recurrent(HeadDrafter):
    """The carry is cat(f_t, s)."""

    family = "recurrent"
    splits_rows = True
    module: RecurrentNet

    def make_net(self, rows: int) -> RecurrentNet:
        return RecurrentNet(self.options, self.spec.hidden_size, rows)

    def own_heads(self) -> list[nn.Linear]:
        return [self.module.lm_head]

    def start_heads(self, rows_KD: Tensor) -> None:
        """The target's rows for f_t, nothing yet for s."""
        self.module.lm_head.weight.copy_(torch.cat([rows_KD, torch.zeros_like(rows_KD)], dim=1))

    @property
    def num_stages(self) -> int:
        return 1

    def begin(self, state_XD: Tensor) -> Tensor:
        return torch.cat([state_XD, torch.zeros_like(state_XD)], dim=-1)

    def read(self, depth: int, carry_XY: Tensor, ids_X: Tensor) -> Tensor:
        state_XD, memory_XD = carry_XY.chunk(2, dim=-1)
        return torch.cat([state_XD, self.module.cell(memory_XD, self.embed(ids_X))], dim=-1)

    def ready(self, depth: int, carry_XY: Tensor) -> Tensor:
        ready_XY: Tensor = self.module.blocks(carry_XY)
        return ready_XY


FAMILY = Family(
    name="recurrent",
    summary=(
        "One head with a small recurrent state: the target's last state stays fixed, a recurrence "
        "takes in each drafted token. As light as a single Medusa head, aware of what it has "
        "drafted, and of any length. Drafts beams and verifies them as one tree without their "
        "common beginnings."
    ),
    paper="https://arxiv.org/abs/2403.09919",
    options=RecurrentOptions,
    build=Recurrent,
    trainable=True,
    policies=("merged-beams", "chain", "dynamic-tree", "static-tree"),
)
