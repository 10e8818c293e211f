"""RowText: what may be given out of a row that ends where it would go on with the next point."""

from __future__ import annotations

from collections.abc import Sequence

from specctl.runtime.engine.request import Emission, Row
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_tokens import ControlTokens
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder

IN_FRONT = "a"  # a letter, which no tokenizer joins with a line's end or a digit behind it
Given = tuple[int, bool]  # a token, and whether it was drafted and accepted


def plain_ids(target: Target, text: str) -> list[int]:
    """Token ids of a text that goes on, none of them a control token."""
    reader = ControlTokens(target)
    return [token for ids in reader.read(reader.spoiled(text)) for token in ids]


def ids_behind(target: Target, text: str) -> list[int]:
    """Token ids of a text with text in front of it. Tokenizers that put a blank in front of all
    that they encode (SentencePiece) are given something in front, whose ids are taken off again."""
    ids, before = plain_ids(target, text), plain_ids(target, IN_FRONT)
    if target.decode([*before, *ids]) == IN_FRONT + text:
        return ids
    both = plain_ids(target, IN_FRONT + text)
    return both[len(before) :] if both[: len(before)] == before else ids


class RowText:
    """The tokens and the text of one row; tokens whose text may belong to a stop string are held
    back. What ends the row is no part of either. `begun`: the tokens of the text that it goes on
    from. One writer: whoever reads the row."""

    def __init__(
        self, target: Target, decoder: TokenDecoder, sampling: Sampling, begun: Sequence[int] = ()
    ) -> None:
        self._target, self._stop_ids = target, sampling.stop_token_ids
        self._stream = TextStream(decoder, sampling.stop, begun=begun)
        self._pieces = list[str]()
        self._held = list[Given]()
        self._num_chars = self._num_given = 0  # of the text, and of the text of tokens given out

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the row."""
        return self._stream.stop

    def add(self, emission: Emission) -> list[Given]:
        """The tokens that a round sets free."""
        tokens, reason, free = emission.tokens, emission.row.finished, list[Given]()
        is_end = reason == "eos" or (reason == "stop" and tokens[-1] in self._stop_ids)
        for at, token in enumerate(tokens[:-1] if is_end else tokens):
            self._take(self._stream.add(token))
            self._held.append((token, at < emission.num_accepted))
            if self._num_chars == self._stream.position and self.stop is None:
                free, self._held = [*free, *self._held], []
                self._num_given = self._num_chars
        return free

    def end(self, row: Row) -> list[Given]:
        """The tokens that were held back, now that the row has ended; where one of them reaches
        into what ended it, the text in front of that is split into tokens anew."""
        self._take(self._stream.end())
        if row.finished != "stop" or self.stop is None:
            return self._held
        rest = self.text[self._num_given :]
        return [(token, False) for token in ids_behind(self._target, rest)] if rest else []

    def _take(self, text: str) -> None:
        self._pieces.append(text)
        self._num_chars += len(text)
