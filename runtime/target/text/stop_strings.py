"""Stop strings against the tokens of a target: also those that spell a control token.

A text leaves control tokens out, so a stop string that holds one (`<|im_end|>`, or `<|end|>\\n`) is
never found in it. Such a string is looked for where the control tokens are spelled: it stops at the
token as well as at the characters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """The tokens that texts leave out, and their spelling; none without a tokenizer."""
    if tokenizer is None:
        return {}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {int(token_id): str(token) for token_id, token in added.items() if token.special}
    for token_id in tokenizer.all_special_ids:
        found.setdefault(int(token_id), str(tokenizer.convert_ids_to_tokens(token_id)))
    return found


@dataclass(frozen=True, slots=True)
class StopStrings:
    """`plain` ones are looked for in the text, `spelled` ones, which hold a token that the text
    leaves out, in the text with those tokens spelled."""

    plain: tuple[str, ...] = ()
    spelled: tuple[str, ...] = ()

    @classmethod
    def of(cls, stops: Sequence[str], hidden: Mapping[int, str]) -> StopStrings:
        """`hidden`: the tokens that are left out, and their spelling. An empty string is none."""
        words = {word for word in hidden.values() if word}
        spelled = tuple(stop for stop in stops if any(word in stop for word in words))
        return cls(tuple(stop for stop in stops if stop and stop not in spelled), spelled)

    def __bool__(self) -> bool:
        return bool(self.plain or self.spelled)


@lru_cache(maxsize=64)
def _stops_of(tokenizer: Any, stops: tuple[str, ...]) -> StopStrings:
    return StopStrings.of(stops, special_tokens(tokenizer))


def ends_with_stop(target: Target, tokens: Sequence[int], stops: Sequence[str]) -> bool:
    """Whether a stop string occurs in the last few of these tokens: every token covers at least one
    byte of it."""
    found = _stops_of(target.tokenizer, tuple(stops))
    window = max((len(stop.encode()) for stop in stops), default=0) + 4
    latest = tokens[-window:]
    if found.plain and _occurs(found.plain, target.decode(latest)):
        return True
    hidden = special_tokens(target.tokenizer)
    return bool(found.spelled) and _occurs(found.spelled, _spelled(target.decode, latest, hidden))


class HeldText:
    """Text on its way to a reader: what may be the beginning of a stop string is held back, and
    what stands behind one is never given out. One writer: the stream of the text. `keeps_stop`:
    the text ends behind the stop string. `stop`: the one that ended it."""

    def __init__(self, stops: StopStrings, keeps_stop: bool = False) -> None:
        self.stop: str | None = None
        self._stops, self._keeps_stop, self._is_over = stops, keeps_stop, False
        self._held, self._is_text = "", list[bool]()  # spelled; which characters are of the text

    def pass_text(self, new: str) -> str:
        """What more text sets free."""
        if self._is_over or not self._stops:
            return "" if self._is_over else new
        return self._passed(new, is_text=True)

    def pass_marker(self, spelling: str) -> str:
        """What a token sets free that the text leaves out."""
        if self._is_over or not self._stops.spelled:
            return ""
        return self._passed(spelling, is_text=False)

    def end(self) -> str:
        """What was held back, now that nothing follows."""
        rest = "" if self._is_over else self._before(len(self._held))
        self._is_over = True
        return rest

    def _passed(self, new: str, is_text: bool) -> str:
        self._held += new
        self._is_text += [is_text] * len(new)
        places = [at for at, is_shown in enumerate(self._is_text) if is_shown]
        text = "".join(self._held[at] for at in places)
        found = [(places[at], stop) for at, stop in _found(self._stops.plain, text)]
        found += _found(self._stops.spelled, self._held)
        if found:
            at, self.stop = min(found, key=lambda one: one[0])
            self._is_over = True
            return self._before(at) + (self.stop if self._keeps_stop else "")
        from_here = len(self._held) - _beginning(self._stops.spelled, self._held)
        kept = _beginning(self._stops.plain, text)
        if kept:
            from_here = min(from_here, places[-kept])
        free = self._before(from_here)
        self._held, self._is_text = self._held[from_here:], self._is_text[from_here:]
        return free

    def _before(self, end: int) -> str:
        """The text in front of that place of what is held."""
        return "".join(compress(self._held[:end], self._is_text))


def _found(stops: Sequence[str], text: str) -> list[tuple[int, str]]:
    """The stop strings that occur, and where they do first."""
    return [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]


def _beginning(stops: Sequence[str], text: str) -> int:
    """How many of the last characters may begin a stop string."""
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for count in range(longest, 0, -1):
        if any(stop.startswith(text[-count:]) for stop in stops):
            return count
    return 0


def _occurs(stops: Sequence[str], text: str) -> bool:
    return any(stop in text for stop in stops)


def _spelled(
    decode: Callable[[Sequence[int]], str], tokens: Sequence[int], hidden: Mapping[int, str]
) -> str:
    """The text of tokens with those spelled that it leaves out."""
    parts: list[str] = []
    run: list[int] = []
    for token in tokens:
        if token not in hidden:
            run.append(token)
            continue
        parts += [decode(run) if run else "", hidden[token]]
        run = []
    return "".join(parts) + (decode(run) if run else "")
