"""Drafting by a language model of another tokenizer, without losing the target's distribution.

Timor et al., "Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies" (arXiv 2502.05202). Token-level intersection (TLI, Algorithm 4): the
draft speaks only tokens that both vocabularies have; its distribution is renormalised on them
*before* it is sampled, and that distribution is what the verifier is told, as in any trimmed
vocabulary. So every policy and every rule applies unchanged. String-level matching (SLEM) is in
`string_match`, string-level rejection sampling (SLRS) in `string_rejection`.

All keep the draft's own reading of the text: the prompt as its tokenizer would write it, then
every committed token translated. Letters: B rows, M nodes, K shared tokens, V target vocabulary,
U draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from specctl.core.drafter import (
    Drafter,
    Needs,
    Outcome,
    RoundView,
    Space,
    StepState,
)
from specctl.core.errors import IncompatibleError, RecipeError, nearest
from specctl.core.language_model import LanguageModel
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.small_lm import SmallLm
from specctl.drafters.states.lm_state import LmState
from specctl.runtime.cross_vocab.token_bytes import Reader, Shared, TokenBytes
from specctl.runtime.policies import policies_of
from specctl.runtime.target.target import Target

METHODS = ("auto", "tli", "slem", "slrs")
LEAST_SHARED = 0.2  # of the smaller vocabulary: below, whole strings carry more than tokens
CATCH_UP = 8  # tokens read in one step with a round's root; more are a new prefill


@dataclass(frozen=True, slots=True)
class Translation:
    """How the draft's tokens become the target's, for the report."""

    method: str
    shared: int
    draft_size: int
    target_size: int

    @property
    def line(self) -> str:
        names = {
            "tli": "token-level intersection",
            "slem": "string-level exact match",
            "slrs": "string-level rejection sampling",
        }
        return (
            f"the draft has another tokenizer: {names[self.method]} ({self.method}), "
            f"{self.shared:,} tokens shared of {self.draft_size:,} and {self.target_size:,}"
        )


def check_method(method: str) -> None:
    """Refuse what is no way to translate."""
    if method not in METHODS:
        raise RecipeError(
            f"unknown translation {method!r}",
            where="--translate",
            found=method,
            expected="one of " + ", ".join(METHODS),
            do=f"--translate {nearest(method, METHODS, 1)}",
        )


def translated(
    lm: LanguageModel, tokenizer: Any, eos_id: int | None, target: Target, method: str = "auto"
) -> Drafter:
    """A drafter for `target` around a model of another tokenizer. `auto` takes TLI where the
    vocabularies share enough tokens."""
    check_method(method)
    target_eos = target.eos_ids[0] if target.eos_ids else None
    draft = TokenBytes.of(tokenizer, lm.spec.vocab_size, eos_id)
    ours = TokenBytes.of(target.tokenizer, target.spec.vocab_size, target_eos)
    shared = Shared.of(draft, ours)
    smaller = min(len(draft.text_of), len(ours.text_of))
    if method == "auto":
        method = "tli" if len(shared.target_ids) >= LEAST_SHARED * smaller else "slem"
    if method == "tli" and len(shared.target_ids) < 2:
        raise IncompatibleError(
            "the two vocabularies share no tokens",
            found=f"{len(shared.target_ids)} common tokens",
            expected="at least 2",
            do="--translate slem",
            where="--translate",
        )
    about = Translation(method, len(shared.target_ids), lm.spec.vocab_size, target.spec.vocab_size)
    reader = Reader(draft, ours, dict(zip(shared.target_ids, shared.draft_ids, strict=True)))
    if method == "tli":
        return Intersection(SmallLm.from_lm(lm, lm.spec), target.spec, reader, shared, about)
    from specctl.runtime.cross_vocab.string_match import StringMatch
    from specctl.runtime.cross_vocab.string_rejection import StringRejection

    kind = StringMatch if method == "slem" else StringRejection
    return kind(SmallLm.from_lm(lm, lm.spec), target.spec, reader, about)


class Translated(Drafter):
    """What the methods share: a small language model with a vocabulary of its own."""

    family: ClassVar[str] = "translated"

    def __init__(
        self,
        inner: SmallLm,
        spec: ModelSpec,
        reader: Reader,
        about: Translation,
        vocab: VocabMap | None = None,
    ) -> None:
        super().__init__(inner.options, spec, vocab)
        self.inner, self.reader, self.translation = inner, reader, about
        self.module, self.note = inner.module, about.line

    def needs(self) -> Needs:
        return Needs()

    def room(self, space: Space) -> Space:
        """What the draft's model needs of texts of that space: they may have twice as many of its
        tokens, and its own context is the most that it reads."""
        most = self.inner.lm.spec.max_positions - space.max_nodes
        return replace(space, max_len=max(2 + CATCH_UP, min(2 * (space.max_len + CATCH_UP), most)))

    def slot_bytes(self, space: Space) -> int:
        return self.inner.slot_bytes(self.room(space))


class Intersection(Translated):
    """Token-level intersection. `draft_ids_K[i]` is the draft's id of target id `vocab.ids_K[i]`:
    one table both prunes the draft's logits and names what is left, so the two cannot disagree."""

    def __init__(
        self, inner: SmallLm, spec: ModelSpec, reader: Reader, shared: Shared, about: Translation
    ) -> None:
        device = inner.lm.device
        ids_K = torch.tensor(shared.target_ids, device=device)
        super().__init__(inner, spec, reader, about, VocabMap(ids_K, spec.vocab_size))
        self.policies = policies_of(family(inner.family))
        self.draft_ids_K = torch.tensor(shared.draft_ids, device=device)
        self.draft_id_V = torch.zeros(spec.vocab_size, dtype=torch.long, device=device)
        self.draft_id_V[ids_K] = self.draft_ids_K

    def open(self, space: Space) -> IntersectionState:
        return IntersectionState(self, space)


