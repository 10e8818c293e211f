"""K-Forcing (arXiv 2606.10820) as a drafter: tokens to come as a function of uniform noise.

A forward of the target reads the newest token and slots behind it, each with the random numbers
that its tokens are drawn at. The newest token says the next one, y_1 = F^-1(u_1 | text), where F is
the CDF over the vocabulary in the order of its ids: the target's own draw. Slot i stands where y_i
will, has seen u_1 to u_(i+1), and says y_(i+1) = F^-1(u_(i+1) | text, y_1 .. y_i) by its argmax:
the randomness is in its input already. A second forward verifies under rule `inverse-cdf`, which
draws at the same numbers, so that drafting and verifying agree wherever the slots have learned the
map (PTP, arXiv 2512.21323, drafts so). Under any other rule, and in greedy rows, slots are told
temperature 0 and draft what is likeliest; all of it is exact.

Progressive self-forcing: 1, 2, 4, .. slots learn, as training goes on. The first token of a rollout
is the target's at u_1. The others are those that this drafter says on the same noise, behind the
tokens so far and with half of the slots, one of the target's own between two such calls. The paper
keeps the student of the stage before for that; here the weights as they are serve, whose first slot
is always taught by the target itself. Half of the anchors learn temperature 0, the rest
`temperature`.

The paper copies the target and trains all of it, with a new last layer, and emits what its slots
say. Here the target stays as it is, to the bit: trained are the slots' embeddings, the encoder of
the noise, and low-rank additions h + U gelu(D h / rms(h) + C e(noise)) in front of every `every`
layers and of the LM head, which the rows of slots alone go through.
Letters: A anchors, B rows, D hidden width, F figures (sinusoids), I input width (code of the
noise), K draft vocabulary, M new nodes (rows fed), N nodes (slots), R flat rows, S sequence, T fed
tokens (of a group), V target vocabulary, X any axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Budget, Family, Needs, RoundView, Space
from specctl.core.forward.sub_layers import SubLayers
from specctl.core.inverse_cdf import inverse_cdf
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel
from specctl.core.tree import DraftTree, NodeKind, chain_tree, empty_tree
from specctl.drafters.frames.place_chain import PlaceChainState, embedded
from specctl.drafters.frames.places import PlacesDrafter, PlacesOptions
from specctl.drafters.losses.align import AlignedRows, ahead_mask, teacher_of
from specctl.drafters.losses.head_losses import LinearHead, head_loss, weighted_sum
from specctl.drafters.nets.options import ADDED
from specctl.drafters.nets.routed import read_head
from specctl.drafters.option_checks import Count, CountOrZero, OneOf, Within
from specctl.drafters.states.borrowed_state import groups_behind
from specctl.models.kernels import linear

LOUD = 16.0  # embeddings are kept this much smaller, to learn as fast as other weights do
FREQUENCIES = 16  # of each number's sinusoidal features
FASTEST = 64.0  # half turns of the fastest between 0 and 1
MIDDLE = 0.5  # stands for noise that decides nothing


@dataclass(frozen=True, slots=True)
class KForcingOptions(PlacesOptions):
    """`num_heads` tokens are drafted, the first by the newest token, the others by slots; trained
    behind `anchors` positions of each row, a share `greedy_share` of them at temperature 0.
    `rank` of the additions in front of every `every` layers (0: none), which read codes of the
    noise of `code` numbers. `noise: constant` hides it (an ablation). `progressive`: more slots as
    training goes on; else all learn at once. `self_forcing`: rollouts are the drafter's own where
    a stage lies behind; else the target's, token by token."""

    num_heads: Annotated[int, Within(2)] = 5
    loss: Annotated[str, OneOf(("ce",))] = "ce"
    rank: CountOrZero = 64
    every: Count = 2
    code: Count = 128
    noise: Annotated[str, OneOf(("uniform", "constant"))] = "uniform"
    greedy_share: Annotated[float, Within(0, 1)] = 0.5
    d_pace: None = field(default=None, metadata=ADDED)  # its stages weigh in their own way
    progressive: bool = True
    self_forcing: bool = True


