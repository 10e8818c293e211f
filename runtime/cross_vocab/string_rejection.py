"""String-level rejection sampling: the draft's texts, compared with the target by probability.

Timor et al. (arXiv 2502.05202, Algorithm 3, SLRS): the first token of a round is drawn from psi,
the distribution of the first target token of what the draft would write (`string_distribution`),
and accepted as any sampled token is: u psi(t) < p(t), else a token of norm([p - psi]+). Drawn from
psi itself, not read off a sampled text, it may be scaled, warped or truncated like every draft
distribution, as long as the verifier is told so; texts that propose nothing are left out before.
Behind it the draft writes greedily and the target's tokenizer reads it, as in SLEM
(`string_match`): distributions of one token each.

Letters: B rows, M nodes, U draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.spec import ModelSpec
from specctl.drafters.small_lm import SmallLm
from specctl.runtime.cross_vocab.first_token_distribution import FirstTokenDistribution
from specctl.runtime.cross_vocab.string_match import as_target
from specctl.runtime.cross_vocab.token_bytes import Reader
from specctl.runtime.cross_vocab.translate import Texts, Translated, Translation


class StringRejection(Translated):
    """SLRS around a small language model, grown as a chain."""

    policies = ("chain",)

    def __init__(self, inner: SmallLm, spec: ModelSpec, reader: Reader, about: Translation) -> None:
        distribution = FirstTokenDistribution.of(reader, inner.lm.spec.vocab_size, spec.vocab_size)
        super().__init__(inner, spec, reader, about)
        self.distribution = distribution.to(inner.lm.device)

    def room(self, space: Space) -> Space:
        """The distribution's nodes beside those of one line: behind the text in the cache, but no
        further ahead than the line reaches."""
        ahead = self.reader.target.longest + space.max_nodes
        line = super().room(replace(space, max_nodes=ahead))
        return replace(line, max_nodes=self.distribution.num_nodes + ahead)

    def open(self, space: Space) -> StringRejectionState:
        return StringRejectionState(self, space)


class StringRejectionState(StepState):
    """The draft's texts, and what it writes behind the first token of the round."""

    may_be_silent = True

    def __init__(self, drafter: StringRejection, space: Space) -> None:
        self.reader, self.distribution = drafter.reader, drafter.distribution
        self.length = space.max_nodes  # one more than can follow: the last read is left out
        self.texts = Texts(drafter, space)
        self.view: RoundView | None = None
        self.rest: list[list[int]] | None = None

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
        del taps
        self.texts.start(slot, tokens)

    def root(self, view: RoundView) -> Tensor:
        state, root_BU = self.texts.state, view.shown(self.texts.root(view))
        for slot in view.slots:
            state.num_cached[slot] = len(self.texts.ids[slot])
        self.view, self.rest = view, None
        return self.distribution.psi(root_BU, state.expand).log()

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        """What the draft wrote, token by token: certain, or nothing more."""
        assert token_BM.shape[1] == 1, "only chains follow one text"
        if self.rest is None:
            self.rest = self._write(token_BM[:, 0].tolist())
        step = int(parent_BM[0, 0]) + 1
        logits_B1V = torch.full((len(self.rest), 1, self.distribution.size), -torch.inf)
        for row_V, rest in zip(logits_B1V[:, 0], self.rest, strict=True):
            if step < len(rest):
                row_V[rest[step]] = 0.0
        return logits_B1V.to(token_BM.device)

    def _write(self, firsts: list[int]) -> list[list[int]]:
        """Per row, the target tokens that the draft would write behind `firsts`."""
        assert self.view is not None, "root() begins a round"
        state, node = self.texts.state, self.distribution.num_nodes
        given = [self.reader.more([first]) or [0] for first in firsts]
        num_steps = max(map(len, given)) + self.length
        forced = [ids + [-1] * (num_steps - len(ids)) for ids in given]
        forced_BS = torch.tensor(forced, device=self.view.slot_B.device)
        steps = [forced_BS[:, 0]]
        parent_B1 = torch.full_like(forced_BS[:, :1], -1)
        for step in range(1, num_steps):
            logits_BMU = self.view.shown(state.expand(steps[-1][:, None], parent_B1))
            own_B, forced_B = logits_BMU[:, 0].argmax(-1), forced_BS[:, step]
            steps.append(torch.where(forced_B < 0, own_B, forced_B))
            parent_B1 = torch.full_like(parent_B1, node + step - 1)
        written = torch.stack(steps, 1).tolist()
        return [
            self._behind([*tokens, first], row[len(ids) : len(ids) + self.length])
            for tokens, first, ids, row in zip(
                self.view.tokens, firsts, given, written, strict=True
            )
        ]

    def _behind(self, tokens: Sequence[int], ids: list[int]) -> list[int]:
        """The written text as target tokens; nothing follows what is no text."""
        target, eos = self.reader.target, self.reader.draft.eos_id
        if tokens[-1] not in target.text_of or tokens[-1] == target.eos_id:
            return []
        written = ids[: ids.index(eos) + 1] if eos in ids else ids
        return as_target(self.reader, tokens, written)

    def observe(self, outcome: Outcome) -> None:
        del outcome  # the text is true in the cache up to the round's root; no node stays

    def end(self, slot: int) -> None:
        self.texts.end(slot)
