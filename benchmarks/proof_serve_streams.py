"""A stream is the answer in pieces, and a client that leaves takes nothing with it.

Texts of many scripts (emoji of several code points, CJK, right to left, U+2028, characters split
over tokens, byte-fallback tokens) come back from a service that echoes its prompt, and answers of
the embedded target come streamed and whole: the same text, the same counts, [DONE] once, no
replacement character that is not in the text. Then clients leave at random moments, from the
connection to the last event: within a second nobody is served, nobody waits, no file is open that
was not before, and the next answer is what it would have been.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof_common import Check, checked, parser, report
from serve_common import CHAT, SETTLE_SECONDS, TEXT, Server, serve_process, stub_server, until
from serve_leave import MOMENTS, leave
from serve_wire import Heard, heard, request_bytes

from specctl.runtime.target.target import Target
from specctl.runtime.target.text.text_stream import TextStream, TokenDecoder
from specctl.server.engine_thread.contract import GenerateRequest, Piece
from specctl_testing.runtime.byte_fallback import byte_fallback_tokenizer
from specctl_testing.runtime.serving import StubService, stub_target, target_around

SCRIPTS = (
    "def f(x):\n    return x\n", "caf\u00e9 na\u00efve \u1e9b\u0323 e\u0301\u0323\u0301",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f1eb\U0001f1f7",
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f\U0001f44d\U0001f3fd",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e\u306e\u6587",
    "\ud55c\uad6d\uc5b4 \U00020bb7", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627\u200f \u202b1 + 2\u202c",
    "\u2028", "\u2029", "\x85", "\r\n", "\r", "\x00", "\x1b[2J", "\ufeff", "data: [DONE]\n\n",
    "\\u2028 \\n \"quoted\" </script>", "\U0010ffff\ufdd0\uffff", "\ufffd", "  ", "\t",
)  # fmt: skip
ROUNDING = 1e-3  # of log-probabilities: the last bits of float32 depend on the batch


class EchoService(StubService):
    """Answers every ask with its own prompt, as the engine would hand it out."""

    def _pieces(self, ask: GenerateRequest) -> list[Piece]:
        rng = random.Random(len(ask.tokens) + ask.sampling.seed)
        stream, pieces, rest = TextStream(TokenDecoder.of(self.target)), [], list(ask.tokens)
        while rest:
            size = rng.randint(1, 5)
            part, rest = rest[:size], rest[size:]
            spans = [stream.add(token) for token in part]
            if not rest:
                spans[-1] += stream.end()
            accepted = tuple(i < len(part) - 1 for i in range(len(part)))
            reason = None if rest else "length"
            text = "".join(spans)
            pieces.append(Piece(tuple(part), accepted, text, tuple(spans), None, reason))
        return pieces


def fallback_target() -> Target:
    """A target whose tokenizer spells in bytes what it does not know."""
    return target_around(byte_fallback_tokenizer())


# -- streams ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt; `text` is what must come back, None if only the two answers are compared."""

    path: str
    body: dict[str, Any]
    text: str | None = None


def echo_cases(rng: random.Random, target: Target, count: int) -> list[Case]:
    """Mixed texts, and what the tokenizer makes of them."""
    cases = []
    for _ in range(count):
        text = "".join(rng.choices(SCRIPTS, k=rng.randint(1, 8)))
        body = {
            "prompt": text,
            "max_tokens": 400,
            "n": rng.randint(1, 2),
            "seed": rng.randrange(99),
        }
        cases.append(Case(TEXT, body, target.decode(target.encode(text))))
    return cases


def real_cases(rng: random.Random, count: int) -> list[Case]:
    """Mixed texts to continue, half of them in a chat."""
    cases = []
    for _ in range(count):
        text = "".join(rng.choices(SCRIPTS, k=rng.randint(1, 8)))
        drawn = {"temperature": rng.choice((0.0, 1.0, 1.5)), "seed": rng.randrange(1 << 40)}
        body = {**drawn, "max_tokens": rng.randint(1, 32), "n": rng.choice((1, 1, 2))}
        if rng.random() < 0.5:
            body |= {"messages": [{"role": "user", "content": text}], "logprobs": True}
        else:
            body |= {"prompt": text}
        cases.append(Case(CHAT if "messages" in body else TEXT, body))
    return cases


def prove_streams(
    server: Server, what: str, cases: Sequence[Case], at_once: int = 4
) -> list[Check]:
    """Every case streamed and whole."""

    async def run() -> list[str | None]:
        turn = asyncio.Semaphore(at_once)

        async def one(case: Case) -> str | None:
            async with turn:
                return await _stream_fault(server, case)

        return list(await asyncio.gather(*map(one, cases)))

    return [checked(f"stream and whole answer agree: {what}", asyncio.run(run()), len(cases))]


async def _stream_fault(server: Server, case: Case) -> str | None:
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "specctl": True}
    whole = await heard(server.url, request_bytes(case.path, case.body))
    sent = await heard(server.url, request_bytes(case.path, {**case.body, **streamed}))
    for one in (whole, sent):
        if one.status != 200 or not one.is_whole:
            return f"{one.status} {one.body[:200]!r} for {case.body!r:.200}"
    fault = _difference(case, whole, sent)
    return None if fault is None else f"{fault} for {case.body!r:.300}"


