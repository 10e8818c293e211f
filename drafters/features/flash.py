"""FLASH (arXiv 2505.12728): few latents in the place of an image, several tokens per forward.

Compression: learned queries, C of them, attend to the target's states at an image's placeholders,
softmax(C F^T) F (section 3, without a scale, as its code has it), and the C vectors stand in the
drafter's context where the image stood; they go into the layer as they are (`VisualDrafter`).
Semi-autoregressive head: the newest row is followed by k - 1 placeholders, each that row plus a
learned vector of its slot. Slot i stands i positions further, sees the text and the slots before
it, and predicts the token i + 1 behind the newest, whatever the others draft: k tokens a forward.
Loss: EAGLE's (SmoothL1 1.0, cross-entropy 0.1) of every slot.
Our own choices: EAGLE's `fc` in the place of the gated one with its residual; one run of
placeholders is one image; an image of fewer placeholders than queries has as many latents.
Letters: B rows, D hidden width, K draft vocabulary, L positions, M new nodes, P path, R flat rows,
S sequence, T fed tokens, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Family, RoundView, Space, StepState
from specctl.drafters.frames.strided_options import StridedOptions
from specctl.drafters.frames.text_alone import begins, without
from specctl.drafters.frames.visual_drafter import VISUAL, VisualDrafter, VisualState
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.short_context import ShortContextState
from specctl.drafters.states.tree_layout import Fed, TreeLayout


@dataclass(frozen=True, slots=True)
class FlashOptions(StridedOptions):
    """`stride` tokens a forward; 1 drafts one by one, as EAGLE (an ablation). `latents` stand for
    an image; None: its states, uncompressed (another)."""

    stride: Annotated[int, Within(1, 64)] = 5
    latents: Count | None = 64


class FlashNet(TrunkNet):
    """EAGLE's module with `queries` (C of width D) and `slots` (k - 1 of them)."""

    def __init__(self, shape: LayerShape, stride: int, latents: int | None) -> None:
        super().__init__(shape)
        width = shape.hidden_size
        self.slots = nn.Parameter(0.02 * torch.randn(stride - 1, width))
        self.queries = None if latents is None else nn.Parameter(0.02 * torch.randn(latents, width))

    def latents(self, state_LD: Tensor) -> Tensor:
        """[X, D]: what stands for an image whose placeholders have these states."""
        if self.queries is None:
            return state_LD
        query_XD = self.queries[: len(state_LD)]
        state_LD = state_LD.to(query_XD)
        return (query_XD @ state_LD.t()).softmax(-1) @ state_LD


class Flash(VisualDrafter):
    """Images are compressed before anything else is done with a batch, or with a prompt."""

    family = "flash"
    module: TrunkNet
    options: FlashOptions

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return FlashNet(shape, self.options.stride, self.options.latents)

    @property
    def net(self) -> FlashNet:
        assert isinstance(self.module, FlashNet)
        return self.module

    @property
    def num_steps(self) -> int:
        return self.options.stride

    def mixed(
        self, batch: TrainBatch, ahead: int, state_BSD: Tensor, first_BSD: Tensor | None = None
    ) -> Tensor:
        if first_BSD is not None:
            return first_BSD + self.net.slots[ahead - 2]
        return super().mixed(batch, ahead, state_BSD)

    def shown(self, batch: TrainBatch) -> TrainBatch:
        """Latents at the last placeholders of each image, the others left out: the state before
        the text goes on is the target's own."""
        image_BS, state_BSD = batch.image_BS, batch.taps[self.tap]
        if image_BS is None:
            return batch
        state_BSD = state_BSD.to(self.dtype)
        visual_BSD, keep_BS = torch.zeros_like(state_BSD), torch.ones_like(image_BS)
        begins_BS = begins(batch.document_BS)
        for b, row in enumerate(image_BS.tolist()):
            starts = begins_BS[b].tolist()
            for first, end in runs_of(row, starts):
                latent_XD = self.net.latents(state_BSD[b, first:end])
                visual_BSD[b, end - len(latent_XD) : end] = latent_XD
                keep_BS[b, first : end - len(latent_XD)] = False
        return without(replace(batch, taps={**batch.taps, VISUAL: visual_BSD}), keep_BS)

    def open(self, space: Space) -> StepState:
        state = FlashState(self, space) if self.options.stride > 1 else VisualState(self, space)
        return CompressedState(self, state, space.unsaid) if space.unsaid else state


