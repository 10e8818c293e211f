"""The distribution of the first target token of a text that a draft of another tokenizer writes.

Timor et al. (arXiv 2502.05202, Algorithm 3) call it psi. A text is read longest match first, so its
first target token is t if it begins with t and with no longer target token; that is decided as soon
as no target token continues the text, which is never later than its `longest` bytes. psi(t) is the
probability of all the ways, draft token by draft token, to write such a text: a walk over the draft
token sequences whose text some target token continues, with the draft's own conditional after each.
What cannot continue a text ends it, so an end of text decides, too; with nothing written it stands
for the target's own end. Texts that no target token begins are no proposal: psi may sum to less.

Letters: B rows, M nodes of one step, N nodes, T = N + 1 with the empty sequence, U draft
vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.runtime.cross_vocab.token_bytes import Reader, TokenBytes

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
                do="--translate slem, or tli where the vocabularies share tokens",
                where="--translate",
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