class Texts:
    """The draft's reading of every row, and its model's memory of it. One writer: a DraftState."""

    def __init__(self, drafter: Translated, space: Space) -> None:
        self.reader, room = drafter.reader, drafter.room(space)
        self.longest = room.max_len - CATCH_UP
        self.state = LmState(drafter.inner, room)
        self.ids: dict[int, list[int]] = {}
        self.num_read = [0] * space.num_slots

    def start(self, slot: int, tokens: Sequence[int]) -> None:
        self.ids[slot], self.num_read[slot] = self.reader.prompt(tokens), len(tokens)
        self._read_again(slot)

    def _read_again(self, slot: int) -> None:
        """A fresh prefill, of the newest half where the text has outgrown the cache."""
        if len(self.ids[slot]) > self.longest:
            self.ids[slot] = self.ids[slot][-max(1, self.longest // 2) :]
        self.state.start(slot, self.ids[slot], {})

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Translate what was committed since."""
        self.ids[slot] += self.reader.more(tokens[self.num_read[slot] :])
        self.num_read[slot] = len(tokens)

    def root(self, view: RoundView) -> Tensor:
        """[B, U]: the draft's logits behind what is committed by now."""
        for slot, tokens in zip(view.slots, view.tokens, strict=True):
            self.read(slot, tokens)
        return self.state.root(self.view(view))

    def view(self, view: RoundView) -> RoundView:
        """The round as the draft's model sees it; at least its last token is read anew."""
        for slot in view.slots:
            ids, cached = self.ids[slot], self.state.num_cached
            cached[slot] = min(cached[slot], len(ids) - 1)
            if len(ids) > self.longest or len(ids) - cached[slot] > CATCH_UP:
                self._read_again(slot)
        texts = tuple(tuple(self.ids[slot]) for slot in view.slots)
        host = [[text[-1] for text in texts], [len(text) - 1 for text in texts]]
        root_B, kept_B = torch.tensor(host, device=view.slot_B.device).unbind()
        return RoundView(view.slots, view.slot_B, root_B, kept_B, texts, watch=view.watch)

    def end(self, slot: int) -> None:
        self.ids.pop(slot, None)


class IntersectionState(StepState):
    """The draft's texts; logits pruned to shared tokens, in the order of their target ids."""

    def __init__(self, drafter: Intersection, space: Space) -> None:
        self.drafter, self.texts = drafter, Texts(drafter, space)

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del taps
        self.texts.start(slot, tokens)

    def root(self, view: RoundView) -> Tensor:
        return self.texts.root(view).index_select(-1, self.drafter.draft_ids_K)

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        logits_BMU = self.texts.state.expand(self.drafter.draft_id_V[token_BM], parent_BM)
        return logits_BMU.index_select(-1, self.drafter.draft_ids_K)

    def observe(self, outcome: Outcome) -> None:
        self.texts.state.observe(outcome)

    def end(self, slot: int) -> None:
        self.texts.end(slot)
