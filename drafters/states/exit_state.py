"""ExitState: the memory of a draft model with several exits, of which each token uses one.

The depth is cut into parts, one per exit. Every entry of the cache (a known token, or a node of
this round) has a residual below each part it has reached. Part 0 reads everything at once; a deeper
part is first asked when a token is not sure enough, and then reads all entries that it has missed,
from the residuals kept below it. So keys and values of skipped layers are never guessed: what is
filled later is what a full forward would have written.
Letters: B rows of the round, R rows that go deeper, S slots, L cache entries, W entries fed,
M nodes, P path, D width, K draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.drafters.states.tree_layout import TreeLayout, aim_cache, expansions
from specctl.models.fast_llama import FastLlama

CHUNK = 512  # entries fed at once while a single row catches up
LONG = 32  # a row that has missed more entries than this catches up alone


class ExitModel(Protocol):
    """What the state needs of its drafter: parts of the depth, and when to leave."""

    @property
    def lm(self) -> FastLlama: ...

    @property
    def parts(self) -> tuple[range, ...]: ...

    @property
    def threshold(self) -> float: ...

    @property
    def only(self) -> int | None: ...


class ExitState(StepState):
    """Per part and slot, the first `filled` entries are true. One writer: the engine's round."""

    def __init__(self, drafter: ExitModel, space: Space) -> None:
        self.lm, self.parts = drafter.lm, drafter.parts
        self.threshold, self.only = drafter.threshold, drafter.only
        max_len = space.max_len + space.max_nodes + 2
        self.kv = self.lm.new_kv(space.num_slots, max_len)
        shape = (space.num_slots, max_len, self.lm.spec.hidden_size)
        device, dtype = self.lm.device, self.lm.dtype
        # Below part 0 lie the embeddings, above the last part what its exit speaks.
        self.residual_SLD = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(len(self.parts) + 1)
        ]
        self.filled = [[0] * space.num_slots for _ in self.parts]
        self.num_known = [0] * space.num_slots
        self._growth: TreeLayout | None = None
        self._known: list[int] = []

    @torch.no_grad()
    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del taps
        count = self.num_known[slot] = len(tokens) - 1
        for filled in self.filled:
            filled[slot] = 0
        slot_1 = torch.full((1,), slot, device=self.lm.device)
        ids_1W = torch.tensor([list(tokens[:-1])], device=self.lm.device, dtype=torch.long)
        self._read(slot_1, ids_1W, torch.arange(count, device=self.lm.device)[None])
        self._catch_up(0, slot, count)

    @torch.no_grad()
    def root(self, view: RoundView) -> Tensor:
        known = self._known = [len(tokens) for tokens in view.tokens]
        starts = [self.num_known[slot] for slot in view.slots]
        missing = [list(t[at:]) for t, at in zip(view.tokens, starts, strict=True)]
        W = max(map(len, missing))
        device = view.slot_B.device
        ids_BW = torch.tensor([ids + [0] * (W - len(ids)) for ids in missing], device=device)
        entry_BW = torch.tensor(starts, device=device)[:, None] + torch.arange(W, device=device)
        self._reserve(max(starts) + W)
        self._read(view.slot_B, ids_BW, entry_BW)
        for slot, count in zip(view.slots, known, strict=True):
            self.num_known[slot] = count
        self._growth = TreeLayout(view, self.kv, known, view.kept_len_B + 1)
        return self._speak(view.kept_len_B[:, None])[:, 0]

    @torch.no_grad()
    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        growth = self._grown()
        first = growth.num_nodes
        growth.place(parent_BM)
        self._reserve(self.kv.max_len)
        at_M = torch.arange(first, growth.num_nodes, device=token_BM.device)
        entry_BM = growth.kept_B[:, None] + at_M
        self._read(growth.view.slot_B, token_BM, entry_BM)
        return self._speak(entry_BM)

    def observe(self, outcome: Outcome) -> None:
        growth, view = self._growth, outcome.view
        if growth is None:
            return  # nothing was fed; the next root catches up from the tokens
        self._growth = None
        is_chain = outcome.tree.is_chain and growth.is_chain
        if not is_chain and outcome.path_BP.shape[1] > 2:
            self._keep(view.slot_B, growth.kept_B, expansions(outcome, growth.num_nodes))
        rows = zip(view.slots, self._known, outcome.num_accepted, strict=True)
        for slot, known, accepted in rows:
            stays = min(accepted, growth.num_nodes) if is_chain else max(accepted - 1, 0)
            self.num_known[slot] = known + stays
            for filled in self.filled:
                # A tree's nodes have moved: a part that had read only some of them reads anew.
                is_whole = is_chain or filled[slot] >= known + growth.num_nodes
                filled[slot] = min(filled[slot], known + stays if is_whole else known)

    # -- entries --------------------------------------------------------------------------------

    def _grown(self) -> TreeLayout:
        assert self._growth is not None, "root() begins a round"
        return self._growth

    def _reserve(self, num_entries: int) -> None:
        extra = num_entries - self.residual_SLD[0].shape[1]
        if extra > 0:
            self.residual_SLD = [F.pad(store, (0, 0, 0, extra)) for store in self.residual_SLD]

    def _read(self, slot_B: Tensor, ids_BW: Tensor, entry_BW: Tensor) -> None:
        """Put embeddings of tokens below part 0."""
        embedding = self.lm.module.model.embed_tokens.weight
        self.residual_SLD[0][slot_B[:, None], entry_BW] = F.embedding(ids_BW, embedding)

    def _keep(self, slot_B: Tensor, kept_B: Tensor, path_BP: Tensor) -> None:
        """Move the accepted path's entries to the front of the round's."""
        self.kv.keep(slot_B, kept_B, path_BP)
        last, slot_B1 = self.residual_SLD[0].shape[1] - 1, slot_B[:, None]
        to_BP = kept_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        from_BP = torch.where(path_BP >= 0, kept_B[:, None] + path_BP, to_BP).clamp(max=last)
        for store in self.residual_SLD:
            store[slot_B1, to_BP.clamp(max=last)] = store[slot_B1, from_BP]

    # -- parts ----------------------------------------------------------------------------------

    def _speak(self, entry_BM: Tensor) -> Tensor:
        """[B, M, K]: logits at those entries, each of the first exit that is sure enough. Whether
        it is follows from its distribution alone, never from a drawn token, so the distribution
        used is the distribution reported."""
        everyone = list(range(len(entry_BM)))
        first = 0 if self.only is None else self.only
        for part in range(first + 1):
            self._fill(part, everyone)
        logits_BMK = self._logits(first, everyone, entry_BM)
        if self.only is not None:
            return logits_BMK
        is_weak_BM = torch.ones_like(entry_BM, dtype=torch.bool)
        for part in range(1, len(self.parts)):
            sure_BM = logits_BMK.float().softmax(-1).amax(-1)
            is_weak_BM = is_weak_BM & (sure_BM < self.threshold)
            rows = [row for row, is_weak in enumerate(is_weak_BM.any(-1).tolist()) if is_weak]
            if not rows:
                break
            self._fill(part, rows)
            deeper_RMK = self._logits(part, rows, entry_BM)
            is_weak_RM1 = is_weak_BM[rows][:, :, None]
            logits_BMK[rows] = torch.where(is_weak_RM1, deeper_RMK, logits_BMK[rows])
        return logits_BMK

    def _logits(self, part: int, rows: list[int], entry_BM: Tensor) -> Tensor:
        slot_R1 = self._grown().view.slot_B[rows][:, None]
        return self.lm.lm_head(self.residual_SLD[part + 1][slot_R1, entry_BM[rows]])

    def _fill(self, part: int, rows: list[int]) -> None:
        """Let a part read what it has missed of those rows."""
        growth, filled = self._grown(), self.filled[part]
        view = growth.view
        ends = [known + growth.num_nodes for known in self._known]
        for row in rows:
            if ends[row] - filled[view.slots[row]] > LONG:
                self._catch_up(part, view.slots[row], self._known[row])
        W = max(ends[row] - filled[view.slots[row]] for row in rows)
        if W == 0:
            return
        # A row that lacks less than W entries reads some of them twice; none beyond the longest.
        starts = [max(0, end - W) for end in ends]
        device = view.slot_B.device
        start_B = torch.tensor(starts, device=device)
        entry_BW = start_B[:, None] + torch.arange(W, device=device)
        span = max(starts[row] for row in rows) + W
        mask, position_BW = growth.sees(entry_BW, span)[rows], growth.position(entry_BW)
        slots = tuple(view.slots[row] for row in rows)
        part_view = replace(view, slots=slots, slot_B=view.slot_B[rows])
        uniform = starts[rows[0]] if len({starts[row] for row in rows}) == 1 else None
        aim_cache(self.kv, part_view, start_B[rows], W, span, uniform)
        self._pass(part, part_view.slot_B, entry_BW[rows], position_BW[rows], mask)
        for row in rows:
            filled[view.slots[row]] = ends[row]

    def _catch_up(self, part: int, slot: int, until: int) -> None:
        """Let a part read the known tokens of one row before `until`, in chunks."""
        device, filled = self.lm.device, self.filled[part]
        slot_1 = torch.full((1,), slot, device=device)
        while filled[slot] < until:
            first, last = filled[slot], min(filled[slot] + CHUNK, until)
            start_1 = torch.full((1,), first, device=device)
            self.kv.begin((slot,), slot_1, start_1, last - first, last, first)
            entry_1W = torch.arange(first, last, device=device)[None]
            mask = self.lm.chain_masks(start_1, last - first, last).full
            self._pass(part, slot_1, entry_1W, entry_1W, mask)
            filled[slot] = last

    def _pass(
        self, part: int, slot_R: Tensor, entry_RW: Tensor, position_RW: Tensor, mask: Tensor
    ) -> None:
        """From the residual below a part to the one above it, against the aimed cache."""
        last = self.lm.spec.max_positions - 1
        at = (slot_R[:, None], entry_RW)
        self.residual_SLD[part + 1][at] = self.lm.through(
            self.residual_SLD[part][at],
            position_RW.clamp(max=last),
            mask,
            self.kv,
            self.parts[part],
        )
