"""TextStream: the text of a continuation as it grows, never taken back.

What it has given out, joined, is a beginning of the text of all tokens up to the first stop string,
and all of it at the end. Two things are held back: tokens whose bytes may still become a character
(half of one; a run of byte-fallback tokens, whose decoder decides about the whole run at once), and
text that may be the beginning of a stop string. Tokens are decoded with those before them, back to
the last complete character, because a decoder may treat the first token of a text differently (the
space in front of a word). Control tokens are left out of the text, but a stop string may spell one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specctl.runtime.target.text.stop_strings import HeldText, StopStrings, special_tokens

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """How tokens become text; all streams of a target share one. `byte_ids`: the tokens of byte
    fallback, and the byte of each; `special_ids`: those that are left out of the text, and their
    spelling."""

    decode: Callable[[Sequence[int]], str]
    byte_ids: Mapping[int, int] = field(default_factory=dict)
    special_ids: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Target, shown: frozenset[int] = frozenset()) -> TokenDecoder:
        """That of a target; without a tokenizer every text is empty. `shown`: control tokens that
        are spelled in the text, which otherwise leaves them out."""
        if target.tokenizer is None:
            return cls(lambda tokens: "")
        found = ((i, _BYTE.fullmatch(word)) for word, i in target.tokenizer.get_vocab().items())
        byte_ids = {i: int(match[1], 16) for i, match in found if match is not None}
        spelled = {i: target.tokenizer.convert_ids_to_tokens(i) for i in target.ends.spelled}
        special = {**special_tokens(target.tokenizer), **spelled}
        hidden = {i: word for i, word in special.items() if i not in shown}
        return cls(_spelling(target, hidden) if shown else target.decode, byte_ids, hidden)


def _spelling(target: Target, hidden: Mapping[int, str]) -> Callable[[Sequence[int]], str]:
    """Decodes with all control tokens but the hidden ones."""

    def decode(tokens: Sequence[int]) -> str:
        said = [token for token in tokens if token not in hidden]
        text = target.tokenizer.decode(said, clean_up_tokenization_spaces=False)
        return str(text)

    return decode


class TextStream:
    """The text of one continuation. One writer: whoever feeds it. `keeps_stop`: the text ends
    behind the stop string, not before it.

    `begun`: tokens that the continuation goes on from in the middle of a text, where the space in
    front of its first word belongs to it. `position` counts the characters of the text in front of
    the next token, whether they were given out or are held back."""

    def __init__(
        self,
        decoder: TokenDecoder,
        stops: Sequence[str] = (),
        keeps_stop: bool = False,
        begun: Sequence[int] = (),
    ) -> None:
        self.position = 0
        self._decoder = decoder
        self._held = HeldText(StopStrings.of(stops, decoder.special_ids), keeps_stop)
        self._tokens = list(begun)  # the last clean stretch, then what came after it
        self._num_base = len(begun)  # of that stretch: its tokens, and its text below
        self._base = decoder.decode(begun) if begun else ""
        self._run = bytearray()  # of byte fallback, since that stretch
        self._in_bytes, self._num_chars = False, 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._held.stop

    def add(self, token: int) -> str:
        """The text that this token sets free."""
        self._tokens.append(token)
        marker = self._decoder.special_ids.get(token)
        if marker is not None:  # left out, and ends no run of bytes
            return self._held.pass_marker(marker) + self._clean()
        self._in_bytes = token in self._decoder.byte_ids
        if self._in_bytes:
            self._run.append(self._decoder.byte_ids[token])
        return self._clean()

    def end(self) -> str:
        """What was held back, now that nothing follows."""
        new = self._decoder.decode(self._tokens)[len(self._base) :]
        return self._held.pass_text(new) + self._held.end()

    def _clean(self) -> str:
        """What is set free where the tokens so far end with a whole character."""
        if self._in_bytes:
            self.position = self._num_chars + len(self._run.decode(errors="ignore"))
            return ""
        text = self._decoder.decode(self._tokens)
        new = text[len(self._base) :]
        self.position = self._num_chars + len(new.rstrip(_BROKEN))
        if text.endswith(_BROKEN) or not new:
            return ""
        self._num_chars += len(new)
        self._tokens = self._tokens[self._num_base :]
        self._num_base, self._base = len(self._tokens), self._decoder.decode(self._tokens)
        self._run.clear()
        return self._held.pass_text(new)


def whole_text(decoder: TokenDecoder, tokens: Sequence[int], stops: Sequence[str] = ()) -> str:
    """The text of a continuation that has ended, up to the first stop string."""
    if not stops:
        return decoder.decode(tokens)
    stream = TextStream(decoder, stops)
    return "".join(map(stream.add, tokens)) + stream.end()
