"""Answers with outlines by an engine: the outline alone, then all points of a wave as its rows."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Emission, Request, Row
from specctl.runtime.generate import (
    Generated,
    OnRound,
    OnTokens,
    Output,
    by_prompt,
    check_greedy,
    default_policy,
    mark_of,
    summarize,
)
from specctl.runtime.outline.answer import (
    WHOLE,
    AnswerPart,
    Encode,
    OutlinedAnswer,
    Outlining,
    Turn,
)
from specctl.runtime.outline.in_order import InOrder
from specctl.runtime.outline.parse import Outline
from specctl.runtime.outline.row_text import Given, RowText, ids_behind, plain_ids
from specctl.runtime.policies import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder

ROOM = 512  # positions for what is requested of the target, which the first opening allows for
Shown = Callable[[Sequence[Given]], None]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be answered, its token ids, and the text by which results name it."""

    turns: tuple[Mapping[str, Any], ...]
    tokens: tuple[int, ...]
    name: str


def write_outlined(
    target: Target,
    chats: Sequence[Chat],
    how: Outlining,
    *,
    drafter: Drafter | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    policy: Policy | None = None,
    rule: str = "auto",
    chooser: LengthChooser | None = None,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
) -> Generated:
    """Answer every conversation from an outline, one after the other; the points of one are rows of
    one batch. Settings as of `generate`; drafts of the rows are verified by the rule.

    Approximate: no distribution of the target is that of such answers. Greedily, and in float32,
    an answer is the same whatever drafts, and one without an outline is the plain one. Raises
    IncompatibleError for a grammar or processors, which stand for one text.
    """
    sampling, each = by_prompt(sampling, len(chats))
    check_greedy(rule, sampling)
    _check_whole(sampling, how)
    policy = policy if policy is not None else default_policy(drafter)
    slots = max(1, how.points)
    engine = Engine(target, drafter, policy, rule, num_slots=slots, chooser=chooser)
    engines = [engine] if how.small is None else [engine, _engine_of(how.small, target, slots)]
    started, decoder = time.perf_counter(), TokenDecoder.of(target)
    outputs, completions = list[Output](), list[Completion]()
    for index, (chat, own) in enumerate(zip(chats, each, strict=True)):

        def show(items: Sequence[Given], index: int = index) -> None:
            for tokens, accepted in runs_of(items):
                if on_tokens is not None:
                    on_tokens(index, tokens)
                if on_round is not None:
                    on_round(index, tokens, accepted)

        one = OneAnswer(engines, decoder, chat, own, how, show)
        outputs.append(one.write())
        completions += one.completions
    seconds = time.perf_counter() - started
    found = mark_of(rule, drafter, policy, target, sampling, parallel=False)
    stats = summarize(completions, engine, seconds, how.marked(found))
    for other in engines[1:]:  # whose rounds are neither drafts nor verified
        reading = stats.prefill_seconds + other.prefill_seconds
        verifying = stats.verify_seconds + other.verify_seconds
        stats = replace(stats, prefill_seconds=reading, verify_seconds=verifying)
    return Generated(tuple(outputs), stats)


def encoder_of(target: Target) -> Encode:
    """Token ids of a conversation, and those of what the assistant's turn begins with: text,
    whatever it spells."""

    def encode(turns: Sequence[Turn], begun: str) -> tuple[list[int], list[int]]:
        return target.encode_chat(turns), plain_ids(target, begun)

    return encode


def runs_of(items: Sequence[Given]) -> Iterator[tuple[tuple[int, ...], int]]:
    """The tokens in stretches whose first ones were drafted and accepted, and how many those
    are."""
    tokens, accepted = list[int](), 0
    for token, is_accepted in items:
        if is_accepted and accepted < len(tokens):
            yield tuple(tokens), accepted
            tokens, accepted = [], 0
        tokens.append(token)
        accepted += is_accepted
    if tokens:
        yield tuple(tokens), accepted