class NoiseEncoder(nn.Module):
    """Codes of a uniform number and of a temperature: sinusoidal features, computed in float64,
    a linear map, and an MLP beside it (the paper's encoder; the frequencies are ours)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.join = nn.Linear(4 * FREQUENCIES, width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, uniform_X: Tensor, heat_X: Tensor) -> Tensor:
        """[X, I]"""
        both = torch.cat([waves(uniform_X), waves(heat_X)], dim=-1).to(self.join.weight.dtype)
        code: Tensor = self.join(both)
        found: Tensor = code + self.narrow(F.gelu(self.wide(self.norm(code))))
        return found


def waves(value_X: Tensor) -> Tensor:
    """[X, 2 F] cosines and sines of pi f x, f from 1/2 up to FASTEST."""
    power_F = torch.linspace(-1, math.log2(FASTEST), FREQUENCIES, dtype=torch.float64)
    angle_XF = value_X.double()[..., None] * math.pi * torch.exp2(power_F).to(value_X.device)
    return torch.cat([angle_XF.cos(), angle_XF.sin()], dim=-1)


class Addition(nn.Module):
    """What is added to the rows of slots, by their noise; nothing at first."""

    def __init__(self, width: int, rank: int, code: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.noise = nn.Linear(2 * code, rank)
        self.up = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, state_XD: Tensor, code_XI: Tensor) -> Tensor:
        own_XD = state_XD.to(self.up.weight.dtype)
        normed_XD = F.rms_norm(own_XD, own_XD.shape[-1:], eps=1e-6)
        added_XD: Tensor = self.up(F.gelu(self.down(normed_XD) + self.noise(code_XI)))
        return state_XD + added_XD.to(state_XD.dtype)


class SlotNet(nn.Module):
    """Slots in front of the first layer, the encoder of their noise, and the additions."""

    def __init__(self, options: KForcingOptions, width: int, places: int) -> None:
        super().__init__()
        count = options.num_heads - 1
        self.tokens = nn.Parameter(torch.randn(count, width) * 0.02 / LOUD)
        self.encoder = NoiseEncoder(options.code)
        self.enter = nn.Linear(2 * options.code, width, bias=False)
        nn.init.zeros_(self.enter.weight)
        rank = options.rank
        additions = [Addition(width, rank, options.code) for _ in range(places if rank else 0)]
        self.additions = nn.ModuleList(additions)

    def codes(self, uniform_XN: Tensor, heat_X: Tensor) -> Tensor:
        """[X, N - 1, 2 I]: of each slot the code of its own noise and of that before it."""
        heat_XN = heat_X[..., None].expand_as(uniform_XN)
        middle_XN = torch.where(heat_XN > 0, uniform_XN, MIDDLE)
        code_XNI = self.encoder(middle_XN, heat_XN)
        return torch.cat([code_XNI[..., 1:, :], code_XNI[..., :-1, :]], dim=-1)

    def slots(self, code_XNI: Tensor) -> Tensor:
        """[X, N, D]"""
        slots: Tensor = self.tokens[: code_XNI.shape[-2]] * LOUD + self.enter(code_XNI)
        return slots


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is behind some anchors: the uniform numbers of the tokens to come, and the temperature.
    `heat_BA` 0 = greedy."""

    anchor_BA: Tensor
    uniform_BAN: Tensor
    heat_BA: Tensor

    def choose(self, logits_BAV: Tensor, index: int) -> Tensor:
        """[B, A]: the target's token at uniform number `index`."""
        hot_BA1 = torch.where(self.heat_BA > 0, self.heat_BA, 1.0)[..., None]
        prob_BAV = (logits_BAV.double() / hot_BA1).softmax(-1)
        drawn_BA = inverse_cdf(prob_BAV, self.uniform_BAN[..., index])
        return torch.where(self.heat_BA > 0, drawn_BA, logits_BAV.argmax(-1))


