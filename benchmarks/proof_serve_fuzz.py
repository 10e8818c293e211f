"""Whatever comes in, the server stays up and says what is wrong.

Schemathesis makes requests from the server's own schema, valid and invalid, zero bytes and halves
of surrogate pairs among them: no answer is 5xx, none takes longer than five seconds, every refusal
has its route's error shape, and nothing that breaks the schema is taken. Bytes that are no proper
HTTP or JSON follow on raw sockets (`serve_inputs.py`): the process lives and its memory stays.
Prompts of one token to four times the context are read whole or refused with both counts.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import schemathesis
from proof_common import Check, checked, parser, report
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import from_schema
from schemathesis.engine.events import EngineEvent, NonFatalError, ScenarioFinished
from serve_common import NAME, Server, serve_process, stub_server
from serve_inputs import INPUTS, drip
from serve_prompts import prompt_cases, prompt_fault
from serve_wire import error_fault, heard

from specctl.server.requests.limits import Limits
from specctl_testing.runtime.serving import StubService

HANG_SECONDS = 5.0
MEMORY_GROWTH = 50 << 20
WARM = 1_000  # inputs before memory is measured: at 200 a server may still have 72 MiB to take
FUZZED_TOKENS = 4  # of an answer: requests of the schema ask for as many as they may
TOO_LARGE = "413"  # says no as well: a string of one character too many fills the largest body
# Not asked for: `positive_data_acceptance`, for what the schema cannot say (logprobs that need a
# flag, a prompt that does not fit the context) is refused by words.
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method",
)  # fmt: skip


# -- requests from the schema -------------------------------------------------------------------


def prove_schema(server: Server, cases: int, phases: tuple[str, ...], seed: int) -> list[Check]:
    """At least so many cases over all operations."""
    failures: list[str | None] = []
    by_status: Counter[str] = Counter()
    raw = server.count("/openapi.json")
    _name_the_model(raw)
    per_operation = max(cases // 3, 1)  # three operations take anything
    while len(failures) < cases:
        for event in _events(server, raw, per_operation, phases, seed):
            failures += _faults_of(event, by_status)
        phases, seed = ("fuzzing",), seed + 1
        per_operation = max((cases - len(failures)) // 3, 50)
    told = ", ".join(f"{count} x {status}" for status, count in sorted(by_status.items()))
    ok = sum(count for status, count in by_status.items() if status.startswith("POST 200"))
    return [
        checked(f"requests of the schema: {told}", failures, cases),
        Check("requests of the schema that were answered with a text", ok, 0, cases // 100),
    ]


def _name_the_model(raw: dict[str, Any]) -> None:
    """A client knows what the model is called; a guess never gets past its name."""
    for name in ("CompletionRequest", "ChatRequest"):
        fields = raw["components"]["schemas"][name]["properties"]
        fields["model"] = {"enum": [NAME, None]}


def _events(
    server: Server, raw: dict[str, Any], examples: int, phases: tuple[str, ...], seed: int
) -> Iterator[EngineEvent]:
    """What schemathesis does: everything allowed, and on after every failure."""
    config = SchemathesisConfig(seed=seed)
    schema = schemathesis.openapi.from_dict(raw, config=config)
    schema.config.update(base_url=server.url, continue_on_failure=True, request_timeout=20)
    schema.config.phases.update(phases=list(phases))
    schema.config.checks.update(included_check_names=list(CHECKS))
    rejection = schema.config.checks.negative_data_rejection
    rejection.expected_statuses = [*rejection.expected_statuses, TOO_LARGE]
    schema.config.generation.update(max_examples=examples, no_shrink=True, allow_x00=True)
    schema.config.generation.codec = None  # halves of surrogate pairs, too
    return iter(from_schema(schema).execute())


def _faults_of(event: EngineEvent, by_status: Counter[str]) -> list[str | None]:
    """One entry per request that was sent."""
    if isinstance(event, NonFatalError):
        return [f"{event.label}: {event.value!r}"[:300]]
    if not isinstance(event, ScenarioFinished):
        return []
    found: list[str | None] = []
    for name, sent in event.recorder.interactions.items():
        where = f"{sent.request.method} {sent.request.uri[:80]}"
        if sent.response is None:
            found.append(f"{where}: no answer")
            continue
        by_status[f"{sent.request.method} {sent.response.status_code}"] += 1
        failed = [c for c in event.recorder.checks.get(name, ()) if c.failure_info is not None]
        wrong = [f"{c.name}: {c.failure_info.failure.message}" for c in failed if c.failure_info]
        if sent.response.elapsed > HANG_SECONDS:
            wrong.append(f"took {sent.response.elapsed:.1f} s")
        if sent.response.status_code >= 400 and sent.request.method != "HEAD":
            shape = error_fault(sent.response.content or b"", urlsplit(sent.request.uri).path)
            wrong += [] if shape is None else [shape]
        told = f"{where}: {'; '.join(wrong)[:300]} {event.recorder.cases[name].value.body!r:.300}"
        found.append(told if wrong else None)
    return found


# -- raw bytes ----------------------------------------------------------------------------------


def prove_bytes(
    server: Server, count: int, slow: int, seed: int, growth: int = MEMORY_GROWTH
) -> list[Check]:
    """So many inputs of every kind in turn, with `slow` clients that dribble beside them."""
    rng, failures, before = random.Random(seed), [], None

    async def run() -> list[str | None]:
        nonlocal before
        slow_ones = [asyncio.create_task(drip(server.url, i)) for i in range(slow)]
        for at in range(count):
            if at == min(WARM, count // 2):
                before = server.size().memory
            kind = INPUTS[at % len(INPUTS)]
            failures.append(await _one_input(server, kind, rng))
            await asyncio.sleep(0)
        return list(await asyncio.gather(*slow_ones))

    slow_faults = asyncio.run(run())
    grown = server.size().memory - (before or 0)
    alive = None if server.hear("/health").status == 200 else "the server is gone"
    fault = f"memory grew by {grown >> 20} MiB" if grown > growth else alive
    return [
        checked(f"raw inputs of {len(INPUTS)} kinds", failures, count),
        checked("dribbling clients hung up on", slow_faults, slow),
        checked(f"alive after them, memory {grown / (1 << 20):+.1f} MiB", [fault]),
    ]


async def _one_input(server: Server, kind: Any, rng: random.Random) -> str | None:
    """What is wrong with the answer to an input of that kind."""
    data = kind.make(rng)
    found = await heard(server.url, data, seconds=2 * HANG_SECONDS, is_ended=kind.is_ended)
    if found.status == 0:
        ok = kind.may_be_silent and found.seconds < HANG_SECONDS
        return None if ok else f"{kind.name}: no answer in {found.seconds:.1f} s"
    if found.seconds > HANG_SECONDS:
        return f"{kind.name}: took {found.seconds:.1f} s"
    if kind.statuses and found.status not in kind.statuses:
        return f"{kind.name}: {found.status} {found.body[:200]!r}"
    if data.startswith(b"HEAD ") and found.is_whole and found.status < 500:
        return None  # a head and nothing else, as it should be
    fault = found.fault()
    return None if fault is None else f"{kind.name}: {fault}"


# -- prompts of every length --------------------------------------------------------------------


def prove_prompts(server: Server, count: int, seed: int) -> list[Check]:
    """So many prompts from one token to four times the context, and stops across drafts."""
    rng = random.Random(seed)
    context = server.count("/v1/status")["context"]
    failures = [prompt_fault(server, case) for case in prompt_cases(rng, context, count)]
    return [checked("prompts of every length, stop strings anywhere", failures, count)]


def _server(folder: Path, tokens: int) -> AbstractContextManager[Server]:
    """The embedded target with a drafter; no answer has more than so many tokens."""
    limits = ("--set", "limits.max_queue=256", "--set", f"limits.max_new_tokens={tokens}")
    return serve_process(folder, "--draft", "prompt-lookup", *limits)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=20_000, help="requests of the schema")
    options.add_argument("--inputs", type=int, default=5_000, help="raw inputs")
    options.add_argument("--slow", type=int, default=50, help="dribbling clients")
    options.add_argument("--prompts", type=int, default=300, help="giant prompts and stops")
    options.add_argument("--stub", action="store_true", help="the schema on a stub of the engine")
    given = options.parse_args()
    phases, checks = ("examples", "coverage", "fuzzing"), []
    with tempfile.TemporaryDirectory() as folder, _server(Path(folder), tokens=64) as server:
        if given.inputs:
            checks += prove_bytes(server, given.inputs, given.slow, given.seed)
        if given.prompts:
            checks += prove_prompts(server, given.prompts, given.seed)
    if given.cases:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
            server = held.enter_context(
                stub_server(StubService(limits=Limits(max_queue=256)))
                if given.stub
                else _server(Path(folder), tokens=FUZZED_TOKENS)
            )
            checks += prove_schema(server, given.cases, phases, given.seed)
    report(checks, given.json)


if __name__ == "__main__":
    main()
