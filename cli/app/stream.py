"""Text as its tokens arrive: a character is shown once it cannot change any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"


class TextStream:
    """Feeds tokens, returns printable text. Bytes of an unfinished character and what may become
    a stop string are held back; `finish(text)` returns the rest of the final text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.decode, self.stop = decode, tuple(s for s in stop if s)
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._decoded = self._shown = ""

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that became certain with these tokens."""
        self._tokens.extend(tokens)
        # Decoding from one settled piece earlier keeps the spaces between words.
        before = self.decode(self._tokens[self._start : self._read])
        after = self.decode(self._tokens[self._start :])
        if after.endswith(INCOMPLETE) or len(after) < len(before):
            return ""
        self._decoded += after[len(before) :]
        self._start, self._read = self._read, len(self._tokens)
        return self._release(len(self._decoded) - self._held())

    def finish(self, text: str) -> str:
        """The rest of the final text, which was cut before any stop string."""
        if not text.startswith(self._shown):
            return ""
        rest = text[len(self._shown) :]
        self._shown = text
        return rest

    def _release(self, end: int) -> str:
        new = self._decoded[len(self._shown) : max(end, len(self._shown))]
        self._shown += new
        return new

    def _held(self) -> int:
        """Characters from the first stop string on, or those at the end that may begin one."""
        hits = [self._decoded.find(s) for s in self.stop if s in self._decoded]
        if hits:
            return len(self._decoded) - min(hits)
        partial = [n for s in self.stop for n in range(1, len(s)) if self._decoded.endswith(s[:n])]
        return max(partial, default=0)