def _difference(case: Case, whole: Heard, sent: Heard) -> str | None:
    """How the two answers differ from each other, or from what is expected."""
    *chunks, last = sent.events()
    if last != "[DONE]" or "[DONE]" in chunks or not sent.body.isascii():
        return f"the stream does not end as it should: {sent.body[-200:]!r}"
    told, usage = whole.json(), chunks.pop()["usage"]
    if usage != told["usage"]:
        return f"usage {usage}, whole {told['usage']}"
    for choice in told["choices"]:
        own = [c for c in chunks if c["choices"][0]["index"] == choice["index"]]
        text = "".join(_text(c["choices"][0], "delta") for c in own)
        spans = "".join(span for c in own for span in c["specctl"].get("spans", ()))
        wanted = _text(choice, "message")
        if not text == spans == wanted:
            return f"streamed {text!r}, spans {spans!r}, whole {wanted!r}"
        if case.text is not None and wanted != case.text:
            return f"{wanted!r} came back for {case.text!r}"
        reasons = [c["choices"][0]["finish_reason"] for c in own]
        if reasons != [None] * (len(own) - 1) + [choice["finish_reason"]] or not reasons[-1]:
            return f"finish reasons {reasons}, whole {choice['finish_reason']}"
        if choice.get("logprobs") and (found := _stray(choice, own)):
            return found
    return None


def _text(choice: dict[str, Any], field: str) -> str:
    return str(choice["text"] if "text" in choice else choice[field].get("content", ""))


def _stray(choice: dict[str, Any], own: Sequence[dict[str, Any]]) -> str | None:
    """Replacement characters that the bytes of the tokens do not account for."""
    drawn = [x for c in own for x in c["choices"][0]["logprobs"]["content"]]
    both = list(zip(drawn, choice["logprobs"]["content"], strict=True))
    if any(
        a["bytes"] != b["bytes"] or abs(a["logprob"] - b["logprob"]) > ROUNDING for a, b in both
    ):
        return f"the log-probabilities differ: {both!r:.300}"
    text = b"".join(bytes(x["bytes"]) for x in drawn).decode(errors="replace")
    found = _text(choice, "message")
    stray = found.count("\ufffd") - text.count("\ufffd")
    return f"{stray} stray replacement characters in {found!r}" if stray > 0 else None


# -- clients that leave -------------------------------------------------------------------------


def prove_leaving(server: Server, count: int, at_once: int, seed: int) -> list[Check]:
    """So many clients leave, `at_once` of them together; what they held is free in a second."""
    rng = random.Random(seed)
    greedy = {"prompt": "def f(", "max_tokens": 16, "temperature": 0}
    before, files = server.hear(TEXT, greedy).json()["choices"], server.size().files
    settled: list[str | None] = []
    slowest, left = 0.0, 0
    while left < count:
        moments = [MOMENTS[(left + i) % len(MOMENTS)] for i in range(min(at_once, count - left))]
        asyncio.run(_leave_all(server, moments, rng))
        left += len(moments)
        seconds = until(server.is_idle, SETTLE_SECONDS)
        settled += [None if seconds is not None else "not free after a second"] * len(moments)
        slowest = max(slowest, seconds or SETTLE_SECONDS)
    same = None if server.hear(TEXT, greedy).json()["choices"] == before else "another answer"
    is_same = until(lambda: server.size().files <= files, 5.0) is not None
    kept = None if is_same else f"{server.size().files} files open, {files} before"
    return [
        checked(f"clients that left, all free after {slowest:.2f} s", settled, count),
        checked("the answer afterwards is that of before", [same]),
        checked("open files are those of before", [kept]),
    ]


async def _leave_all(server: Server, moments: Sequence[str], rng: random.Random) -> None:
    await asyncio.gather(*(leave(server.url, moment, rng) for moment in moments))


def prove(given: Any) -> list[Check]:
    """Everything, at the sizes of the options."""
    rng, checks = random.Random(given.seed), []
    targets = {"byte-level tokens": stub_target(), "byte-fallback tokens": fallback_target()}
    for what, target in targets.items():
        with stub_server(EchoService(target=target)) as server:
            checks += prove_streams(server, what, echo_cases(rng, target, given.prompts // 2))
    flags = ("--draft", "prompt-lookup", "--max-batch", "4", "--set", "limits.max_queue=256")
    with tempfile.TemporaryDirectory() as folder, serve_process(Path(folder), *flags) as server:
        checks += prove_streams(server, "the embedded target", real_cases(rng, given.real))
        checks += prove_leaving(server, given.aborts, given.at_once, given.seed)
    return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=2_000, help="texts that are echoed")
    options.add_argument("--real", type=int, default=2_000, help="texts that are continued")
    options.add_argument("--aborts", type=int, default=1_000, help="clients that leave")
    options.add_argument("--at-once", type=int, default=20, help="clients that leave together")
    given = options.parse_args()
    report(prove(given), given.json)


if __name__ == "__main__":
    main()
