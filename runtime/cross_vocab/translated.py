"""What the ways to draft across vocabularies share: the draft's own reading of every text.

The prompt is read as the draft's tokenizer would write it, then every committed token is
translated.
Letters: B rows, U foreign vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, RoundView, Space
from specctl.core.errors import RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.cross_vocab.token_bytes import Reader

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


class Translated(Drafter):
    """What the methods share: a small language model with a vocabulary of its own."""

    family = "translated"

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

    @property
    def positions(self) -> int | None:
        return self.inner.positions

    def check_served(self) -> None:
        if self.options.context is not None:
            raise RecipeError(
                "a draft model with another tokenizer reads every prompt whole",
                where="drafter.options.context",
                found=f"context: {self.options.context}",
                expected="a draft model with the target's own tokenizer beside it",
                do="leave context out",
            )

    def draft_space(self, space: Space) -> Space:
        """What the draft's model needs of texts of that space: they may have twice as many of its
        tokens, and its own context is the most that it reads."""
        most = self.inner.lm.spec.max_positions - space.max_nodes
        return replace(space, max_len=max(2 + CATCH_UP, min(2 * (space.max_len + CATCH_UP), most)))

    def slot_bytes(self, space: Space) -> int:
        return self.inner.slot_bytes(self.draft_space(space))


class Texts:
    """The draft's reading of every row, and its model's memory of it. One writer: a DraftState."""

    def __init__(self, drafter: Translated, space: Space) -> None:
        self.reader, wanted = drafter.reader, drafter.draft_space(space)
        self.longest = wanted.max_len - CATCH_UP
        self.state = drafter.inner.open_whole(wanted)
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
