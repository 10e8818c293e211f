"""Falcon (arXiv 2412.12639): several tokens per pass of the drafter, from a recurrence and a layer.

Semi-autoregressive drafting: the last k rows of the text, (token t + 1, f_t) each, are a block that
looks at everything up to its end; its j-th row predicts the feature k rows ahead and so, through
the target's LM head, the token j + 1 behind the newest. The next block reads the k drafted tokens
and features: a tree k levels deep per pass. In place of EAGLE's fc stands an LSTM over the text.
Loss: EAGLE's (SmoothL1 on features, KL at the given temperature) in the light of coupled sequential
glancing (`glancing`): rows at the beginning of some blocks read the token and the feature that they
are to predict, so that the rows behind learn what follows from it; what was shown is not scored.
Our own choices: the fc stays beside the LSTM, so that fresh rows are features; every grouping into
blocks is trained at once, where the paper fixes one; the paper's draws from the target's
distribution, whose mean is the KL, are left out; wrong is what differs from the text. Letters: X
any leading axes, B rows, S sequence, R flat rows, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, Space
from specctl.core.errors import RecipeError
from specctl.core.masks import document_mask
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.losses.align import ahead_mask, shifted
from specctl.drafters.losses.glancing import Glance, ahead, behind, choose
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.feature_drafter import FeatureDrafter, FeatureOptions, Unrolled
from specctl.drafters.nets.heads import check_count
from specctl.drafters.nets.stride_net import StrideNet, pick
from specctl.drafters.states.stride_state import StrideState

AT_ONCE = 256  # rows of logits alive while the first pass is judged


@dataclass(frozen=True, slots=True)
class FalconOptions(FeatureOptions):
    """`stride` tokens per pass, an LSTM of `lstm_layers`. `glance` times as many blocks as tokens
    were wrong are shown a part of the answer, falling to `glance_last` at the end (0: none)."""

    temperature: float = 0.95
    noise: float = 0.1
    stride: int = 2
    lstm_layers: int = 2
    glance: float = 0.45
    glance_last: float = 0.1

    def __post_init__(self) -> None:
        FeatureOptions.__post_init__(self)
        check_count("stride", self.stride, 2)
        check_count("lstm_layers", self.lstm_layers)
        if self.ttt_steps != 1:
            raise RecipeError(
                "Falcon is not unrolled in training",
                where="drafter.options.ttt_steps",
                found=str(self.ttt_steps),
                expected="1",
                do="say how many tokens a pass drafts with drafter.options.stride",
            )

    @property
    def num_heads(self) -> int:
        """Distributions that a row is trained on."""
        return self.stride


class Falcon(FeatureDrafter):
    """The passes over a batch; the frame does the rest."""

    family: ClassVar[str] = "falcon"
    module: StrideNet
    options: FalconOptions

    def make_net(self, shape: LayerShape) -> StrideNet:
        return StrideNet(shape, self.options.stride, self.options.lstm_layers)

    @property
    def net(self) -> StrideNet:
        return self.module

    def open(self, space: Space) -> StrideState:
        return StrideState(self, space)

    def unroll(self, batch: TrainBatch) -> list[Unrolled]:
        """At the end of every block, by row of the block. Without gradients nothing is shown: the
        loss is then that of what drafting will meet."""
        state_BSD, glance = self.noisy(batch), None
        if self.options.glance > 0 and torch.is_grad_enabled():
            with torch.no_grad():
                glance = self._glance(batch, state_BSD)
        return self._pass(batch, state_BSD, glance)

    def _glance(self, batch: TrainBatch, state_BSD: Tensor) -> Glance:
        options = self.options
        share = options.glance_last + (options.glance - options.glance_last) * (1 - batch.progress)
        is_end_BS = ahead_mask(batch, 1 + options.stride)
        is_end_BS &= batch.position_BS >= options.stride - 1
        wrong_BS = torch.zeros_like(batch.ids_BS)
        for step, unrolled in enumerate(self._pass(batch, state_BSD, None)):
            row_BS = first_choice(unrolled.ready_BSD, self.head_weight(), is_end_BS)
            said_BS = row_BS if self.vocab is None else self.vocab.ids_K[row_BS]
            wrong_BS += said_BS != shifted(batch.ids_BS, 2 + step)
        return choose(wrong_BS, is_end_BS, options.stride, share)

    def _pass(self, batch: TrainBatch, state_BSD: Tensor, glance: Glance | None) -> list[Unrolled]:
        net, position_BS, stride = self.module, batch.position_BS, self.options.stride
        phase_BS = position_BS % stride
        next_BS = shifted(batch.ids_BS, 1)
        versions = [(next_BS, state_BSD)]
        if glance is not None:  # a grouping into blocks each, with answers in its own blocks only
            shown = [glance.rows(phase_BS == phase) for phase in range(stride)]
            later_BS, later_BSD = shifted(next_BS, stride), ahead(state_BSD, stride)
            versions = [
                (
                    torch.where(here_BS, later_BS, next_BS),
                    torch.where(here_BS[:, :, None], later_BSD, state_BSD),
                )
                for here_BS in shown
            ]
        ids, states = (torch.cat(parts) for parts in zip(*versions, strict=True))
        document = batch.document_BS.repeat(len(versions), 1)
        rows = net.over(self.embed(ids), states, document).chunk(len(versions))
        turn = net.rope(position_BS)
        seen = [net.key_value(x_BSD, turn) for x_BSD in rows]
        mask, steps = document_mask(batch.document_BS), []
        for index in range(stride):
            back = stride - 1 - index
            x_BSD = pick([behind(x_BSD, position_BS, back) for x_BSD in rows], phase_BS)
            at = net.rope((position_BS - back).clamp(min=0))
            out_BSD = net.look(x_BSD, at, seen, mask, phase_BS)
            known_BS = None if glance is None else glance.shows(index)
            steps.append(Unrolled(out_BSD, out_BSD, known_BS))
        return steps


def first_choice(ready_BSD: Tensor, head_KD: Tensor, wanted_BS: Tensor) -> Tensor:
    """[B, S]: the draft row of largest logit where it is wanted, a few rows at a time; else 0."""
    best_BS = torch.zeros_like(wanted_BS, dtype=torch.long)
    parts = [(x_ND @ head_KD.t()).argmax(-1) for x_ND in torch.split(ready_BSD[wanted_BS], AT_ONCE)]
    best_BS[wanted_BS] = torch.cat(parts)
    return best_BS


def build(options: FalconOptions, spec: ModelSpec, vocab: VocabMap | None) -> Falcon:
    return Falcon(options, spec, vocab)


FAMILY = Family(
    name="falcon",
    summary=(
        "Says several tokens per pass of a recurrence and one decoder layer, each guessed without "
        "the others of its block, and goes on from all of them together: half the passes of EAGLE "
        "for drafts of the same depth. Glancing in training teaches the later tokens of a block "
        "what follows from the earlier ones. Take it where passes of the drafter are dear."
    ),
    paper="https://arxiv.org/abs/2412.12639",
    options=FalconOptions,
    build=build,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree"),
)
