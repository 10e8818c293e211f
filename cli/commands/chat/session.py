"""A conversation on the engine: a turn in, pieces of the answer out. What was read stays read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.runtime.engine.engine import Engine
    from specctl.runtime.engine.request import Completion, Emission
    from specctl.runtime.measure.stats import Stats
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target
    from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder

Piece = tuple[str, bool]
LEAST_ROOM = 2048  # positions that are reserved at first; they double when a talk outgrows them


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """What was said and what came back. `finish_reason` is that of a completion, or "stopped";
    `reused` counts the tokens of the prompt that had been read before."""

    user: str
    answer: str
    completion: Completion
    seconds: float
    reused: int

    def to_json(self) -> dict[str, Any]:
        stats = self.completion.stats
        return {
            "user": self.user,
            "answer": self.answer,
            "finish_reason": self.completion.finish_reason,
            "prompt_tokens": len(self.completion.request.tokens),
            "reused_tokens": self.reused,
            "tokens": stats.tokens,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "tau": round(stats.tokens / stats.rounds, 4) if stats.rounds else None,
            "seconds": round(self.seconds, 4),
        }


@dataclass(slots=True)
class ChatSession:
    """The turns so far, and the engine that goes on with them. One writer: whoever calls it.

    With a chat template the turns become messages; without one everything said is one text, a line
    of the user behind what the target wrote.
    """

    target: Target
    draft: LoadedDraft
    sampling: Sampling
    system: str | None = None
    turns: list[ChatTurn] = field(default_factory=list)
    past: list[ChatTurn] = field(default_factory=list)  # of conversations that were reset
    _engine: Engine | None = None
    _decoder: TokenDecoder | None = None
    _name: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def has_template(self) -> bool:
        return self.target.template_digest is not None

    def answer(self, text: str, is_stopped: Callable[[], bool]) -> Iterator[Piece]:
        """The answer as it comes, by tokens: text, and whether the token was drafted and accepted.
        `is_stopped` is called between rounds. Then `turns` has it."""
        from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder

        tokens = self._tokens(text)
        engine = self._ready(tokens)
        self._decoder = self._decoder or TokenDecoder.of(self.target)
        number = len(self.past) + len(self.turns)
        seed = (self.sampling.seed + number) % (1 << 63)
        request = _request(tokens, replace(self.sampling, seed=seed), self._name)
        stream = TextStream(self._decoder, self.sampling.stop)
        started = time.perf_counter()
        last: Emission | None = None
        said: list[str] = []
        engine.submit(number, request)
        while engine.is_busy:
            if is_stopped():
                engine.cancel(number)
                break
            for last in engine.step():
                for piece in _pieces(stream, last):
                    said.append(piece[0])
                    yield piece
        seconds = time.perf_counter() - started
        said.append(stream.end())
        turn = self._turn(text, "".join(said), request, last, seconds)
        yield said[-1], False
        self.turns.append(turn)

    def reset(self) -> None:
        """Begin anew: nothing said before is read, or remembered by the drafter."""
        self.past += self.turns
        self.turns = []
        self._name = secrets.token_hex(16)

    def stats(self) -> Stats:
        """Of everything that was answered, also before a reset."""
        from specctl.runtime.generate import summarize
        from specctl.runtime.verify.choice import verification_of

        turns, engine = [*self.past, *self.turns], self._engine
        assert engine is not None, "nothing was answered yet"
        sampled = self.sampling.temperature > 0
        drafter, policy = self.draft.drafter, engine.policy
        mark = verification_of(engine.rule, drafter, policy, sampled, engine.target)
        seconds = sum(turn.seconds for turn in turns)
        done = [turn.completion for turn in turns]
        return summarize(done, engine, seconds, f"{mark['class']}:{mark['rule']}")

    def record(self) -> dict[str, Any]:
        """The conversation as a record of training data."""
        return {"messages": self._messages()} if self.has_template else {"text": self._text()}

    def _messages(self) -> list[dict[str, str]]:
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.answer})
        return found

    def _text(self) -> str:
        return "\n".join(turn.user + turn.answer for turn in self.turns)

    def _tokens(self, text: str) -> list[int]:
        from specctl.runtime.target.text.prompt_limits import check_room

        check_room(self.target, text.strip())
        if self.has_template:
            return self.target.encode_chat([*self._messages(), {"role": "user", "content": text}])
        before = self._text()
        return self.target.encode(f"{before}\n{text}" if before else text)

    def _ready(self, tokens: list[int]) -> Engine:
        """The engine, with room for this turn; drafting is fitted to measured prices at first."""
        from specctl.runtime.engine.engine import Engine
        from specctl.runtime.engine.prefill import CHUNK
        from specctl.runtime.generate import check_greedy
        from specctl.runtime.measure.cost import equip

        if self._engine is None:
            check_greedy(self.draft.rule, self.sampling)
            sampled = self.sampling.temperature > 0
            costs = self.draft.costs(self.target, [tokens], sampled=sampled)
            chosen = equip(self.draft.policy, costs)
            self._engine = Engine(
                self.target,
                self.draft.drafter,
                chosen.policy,
                self.draft.rule,
                chooser=chosen.chooser,
                prefill_chunk=CHUNK,  # a long prompt can be stopped, too
            )
        wanted, room = len(tokens) + self.sampling.max_new_tokens, LEAST_ROOM
        while room < wanted:
            room *= 2
        self._engine.open(min(room, self._engine.context))
        return self._engine

    def _turn(
        self, text: str, answer: str, request: Any, last: Emission | None, seconds: float
    ) -> ChatTurn:
        from specctl.runtime.engine.request import Completion
        from specctl.runtime.measure.stats import RowStats

        new = () if last is None else tuple(last.row.tokens[last.row.prompt_len :])
        stats = RowStats() if last is None else last.row.stats
        reason = "stopped" if last is None else last.row.finished or "stopped"
        reused = 0 if last is None else last.row.reused_len
        return ChatTurn(text, answer, Completion(request, new, reason, stats), seconds, reused)


def _request(tokens: list[int], sampling: Sampling, conversation: str) -> Any:
    from specctl.runtime.engine.request import Request

    return Request(tuple(tokens), sampling, conversation)


def _pieces(stream: TextStream, emission: Emission) -> Iterator[Piece]:
    for place, token in enumerate(emission.tokens):
        text = stream.add(token)
        if text:
            yield text, place < emission.num_accepted
