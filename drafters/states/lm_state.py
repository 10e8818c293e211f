"""LmState: the memory of an independent language model that drafts, and its steps.

Letters: B rows, D hidden width, K draft vocabulary, M new nodes, P path, T fed tokens, V target
vocabulary, W window, X any axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.language_model import ChainDraws, ChainRoot, LanguageModel, Masks, WholeChain
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.routed import RoutedHead, Router, served_head
from specctl.drafters.nets.shortlist import ShortlistHead
from specctl.drafters.states.tree_layout import Place, TreeLayout, aim_cache, expansions
from specctl.models.compiled import CompiledLM
from specctl.models.llama.fast_llama import FastLlama, LlamaModel
from specctl.models.native.chain import NextToken

PREFILL_CHUNK = 512
MOST_AT_ROOT = 32  # tokens behind that a root reads with itself


class SpokenModel(Protocol):
    """What the state needs of its drafter: a model, and the words of both vocabularies."""

    options: Any

    @property
    def lm(self) -> LanguageModel: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def router(self) -> Router | None: ...

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def vocab(self) -> VocabMap | None: ...

    def readable(self, ids: Tensor) -> Tensor: ...

    def draft_logits(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Missing:
    """Tokens that a cache lacks, row b's behind its first `starts[b]` positions: `counts[b]` of
    them, and what stands behind these."""

    ids_BW: Tensor
    start_B: Tensor
    starts: list[int]
    counts: list[int]


class LmState(StepState):
    """Per slot: the draft's own keys and values, of which the first `num_cached` are true.

    A round's root feeds every token the cache lacks (one, or two after full acceptance); nodes are
    written behind. Of a chain the accepted nodes stay where they are, of a tree the accepted path
    is moved up, all but its last node, which may never have been expanded.
    """

    prefills_in_parts = True
    is_recordable = True  # asks its model for whole forwards alone
    chunk = PREFILL_CHUNK

    def __init__(self, drafter: SpokenModel, space: Space) -> None:
        self.drafter, self.lm = drafter, drafter.lm.for_drafting()
        if isinstance(self.lm, CompiledLM) and not self.is_recordable:
            self.lm = self.lm.lm
        self.kv = self.lm.new_kv(space.num_slots, space.max_len + space.max_nodes + 2)
        self.num_cached = [0] * space.num_slots
        self._num_prefilled = [0] * space.num_slots
        self._growth: TreeLayout | None = None
        self._next_token: NextToken | None = None
        self._kept: list[int] = []
        self._chosen: RoutedHead | ShortlistHead | None = None  # of a head that is read in part
        self._newest_BTD = torch.empty(0)
        self._version = -1

    def prefill(
        self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor], first: int, last: int
    ) -> None:
        self._refresh()
        self._fill(slot, tokens, first, last)
        self._num_prefilled[slot] = last

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        self._refresh()
        self._fill(slot, tokens, self._num_prefilled[slot], len(tokens) - 1)
        self._num_prefilled[slot], self.num_cached[slot] = 0, len(tokens) - 1

    def _fill(self, slot: int, tokens: Sequence[int], begin: int, end: int) -> None:
        """Read positions begin .. end - 1 into the cache."""
        device = self.lm.device
        slot_1 = torch.full((1,), slot, device=device)
        for first in range(begin, end, self.chunk):
            part = list(tokens[first : min(first + self.chunk, end)])
            start_1 = torch.full((1,), first, device=device)
            span = first + len(part)
            self.kv.begin((slot,), slot_1, start_1, len(part), span, first)
            self._feed(torch.tensor([part], device=device), start_1, span, logits=False)
            self._read_run(slot_1, [len(part)])

    def _read_run(self, slot_B: Tensor, counts: Sequence[int]) -> None:
        """So many known tokens of each row were just fed, from its first position on."""

    def _refresh(self) -> None:
        """Prepare a head that is read in part again when its weights have changed."""
        drafter, module = self.drafter, self.drafter.module
        router, options = drafter.router, drafter.options
        if not isinstance(module, LlamaModel) or (router is None and options.head_rank is None):
            return
        weight, size = module.head_weight, self.num_ids
        version = weight._version + (0 if router is None else router.weight._version)
        if version != self._version:
            weight = weight if len(weight) == size else weight[:size]
            head, self._version = served_head(weight, options, router), version
            assert isinstance(head, RoutedHead | ShortlistHead)
            self._chosen = head

    @property
    def num_ids(self) -> int:
        """Ids that may be drafted; a padded draft model has more rows."""
        vocab = self.drafter.vocab
        return self.drafter.spec.vocab_size if vocab is None else vocab.size

    def _read(self, ids: Tensor, position: Tensor, masks: Masks, logits: bool = True) -> Any:
        """Logits of one forward; the states in front of a head read in part, which
        `_head_logits` applies."""
        ids, position = self.drafter.readable(ids), self._within(position)
        last, logits = self.lm.spec.num_layers, logits and self._chosen is None
        out = self.lm.forward(ids, position, masks, self.kv, (last,), logits=logits)
        self._newest_BTD = out.taps[last]
        return out.logits_BTV if self._chosen is None else self._newest_BTD

    def _head_logits(self, read: Tensor) -> Tensor:
        return self.drafter.draft_logits(read) if self._chosen is None else self._chosen(read)

    def _feed(self, ids_BW: Tensor, start_B: Tensor, span: int, logits: bool = True) -> Any:
        """A causal run of tokens per row, each row from its own position on."""
        W = ids_BW.shape[1]
        position_BW = start_B[:, None] + torch.arange(W, device=ids_BW.device)
        masks = self.lm.chain_masks(start_B, W, span)
        return self._read(ids_BW, position_BW, masks, logits)

    def _within(self, position: Tensor) -> Tensor:
        last = self.lm.spec.max_positions - 1
        return position if self.kv.max_len <= last else position.clamp(max=last)

    def root(self, view: RoundView) -> Tensor:
        return self._head_logits(self._catch_up(view, [[] for _ in view.slots])[:, 0])

    def whole_chain(
        self, view: RoundView, length: int, draws: ChainDraws | None = None
    ) -> WholeChain | None:
        if type(self) is not LmState or self._chosen is not None or self.lm.device.type != "cpu":
            return None  # logits are read in another way
        drafter, vocab = self.drafter, self.drafter.vocab
        longest = max(map(len, view.tokens)) + length
        if longest > self.kv.max_len:
            self.kv.reserve(longest + 64)
        missing = self._missing(view, [[] for _ in view.slots])
        at_W = torch.arange(missing.ids_BW.shape[1])
        root = ChainRoot(
            drafter.readable(missing.ids_BW),
            self._within(missing.start_B[:, None] + at_W),
            tuple(count - 1 for count in missing.counts),
            self.num_ids,
            None if vocab is None else vocab.ids_K,
            self.lm.spec.max_positions - 1,
            draws=draws,
        )
        self._aim(view, missing)
        found = self.lm.whole_chain(root, length, self.kv)
        if found is not None:
            self._begin(view, missing).drafted(length - 1)
        return found

    def _missing(self, view: RoundView, guesses: Sequence[list[int]]) -> _Missing:
        """What the cache lacks, and the guesses behind each root."""
        starts = [self.num_cached[slot] for slot in view.slots]
        texts = [list(tokens[n:]) for n, tokens in zip(starts, view.tokens, strict=True)]
        counts, device = [len(text) for text in texts], view.slot_B.device
        W = max(counts) + max(map(len, guesses))
        if W == 1:
            return _Missing(view.root_B[:, None], view.kept_len_B, starts, counts)
        fed = [text + guess for text, guess in zip(texts, guesses, strict=True)]
        ids_BW = torch.tensor([row + [0] * (W - len(row)) for row in fed], device=device)
        return _Missing(ids_BW, torch.tensor(starts, device=device), starts, counts)

    def _aim(self, view: RoundView, missing: _Missing) -> int:
        """Aim the cache at what it lacks; the positions that are read."""
        starts, W = missing.starts, missing.ids_BW.shape[1]
        uniform = starts[0] if min(starts) == max(starts) else None
        span = max(starts) + W
        aim_cache(self.kv, view, missing.start_B, W, span, uniform)
        return span

    def _begin(self, view: RoundView, missing: _Missing) -> TreeLayout:
        """The root has been read: what grows behind it."""
        self._kept = [n + count for n, count in zip(missing.starts, missing.counts, strict=True)]
        self._growth = TreeLayout(view, self.kv, self._kept, view.kept_len_B + 1)
        if self._next_token is not None and not self._next_token.is_current(view.slots):
            self._next_token = None
        return self._growth

    def _catch_up(self, view: RoundView, guesses: Sequence[list[int]]) -> Tensor:
        """[B, 1 + guesses, X]: what was read at each row's root and at the guesses behind it, in
        one forward over these and the tokens that the cache lacks."""
        missing = self._missing(view, guesses)
        ids_BW, counts = missing.ids_BW, missing.counts
        W, num_guesses, device = ids_BW.shape[1], max(map(len, guesses)), view.slot_B.device
        span = self._aim(view, missing)
        read_BWX: Tensor = self._feed(ids_BW, missing.start_B, span)
        self._read_run(view.slot_B, counts)
        self._begin(view, missing)
        if min(counts) == max(counts):
            last = slice(W - num_guesses - 1, W)
            self._newest_BTD = self._newest_BTD[:, last]
            return read_BWX[:, last]
        row_B1 = torch.arange(len(counts), device=device)[:, None]
        at_BX = torch.tensor(counts, device=device)[:, None] + torch.arange(
            -1, num_guesses, device=device
        )
        self._newest_BTD = self._newest_BTD[row_B1, at_BX]
        return read_BWX[row_B1, at_BX]

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        return self._read_nodes(token_BM, parent_BM)

    def _read_nodes(self, token_BM: Tensor, parent_BM: Tensor, is_nested: bool = False) -> Tensor:
        """[B, M, K]: logits behind new nodes. `is_nested`: parents may be among them."""
        assert self._growth is not None, "root() begins a round"
        place = self._growth.place(parent_BM, is_nested)
        if place.is_next and (logits_BMV := self._read_next(token_BM, place)) is not None:
            return self.drafter.draft_logits(logits_BMV)
        masks = self._growth.masks(place, self.lm.windows)
        return self._head_logits(self._read(token_BM, place.position_BM, masks))

    def _read_next(self, token_B1: Tensor, place: Place) -> Tensor | None:
        """[B, 1, V]: the logits behind the next token of a chain, by the short call for that."""
        assert self._growth is not None, "root() begins a round"
        if self._chosen is not None or not isinstance(self.lm, FastLlama):
            return None
        if self._next_token is None or not self._next_token.is_of(self.kv):
            self._next_token = self.lm.next_token(self._growth.view.slots, self.kv)
            if self._next_token is None:
                return None
        ids_B1, position_B1 = self.drafter.readable(token_B1), self._within(place.position_BM)
        out = self._next_token.read(ids_B1, position_B1, self.kv)
        self._newest_BTD = out.taps[self.lm.spec.num_layers]
        return out.logits_BTV

    def hidden(self) -> Tensor:
        return self._newest_BTD[:, -1]

    def observe(self, outcome: Outcome) -> None:
        growth, view = self._growth, outcome.view
        if growth is None:
            self._read_on(view)
            return
        self._growth = None
        is_chain = outcome.tree.is_chain and growth.is_chain
        if not is_chain and outcome.path_BP.shape[1] > 2:
            self.kv.keep(view.slot_B, growth.kept_B, expansions(outcome, growth.num_nodes))
        for slot, kept, accepted in zip(view.slots, self._kept, outcome.num_accepted, strict=True):
            stays = min(accepted, growth.num_nodes) if is_chain else max(accepted - 1, 0)
            self.num_cached[slot] = kept + stays

    def _read_on(self, view: RoundView) -> None:
        """Nothing was fed. The next root catches up from the tokens, unless these are many."""
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            first, last = self.num_cached[slot], len(tokens) - 1
            if last - first > MOST_AT_ROOT:
                self._fill(slot, tokens, first, last)
                self.num_cached[slot] = last
