"""String-level rejection sampling: the draft's texts, compared with the target by probability.

Timor et al. (arXiv 2502.05202, Algorithm 3, SLRS): the first token of a round is drawn from psi,
the distribution of the first target token of what the draft would write, and accepted as any
sampled token is: u psi(t) < p(t), else a token of norm([p - psi]+). Drawn from psi itself, not read
off a sampled text, it may be scaled, warped or truncated like every draft distribution, as long as
the verifier gets the same one; texts that propose nothing are left out before. Behind it the draft
writes greedily and the target's tokenizer reads it, as in SLEM (`string_match`): distributions of
one token each.

psi (`FirstTokenDistribution`): a text is read longest match first, so its first target token is t
if it begins with t and with no longer target token; that is decided as soon as no target token
continues the text, which is never later than its `longest` bytes. psi(t) is the probability of all
the ways, draft token by draft token, to write such a text: a walk over the draft token sequences
whose text some target token continues, with the draft's own conditional after each. What cannot
continue a text ends it, so an end of text decides, too; with nothing written it stands for the
target's own end. Texts that no target token begins are no proposal: psi may sum to less.
Letters: B rows, C candidates, M new nodes, N nodes, S sequence, T fed tokens (N + 1, the empty
sequence first), U foreign vocabulary, V target vocabulary, X any axes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView, Space, StepState
from specctl.core.errors import IncompatibleError
from specctl.core.spec import ModelSpec
from specctl.drafters.lm.small_lm import SmallLm
from specctl.runtime.cross_vocab.string_match import as_target
from specctl.runtime.cross_vocab.token_bytes import Reader, TokenBytes
from specctl.runtime.cross_vocab.translated import Texts, Translated, Translation

LIMIT = 1024  # draft token sequences that a round may have to read
AT_ONCE = 64  # of them in one forward

Expand = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class FirstTokenDistribution:
    """The undecided draft token sequences, parents first, and what every next token decides.

    token_N, parent_N   the sequences' last tokens, and the sequences they continue (-1 = empty)
    first_TU            target id of the first token once u follows sequence t, the empty one first;
                        `size` where that is still undecided, or no token
    """

    token_N: Tensor
    parent_N: Tensor
    first_TU: Tensor
    size: int

    @classmethod
    def of(cls, reader: Reader, draft_size: int, size: int) -> FirstTokenDistribution:
        """For a draft and a target whose heads have so many rows; refused beyond `LIMIT`."""
        words = _Words.of(reader)
        number = words.count()
        if number > LIMIT:
            raise IncompatibleError(
                "too many draft token sequences lie between two target tokens",
                found=f"{number:,} sequences to read in every round",
                expected=f"at most {LIMIT:,} (short target tokens, or a small draft vocabulary)",
                do="--set drafter.translate=slem, or tli where the vocabularies share tokens",
                where="drafter.translate",
            )
        waiting, tokens, parents, rows = [b""], list[int](), list[int](), list[NDArray[np.int32]]()
        for at, text in enumerate(waiting):  # grows while it is read: breadth first
            row = words.decided(text, draft_size, size)
            for token, longer in words.undecided(text):
                row[token] = size
                waiting.append(longer)
                tokens.append(token)
                parents.append(at - 1)
            rows.append(row)
        assert len(rows) == number, (len(rows), number)
        table_TU = torch.from_numpy(np.stack(rows))
        return cls(torch.tensor(tokens).long(), torch.tensor(parents).long(), table_TU, size)

    @property
    def num_nodes(self) -> int:
        return len(self.token_N)

    def to(self, device: torch.device) -> FirstTokenDistribution:
        parts = (self.token_N, self.parent_N, self.first_TU)
        token_N, parent_N, first_TU = (part.to(device) for part in parts)
        return FirstTokenDistribution(token_N, parent_N, first_TU, self.size)

    def psi(self, root_BU: Tensor, expand: Expand) -> Tensor:
        """[B, V] from the draft's logits behind the text; `expand(token_BM, parent_BM)` gives them
        behind M more sequences (`StepState.expand`)."""
        B, logits_BMU, first = len(root_BU), root_BU[:, None], 0
        dtype = torch.promote_types(root_BU.dtype, torch.float32)
        psi_BV = root_BU.new_zeros(B, self.size + 1, dtype=dtype)
        mass_BT = root_BU.new_ones(B, 1, dtype=dtype)
        while True:
            last = first + logits_BMU.shape[1]
            distribution_BMU = logits_BMU.to(dtype).softmax(-1) * mass_BT[:, first:last, None]
            to_X = self.first_TU[first:last].flatten().long()
            psi_BV.index_add_(1, to_X, distribution_BMU.flatten(1))
            child = slice(*self._children(first, last))
            from_C, token_C = self.parent_N[child] + 1 - first, self.token_N[child]
            mass_BT = torch.cat([mass_BT, distribution_BMU[:, from_C, token_C]], 1)
            if last > self.num_nodes:
                return psi_BV[:, : self.size]
            first, last = last, min(last + AT_ONCE, mass_BT.shape[1])
            step = slice(first - 1, last - 1)
            fed = (self.token_N[step].expand(B, -1), self.parent_N[step].expand(B, -1))
            logits_BMU = expand(*fed)

    def _children(self, first: int, last: int) -> tuple[int, int]:
        """The nodes that continue sequences first .. last - 1 stand in one run."""
        ends = torch.tensor([first - 1, last - 1], device=self.parent_N.device)
        begin, end = torch.searchsorted(self.parent_N, ends).tolist()
        return begin, end


@dataclass(frozen=True, slots=True)
class _Words:
    """Target tokens by what they continue, draft tokens by what they begin with."""

    target: TokenBytes
    ends: dict[int, int]  # draft id -> target id of what stands for no text
    draft_ids: dict[bytes, list[int]]
    starting: dict[bytes, list[int]]  # draft ids
    continuing: dict[bytes, list[bytes]]  # target tokens, shorter ones first

    @classmethod
    def of(cls, reader: Reader) -> _Words:
        draft, target = reader.draft, reader.target
        ids: dict[bytes, list[int]] = defaultdict(list)
        starting: dict[bytes, list[int]] = defaultdict(list)
        continuing: dict[bytes, list[bytes]] = defaultdict(list)
        for i, text in draft.text_of.items():
            if text and i != draft.eos_id:
                ids[text].append(i)
                for size in range(1, len(text) + 1):
                    starting[text[:size]].append(i)
        words = (text for text, i in target.id_of.items() if i != target.eos_id)
        for text in sorted(words, key=len):
            for size in range(len(text)):
                continuing[text[:size]].append(text)
        ends = {
            d: t for t, d in reader.shared.items() if t in target.marker_of or t == target.eos_id
        }
        return cls(target, ends, dict(ids), dict(starting), dict(continuing))

    def count(self) -> int:
        """How many draft token sequences write a text that a target token continues."""
        number, longest = Counter({b"": 1}), max(map(len, self.draft_ids), default=0)
        for text in sorted(self.continuing, key=len):
            for cut in range(max(0, len(text) - longest), len(text)):
                number[text] += number[text[:cut]] * len(self.draft_ids.get(text[cut:], ()))
        return number.total()

    def decided(self, text: bytes, draft_size: int, size: int) -> NDArray[np.int32]:
        """The first token of `text` and what follows it, by draft id."""
        row = np.full(draft_size, size, dtype=np.int32)
        if text:
            whole = self.target.longest_match(text)
            row[:] = size if whole is None else whole
        else:
            row[list(self.ends)] = list(self.ends.values())
        for longer in self.continuing[text]:
            row[self.starting.get(longer[len(text) :], [])] = self.target.id_of[longer]
        return row

    def undecided(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Draft tokens after which a target token may still go on, and the text so far."""
        texts = {
            longer[:size]: None
            for longer in self.continuing[text]
            for size in range(len(text) + 1, len(longer))
        }
        for longer in texts:
            for token in self.draft_ids.get(longer[len(text) :], ()):
                yield token, longer