class OneAnswer:
    """Writes one answer. `engines`: the target's, and that of the smaller model, if there is one.
    `completions`: all rows that it took."""

    def __init__(
        self,
        engines: Sequence[Engine],
        decoder: TokenDecoder,
        chat: Chat,
        sampling: Sampling,
        how: Outlining,
        show: Shown,
    ) -> None:
        self.engines, self.target, self.how = engines, engines[0].target, how
        self.decoder, self.chat, self.sampling = decoder, chat, sampling
        encode = encoder_of(self.target)
        self.answer = OutlinedAnswer(
            chat.turns, chat.tokens, sampling, how, encode, engines[0].context
        )
        self.completions = list[Completion]()
        self._show = show
        self._name = secrets.token_hex(16)  # of what its rows may reuse of one another
        self._tokens = list[int]()  # of the answer so far
        self._text, self._pieces = TextStream(decoder, sampling.stop), list[str]()
        self._order = InOrder[Given]([])
        self._last = 0  # the last point of the answer: those behind it are not needed

    def write(self) -> Output:
        """The answer; its ids are those of its text, with the headings in it."""
        answer = self.answer
        if (part := answer.outline_part()) is not None:
            stream = TextStream(self.decoder, part.sampling.stop, begun=part.begun)
            [row] = self._run([part], partial(self._take_outline, stream))
            answer.take_outline(is_cut=row.finished in ("length", "context"))
        reason = self._plain() if answer.outline is None else self._points(answer.outline)
        whole = "".join(self._pieces) + self._text.end()
        return Output(self.chat.name, whole, tuple(self._tokens), reason, answer.report())

    def _take_outline(self, stream: TextStream, emission: Emission) -> None:
        """What a round emitted for the outline; ends it with its list."""
        spans = [stream.add(token) for token in emission.tokens]
        if emission.row.finished is not None:
            spans[-1] += stream.end()
        if self.answer.add_outline(spans):
            self.engines[0].cancel(WHOLE)

    def _plain(self) -> str:
        part = self.answer.plain_part()
        [row] = self._run([part], self._show_round)
        self._tokens = row.tokens[row.prompt_len :]
        is_token = row.finished == "stop" and self._tokens[-1] in self.sampling.stop_token_ids
        self._pieces += map(self._text.add, self._tokens[:-1] if is_token else self._tokens)
        self.answer.take_plain(row.num_new)
        return str(row.finished)

    def _show_round(self, emission: Emission) -> None:
        accepted = emission.num_accepted
        self._show([(token, at < accepted) for at, token in enumerate(emission.tokens)])

    def _points(self, outline: Outline) -> str:
        first, *others = [self.answer.heading(point) for point in outline.points]
        encoded = plain_ids(self.target, first), *(ids_behind(self.target, one) for one in others)
        heads = [[(token, False) for token in ids] for ids in encoded]
        self._order, self._last = InOrder(heads), len(heads)
        for wave in outline.waves:
            numbers = [number for number in wave if number <= self._last]
            parts = self.answer.parts(numbers)
            for number in set(numbers) - {part.number for part in parts}:
                self._give(self._order.end(number - 1))
            texts = self._texts(parts)
            self._run(parts, partial(self._take, texts))
        return "stop" if self._text.stop is not None else self.answer.reason

    def _take(self, texts: Mapping[int, RowText], emission: Emission) -> None:
        """What a round emitted for a point; cancels those that the answer ends in front of."""
        row, number = emission.row, emission.row.index
        text, at = texts[number], number - 1
        self._give(self._order.add(at, text.add(emission)))
        if row.finished is not None:
            self._give(self._order.add(at, text.end(row)))
            goes_on = row.finished == "stop" and text.stop == self.answer.next_point(number)
            reason = "eos" if goes_on else row.finished
            self.answer.take_point(number, text.text, row.num_new, reason)
            if reason == "stop":  # nothing behind this point is given out
                self._last = min(self._last, number)
            else:
                self._give(self._order.end(at))
        if self._text.stop is not None:
            self._last = 0
        for other in texts:
            if other > self._last:
                self._engine(other).cancel(other)

    def _give(self, items: Sequence[Given]) -> None:
        """Add to the answer, up to a stop string."""
        kept = list[Given]()
        for token, is_accepted in items:
            if self._text.stop is not None:
                break
            kept.append((token, is_accepted))
            self._pieces.append(self._text.add(token))
        self._tokens += [token for token, _ in kept]
        if kept:
            self._show(kept)

    def _texts(self, parts: Sequence[AnswerPart]) -> dict[int, RowText]:
        about = self.target, self.decoder
        return {part.number: RowText(*about, part.sampling, part.begun) for part in parts}

    def _engine(self, number: int) -> Engine:
        """What writes that point, or WHOLE."""
        outline = self.answer.outline
        if number == WHOLE or outline is None:
            return self.engines[0]
        return self.engines[self.how.is_for_small(outline.points[number - 1])]

    def _run(self, parts: Sequence[AnswerPart], on_new: Callable[[Emission], object]) -> list[Row]:
        """The rows of these requests, when they have ended or were cancelled."""
        if not parts:
            return []
        longest = max(len(part.tokens) + part.sampling.max_new_tokens for part in parts)
        usual = len(self.chat.tokens) + 2 * self.sampling.max_new_tokens + ROOM
        for engine in self.engines:
            engine.open(min(max(longest, usual), engine.context))
        for part in parts:
            request = Request(part.tokens, part.sampling, self._name)
            self._engine(part.number).submit(part.number, request)
        rows = dict[int, Row]()
        while busy := [engine for engine in self.engines if engine.is_busy]:
            for emission in (each for engine in busy for each in engine.step()):
                rows[emission.row.index] = emission.row
                on_new(emission)
        for row in rows.values():
            new, reason = tuple(row.tokens[row.prompt_len :]), row.finished or "stop"
            self.completions.append(Completion(row.request, new, reason, row.stats))
            if row.finished is None and row.index != WHOLE:
                self.answer.take_cancelled(row.num_new)
        return list(rows.values())


def _engine_of(small: Target, target: Target, slots: int) -> Engine:
    """Of the smaller model: its texts end as the target's do."""
    if small.tokenizer_fingerprint != target.tokenizer_fingerprint:
        raise IncompatibleError(
            "points of one answer need two models of the same tokens",
            where="outline.small",
            found=f"other tokens of {small.name}",
            expected=f"the tokenizer of {target.name}",
            do="name a smaller model of the same family",
        )
    return Engine(replace(small, eos_ids=target.eos_ids, ends=target.ends), num_slots=slots)


def _check_whole(sampling: Sampling, how: Outlining) -> None:
    """Refuse what speaks of one text."""
    given = "a grammar" if sampling.grammar is not None else "processors"
    if sampling.grammar is None and not sampling.processors:
        return
    raise IncompatibleError(
        f"an answer from an outline takes no {given.removeprefix('a ')}",
        where="outline.kind",
        found=f"{given} beside {how.kind}",
        expected="none: the points are texts of their own",
        do="leave out outline.kind",
    )
