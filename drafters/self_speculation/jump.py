"""Jump (economize, github.com/Thiggel/economize): a drafted token skips the target's lower layers.

A predictor P puts the state of the next token in front of layer m, and the target's layers m .. r-1
read it as they are, or with low-rank additions that only drafted tokens see:

    x = P(h^u_t, e_(t+1)),   h^r_(t+1) = layers m .. r-1 (x; keys and values up to t, own ones),
    q_(t+2) = softmax(W norm(h^r_(t+1))),   m <= u <= r.

h^u_t is the target's own for the newest token whose layers have run, and that of the jump itself
from then on, so that a draft goes on by itself. With z = [P_s rms(h), P_e rms(e)]

    P(h, e) = e + gain * (S z + O(silu(G z) * V z)) + bias       (linear: S z alone).

A drafted token's keys and values lie where the verification writes the exact ones.

Trained on rollouts of `num_heads` steps behind every `stride`-th position of a text, from a random
one on: each step reads the text's own token and the state of the step before it. The loss of every
step is KL(p || q), and times `feature_weight` the squared error of x over the mean square of the
target's state in front of layer m; none counts less for being deep. Left out of the original:
several source layers, predictors that attend or flow, copies of the layers.
Letters: A anchors, B rows, D hidden width, E head width, I input width, J key/value heads, L
positions, M new nodes, N nodes, P path, Q picked rows, R flat rows, S sequence, T fed tokens, V
target vocabulary, X any axes, Z slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Family, Needs, Outcome, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.forward.row_additions import ATTENTION, MLP, Factors, Place, RowAdditions
from specctl.core.forward.sub_layers import NOTHING, SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, Masks
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.places import PlacesDrafter
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import joined, weighted_sum
from specctl.drafters.losses.teacher import wide
from specctl.drafters.nets.low_rank import (
    OF_PACKED,
    LinearName,
    check_names,
    check_places,
    factors_of,
    pairs_of,
)
from specctl.drafters.nets.options import HeadOptions
from specctl.drafters.nets.routed import read_head, served_head
from specctl.drafters.option_checks import Count, OneOf, Within
from specctl.drafters.states.borrowed_state import BorrowedState, groups_behind

NO_ADDITIONS = "--set drafter.options.rank=null, which adds nothing"
RMS_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class JumpOptions(HeadOptions):
    """A drafted token enters in front of layer `first` (m; None: half of the layers are skipped),
    made of the state in front of layer `source` (u; None: three quarters), and leaves in front of
    layer `last` (r; None: behind all of them; else a trained readout follows). Additions of `rank`,
    times `alpha` / `rank`, to the linear layers named `targets` of the layers that run (None: as
    they are). `predictor`: mlp, `width` times as wide as the target, or linear; none puts the
    token's embedding there (an ablation); `reads_state: false` hides the state from it (another).
    Trained `num_heads` steps deep behind every `stride`-th position."""

    num_heads: Count = 16
    stride: Count = 8
    first: int | None = None
    source: int | None = None
    last: int | None = None
    predictor: Annotated[str, OneOf(("mlp", "linear", "none"))] = "mlp"
    width: Annotated[float, Within(0.01, 64)] = 2.0
    reads_state: bool = True
    rank: Count | None = 16
    alpha: Annotated[float, Within(1e-3, 1e6)] = 32.0
    targets: tuple[LinearName, ...] = ATTENTION + MLP
    feature_weight: Annotated[float, Within(0)] = 1.0

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)
        check_names(self.targets)
        if self.predictor == "none" and self.rank is None and self.last is None:
            raise RecipeError(
                "a jump of embeddings through layers as they are has nothing to learn",
                where="drafter.options.predictor",
                found="predictor: none, rank: null, last: null",
                expected="a predictor, additions, or both",
                do="leave predictor out, or rank",
            )


@dataclass(frozen=True, slots=True)
class JumpPath:
    """Layers `first` .. `last` - 1 run on a state made of the one in front of layer `source`."""

    first: int
    source: int
    last: int

    @classmethod
    def of(cls, options: JumpOptions, spec: ModelSpec) -> JumpPath:
        layers = spec.num_layers
        last = layers if options.last is None else options.last
        first = max(1, layers // 2) if options.first is None else options.first
        most = min(last, layers - 1)  # what is behind the last layer is not tapped before the norm
        usual = min(max(first, 3 * layers // 4), most)
        source = usual if options.source is None else options.source
        if not (1 <= first < last <= layers and first <= source <= most):
            raise RecipeError(
                "a jump runs some of the layers, and begins within them",
                where="drafter.options.first",
                found=f"first: {first}, source: {source}, last: {last}, of {layers} layers",
                expected=f"1 <= first <= source <= last <= {layers}, first < last and source < "
                f"{layers}",
                do="leave first, source and last out",
            )
        return cls(first, source, last)


def unit_rms(x_XD: Tensor) -> Tensor:
    """Of root mean square 1, without weights."""
    return x_XD * torch.rsqrt(x_XD.pow(2).mean(-1, keepdim=True) + RMS_EPS)


class GatedMap(nn.Module):
    """O(silu(G z) * V z), small or zero when fresh."""

    def __init__(self, inputs: int, inner: int, outputs: int, std: float) -> None:
        super().__init__()
        self.gate = nn.Linear(inputs, inner, bias=False)
        self.value = nn.Linear(inputs, inner, bias=False)
        self.out = nn.Linear(inner, outputs, bias=False)
        for linear, spread in ((self.gate, 0.02), (self.value, 0.02), (self.out, std)):
            nn.init.normal_(linear.weight, std=spread)

    def forward(self, z_XI: Tensor) -> Tensor:
        out: Tensor = self.out(F.silu(self.gate(z_XI)) * self.value(z_XI))
        return out


class StatePredictor(nn.Module):
    """P. Fresh, about the token's embedding."""

    def __init__(self, width: int, options: JumpOptions) -> None:
        super().__init__()
        half = width // 2
        self.state_proj = nn.Linear(width, half, bias=False) if options.reads_state else None
        self.token_proj = nn.Linear(width, half, bias=False)
        inputs = half * (1 + options.reads_state)
        self.skip = nn.Linear(inputs, width, bias=False)
        is_gated = options.predictor == "mlp"
        inner = max(1, int(options.width * width))
        self.mlp = GatedMap(inputs, inner, width, 1e-3) if is_gated else None
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))  # some channels of states are large constants
        nn.init.normal_(self.skip.weight, std=1e-3)
        for linear in (self.state_proj, self.token_proj):
            if linear is not None:
                nn.init.normal_(linear.weight, std=0.02)

    def forward(self, state_BTD: Tensor, embedded_BTD: Tensor) -> Tensor:
        state_BTD, embedded_BTD = state_BTD.to(self.bias), embedded_BTD.to(self.bias)
        z_BTI = self.token_proj(unit_rms(embedded_BTD))
        if self.state_proj is not None:
            z_BTI = torch.cat([self.state_proj(unit_rms(state_BTD)), z_BTI], dim=-1)
        moved_BTD = self.skip(z_BTI)
        if self.mlp is not None:
            moved_BTD = moved_BTD + self.mlp(z_BTI)
        out: Tensor = embedded_BTD + moved_BTD * self.gain + self.bias
        return out