class StringRejection(Translated):
    """SLRS around a small language model, grown as a chain."""

    policies = ("chain",)

    def __init__(self, inner: SmallLm, spec: ModelSpec, reader: Reader, about: Translation) -> None:
        distribution = FirstTokenDistribution.of(reader, inner.lm.spec.vocab_size, spec.vocab_size)
        super().__init__(inner, spec, reader, about)
        self.distribution = distribution.to(inner.lm.device)

    def draft_space(self, space: Space) -> Space:
        """The distribution's nodes beside those of one line: behind the text in the cache, but no
        further ahead than the line reaches."""
        ahead = self.reader.target.longest + space.max_nodes
        line = super().draft_space(replace(space, max_nodes=ahead))
        return replace(line, max_nodes=self.distribution.num_nodes + ahead)

    def open(self, space: Space) -> StringRejectionState:
        return StringRejectionState(self, space)


class StringRejectionState(StepState):
    """The draft's texts, and what it writes behind the first token of the round."""

    may_draft_nothing = True

    def __init__(self, drafter: StringRejection, space: Space) -> None:
        self.reader, self.distribution = drafter.reader, drafter.distribution
        self.length = space.max_nodes  # one more than can follow: the last read is left out
        self.texts = Texts(drafter, space)
        self.view: RoundView | None = None
        self.rest: list[list[int]] | None = None

    def start(self, slot: int, tokens: Sequence[int], taps: Mapping[int, Tensor]) -> None:
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