class KForcing(PlacesDrafter):
    """All layers of the target run. The newest token is the first place, slots are the others."""

    family = "k-forcing"
    teaches_target = False  # rollouts are those of the target as it is
    reach, replaces_anchor = 1, True
    first = 0
    module: SlotNet
    options: KForcingOptions
    _borrowed: Borrowed | None = None

    def make_net(self) -> SlotNet:
        places = math.ceil(self.spec.num_layers / self.options.every) + 1
        return SlotNet(self.options, self.spec.hidden_size, places)

    def needs(self) -> Needs:
        return Needs(self.attention, teacher=True, teacher_rows=True, borrow=True)

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._borrowed = borrowed

    def trimmed(self, vocab: object) -> Self:
        small = super().trimmed(vocab)  # type: ignore[arg-type]
        small._borrowed = self._borrowed
        return small

    def behind(self, state_BAD: Tensor) -> Tensor:
        raise AssertionError("slots are made of noise, not of states")

    def codes(self, uniform_XN: Tensor, heat_X: Tensor) -> Tensor:
        """[X, N - 1, 2 I], as the slots read noise; `noise: constant` hides it."""
        if self.options.noise == "constant":
            uniform_XN = torch.full_like(uniform_XN, MIDDLE)
        return self.module.codes(uniform_XN, heat_X)

    # -- a forward ------------------------------------------------------------------------------

    def behind_tokens(
        self, feed: Feed, token_XTD: Tensor, code_XNI: Tensor, kv: SlotKV, lm: LanguageModel
    ) -> Tensor:
        """[X, T + N, D]: what the LM head reads at groups of T tokens [X, T, D] (their embeddings)
        and N slots behind them; `feed` holds all groups of a row one after another."""
        X, T, last = token_XTD.shape[:-2], token_XTD.shape[-2], self.spec.num_layers
        slot_XND = self.module.slots(code_XNI).to(token_XTD.dtype)
        shape = (*X, T + slot_XND.shape[-2], token_XTD.shape[-1])
        state_BMD = torch.cat([token_XTD, slot_XND], dim=-2).reshape(*feed.position_BT.shape, -1)
        step = self.options.every if len(self.module.additions) and shape[-2] > T else last
        for place, first in enumerate(range(0, last, step)):
            until = min(first + step, last)
            state_BMD = self._added(state_BMD, place, shape, code_XNI)
            part = replace(feed, logits=False, taps=(until,), parts=SubLayers.span(first, until))
            state_BMD = lm.run(replace(part, residual_BTD=state_BMD), kv).taps[until]
        return self._added(state_BMD, -1, shape, code_XNI).view(shape)

    def _added(
        self, state_BMD: Tensor, place: int, shape: tuple[int, ...], code_XNI: Tensor
    ) -> Tensor:
        """The residuals, with addition number `place` at the slots of each group."""
        N = code_XNI.shape[-2]
        if not N or not len(self.module.additions):
            return state_BMD
        state_XTD = state_BMD.view(shape)
        told_XTD, slot_XND = state_XTD[..., :-N, :], state_XTD[..., -N:, :]
        slot_XND = self.module.additions[place](slot_XND, code_XNI)
        return torch.cat([told_XTD, slot_XND], dim=-2).view_as(state_BMD)

    # -- training -------------------------------------------------------------------------------

    def num_slots(self, progress: float) -> int:
        """How many slots learn: all of them in the last stage, half as many in the one before."""
        most = self.options.num_heads - 1
        stages = [most]
        while self.options.progressive and stages[0] > 1:
            stages.insert(0, stages[0] // 2)
        return stages[min(int(progress * len(stages)), len(stages) - 1)]

    def loss(self, batch: TrainBatch) -> LossOut:
        """Sum over slots of decay^i times the cross-entropy to the token that the noise says."""
        anchor_BA, options = self._anchors(batch), self.options
        N, shape = self.num_slots(batch.progress), anchor_BA.shape
        device = anchor_BA.device
        is_hot_BA = torch.rand(shape, device=device) >= options.greedy_share
        heat_BA = torch.where(is_hot_BA, options.temperature, 0.0)
        uniform_BAN = torch.rand(*shape, N + 1, dtype=torch.float64, device=device)
        rollout = Rollout(anchor_BA, uniform_BAN, heat_BA)
        tokens = self.rollout(batch, rollout, N)
        ready_BATD = self._read_behind(batch, rollout, [], 0, N)
        wanted_R = ahead_mask(batch, 1).gather(1, anchor_BA).flatten().nonzero()[:, 0]
        head, parts = LinearHead(self.head_weight().float()), []
        for i in range(1, N + 1):
            rows = AlignedRows(wanted_R, tokens[i].flatten()[wanted_R], wanted_R, None)
            ready_RD = ready_BATD[:, :, i].flatten(0, 1).float()
            out = head_loss(ready_RD, head, rows, self.vocab, options.compared())
            parts.append((options.decay ** (i - 1), out))
        return weighted_sum(parts)

    @torch.no_grad()
    def rollout(self, batch: TrainBatch, rollout: Rollout, num_slots: int) -> list[Tensor]:
        """`num_slots` + 1 tokens [B, A] behind each anchor: the first is the target's, then one of
        the target's and what half of the slots say behind it, in turn."""
        teacher, (B, S) = teacher_of(batch), batch.ids_BS.shape
        assert teacher is not None
        assert self._borrowed is not None
        options, row_B1 = self.options, torch.arange(B, device=batch.ids_BS.device)[:, None]
        shape = rollout.anchor_BA.shape
        own = num_slots // 2 if options.progressive and options.self_forcing else 0
        first_RV = teacher[(row_B1 * S + rollout.anchor_BA).flatten()]
        tokens = [rollout.choose(first_RV.view(*shape, -1), 0)]
        while (known := len(tokens)) < num_slots + 1:
            slots = min(own, num_slots - known)
            ready_BATD = self._read_behind(batch, rollout, tokens, known, slots)
            states_BAD, head = ready_BATD[:, :, known], self._borrowed
            logits_BAV = F.linear(states_BAD.to(head.head_VD.dtype), head.head_VD, head.head_bias_V)
            tokens.append(rollout.choose(logits_BAV, known))
            for i in range(1, slots + 1):
                said_BAK = linear(ready_BATD[:, :, known + i], self.head_weight())
                tokens.append(self._target_ids(said_BAK.argmax(-1)))
        return tokens

    def _target_ids(self, row_X: Tensor) -> Tensor:
        return row_X if self.vocab is None else self.vocab.ids_K[row_X]

    def _read_behind(
        self, batch: TrainBatch, rollout: Rollout, tokens: list[Tensor], known: int, slots: int
    ) -> Tensor:
        """[B, A, 1 + known + slots, D] behind the anchors and `known` tokens of the rollout."""
        anchor_BA, lm = rollout.anchor_BA, self.lm
        size = 1 + known + slots
        groups = groups_behind(lm, self.attention, batch, anchor_BA, size, replaces_anchor=True)
        to_BAD = anchor_BA[:, :, None].expand(-1, -1, self.spec.hidden_size)
        token_BATD = batch.taps[0].to(lm.dtype).gather(1, to_BAD)[:, :, None]
        position_BAT = groups.position_BM.view(*anchor_BA.shape, size)
        if known:
            ids_BAT = torch.stack(tokens, dim=-1)
            at_BM = position_BAT[:, :, 1 : 1 + known].flatten(1)
            more_BMD = embedded(lm, ids_BAT.flatten(1), at_BM, batch.ids_BS.shape[1] + size)
            token_BATD = torch.cat([token_BATD, more_BMD.view(*ids_BAT.shape, -1)], dim=2)
        code_BANI = self.codes(rollout.uniform_BAN[..., known : known + slots + 1], rollout.heat_BA)
        none_BM = torch.zeros_like(groups.position_BM)
        feed = Feed(none_BM, groups.position_BM, groups.masks, logits=False)
        return self.behind_tokens(feed, token_BATD, code_BANI, groups.kv, lm)

    def open(self, space: Space) -> KForcingState:
        return KForcingState(self, space)


class KForcingState(PlaceChainState):
    """Slots stand at the places behind the newest token, each with the noise of the round."""

    def __init__(self, drafter: KForcing, space: Space) -> None:
        super().__init__(drafter, space)
        self.drafter = drafter

    def ready(self, view: RoundView, root_B1D: Tensor, feed: Feed) -> Tensor:
        (B, T), device = feed.position_BT.shape, root_B1D.device
        if view.shared is None:  # another rule: what is likeliest
            uniform_BN = torch.full((B, T), MIDDLE, device=device)
            heat_B = torch.zeros(B, device=device)
        else:
            uniform_BN, heat_B = view.shared.uniform(T), view.shared.temperature_B
        code_BNI = self.drafter.codes(uniform_BN, heat_B)
        return self.drafter.behind_tokens(feed, root_B1D, code_BNI, self.kv, self.lm)

    @torch.no_grad()
    def propose(self, view: RoundView, budget: Budget) -> DraftTree:
        """A chain of what the noise of the round says."""
        depth = min(budget.depth, budget.nodes, self.drafter.options.num_heads)
        if depth <= 0:
            return empty_tree(len(view.slots), view.slot_B.device)
        first_BK = self.root(view)
        rest_BNK = read_head(self._ready_BMD[:, 1:depth], self._head)
        logits_BNK = view.shown(torch.cat([first_BK[:, None], rest_BNK], dim=1))
        row_BN = logits_BNK.argmax(-1)
        if view.shared is not None:
            prob_BK = view.shared.distribution(logits_BNK[:, :1])[:, 0]
            row_BN[:, 0] = inverse_cdf(prob_BK, view.shared.uniform(1)[:, 0])
        token_BN = self.drafter._target_ids(row_BN)
        return chain_tree(token_BN, torch.ones_like(token_BN, dtype=torch.bool), NodeKind.POINT)


FAMILY = Family(
    name="k-forcing",
    summary=(
        "The target reads slots with uniform noise and says several tokens in one forward, those "
        "that the same noise makes the target draw; a second forward verifies at the same noise "
        "(rule inverse-cdf), which is lossless. The target itself stays as it is. Made for sampled "
        "text and long training; after a short one `pass` accepts as much for fewer weights."
    ),
    paper="https://arxiv.org/abs/2606.10820",
    options=KForcingOptions,
    build=KForcing,
    trainable=True,
    policies=("direct", "chain"),
    borrows_layers=True,
)
