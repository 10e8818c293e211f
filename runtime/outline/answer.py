"""One answer with an outline: which requests it takes, in which order. No engine is run here.

Budget: of `max_new_tokens` the outline may take half, and what it leaves is shared by the points: a
wave's points have equal parts of what the points not yet written may have together. An answer
without an outline is the plain one with its whole budget; its tokens come on top.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specctl.core.errors import RecipeError, unknown
from specctl.runtime.outline.parse import (
    HARDEST,
    LEAST,
    Outline,
    OutlinePoint,
    is_over,
    read_outline,
)
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

SKELETON, GRAPH = "skeleton", "skeleton-graph"
KINDS = (SKELETON, GRAPH)
MOST_POINTS, USUAL_POINTS, USUALLY_HARD = 32, 8, 3
TOKENS_A_POINT = 24  # of an outline
LEAST_TOKENS = 16  # of an outline: with fewer, none is written
FIRST = "1."  # the outline is begun for the target, so that it is a list
BETWEEN = "\n\n"
WHOLE = 0  # the number of what is no point
Turn = Mapping[str, Any]
Encode = Callable[[Sequence[Turn], str], tuple[Sequence[int], Sequence[int]]]

_OUTLINE = (
    "Do not answer yet. First write the outline of the answer: a numbered list of 3 to {most} "
    "points, one a line, each of 3 to 6 words, and nothing else."
)
_GRAPH_OUTLINE = (
    "Do not answer yet. First write the outline of the answer: a numbered list of 3 to {most} "
    "points, one a line, each of 3 to 6 words. Behind each point write which earlier points one "
    "must have read to write it, and how hard it is to write, from 1 to 5. For example:\n"
    "1. What the word means (needs: none; difficulty: 1)\n"
    "2. Where it comes from (needs: none; difficulty: 2)\n"
    "3. How its meaning changed (needs: 1, 2; difficulty: 4)\n"
    "Write nothing else."
)
_EXPANDING = (
    "Write one part of the answer. The outline of the whole answer is:\n{outline}\n\n"
    "{written}Write point {number} and nothing else, in one to three sentences."
)
_WRITTEN = "What is written so far:\n\n{written}\n\n"


@dataclass(frozen=True, slots=True)
class Outlining:
    """How answers are written: `skeleton` or `skeleton-graph`, of at most `points` points; with
    fewer than two every answer is the plain one. `small`: a smaller model of the same tokens, which
    writes the points of a graph whose declared difficulty is below `hard`."""

    kind: str
    points: int = USUAL_POINTS
    small: Target | None = None
    hard: int = USUALLY_HARD

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("way to write from an outline", self.kind, KINDS, "outline.kind")
        is_count = isinstance(self.points, int) and not isinstance(self.points, bool)
        if not is_count or not 1 <= self.points <= MOST_POINTS:
            raise RecipeError(
                "an outline has another number of points",
                where="outline.points",
                found=repr(self.points)[:40],
                expected=f"1 to {MOST_POINTS}",
                do="--set outline.points=8",
            )
        if self.hard not in range(1, HARDEST + 2):
            raise RecipeError(
                "the points of an outline have another difficulty",
                where="outline.hard",
                found=repr(self.hard)[:40],
                expected=f"1 (none is easy) to {HARDEST + 1} (all are)",
                do=f"--set outline.hard={USUALLY_HARD}",
            )
        if self.small is not None and not self.is_graph:
            raise RecipeError(
                "only the outlines of skeleton-graph say how hard their points are",
                where="outline.small",
                found=f"{self.small.name} beside outline.kind={self.kind}",
                expected=f"outline.kind={GRAPH}",
                do=f"--set outline.kind={GRAPH}, or leave outline.small out",
            )

    @property
    def is_graph(self) -> bool:
        return self.kind == GRAPH

    def is_for_small(self, point: OutlinePoint) -> bool:
        """Whether the smaller model writes that point."""
        is_easy = point.difficulty is not None and point.difficulty < self.hard
        return self.small is not None and is_easy

    def marked(self, verification: str) -> str:
        """The mark of results, from that of the rows: what makes those other than the target's is
        named, too."""
        mark = f"approximate:{self.kind}"
        is_own = verification.partition(":")[0] == "lossless"
        return mark if is_own else f"{mark} of {verification}"


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A request that an answer takes: `number` is that of a point, or WHOLE; the last `num_begun`
    of its `tokens` are of the text that it goes on from."""

    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    num_begun: int = 0

    @property
    def begun(self) -> tuple[int, ...]:
        return self.tokens[len(self.tokens) - self.num_begun :]