def runs_of(flags: Sequence[bool], begins: Sequence[bool] = ()) -> Iterator[tuple[int, int]]:
    """Runs of True, first and end, cut where something `begins`."""
    first: int | None = None
    for at, flag in enumerate(flags):
        if first is not None and (not flag or (at < len(begins) and begins[at])):
            yield first, at
            first = None
        if flag and first is None:
            first = at
    if first is not None:
        yield first, len(flags)


class CompressedState(ShortContextState):
    """A state that is shown prompts with latents in the place of their images."""

    inner: VisualState

    def __init__(self, drafter: Flash, inner: VisualState, unsaid: Collection[int]) -> None:
        super().__init__(inner, None, unsaid)
        self.drafter = drafter

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        state_TD = taps[self.drafter.tap]
        visual_TD, keep = torch.zeros_like(state_TD), torch.ones(len(tokens), dtype=torch.bool)
        for first, end in runs_of([token in self.unsaid for token in tokens[: len(state_TD)]]):
            latent_XD = self.drafter.net.latents(state_TD[first:end])
            visual_TD[end - len(latent_XD) : end] = latent_XD.to(visual_TD)
            keep[first : end - len(latent_XD)] = False
        kept = keep.nonzero()[:, 0].tolist()
        head = [tokens[at] for at in kept]
        self._heads[slot] = head, len(tokens)
        whole = {**taps, VISUAL: visual_TD}
        self.inner.start(slot, head, {tap: value[kept[:-1]] for tap, value in whole.items()})

    def marginals(self, view: RoundView, length: int) -> Tensor | None:
        return self.inner.marginals(self._short(view), length)


class FlashState(VisualState):
    """Memory of one engine. One forward a round: the pending rows and, right behind the newest, the
    slots. What is drafted changes nothing, so a node takes the logits of its depth (behind the last
    slot, that slot's) and nothing is written for it."""

    def __init__(self, drafter: Flash, space: Space) -> None:
        self.slots, self.stride = drafter.net.slots, drafter.options.stride
        self._logits_BPK = self._block_BPD = torch.empty(0)
        self._depths: list[Tensor] = []
        super().__init__(drafter, replace(space, max_nodes=space.max_nodes + self.stride))

    @property
    def is_recordable(self) -> bool:
        return False

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        counts, kept = self._lengths(view)
        kept_B = self._kept_B(view)
        self._growth = TreeLayout(view, self.kv, kept, kept_B)
        width = max(counts) + self.stride - 1
        fed = self._aim_pending(view, counts, kept, kept_B, width)
        count_B1 = torch.tensor(counts, device=self.device)[:, None]
        at_BP = count_B1 - 1 + torch.arange(self.stride, device=self.device)
        row_B1 = torch.arange(len(counts), device=self.device)[:, None]
        x_BTD = self.mixed(fed).clone()
        x_BTD[row_B1, at_BP[:, 1:]] = x_BTD[row_B1, at_BP[:, :1]] + self.slots.to(x_BTD)
        out_BTD = self._through(_with_slots(fed, self.stride), x_BTD)
        self._block_BPD = out_BTD[row_B1, at_BP]
        self._logits_BPK = self.net.logits(self._block_BPD, self._read)
        self._states, self._depths = [self._block_BPD[:, :1]], [torch.zeros_like(count_B1)]
        return self._logits_BPK[:, 0]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        self._depths.append(depth_BM)
        at_BM1 = depth_BM.clamp(max=self.stride - 1)[:, :, None]
        state_BMD, logits_BMK = (
            values.gather(1, at_BM1.expand(-1, -1, values.shape[-1]))
            for values in (self._block_BPD, self._logits_BPK)
        )
        self._states.append(state_BMD)
        return logits_BMK

    def marginals(self, view: RoundView, length: int) -> Tensor | None:
        self.root(view)
        return self._logits_BPK[:, :length]


def _with_slots(fed: Fed, stride: int) -> Fed:
    """The same rows, of which the slots behind the newest are real, too."""
    return replace(fed, counts=tuple(count + stride - 1 for count in fed.counts))


FAMILY = Family(
    name="flash",
    summary=(
        "EAGLE's layer for targets that read images, made cheap: a few learned latents stand for "
        "an image in the drafter's context, and one pass of the layer drafts several tokens, each "
        "guessed without the others. Take it where images are long and passes of the drafter are "
        "dear."
    ),
    paper="https://arxiv.org/abs/2505.12728",
    options=FlashOptions,
    build=Flash,
    trainable=True,
    policies=("dynamic-tree", "chain", "static-tree", "marginal-tree"),
)