class Readout(nn.Module):
    """From behind an inner layer towards what the final norm reads. Fresh, it passes states on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.mlp = GatedMap(width, width, width, 0.0)
        nn.init.zeros_(self.linear.weight)

    def forward(self, state_BTD: Tensor) -> Tensor:
        state_BTD = state_BTD.to(self.linear.weight)
        flat_BTD = unit_rms(state_BTD)
        out: Tensor = state_BTD + self.linear(flat_BTD) + self.mlp(flat_BTD)
        return out


class JumpNet(nn.Module):
    """Predictor, pairs of the layers that run, readout: those that there are."""

    def __init__(self, spec: ModelSpec, options: JumpOptions, path: JumpPath) -> None:
        super().__init__()
        width, layers = spec.hidden_size, path.last - path.first
        if options.predictor != "none":
            self.predictor = StatePredictor(width, options)
        if options.rank is not None:
            self.layers = pairs_of(spec, options.targets, options.rank, layers)
        if path.last < spec.num_layers:
            self.readout = Readout(width)


@dataclass(frozen=True, slots=True)
class JumpOut:
    """Of fed tokens, [B, T, D]: the state predicted for them, the one that the next jump is made
    of, and what the LM head reads."""

    predicted_BTD: Tensor
    source_BTD: Tensor
    ready_BTD: Tensor


class RolloutKV(SlotKV):
    """The text as the target caches it, then the tokens of each step of a rollout. Nothing is
    written over, so that gradients reach every step."""

    is_as_read = False

    def __init__(self, text: SlotKV, length: int) -> None:
        self.__dict__.update(text.__dict__)
        self.key_ZJLE = [key[:, :, :length] for key in text.key_ZJLE]
        self.value_ZJLE = [value[:, :, :length] for value in text.value_ZJLE]
        self._steps: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    def update(self, layer: int, key_BJTE: Tensor, value_BJTE: Tensor) -> tuple[Tensor, Tensor]:
        key_BJLE, value_BJLE = self.key_ZJLE[layer], self.value_ZJLE[layer]
        keys, values = self._steps.setdefault(layer, ([], []))
        keys.append(key_BJTE.to(key_BJLE))
        values.append(value_BJTE.to(value_BJLE))
        return torch.cat([key_BJLE, *keys], dim=2), torch.cat([value_BJLE, *values], dim=2)


class Jump(PlacesDrafter):
    """Places stand behind the token that they follow: step i reads token 1 + i behind the anchor
    and says token 2 + i."""

    family = "jump"
    shares_kv = True
    teaches_target = False  # the layers that run are the target's, which stay as they are
    reach, replaces_anchor = 2, False
    module: JumpNet
    options: JumpOptions
    _embedding_VD: Tensor | None = None
    _scale = 1.0

    def __init__(
        self, options: JumpOptions, spec: ModelSpec, vocab: VocabMap | None = None
    ) -> None:
        self.path = JumpPath.of(options, spec)
        super().__init__(options, spec, vocab)

    def make_net(self) -> JumpNet:
        return JumpNet(self.spec, self.options, self.path)

    @property
    def first(self) -> int:
        return self.path.first

    @property
    def parts(self) -> SubLayers:
        return SubLayers.span(self.path.first, self.path.last)

    @property
    def attention(self) -> tuple[int, ...]:
        return self.parts.attention

    def needs(self) -> Needs:
        """While drafting in the target's own cache the source alone."""
        source = self.path.source
        taps = tuple(sorted({*self.attention, source}))
        copied = tuple(tap for tap in self.copied if tap != source)
        return Needs(taps, teacher=self.options.loss != "ce", borrow=True, copied=copied)

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._embedding_VD, self._scale = borrowed.embedding_VD, borrowed.embed_scale
        check_places(self.lm, self.factors(), NO_ADDITIONS)

    def trimmed(self, vocab: VocabMap) -> Self:
        small = super().trimmed(vocab)
        small._embedding_VD, small._scale = self._embedding_VD, self._scale
        return small

    def remarks(self, is_packed: bool) -> list[str]:
        return [OF_PACKED] if is_packed and self.factors() else []

    def behind(self, state_BAD: Tensor) -> Tensor:
        raise AssertionError("a step is made of the one before it, not all of the anchor")

    # -- a jump ---------------------------------------------------------------------------------

    def factors(self) -> dict[Place, Factors]:
        """What is added where."""
        options = self.options
        if options.rank is None:
            return {}
        return factors_of(self.module.layers, options.alpha / options.rank, self.path.first)

    def predicted(self, state_BTD: Tensor, ids_BT: Tensor) -> Tensor:
        """[B, T, D]: what stands in front of layer m of these tokens, behind tokens with these
        states."""
        assert self._embedding_VD is not None, "bind() the target's embedding first"
        embedded_BTD = F.embedding(ids_BT, self._embedding_VD) * self._scale
        if self.options.predictor == "none":
            return embedded_BTD
        found: Tensor = self.module.predictor(state_BTD, embedded_BTD)
        return found

    def jump(self, state_BTD: Tensor, feed: Feed, kv: SlotKV, lm: LanguageModel) -> JumpOut:
        """The fed tokens, each behind a token with that state, against the aimed cache."""
        path, end = self.path, self.spec.num_layers
        predicted_BTD = self.predicted(state_BTD, feed.ids_BT)
        factors = self.factors()
        out = lm.run(
            replace(
                feed,
                taps=tuple(sorted({path.source, path.last})),
                logits=False,
                parts=self.parts,
                residual_BTD=predicted_BTD.to(lm.dtype),
                added=(RowAdditions(factors),) if factors else (),
            ),
            kv,
        )
        ready_BTD = out.taps[path.last]
        if path.last < end:
            onward_BTD = self.module.readout(ready_BTD).to(lm.dtype)
            rest = replace(feed, taps=(end,), logits=False, parts=NOTHING, residual_BTD=onward_BTD)
            ready_BTD = lm.run(rest, None).taps[end]
        return JumpOut(predicted_BTD, out.taps[path.source], ready_BTD)

    # -- training -------------------------------------------------------------------------------

    def _anchors(self, batch: TrainBatch) -> Tensor:
        """[B, A]: every `stride`-th position, from a random one on."""
        (B, S), stride = batch.ids_BS.shape, self.options.stride
        begin = torch.randint(stride, (1,), device=batch.ids_BS.device)
        at_A = torch.arange(0, S, stride, device=begin.device) + begin
        return at_A.clamp(max=S - 1).expand(B, -1)

    def _steps(self, batch: TrainBatch, anchor_BA: Tensor, lm: LanguageModel) -> list[JumpOut]:
        """What the tokens behind the anchors [B, A, D] are in each step. They see the text up to
        their anchor, as the target saw it, and the steps behind it."""
        groups = groups_behind(lm, self.attention, batch, anchor_BA, 1, replaces_anchor=False)
        S, last = batch.ids_BS.shape[1], self.spec.max_positions - 1
        kv, found = RolloutKV(groups.kv, S), list[JumpOut]()
        to_BAD = anchor_BA[:, :, None].expand(-1, -1, self.spec.hidden_size)
        state_BAD = batch.taps[self.path.source].gather(1, to_BAD)
        at_BA = batch.position_BS.gather(1, anchor_BA)
        for step in range(1, 1 + self.options.num_heads):
            ids_BA = batch.ids_BS.gather(1, (anchor_BA + step).clamp(max=S - 1))
            position_BA = at_BA + step
            masks = self._masks(groups.masks.full[:, 0, :, :S], batch, position_BA, step, lm)
            feed = Feed(ids_BA, position_BA.clamp(max=last), masks)
            found.append(self.jump(state_BAD, feed, kv, lm))
            state_BAD = found[-1].source_BTD
        return found

    def _masks(
        self, text_BAS: Tensor, batch: TrainBatch, position_BA: Tensor, step: int, lm: LanguageModel
    ) -> Masks:
        """Of a step, whose tokens stand behind the text and the steps before it."""
        A, device = position_BA.shape[1], text_BAS.device
        own_AL = torch.eye(A, dtype=torch.bool, device=device).repeat(1, step)
        full_BAL = torch.cat([text_BAS, own_AL.expand(len(text_BAS), -1, -1)], dim=2)
        far_BAS = position_BA[:, :, None] - batch.position_BS[:, None]
        back_L = (step - 1 - torch.arange(step, device=device)).repeat_interleave(A)
        far_BAL = torch.cat([far_BAS, back_L.expand(len(far_BAS), A, -1)], dim=2)
        windows = {w: (full_BAL & (far_BAL < w))[:, None] for w in lm.windows}
        return Masks(full_BAL[:, None], windows)

    def loss(self, batch: TrainBatch) -> LossOut:
        anchor_BA, weight = self._anchors(batch), self.options.feature_weight
        steps = self._steps(batch, anchor_BA, self.lm)
        ready_BATD = torch.stack([step.ready_BTD for step in steps], dim=2)
        parts = self._compared(batch, anchor_BA, ready_BATD)
        if not weight or self.options.predictor == "none":
            return weighted_sum(parts)
        state_RD, both = batch.taps[self.path.first].flatten(0, 1), []
        for i, (share, out) in enumerate(parts):
            rows, drawn_RD = self._aimed(batch, anchor_BA, i), steps[i].predicted_BTD.flatten(0, 1)
            both.append((share, joined(out, state_loss(drawn_RD, rows, state_RD), weight)))
        return weighted_sum(both)

    def open(self, space: Space) -> JumpState:
        return JumpState(self, space)