@dataclass(frozen=True, slots=True)
class OutlineReport:
    """How an answer was written. `titles` of its points, none for a plain answer; `waves` of points
    that were written at once; `tokens` that were generated for it, `outline_tokens` of them for the
    outline; `why_plain`: why there was none; `why_sequential`: why each point waited for all in
    front of it; `small`: the points that a smaller model wrote."""

    titles: tuple[str, ...]
    waves: tuple[tuple[int, ...], ...]
    outline_tokens: int
    tokens: int
    why_plain: str | None
    why_sequential: str | None
    small: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "points": len(self.titles),
            "titles": list(self.titles),
            "waves": [list(wave) for wave in self.waves],
            "outline_tokens": self.outline_tokens,
            "tokens": self.tokens,
            "why_plain": self.why_plain,
            "why_sequential": self.why_sequential,
            **({"small": list(self.small)} if self.small else {}),
        }


class OutlinedAnswer:
    """The answer to one conversation. `plain`: its token ids; `encode(turns, begun)`: token ids of
    turns up to where the assistant speaks next, and those of what its turn begins with; `context`:
    the most tokens of a prompt and what is written behind it. One writer: whoever carries the parts
    out.

    First `outline_part`, whose text goes to `add_outline`, and `take_outline`; then, with an
    `outline`, the `parts` of every wave, each of whose texts goes to `take_point`; without one,
    `plain_part`.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        plain: Sequence[int],
        sampling: Sampling,
        how: Outlining,
        encode: Encode,
        context: int,
    ) -> None:
        self.turns, self.plain, self.sampling, self.how = turns, tuple(plain), sampling, how
        self.outline: Outline | None = None
        self.why_plain: str | None = None
        self.num_tokens = self.outline_tokens = 0
        self._encode, self._context = encode, context
        self._listed = FIRST
        self._texts: dict[int, str] = {}
        self._reasons: set[str] = set()

    def outline_part(self) -> AnswerPart | None:
        """The request for the outline; None where there can be none."""
        most = self.how.points
        limit = min(self.sampling.max_new_tokens // 2, TOKENS_A_POINT * most)
        if most < LEAST:
            self.why_plain = "at most one point was wanted"
        elif limit < LEAST_TOKENS:
            self.why_plain = f"an outline of {limit} tokens, half of the limit, is too short"
        if self.why_plain is not None:
            return None
        sampling = replace(
            self.sampling,
            max_new_tokens=limit,
            stop=(f"\n{most + 1}.",),
            stop_token_ids=(),
            ignore_eos=False,
            seed=self._seed(WHOLE),
        )
        part = self._opened(WHOLE, self._outlining, FIRST, sampling)
        if self._room(part) < LEAST_TOKENS:
            self.why_plain = "the context has no room for an outline"
            return None
        return part

    def add_outline(self, spans: Sequence[str]) -> bool:
        """The text of the next tokens behind FIRST, token by token; whether the list has ended:
        tokens behind that are neither read nor counted, however many a round has."""
        for span in spans:
            if is_over(self._listed, self.how.points, self.how.is_graph):
                return True
            self._listed += span
            self.outline_tokens += 1
        return is_over(self._listed, self.how.points, self.how.is_graph)

    def take_outline(self, is_cut: bool) -> None:
        """The outline is written; `is_cut`: up to a limit."""
        how = self.how
        is_cut = is_cut and not is_over(self._listed, how.points, how.is_graph)
        self.num_tokens = self.outline_tokens
        self.outline = read_outline(self._listed, how.points, how.is_graph, is_cut)
        if self.outline is None:
            self.why_plain = "what the target wrote as an outline is no list of points"
        elif self._left < len(self.outline.points):
            self.outline, self.why_plain = None, "the limit leaves no tokens for some points"

    def plain_part(self) -> AnswerPart:
        """The request for the answer without an outline."""
        return AnswerPart(WHOLE, self.plain, self.sampling)

    def take_plain(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens

    def parts(self, wave: Sequence[int]) -> list[AnswerPart]:
        """The requests for the points of a wave; those that they need must be written. A point
        whose prompt fills the context has no request, and no text."""
        assert self.outline is not None, "there are points"
        share = self._left // (len(self.outline.points) - len(self._texts))
        parts = [self._part(self.outline.points[number - 1], share) for number in wave]
        for part in parts:
            if self._room(part) < 1:
                self.take_point(part.number, "", 0, "context")
        return [part for part in parts if self._room(part) >= 1]

    def take_point(self, number: int, text: str, num_tokens: int, reason: str) -> None:
        """The text of a point behind its heading, and why it ended: as the engine says, "eos" where
        it went on with the next point."""
        self._texts[number] = text
        self._reasons.add(reason)
        self.num_tokens += num_tokens

    def take_cancelled(self, num_tokens: int) -> None:
        """What was generated for a point that the answer ends in front of."""
        self.num_tokens += num_tokens

    def heading(self, point: OutlinePoint) -> str:
        """What stands in front of the text of a point in the answer."""
        return (BETWEEN if point.number > 1 else "") + point.heading

    def next_point(self, number: int) -> str:
        """The text by which a point shows that it goes on with the next."""
        return f"\n{number + 1}."

    @property
    def reason(self) -> str:
        """Why the answer ended: what cut one of its points comes first."""
        cuts = ("stop", "context", "length", "grammar")
        return next((reason for reason in cuts if reason in self._reasons), "eos")

    def report(self) -> OutlineReport:
        outline = self.outline
        about = self.outline_tokens, self.num_tokens, self.why_plain
        if outline is None:
            return OutlineReport((), (), *about, None)
        titles = tuple(point.title for point in outline.points)
        small = tuple(p.number for p in outline.points if self.how.is_for_small(p))
        return OutlineReport(titles, outline.waves, *about, outline.why_sequential, small)

    # -- what is read -----------------------------------------------------------------------------

    def _room(self, part: AnswerPart) -> int:
        return self._context - len(part.tokens)

    @property
    def _left(self) -> int:
        """Tokens of the budget that are not used."""
        return self.sampling.max_new_tokens - self.num_tokens

    @property
    def _outlining(self) -> list[Turn]:
        wanted = (_GRAPH_OUTLINE if self.how.is_graph else _OUTLINE).format(most=self.how.points)
        return with_request(self.turns, wanted)

    def _part(self, point: OutlinePoint, share: int) -> AnswerPart:
        """All points read the same up to the texts that they need and their number."""
        written = _WRITTEN.format(written=self._written(point.needs)) if point.needs else ""
        request = _EXPANDING.format(outline=self.outline, written=written, number=point.number)
        turns = with_request(self.turns, request)
        sampling = replace(
            self.sampling,
            max_new_tokens=share,
            stop=(*self.sampling.stop, self.next_point(point.number)),
            seed=self._seed(point.number),
        )
        return self._opened(point.number, turns, point.heading, sampling)

    def _opened(
        self, number: int, turns: Sequence[Turn], begun: str, sampling: Sampling
    ) -> AnswerPart:
        """The request for an assistant's turn that begins so."""
        said, opened = self._encode(turns, begun)
        return AnswerPart(number, (*said, *opened), sampling, len(opened))

    def _written(self, numbers: Sequence[int]) -> str:
        assert self.outline is not None, "there are points"
        points = [self.outline.points[number - 1] for number in numbers]
        return BETWEEN.join(point.heading + self._texts[point.number] for point in points)

    def _seed(self, number: int) -> int:
        """Random numbers of its own for every part."""
        words = f"{self.sampling.seed} {number}".encode()
        return int.from_bytes(hashlib.sha256(words).digest()[:8], "big") >> 1


def with_request(turns: Sequence[Turn], request: str) -> list[Turn]:
    """The conversation with a request at the end of the user's last turn, or in one of its own."""
    last = turns[-1]
    if last["role"] != "user":
        return [*turns, {"role": "user", "content": request}]
    said = str(last.get("content") or "")
    return [*turns[:-1], {**last, "content": f"{said}{BETWEEN}{request}"}]
