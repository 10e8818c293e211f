"""TextStream: the text of a continuation as it grows, never taken back.

What it has given out, joined, is a beginning of the text of all tokens up to the first stop string,
and all of it at the end. Two things are held back: tokens whose bytes may still become a character
(half of one; a run of byte-fallback tokens, whose decoder decides about the whole run at once), and
text that may be the beginning of a stop string. Tokens are decoded with those before them, back to
the last complete character, because a decoder may treat the first token of a text differently (the
space in front of a word).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How tokens become text; all streams of a target share one."""

    decode: Callable[[Sequence[int]], str]
    byte_ids: frozenset[int] = frozenset()  # of byte fallback
    special_ids: frozenset[int] = frozenset()  # left out of the text

    @classmethod
    def of(cls, target: Target, shown: frozenset[int] = frozenset()) -> TokenDecoder:
        """That of a target; without a tokenizer every text is empty. `shown`: control tokens that
        are spelled in the text, which otherwise leaves them out."""
        if target.tokenizer is None:
            return cls(lambda tokens: "")
        words = target.tokenizer.get_vocab()
        byte_ids = frozenset(i for word, i in words.items() if _BYTE.fullmatch(word))
        added = target.tokenizer.added_tokens_decoder
        special = {int(i) for i, token in added.items() if token.special}
        hidden = special.union(target.tokenizer.all_special_ids, target.ends.spelled) - shown
        return cls(
            _spelling(target, hidden) if shown else target.decode, byte_ids, frozenset(hidden)
        )


def _spelling(target: Target, hidden: set[int]) -> Callable[[Sequence[int]], str]:
    """Decodes with all control tokens but the hidden ones."""

    def decode(tokens: Sequence[int]) -> str:
        said = [token for token in tokens if token not in hidden]
        text = target.tokenizer.decode(said, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


class TextStream:
    """The text of one continuation. One writer: whoever feeds it."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str] = ()) -> None:
        self._decoder, self._stops = decoder, tuple(stop for stop in stops if stop)
        self._tokens: list[int] = []  # the last clean stretch, then what came after it
        self._num_base, self._base = 0, ""  # that stretch: its tokens, its text
        self._in_bytes, self._held, self._is_over = False, "", False

    def add(self, token: int) -> str:
        """The text that this token sets free."""
        self._tokens.append(token)
        if token not in self._decoder.special_ids:  # those are left out, and end nothing
            self._in_bytes = token in self._decoder.byte_ids
        if self._in_bytes:
            return ""
        text = self._decoder.decode(self._tokens)
        if text.endswith(_BROKEN) or len(text) <= len(self._base):
            return ""
        new, self._tokens = text[len(self._base) :], self._tokens[self._num_base :]
        self._num_base, self._base = len(self._tokens), self._decoder.decode(self._tokens)
        return self._before_stop(new)

    def end(self) -> str:
        """What was held back, now that nothing follows."""
        new = self._before_stop(self._decoder.decode(self._tokens)[len(self._base) :])
        if self._is_over:
            return new
        self._is_over = True
        return new + self._held

    def _before_stop(self, new: str) -> str:
        if self._is_over or not self._stops:
            return "" if self._is_over else new
        text = self._held + new
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self._is_over = True
            return text[: min(ends)]
        kept = self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _beginning(self, text: str) -> int:
        """How many of the last characters may begin a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for count in range(longest, 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self._stops):
                return count
        return 0
