"""FeatureState: the memory of a drafter that reads the target's features one token at a time.

Per slot there are true rows (token t + 1 with the target's features at t) and, while a round grows,
drafted rows behind them (a drafted token with the drafter's own output state). The newest true rows
wait as *pending* until the next root feeds them in one ragged call; writing them overwrites what
the last round drafted. rows written + pending = kept length, because the first token has no row.
Letters: B rows, D hidden width, E head width, K draft vocabulary, L positions, M new nodes, N
nodes, T fed tokens, V target vocabulary, W window, X any axes, Z slots.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.forward.masks import chain_mask
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.kv_cache import Aim, SlotKV
from specctl.core.language_model import ChainDraws, Feed, LmOut, Masks, WholeChain
from specctl.drafters.attention.kept_rows import KeptRows
from specctl.drafters.attention.seen import AttentionWindow
from specctl.drafters.nets.axes import axes_of
from specctl.drafters.nets.blocks import LayerShape
from specctl.drafters.nets.heads import BorrowingDrafter
from specctl.drafters.states.recorded import RecordedCall, RecordedCalls
from specctl.drafters.states.recorded_draws import RecordedDraws
from specctl.drafters.states.row_axes import RowAxes
from specctl.drafters.states.tree_layout import Fed, Place, TreeLayout, aim_cache
from specctl.models.native.step import (
    RESIDUAL,
    NativeStep,
    Stack,
    drafts_in_int8,
    native_step,
)

WIDTH = 8  # true rows of a text that a recording reads, though fewer are there,
FREE = 64  # as long as all texts together have no more: a GPU reads them as fast as one


class FeatureState(StepState):
    """Memory of one engine. What is computed is left to `TrunkState`, `StrideState` and
    `Eagle3State`, which append the states that they feed back to `_states`, nodes of one call at a
    time."""

    prefills_in_parts = True

    def __init__(
        self,
        drafter: BorrowingDrafter,
        shape: LayerShape,
        num_layers: int,
        space: Space,
        window: AttentionWindow | None = None,
    ) -> None:
        first = next(drafter.module.parameters())
        self._embed = drafter.embed
        self.shape, self.device, self.dtype = shape, first.device, first.dtype
        width = space.max_nodes + 2
        layers, self._num_positions = [shape.kv] * num_layers, space.max_len + width
        self._kept = None if window is None else KeptRows(window, space.num_slots, width)
        rows = space.max_len if self._kept is None else min(space.max_len, self._kept.most)
        self.kv = SlotKV.of(layers, space.num_slots, rows + width, self.dtype, self.device)
        self.pending_token_ZW = torch.zeros(
            space.num_slots, width, dtype=torch.long, device=self.device
        )
        self.pending_ZWD = torch.zeros(
            space.num_slots, width, shape.hidden_size, dtype=self.dtype, device=self.device
        )
        self.num_pending = [0] * space.num_slots
        self.num_rows = [0] * space.num_slots
        self._num_prefilled = [0] * space.num_slots
        axis = axes_of(drafter.options)
        self._axes = None if axis is None else RowAxes(axis, self.device)
        self._rope_L2E = torch.empty(0, device=self.device)  # until something is read
        self._growth: TreeLayout | None = None
        self._states: list[Tensor] = []
        self._weights_version, self._vocab = drafter.version, drafter.vocab
        size = None if self._vocab is None else self._vocab.size
        self._num_choices = size or drafter.spec.vocab_size
        self._calls = RecordedCalls()
        if not space.records:
            self._calls.patience = None
        self._waits = False  # this round's chain is yet to be recorded, its pieces never
        self._version: object = None  # of the weights, which are prepared when a text begins
        self._native: NativeStep | None = None

    # -- what a drafter computes ------------------------------------------------------------------

    @abstractmethod
    def fuse_weights(self) -> None:
        """Prepare the weights for serving."""

    def stack(self) -> Stack | None:
        """The layers as the compiled step reads them; None where they are of another kind."""
        return None

    def stack_of(
        self,
        layers: Sequence[nn.Module],
        head: Tensor,
        embedding_VD: Tensor | None = None,
        norm: Tensor | None = None,
        **entry: Any,
    ) -> Stack:
        """These layers, of this state's shape and positions; `entry` as `Stack` has it."""
        shape = self.shape
        return Stack(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.intermediate_size,
            shape.norm_eps,
            shape.norm_eps,
            layers,
            embedding_VD,
            norm,
            head,
            self.rotations,
            **entry,
        )

    @abstractmethod
    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        """[..., D]: what stands beside a token in a true row."""

    @abstractmethod
    def fill(self, fed: Fed) -> None:
        """Write true rows into the cache, which is aimed at them."""

    @abstractmethod
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        """[B, 1, K]: the same, and the logits after the last real row."""

    @abstractmethod
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        """[B, M, K]: the logits after drafted tokens, whose place the cache is aimed at."""

    @property
    def is_recordable(self) -> bool:
        """Whether `newest` and `nodes` of a chain read nothing from the GPU, so that they can be
        recorded there."""
        return False

    @torch.inference_mode(mode=False)  # others may compute gradients with the same copies
    @torch.no_grad()
    def _prepare(self) -> None:
        self.fuse_weights()
        self._calls.forget()
        self._version, stack = self._weights_version(), self.stack()
        bits = 8 if stack is not None and drafts_in_int8(stack) else None
        self._native = None if stack is None else native_step(stack, bits)

    def compiled(
        self,
        ids_BT: Tensor,
        state_BTD: Tensor,
        at: Fed | Place,
        taps: tuple[int, ...] = (RESIDUAL,),
        *,
        logits: bool = False,
    ) -> LmOut | None:
        """These tokens through the layers by the compiled step, the cache being aimed at them; of
        true rows with the logits after the last real one. None where PyTorch does it."""
        if self._native is not None and not self._native.is_current:
            self._prepare()  # the weights lie elsewhere
        step, span, kept = self._native, self.kv.aim.span, self._kept
        is_turned = isinstance(at, Fed) and at.has_axes  # by no single position
        if step is None or is_turned or ids_BT.numel() > step.most_rows or torch.is_grad_enabled():
            return None
        T, only = ids_BT.shape[1], None
        if isinstance(at, Fed):
            position_BT = at.first_B[:, None] + torch.arange(T)
            run = at.start_B, T, span
            mask = chain_mask(*run) if kept is None else kept.chain(*run)
            only = tuple(count - 1 for count in at.counts)
        else:
            position_BT = at.position_BM
            mask = torch.ones(1, 1, T, span, dtype=torch.bool) if at.mask is None else at.mask
        masks = Masks(mask)
        feed = Feed(ids_BT, position_BT, masks, taps, logits, only, residual_BTD=state_BTD)
        return step.run(feed, self.kv)

    def rotations(self, _: int) -> Tensor:
        """float32 [L, 2 E]: cos and signed sin of every position of the cache."""
        self._rotate_all()
        return self._rope_L2E.flatten(1).float()

    def _rotate_all(self) -> None:
        """Angles as far as positions reach, which may grow, and none before they are needed."""
        dropped = 0 if self._kept is None else max(self._kept.dropped)
        ahead = 0 if self._axes is None else self._axes.most_ahead
        needed = max(self._num_positions, self.kv.max_len + dropped) + ahead
        if self._rope_L2E.shape[0] < needed:
            at_L = torch.arange(needed, device=self.device)
            self._rope_L2E = self.shape.rope(at_L).to(self.dtype)

    def of_parents(self, stored: list[Tensor], parent_BM: Tensor, place: Place) -> Tensor:
        """[B, M, ...]: entries of the nodes' parents."""
        if place.is_next:
            return stored[-1]
        every_BND = torch.cat(stored, dim=1)
        at_BM1 = (parent_BM + 1)[:, :, None]
        return every_BND.gather(1, at_BM1.expand(-1, -1, every_BND.shape[-1]))

    # -- rows join ------------------------------------------------------------------------------

    def see(self, slot: int, images: PromptImages | None) -> None:
        if self._axes is not None:
            self._axes.see(slot, images)

    def forget(self, slot: int) -> None:
        """A new text begins in that slot."""
        if self._kept is not None:
            self._kept.forget(slot)
        if self._version != self._weights_version():
            self._prepare()

    def prefill(
        self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int, last: int
    ) -> None:
        if first == 0:
            self.forget(slot)
        if last > first:
            self._write_rows(slot, tokens, self.features(taps), first)
        self._num_prefilled[slot] = last

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        first, self._num_prefilled[slot] = self._num_prefilled[slot], 0
        if first == 0:
            self.forget(slot)
        num_rows = self.num_rows[slot] = len(tokens) - 1
        self.num_pending[slot] = min(num_rows, 1)
        self.pending_token_ZW[slot, 0] = tokens[-1]
        self.pending_ZWD[slot] = 0.0
        if num_rows == 0:
            return  # no features at all: the first round drafts from a zero row
        state_TD = self.features({tap: value[first:] for tap, value in taps.items()})
        self.pending_ZWD[slot, 0] = state_TD[-1]
        if len(state_TD) > 1:
            self._write_rows(slot, tokens, state_TD[:-1], first)

    def _write_rows(self, slot: int, tokens: Sequence[int], state_TD: Tensor, first: int) -> None:
        """True rows of a prompt from `first` on, for which these are the features."""
        last = first + len(state_TD)
        kept, whole = self._kept, [(first, last, first)]
        for start, stop, at in whole if kept is None else kept.runs(self.kv, slot, first, last):
            count, own_TD = stop - start, state_TD[start - first : stop - first]
            ids_1T = torch.tensor([list(tokens[start + 1 : stop + 1])], device=self.device)
            places = slot, at, start - at
            slot_1, at_1, shift_1 = (torch.full((1,), n, device=self.device) for n in places)
            self.kv.begin((slot,), slot_1, at_1, count, at + count, at)
            self._rotate_all()
            fed = Fed(ids_1T, own_TD[None], self._rope_L2E, at_1, (count,), shift_B=shift_1)
            self.fill(self._turned((slot,), [start], fed))

    # -- a round --------------------------------------------------------------------------------

    def root(self, view: RoundView) -> Tensor:
        counts, kept = self._lengths(view)
        kept_B = self._kept_B(view)
        self._growth, self._states = TreeLayout(view, self.kv, kept, kept_B), []
        if self._records(view.slots) and not self._waits:
            inputs = self._padded(view, counts, kept, kept_B)
            found = self._calls.run("newest", self.kv, self._root_call, *inputs)
            if found is not None:
                return self._remembered(*found)[:, 0]
        return self.newest(self._aim_pending(view, counts, kept, kept_B), kept_B)[:, 0]

    # -- recorded -------------------------------------------------------------------------------

    def _records(self, slots: tuple[int, ...]) -> bool:
        is_on = self._calls.patience is not None
        if self._axes is not None and self._axes.has_any(slots):
            return False  # a recording counts positions by where rows lie
        return is_on and self.device.type == "cuda" and self.is_recordable

    @torch.no_grad()
    def whole_chain(
        self, view: RoundView, length: int, draws: ChainDraws | None = None
    ) -> WholeChain | None:
        if not self._records(view.slots):
            return None
        how = None if draws is None else RecordedDraws.of(draws, self._num_choices)
        if draws is not None and how is None:
            return None
        counts, kept = self._lengths(view)
        kept_B = self._kept_B(view)
        inputs, name = self._padded(view, counts, kept, kept_B, length - 1), f"chain of {length}"
        if draws is not None and how is not None:
            inputs, name = (*inputs, *how.inputs(draws, self.device)), f"{name}, {how.name}"
        self._growth, self._states = TreeLayout(view, self.kv, kept, kept_B), []
        more = length, how
        found = self._calls.run(name, self.kv, self._chain_call, *inputs, more=more)
        self._waits = found is None
        if found is None:
            return None
        token_BN, logits_BN, state_B1D, *drawn_of = (x.clone() for x in found)
        self._growth.drafted(length - 1)
        self._states.append(state_B1D)
        return WholeChain(token_BN, logits_BN, distribution_BNK=next(iter(drawn_of), None))

    def _padded(
        self,
        view: RoundView,
        counts: list[int],
        kept: list[int],
        kept_B: Tensor,
        num_nodes: int = 0,
    ) -> tuple[Tensor, ...]:
        """Ids, states and number of the pending rows, padded to few widths; the cache is aimed at
        them, and has room for so many nodes behind."""
        width = 1 << (max(counts) - 1).bit_length()
        if len(counts) * WIDTH <= FREE:
            width = max(width, WIDTH)
        width = min(width, self.pending_token_ZW.shape[1])
        fed = self._aim_pending(view, counts, kept, kept_B, width, num_nodes)
        return fed.ids_BT, fed.state_BTD, kept_B - fed.start_B

    def _remembered(self, logits_BMK: Tensor, state_BMD: Tensor) -> Tensor:
        """What a recording returned, before the next overwrites it."""
        self._states.append(state_BMD.clone())
        return logits_BMK.clone()

    def _root_call(self, kv: SlotKV, own: RecordedCall) -> tuple[Tensor, Tensor]:
        """`newest`, on the buffers of a recording."""
        ids_BT, state_BTD, count_B, *_ = own.inputs
        start_B, rope = own.aim.start_B1[:, 0], self._rope_L2E[own.at_BT]
        fed = Fed(ids_BT, state_BTD, rope, start_B, (), count_B)
        return self._on_buffers(kv, [], lambda: self.newest(fed, start_B + count_B))

    def _node_call(self, kv: SlotKV, own: RecordedCall) -> tuple[Tensor, Tensor]:
        """`nodes` of a chain that goes on, on the buffers of a recording."""
        ids_B1, state_B1D = own.inputs
        at_L = torch.arange(own.aim.span, device=self.device)
        mask = (at_L <= own.aim.start_B1)[:, None, None]
        place = Place(mask, own.at_BT, own.aim.span, is_next=True)
        return self._on_buffers(kv, [state_B1D], lambda: self.nodes(ids_B1, own.at_BT, place))

    def _chain_call(
        self, length: int, how: RecordedDraws | None, kv: SlotKV, own: RecordedCall
    ) -> tuple[Tensor, ...]:
        """Tokens, their logits and last state of a whole chain, on the buffers of a recording, the
        likeliest; or drawn, and the distributions of which."""
        logits_B1K, state_B1D = self._root_call(kv, own)
        aim, start_B1 = own.aim, own.aim.start_B1 + own.inputs[2][:, None]
        tokens, kept, distributions = list[Tensor](), list[Tensor](), list[Tensor]()
        for index in range(length):
            scores_B1K = logits_B1K.float()
            if how is None:
                row_B1 = scores_B1K.argmax(-1)
            else:
                row_B1, distribution_B1K = how.drawn(scores_B1K, index, iter(own.inputs[3:]))
                distributions.append(distribution_B1K)
            kept.append(scores_B1K.gather(2, row_B1[:, :, None])[:, :, 0])
            tokens.append(row_B1 if self._vocab is None else self._vocab.ids_K[row_B1])
            if index + 1 < length:
                at_B1 = start_B1 + index
                node_aim = Aim(aim.slot_B1, at_B1, aim.span, aim.is_whole)
                node = RecordedCall((tokens[-1], state_B1D), node_aim, at_B1)
                logits_B1K, state_B1D = self._node_call(kv.aimed(node_aim, at_B1), node)
        out = torch.cat(tokens, 1), torch.cat(kept, 1), state_B1D
        return out if how is None else (*out, torch.cat(distributions, 1))

    def _on_buffers(
        self, kv: SlotKV, states: list[Tensor], call: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Logits and newest states of a call on that cache; this state is as before."""
        mine = self.kv, self._states, self._growth
        try:
            self.kv, self._states, self._growth = kv, states, copy.copy(self._growth)
            if self._growth is not None:
                self._growth.uniform = None  # masks, not slices
            logits_BMK = call()
            return logits_BMK, self._states[-1]
        finally:
            self.kv, self._states, self._growth = mine

    def _lengths(self, view: RoundView) -> tuple[list[int], list[int]]:
        """Pending rows, and kept true rows with them; a text without any counts its zero row."""
        counts = [max(self.num_pending[slot], 1) for slot in view.slots]
        kept = [max(self.num_rows[slot], 1) for slot in view.slots]
        if self._kept is None:
            return counts, kept
        for slot in view.slots:
            have = self.num_rows[slot] - self.num_pending[slot]
            self._kept.make_room(self.kv, slot, have, self.num_rows[slot])
        dropped = [self._kept.dropped[slot] for slot in view.slots]
        return counts, [rows - gone for rows, gone in zip(kept, dropped, strict=True)]

    def _kept_B(self, view: RoundView) -> Tensor:
        """[B]: `_lengths`' true rows, on the device; to be read behind it."""
        kept_B, shift_B = view.kept_len_B.clamp(min=1), self._shift_B(view)
        return kept_B if shift_B is None else kept_B - shift_B

    def _shift_B(self, view: RoundView) -> Tensor | None:
        return None if self._kept is None else self._kept.shift_B(view.slots, self.device)

    def _aim_pending(
        self,
        view: RoundView,
        counts: list[int],
        kept: list[int],
        kept_B: Tensor,
        width: int | None = None,
        num_nodes: int = 0,
    ) -> Fed:
        """Aim the cache at the pending rows, padded to `width`, and gather them; `num_nodes` are to
        have room behind them."""
        B, W = len(counts), width or max(counts)
        before = [k - c for k, c in zip(kept, counts, strict=True)]
        uniform = before[0] if min(before) == max(before) else None
        most = max(counts)
        is_even = min(counts) == most
        start_B = kept_B - (most if is_even else torch.tensor(counts, device=self.device))
        self._aim(view, start_B, W, max(max(before) + W, max(kept) + num_nodes), uniform)
        if view.slots == tuple(range(B)):
            ids_BW, state_BWD = self.pending_token_ZW[:B, :W], self.pending_ZWD[:B, :W]
        else:
            ids_BW = self.pending_token_ZW[view.slot_B, :W]
            state_BWD = self.pending_ZWD[view.slot_B, :W]
        have = [max(self.num_rows[slot], 1) for slot in view.slots]
        firsts = [rows - count for rows, count in zip(have, counts, strict=True)]
        shift_B, counted = self._shift_B(view), tuple(counts)
        fed = Fed(ids_BW, state_BWD, self._rope_L2E, start_B, counted, shift_B=shift_B)
        return self._turned(view.slots, firsts, fed)

    def _turned(self, slots: tuple[int, ...], firsts: list[int], fed: Fed) -> Fed:
        """These rows, from index `firsts` on, with their rotations; `fed.shift_B`: of an index."""
        T, axes, rope, shift_B = fed.ids_BT.shape[1], self._axes, None, fed.shift_B
        offset_B = None if axes is None else axes.offset_B(slots)
        if axes is not None and offset_B is not None:
            rope = axes.rope(self._rope_L2E, slots, firsts, T)
            shift_B = offset_B if shift_B is None else shift_B + offset_B
        elif min(firsts) == max(firsts):
            return replace(fed, rope_BT2E=self._rope_L2E[None, firsts[0] : firsts[0] + T])
        if rope is not None:
            return replace(fed, rope_BT2E=rope, shift_B=shift_B, has_axes=True)
        moved = replace(fed, shift_B=shift_B)
        at_BT = moved.first_B[:, None] + torch.arange(T, device=self.device)
        return replace(moved, rope_BT2E=self._rope_L2E[at_BT])

    def _aim(
        self, view: RoundView, start_B: Tensor, num_fed: int, span: int, uniform: int | None
    ) -> None:
        aim_cache(self.kv, view, start_B, num_fed, span, uniform)
        self._rotate_all()

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        assert self._growth is not None, "root() begins a round"
        place = self._growth.place(parent_BM)
        if self._kept is not None:
            place = self._growth.within(place, self._kept)
        slots = self._growth.view.slots
        if self._axes is not None:
            place = self._axes.moved(place, slots)
        self._rotate_all()
        if place.is_next and self._records(slots) and not self._waits:
            inputs = token_BM, self._states[-1]
            found = self._calls.run("node", self.kv, self._node_call, *inputs)
            if found is not None:
                return self._remembered(*found)
        return self.nodes(token_BM, parent_BM, place)

    def known(self, view: RoundView) -> Tensor:
        last_B = torch.tensor(
            [max(self.num_pending[slot], 1) - 1 for slot in view.slots], device=self.device
        )
        state_BD = self.pending_ZWD[view.slot_B, last_B]
        return torch.stack([self._embed(view.root_B), state_BD], dim=1)

    def hidden(self) -> Tensor:
        return self._states[-1][:, -1]

    def observe(self, outcome: Outcome) -> None:
        view = outcome.view
        if self._growth is None:  # a round without drafting: nothing may pile up
            counts, kept = self._lengths(view)
            self.fill(self._aim_pending(view, counts, kept, self._kept_B(view)))
        self._growth, self._states, self._waits = None, [], False
        W = max(len(new) for new in outcome.emitted)
        tokens = [[*new, *(0,) * (W - len(new))] for new in outcome.emitted]
        taps = {tap: value[:, :W] for tap, value in outcome.taps.items()}
        at: slice | Tensor = view.slot_B
        if view.slots == tuple(range(len(view.slots))):
            at = slice(len(view.slots))
        self.pending_token_ZW[at, :W] = torch.tensor(tokens, device=self.device)
        self.pending_ZWD[at, :W] = self.features(taps)
        for slot, new in zip(view.slots, outcome.emitted, strict=True):
            self.num_pending[slot] = len(new)
            self.num_rows[slot] += len(new)