def state_loss(state_RD: Tensor, rows: AlignedRows, target_RD: Tensor) -> LossOut:
    """Squared error of predicted states over the mean square of the target's own at the tokens that
    they were predicted for, which stand where the teacher says the next one."""
    wanted_QD = wide(target_RD.detach()[rows.teacher_row_Q])
    off_Q = (wide(state_RD[rows.row_Q]) - wanted_QD).pow(2).mean(-1)
    loss = (off_Q / wanted_QD.pow(2).mean(-1)).sum()
    count = torch.full((), float(rows.row_Q.numel()), device=state_RD.device)
    return LossOut(loss, count, {"state": (loss.detach(), count)})


class JumpState(BorrowedState):
    """Beside the cache the newest exact source state of every slot, and those of this round."""

    def __init__(self, drafter: Jump, space: Space) -> None:
        super().__init__(drafter.lm, drafter.attention, space)
        self.drafter, width = drafter, drafter.spec.hidden_size
        lm, head = drafter.lm, drafter.head_weight()
        self._known_ZD = torch.zeros(space.num_slots, width, dtype=lm.dtype, device=lm.device)
        self._head = served_head(head, drafter.options)
        self._source_BND = torch.empty(0)  # of the last known token, the root, the nodes
        self._parent_BM = torch.empty(0)

    def parts_of(self, slot: int, first: int) -> SubLayers:
        return self.drafter.parts

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        super().start(slot, tokens, taps)
        is_behind = len(tokens) > 1  # nothing is known in front of a first token
        self._known_ZD[slot] = taps[self.drafter.path.source][-1] if is_behind else 0

    @torch.no_grad()
    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        state_BPD, view = outcome.taps[self.drafter.path.source], outcome.view
        at_B = torch.tensor([max(0, len(new) - 1) for new in outcome.emitted]).to(view.slot_B)
        row_B = torch.arange(len(at_B), device=at_B.device)
        self._known_ZD[view.slot_B] = state_BPD[row_B, at_B].to(self._known_ZD)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        self._source_BND = self._known_ZD[view.slot_B][:, None]
        return super().root(view)

    def _nodes(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        self._parent_BM = parent_BM + 1  # the last known token is the root's
        return super()._nodes(token_BM, parent_BM)

    def read(self, feed: Feed, rows: Sequence[int]) -> Tensor:
        to_BMD = self._parent_BM[:, :, None].expand(-1, -1, self._source_BND.shape[2])
        state_BMD = self._source_BND.gather(1, to_BMD)
        landed = self.drafter.jump(state_BMD, feed, self.kv, self.lm)
        source_BMD = landed.source_BTD.to(self._source_BND)
        self._source_BND = torch.cat([self._source_BND, source_BMD], dim=1)
        self._ready_BMD = landed.ready_BTD
        return read_head(self._ready_BMD, self._head)


FAMILY = Family(
    name="jump",
    summary=(
        "Drafted tokens skip the target's lower layers: a small predictor puts the state of the "
        "next token in front of a layer in the middle, and the upper layers read it, with low-rank "
        "additions that only drafted tokens see. Needs a target of many layers: a drafted token "
        "costs as many of them as are left."
    ),
    paper="https://github.com/Thiggel/economize",
    options=JumpOptions,
    build=Jump,
    trainable=True,
    policies=("chain", "dynamic-tree"),
    borrows_layers=True,
)
