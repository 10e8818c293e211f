"""FeatureDrafter: the frame of drafters that predict the target's features (EAGLE-1 and its kin).

Row t reads token t + 1 and f_t, the target's last state; its output stands for f_{t+1} and, read by
the target's own LM head, predicts token t + 2. The loss is that of the head against the target's
distribution plus `feature_weight` times SmoothL1 between output and f_{t+1} (EAGLE, arXiv
2401.15077, eq. 3: 10 to 1). It may be unrolled: step j feeds the output back and reads token t + 2
+ j, exactly as a chain is drafted. What a family adds is a net (see `trunk`), or terms of the loss.

`TrunkState` serves it. A node less than `passes` tokens deep goes through the layers; a deeper one
carries on what its ancestor handed to the parallel heads, and costs an LM head only.
Letters: B rows, D hidden width, E head width, K draft vocabulary, L positions, M new nodes, O
output width, Q picked rows, R flat rows, S sequence, T fed tokens, V target vocabulary, X any axes,
Y carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Self

import torch
from torch import Tensor

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Needs, Space, StepState
from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.attention.recompute import is_large, run
from specctl.drafters.attention.seen import seen_text
from specctl.drafters.losses.align import AlignedRows, aim, document_lengths, shifted
from specctl.drafters.losses.head_losses import (
    LinearHead,
    feature_loss,
    head_loss,
    joined,
    teacher_logits,
    weighted_sum,
    with_stretch,
)
from specctl.drafters.losses.teacher import TeacherLogits
from specctl.drafters.nets.axes import checked_axes, rope_ahead
from specctl.drafters.nets.blocks import Attending, DecoderLayer, LayerShape, attending
from specctl.drafters.nets.heads import BorrowingDrafter, cut_rows, head_rows
from specctl.drafters.nets.options import ADDED, DepthOptions
from specctl.drafters.nets.routed import (
    RoutedHead,
    Router,
    ServedHead,
    cut_router,
    read_head,
    served_head,
    with_router,
)
from specctl.drafters.nets.trunk import Chains, TrunkNet
from specctl.drafters.option_checks import Count, Within
from specctl.drafters.states.feature_state import FeatureState
from specctl.drafters.states.tree_layout import Fed, Place
from specctl.models.native.step import RESIDUAL, Stack
from specctl.models.sliced_head import Head


@dataclass(frozen=True, slots=True)
class FeatureOptions(DepthOptions):
    """What all of them have. `ttt_steps` steps are unrolled; `noise` is the half-width of uniform
    noise on the features that are read while training; in documents of more than `noise_length`
    tokens it falls as the inverse of their length, as in EAGLE's trainer (which raises it in
    shorter ones, too; None: the same in all); `intermediate` is the width of the MLP, None that of
    the target."""

    ttt_steps: Count = 1
    feature_weight: float = 10.0
    noise: float = 0.0
    intermediate: int | None = None
    noise_length: Annotated[int, Within(most=10**9)] | None = field(default=512, metadata=ADDED)


@dataclass(frozen=True, slots=True)
class AxesOptions(FeatureOptions):
    """Those of families whose rows are unrolled and served by this frame alone. `mrope`: the axis
    (0 time, 1 height, 2 width) of each frequency, by which rows of images are rotated; [] is plain,
    None the target's axes where the data hold images (see nets/axes.py)."""

    mrope: tuple[int, ...] | None = field(default=None, metadata=ADDED)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """One step over whole rows: what the LM head reads, what is compared with the feature, and the
    rows that have seen what they are to predict (None: none)."""

    ready_BSD: Tensor
    state_BSD: Tensor
    known_BS: Tensor | None = None


