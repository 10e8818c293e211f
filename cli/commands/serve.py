"""`specctl serve`: a target behind an OpenAI-compatible HTTP API, its answers drafted ahead."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.commands.serving import (
    AccessFlags,
    LimitFlags,
    check_batching,
    make_batching,
    priced,
)
from specctl.cli.options.flags import Compile
from specctl.cli.options.generation_config import GenerationConfigFlag, check_choice, followed, tell
from specctl.cli.options.loading import NO_DRAFTER, DraftChoice
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import SpecctlError
from specctl.core.installed import pip_install

if TYPE_CHECKING:
    from specctl.api.drafting import LoadedDraft
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.server.limits import Limits
    from specctl.runtime.server.service import Service
    from specctl.runtime.target.target import Target

RULE = "target-only"  # seeded answers do not depend on who else is served
EXTRA = ("fastapi", "uvicorn", "prometheus_client")


def serve(
    console: Console,
    draft: DraftChoice,
    access: AccessFlags,
    limit: LimitFlags,
    target: TargetChoice = OWN_TARGET,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; else --target.")
    ] = None,
    batching: Annotated[
        str,
        typer.Option(
            help="How long each row of a batch drafts: auto, goodput, tetris, table, fixed, bass.",
        ),
    ] = "auto",
    record: Annotated[
        Path | None,
        typer.Option(help="Append prompts and answers to this JSONL, for distill and adapt."),
    ] = None,
    generation_config: GenerationConfigFlag = None,
    compiled: Compile = False,
) -> None:
    """Serve a target to many users at once. With a drafter the answers are the same, only sooner.

    The API is OpenAI's (/v1/chat/completions, /v1/completions, /v1/models), / is a page to try it,
    /metrics is for Prometheus, /health and /ready for whoever watches. SIGTERM or Ctrl-C lets
    running answers finish first; a second one does not. Logs go to stderr as JSON, without prompts.

    Examples:

      specctl serve --draft prompt-lookup
      specctl serve --target qwen3-8b --draft runs/eagle3/package --max-batch 16 --port 0
      specctl serve --host 0.0.0.0 --api-key-file keys.txt --record traffic.jsonl
    """
    _check_extra()
    check_batching(batching, draft.draft != NO_DRAFTER)
    check_choice(generation_config)
    from specctl.runtime.server.listen import Listener, bind, url_of
    from specctl.runtime.server.logs import log, send_logs
    from specctl.runtime.server.record import Recorder

    door, limits = access.door(console), limit.limits()
    target = target.or_own(draft.draft)
    socket = bind(access.host, access.port)
    url, called = url_of(socket), name or target.name
    recorder = Recorder(record) if record is not None else None
    model = target.load(console, compiled)
    defaults = _defaults(console, model, generation_config)
    loaded = draft.load(model)
    loaded.announce(console)
    service, verification = _service(console, model, loaded, batching, limits)
    from specctl.runtime.server.app import create_app

    app = create_app(
        service,
        called,
        door=door,
        recorder=recorder,
        verification=verification,
        defaults=defaults,
    )
    send_logs(console.stderr, logging.WARNING if console.quiet else logging.INFO)

    def ready() -> None:
        about = {"url": url, "port": socket.getsockname()[1], "model": called}
        about |= _serving_json(service, loaded)
        console.event({"event": "ready", **about})
        if console.stderr.isatty():
            console.say(f"serving {called} at {url}  (API {url}/v1, page {url}/, Ctrl-C ends)")
            console.say(_serving_line(service, loaded))
        else:
            log("ready", **about)

    code = asyncio.run(Listener(app, service, socket, limits.drain).run(ready))
    if recorder is not None:
        recorder.close()
    where = f"--target {target.name}"
    where += f" --draft {draft.draft}" if draft.draft != NO_DRAFTER else ""
    nexts = [f"specctl bench {where}"]
    if record is not None:
        nexts.insert(0, f"specctl distill --target {target.name} --data {record}")
    result = {"url": url, "model": called, "was_cut": code != 0, **_totals(service)}
    console.done(result, next=nexts, ok=code == 0)
    raise typer.Exit(code)


def _defaults(console: Console, target: Target, choice: str | None) -> Sampling:
    """How a request is sampled that does not say it."""
    from specctl.runtime.sampling.generation_config import SETTINGS
    from specctl.runtime.server.generate_request import DEFAULTS

    suggested, used = followed(console, target, choice), DEFAULTS
    if suggested is not None:
        filled = suggested.fill(dict.fromkeys(SETTINGS))
        heat = filled.pop("temperature")
        used = replace(used, **filled, temperature=used.temperature if heat is None else heat)
    tell(console, target, choice, [used], ", where a request does not say it")
    return used


def _check_extra() -> None:
    missing = [package for package in EXTRA if importlib.util.find_spec(package) is None]
    if missing:
        raise SpecctlError(
            "the server needs packages that are not installed",
            where="this Python environment",
            found="no " + ", ".join(missing),
            expected=", ".join(EXTRA),
            do=pip_install("serve"),
        )


def _service(
    console: Console, target: Target, draft: LoadedDraft, batching: str, limits: Limits
) -> tuple[Service, str]:
    """The service, and what kind of verification its answers have."""
    from specctl.runtime.server.logs import log
    from specctl.runtime.server.service import Service
    from specctl.runtime.verify.choice import verification_of

    def say(text: str) -> None:
        log("engine", logging.WARNING, message=text)
        console.warnings.append(text)

    if draft.parallel:
        console.warn("drafting in parallel is left out: it serves one prompt at a time")
    rule = RULE if draft.rule == "auto" else draft.rule
    if rule != RULE and draft.drafter is not None:
        console.warn(f"with rule {rule}, an answer to a seed depends on what is drafted for it")
    draft = priced(target, draft)
    chosen = make_batching(console, batching, target, draft, limits.max_batch)
    service = Service(
        target,
        draft.drafter,
        draft.policy,
        rule,
        batching=chosen,
        limits=limits,
        say=say,
        why_off="no drafter was given" if draft.drafter is None else None,
    )
    mark = verification_of(rule, draft.drafter, service.policy, sampled=True)
    return service, str(mark["class"])


def _serving_json(service: Service, draft: LoadedDraft) -> dict[str, Any]:
    now = service.status()
    room = {"slots": now.slots, "context": now.context, "cache_bytes": _reserved(service)}
    return {"draft": draft.name, **room, "speculation": now.speculation}


def _reserved(service: Service) -> int:
    return service.room.slots * service.room.slot_bytes


def _serving_line(service: Service, draft: LoadedDraft) -> str:
    now = service.status()
    drafts = "plain decoding, nothing is drafted (--draft auto drafts without training)"
    if draft.drafter is not None and draft.policy is not None:
        drafts = f"{draft.name} drafts up to {draft.policy.depth} tokens ahead"
    size = f"{_reserved(service) / (1 << 20):,.0f} MiB of caches"
    return f"{drafts}; {now.slots} rows of {now.context:,} tokens at once, {size} reserved"


def _totals(service: Service) -> dict[str, Any]:
    """What was served."""
    found = service.counters
    return {
        "requests": dict(found.requests),
        "tokens": found.tokens,
        "drafted": found.drafted,
        "accepted": found.accepted,
        "tau": round(found.tokens / found.rounds, 4) if found.rounds else None,
    }