class FeatureDrafter(BorrowingDrafter):
    """Binding, trimming, unrolling and the loss. A family gives its net and may add to the loss."""

    module: TrunkNet
    options: FeatureOptions
    detach: bool = True  # steps learn from what was fed back to them, not how to feed better

    def __init__(
        self, options: FeatureOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        super().__init__(options, spec, vocab)
        self.module = self.make_net(LayerShape.of(spec, options.intermediate))
        self.axes = checked_axes(options, self.module.shape.head_dim)
        self.router: Router | None = None
        self._head_KD: Tensor | None = None

    def make_net(self, shape: LayerShape) -> TrunkNet:
        return TrunkNet(shape)

    def step_weight(self, step: int) -> float:
        """What the loss of that step, or of the parallel head behind the steps, weighs."""
        return float(self.options.decay**step)

    def term(
        self, out: LossOut, ready_RD: Tensor, rows: AlignedRows, teacher: TeacherLogits | None
    ) -> LossOut:
        """The loss of a step with what the family adds to it."""
        return out

    def whole_loss(self, out: LossOut, steps: list[Unrolled], batch: TrainBatch) -> LossOut:
        """The loss of all steps with what the family adds to it."""
        return out

    # -- the frame ------------------------------------------------------------------------------

    @property
    def tap(self) -> int:
        return self.spec.num_layers

    def needs(self) -> Needs:
        return Needs((self.tap,), teacher=self.options.loss != "ce", borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        self.borrowed, self._head_KD = borrowed, head_rows(borrowed, self.vocab)
        if self._is_fresh and self.router is not None:
            self.router.arrange(self._head_KD)
        self._is_fresh = False

    def trimmed(self, vocab: VocabMap) -> Self:
        weights, options = cut_router(self.module, self.options, self.vocab, vocab)
        small = type(self)(options, self.spec, vocab)
        small.module.to(self.module.fc.weight)
        small.module.load_state_dict(weights)
        small.borrowed, small._is_fresh = self.borrowed, self._is_fresh
        if self._head_KD is not None:
            small._head_KD = cut_rows(self._head_KD, self.vocab, vocab)
        return small

    def open(self, space: Space) -> StepState:
        return TrunkState(self, space)

    def head_weight(self) -> Tensor:
        """[K, D]: the target's LM head over the draft vocabulary."""
        assert self._head_KD is not None, "bind() the target's LM head first"
        return self._head_KD.to(self.dtype)

    def served_head(self) -> ServedHead:
        """That head as serving reads it."""
        return served_head(self.head_weight(), self.options, self.router)

    def head(self) -> Head:
        """What makes logits of what a step has ready, in training."""
        return LinearHead(self.head_weight())

    def noisy(self, batch: TrainBatch) -> Tensor:
        """[B, S, D]: the target's features with the noise of training."""
        state_BSD = batch.own(batch.taps[self.tap]).to(self.dtype)
        if self.options.noise > 0:
            noise_BSD = self.options.noise * (2 * torch.rand_like(state_BSD) - 1)
            if self.options.noise_length is not None:
                length_BS = batch.own(document_lengths(batch))
                share_BS = (self.options.noise_length / length_BS).clamp(max=1.0)
                noise_BSD = noise_BSD * share_BS[:, :, None].to(noise_BSD)
            state_BSD = state_BSD + noise_BSD
        return state_BSD

    @property
    def num_steps(self) -> int:
        """Forwards of the layers that training unrolls."""
        return self.options.ttt_steps

    def mixed(
        self, batch: TrainBatch, ahead: int, state_BSD: Tensor, first_BSD: Tensor | None = None
    ) -> Tensor:
        """[B, S, D]: what the layers read of the token so far ahead and of the state before it;
        `first_BSD`: what they read in the first step, in those behind it."""
        embedding_BSD = self.embed(batch.own(shifted(batch.ids_BS, ahead)))
        return self.module.mix(embedding_BSD, state_BSD)

    def unroll(self, batch: TrainBatch) -> list[Unrolled]:
        """The steps, then the parallel heads, at every position."""
        net, state_BSD, own = self.module, self.noisy(batch), batch.own
        seen = seen_text(batch)
        pairs, depth = list[Tensor](), len(net.layers)
        width, inner = net.shape.hidden_size, net.shape.intermediate_size
        again = is_large(own(batch.ids_BS).numel(), self.num_steps * depth, width, inner)

        def one(ahead: int, x_BSD: Tensor, *before: Tensor) -> tuple[Tensor, ...]:
            """The layers' output, and key and value of every layer; `before`: those of the steps
            before."""
            chains = [
                Chains(seen, [*before[2 * i :: 2 * depth]], [*before[2 * i + 1 :: 2 * depth]])
                for i in range(depth)
            ]
            rope = rope_ahead(batch, ahead, net.rope, self.axes)
            out_BSO = net.through(x_BSD, rope, lambda layer: chains[layer].attending)
            return out_BSO, *(part[-1] for chain in chains for part in (chain.keys, chain.values))

        steps, ahead = [], 0
        first_BSD: Tensor | None = None
        while ahead < self.num_steps or net.num_parallel:
            x_BSD = self.mixed(batch, 1 + ahead, state_BSD, first_BSD)
            if ahead == self.num_steps:
                break
            first_BSD = x_BSD if first_BSD is None else first_BSD
            out_BSO, *pair = run(again, one, ahead, x_BSD, *pairs)
            pairs += pair
            steps.append(Unrolled(net.ready(out_BSO), net.fed_back(out_BSO)))
            state_BSD = steps[-1].state_BSD.detach() if self.detach else steps[-1].state_BSD
            before_BSD, ahead = x_BSD, ahead + 1
        if net.num_parallel:
            carry_BSY = net.handed(before_BSD, x_BSD, out_BSO)
            for index in range(net.num_parallel):
                guess_BSD = run(again, net.parallel, index, carry_BSY)
                steps.append(Unrolled(guess_BSD, guess_BSD))
        return steps

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over steps of their weights (decay^j) times the loss of predicting 2 + j ahead
        (A1)."""
        options = self.options
        how = options.compared()
        teacher, head, parts = (
            teacher_logits(batch, how, self.vocab),
            self.head(),
            [],
        )
        steps, feature_RD = self.unroll(batch), batch.taps[self.tap].flatten(0, 1)
        for step, unrolled in enumerate(steps):
            rows, ready_RD = aim(batch, 2 + step), unrolled.ready_BSD.flatten(0, 1)
            if unrolled.known_BS is not None:
                rows = rows.only(~unrolled.known_BS.flatten()[rows.row_Q])
            out = head_loss(ready_RD, head, rows, self.vocab, how, teacher)
            if options.feature_weight > 0:
                near = feature_loss(unrolled.state_BSD.flatten(0, 1), rows, feature_RD)
                out = joined(out, near, options.feature_weight)
            out = self.term(out, ready_RD, rows, teacher)
            out = with_router(out, self.router, ready_RD, rows, self.vocab, teacher)
            parts.append((self.step_weight(step), out))
        total = self.whole_loss(weighted_sum(parts), steps, batch)
        return with_stretch(total, [unrolled.ready_BSD for unrolled in steps])


class TrunkState(FeatureState):
    """Memory of one engine. Of the nodes of a round it keeps, by call: what was mixed, what the
    layers made of it, what was handed to parallel heads, and how deep they stand."""

    def __init__(self, drafter: FeatureDrafter, space: Space) -> None:
        self.drafter, self.net = drafter, drafter.module
        self._mixed: list[Tensor] = []
        self._outs: list[Tensor] = []
        self._carries: list[Tensor] = []
        self._depths: list[Tensor] = []
        super().__init__(drafter, self.net.shape, len(self.net.layers), space)

    def fuse_weights(self) -> None:
        self._head = self.drafter.served_head()

    def stack(self) -> Stack | None:
        net = self.net
        is_plain = type(net).through is TrunkNet.through
        if not is_plain or any(type(layer) is not DecoderLayer for layer in net.layers):
            return None
        return self.stack_of(list(net.layers), self.drafter.head_weight())

    @property
    def is_recordable(self) -> bool:
        return self.net.passes is None and not isinstance(self._head, RoutedHead)

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.drafter.tap].to(self.dtype)

    # -- true rows ------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, fed: Fed) -> None:
        self._true_rows(fed)

    def mixed(self, fed: Fed) -> Tensor:
        """[B, T, D]: what the layers read of true rows."""
        return self.net.mix(self.drafter.embed(fed.ids_BT), fed.state_BTD)

    def _true_rows(self, fed: Fed) -> tuple[Tensor, Tensor]:
        """What was mixed, and the layers' output, of every row."""
        x_BTD = self.mixed(fed)
        return x_BTD, self._through(fed, x_BTD)

    def _through(self, fed: Fed, x_BTD: Tensor) -> Tensor:
        """[B, T, O]: what the layers make of rows that follow one another."""
        if (out := self.compiled(fed.ids_BT, x_BTD, fed)) is not None:
            return out.taps[RESIDUAL]
        mask = chain_mask(fed.start_B, fed.ids_BT.shape[1], self.kv.aim.span)
        return self.net.through(x_BTD, fed.rope_BT2E, self._attending(mask))

    def _attending(self, mask: Tensor | None) -> Callable[[int], Attending]:
        return lambda layer: attending(mask, self.kv, layer)

    @torch.no_grad()
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        x_B1D, out_B1O = map(fed.newest, self._true_rows(fed))
        if self.net.passes is not None:
            self._mixed, self._outs = [x_B1D], [out_B1O]
            self._carries = [self.net.handed(x_B1D, x_B1D, out_B1O)]  # for its shape only
            self._depths = [torch.zeros(len(fed.counts), 1, dtype=torch.long, device=self.device)]
        return self._head_logits(out_B1O)

    def _head_logits(self, out_BMO: Tensor) -> Tensor:
        self._states.append(self.net.fed_back(out_BMO))
        return self.net.logits(self.net.ready(out_BMO), self._read)

    def _read(self, state_BMD: Tensor) -> Tensor:
        return read_head(state_BMD, self._head)

    # -- nodes ----------------------------------------------------------------------------------

    @torch.no_grad()
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        state_BMD = self.of_parents(self._states, parent_BM, place)
        x_BMD = self.net.mix(self.drafter.embed(token_BM), state_BMD)
        passes = self.net.passes
        if passes is None:
            return self._head_logits(self._pass(x_BMD, place))
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        depths = sorted(set(depth_BM.flatten().tolist()))  # heads are chosen by the host
        out_BMO = self.of_parents(self._outs, parent_BM, place)
        handed_BMY = self.net.handed(self.of_parents(self._mixed, parent_BM, place), x_BMD, out_BMO)
        carry_BMY = torch.where(
            (depth_BM <= passes)[:, :, None],
            handed_BMY,
            self.of_parents(self._carries, parent_BM, place),
        )
        if depths[0] < passes:  # else nothing will look at these entries of the cache
            out_BMO = self._pass(x_BMD, place)
        for stored, new in (
            (self._mixed, x_BMD),
            (self._outs, out_BMO),
            (self._carries, carry_BMY),
            (self._depths, depth_BM),
        ):
            stored.append(new)
        return self._by_depth(out_BMO, carry_BMY, depth_BM, depths)

    def _pass(self, x_BMD: Tensor, place: Place) -> Tensor:
        if (out := self.compiled(place.position_BM, x_BMD, place)) is not None:
            return out.taps[RESIDUAL]
        rope_BM2E = self._rope_L2E[place.position_BM]
        return self.net.through(x_BMD, rope_BM2E, self._attending(place.mask))

    def _by_depth(
        self, out_BMO: Tensor, carry_BMY: Tensor, depth_BM: Tensor, depths: list[int]
    ) -> Tensor:
        """[B, M, K]: each node's logits by the head of its depth, the last one serving the rest."""
        assert self.net.passes is not None
        logits_BMK = None if depths[0] >= self.net.passes else self._head_logits(out_BMO)
        for index in range(self.net.num_parallel):
            here = [
                d for d in depths if min(d - self.net.passes, self.net.num_parallel - 1) == index
            ]
            if not here:
                continue
            there_BMD = self.net.parallel(index, carry_BMY)
            there_BMK = read_head(there_BMD, self._head)
            if logits_BMK is None:
                self._states.append(there_BMD)
                logits_BMK = there_BMK
            else:
                is_here_BM1 = (depth_BM >= here[0])[:, :, None]
                logits_BMK = torch.where(is_here_BM1, there_BMK, logits_BMK)
        assert logits_BMK is not None
        return logits_BMK
