"""`specctl serve`: a target behind the APIs of OpenAI and Anthropic; answers are drafted ahead."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import command_line
from specctl.cli.app.settings import Setting
from specctl.cli.options.flags import Compile
from specctl.cli.options.keeping import begin_traffic, check_features, recorder_for
from specctl.cli.options.loading import NO_DRAFTER, DraftChoice
from specctl.cli.options.names import one_of
from specctl.cli.options.positional import Word
from specctl.cli.options.sampling import GenerationConfig, check_choice, followed, tell
from specctl.cli.options.serving import AccessFlags, LimitFlags, adapter_folders
from specctl.cli.options.target_choice import OWN_ANSWERING, AnsweringChoice, TargetChoice, loading
from specctl.core.errors import SpecctlError, unknown
from specctl.core.messages.installed import pip_install
from specctl.core.messages.sizes import size_text
from specctl.core.plugins import declared
from specctl.core.storage.traffic_files import has_records
from specctl.recipes.published import path_named

if TYPE_CHECKING:
    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.runtime.batching import BatchCosts, Batching
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target
    from specctl.server.drafter_route import Shelf
    from specctl.server.engine_thread.exchange import Drafting
    from specctl.server.engine_thread.service import Service
    from specctl.server.requests.limits import Limits

RULE = "target-only"  # seeded answers do not depend on who else is served
EXTRA = ("fastapi", "uvicorn", "prometheus_client")
_KNOWN = declared("specctl.runtime.batching", "BATCHING")
BATCHINGS = ("auto", *_KNOWN)
TOOL_PARSERS = tuple(declared("specctl.server.tools", "TOOL_FORMAT"))
MEASURED = [name for name, entry in _KNOWN.items() if entry.values.get("reads_costs")]
SAMPLE = 'class Node:\n    """A value and what follows it."""\n\n    def __init__(self, value):\n'


def serve(
    console: Console,
    draft: DraftChoice,
    access: AccessFlags,
    limit: LimitFlags,
    target: AnsweringChoice = OWN_ANSWERING,
    drafter: Word = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model for clients; else --target.")
    ] = None,
    batching: Annotated[
        str,
        typer.Option(
            help="How many tokens each request drafts: " + ", ".join(BATCHINGS) + ".",
        ),
    ] = "auto",
    record: Annotated[
        Path | None,
        typer.Option(help="Append prompts and answers to this JSONL, for distill and adapt."),
    ] = None,
    keep_traffic: Annotated[
        Path | None,
        typer.Option(
            "--keep-traffic",
            metavar="DIR",
            help="Keep prompts and answers in this folder, for train-draft --follow; nothing of "
            "requests with store: false.",
        ),
    ] = None,
    keep_traffic_limit: Annotated[
        float | None,
        Setting(
            "limits.keep_traffic",
            "GB of traffic that are kept, 1 if left out; the oldest is deleted first.",
            was="--keep-traffic-limit",
            min=0.001,
        ),
    ] = None,
    keep_features: Annotated[
        bool,
        Setting(
            "traffic.features",
            "With --keep-traffic: keep the target's hidden states of these texts, too, which "
            "reveal the text; train-draft --follow then need not compute them.",
        ),
    ] = False,
    tool_parser: Annotated[
        str,
        Setting(
            "api.tool_parser",
            "How the target writes tool calls: auto (as its chat template shows), none, "
            + ", ".join(TOOL_PARSERS)
            + ".",
            was="--tool-parser",
            metavar="NAME",
            complete=one_of("auto", "none", *TOOL_PARSERS),
        ),
    ] = "auto",
    reasoning: Annotated[
        bool,
        Setting(
            "api.reasoning",
            "Return a thinking model's thoughts as reasoning_content.",
            was="--reasoning/--no-reasoning",
        ),
    ] = True,
    strict: Annotated[
        bool,
        Setting(
            "api.strict",
            "Answer 400 to a request with a field that is not known; else it is ignored, and named "
            "in the header X-Specctl-Ignored.",
            was="--strict",
        ),
    ] = False,
    images: Annotated[
        bool,
        Setting("api.images", "Read images in chats: a multimodal target with its vision."),
    ] = False,
    adapters: Annotated[
        list[str] | None,
        Setting(
            "api.adapters",
            "LoRA adapters that a request chooses as its model, in peft's format (repeatable).",
            metavar="NAME=FOLDER",
        ),
    ] = None,
    generation_config: GenerationConfig = None,
    compiled: Compile = None,
) -> None:
    """Serve a target to many users at once. With a drafter the answers are the same, but faster.

    The API is OpenAI's (/v1/chat/completions, /v1/completions, /v1/models, and /v1/responses
    without storage) and Anthropic's (/v1/messages). / is a web page to try it, /docs lists every
    route and field, /metrics is for Prometheus, /health and /ready for monitoring.

    SIGTERM or Ctrl-C lets running answers finish; a second one ends them. Logs go to stderr,
    without prompts: short lines at a terminal, JSON elsewhere.

    Of several drafters a request may choose one: "draft": "prompt-lookup".

    Examples:

      specctl serve auto --target model.gguf
      specctl serve prompt-lookup+token-recycling
      specctl serve runs/eagle3 --target qwen3-8b --max-batch 16 --port 0
      specctl serve --host 0.0.0.0 --api-key-file keys.txt --record traffic.jsonl
    """
    _check_extra()
    draft = draft.worded(drafter)
    check_batching(batching, draft.draft != NO_DRAFTER)
    check_choice(generation_config)
    if tool_parser not in ("auto", "none", *TOOL_PARSERS):
        known = ("auto", "none", *TOOL_PARSERS)
        raise unknown("tool parser", tool_parser, known, "--set api.tool_parser")
    from specctl.server.listen import Listener, bind, url_of
    from specctl.server.loading import answering
    from specctl.server.logs import log, send_logs

    door, limits = access.door(console), limit.limits()
    target = target.or_own(draft.draft)
    socket = bind(access.host, access.port)
    url, called = url_of(socket), name or target.name
    chosen = adapter_folders(adapters or (), called)
    recorder = recorder_for(record, keep_traffic, keep_traffic_limit, keep_features)
    level = logging.WARNING if console.quiet else logging.INFO
    send_logs(console.stderr, level, as_json=not console.stderr.isatty())
    with answering(socket):
        _tell(console, loading(target))
        wanted = draft.wanted(draft.draft, may_be_parallel=False)
        model = target.load(console, compiled, wanted=wanted, images=images)
        if chosen:
            from specctl.runtime.target.variants.row_adapted import with_row_adapters

            model = with_row_adapters(model, chosen)
            _tell(console, f"requests choose among {called}, {', '.join(chosen)}")
        begin_traffic(recorder, model)
        defaults = _defaults(console, model, generation_config)
        loaded = draft.load(model)
        loaded.announce(console)
        if keep_features:
            check_features(model, loaded.drafter, loaded.name)
        loaded = replace(loaded, name=_name_in(access.drafter_folder, loaded.name))
        service, verification = _service(console, model, loaded, batching, limits, keep_features)
        del loaded  # an exchange frees its weights
        from specctl.server.app import create_app
        from specctl.server.requests.chat_template import ChatStyle

        app = create_app(
            service,
            called,
            door=door,
            recorder=recorder,
            verification=verification,
            defaults=defaults,
            style=ChatStyle.of(model, tool_parser, reasoning),
            is_strict=strict,
            shelf=_shelf(console, access.drafter_folder, draft, service, batching, verification),
        )

    def ready() -> None:
        about = {"url": url, "port": socket.getsockname()[1], "model": called}
        about |= {"adapters": list(chosen)} if chosen else {}
        about |= _serving_json(service)
        console.event({"event": "ready", **about})
        if console.stderr.isatty():
            console.say(f"serving {called} at {url}  (API {url}/v1, page {url}/, Ctrl-C ends)")
            console.say(_serving_line(service))
        else:
            log("ready", **about)

    code = asyncio.run(Listener(app, service, socket, limits.drain).run(ready))
    if recorder is not None:
        recorder.close()
    nexts = [command_line("bench", *target.words(), *draft.positional(), *draft.words())]
    if record is not None and record.is_file() and record.stat().st_size:
        nexts.insert(0, command_line("distill", *target.training_words(), "--data", record))
    if keep_traffic is not None and has_records(keep_traffic):
        newest = draft.draft
        if service.counters.exchanges and access.drafter_folder is not None:
            newest = str(access.drafter_folder / str(service.drafting.name))
        nexts.insert(0, _learning_line(keep_traffic, newest, target))
    result = {"url": url, "model": called, "was_cut": code != 0, **_totals(service)}
    console.done(result, next=nexts, ok=code == 0)
    raise typer.Exit(code)


def _learning_line(folder: Path, draft: str, target: TargetChoice) -> str:
    """The command that learns from kept traffic: the drafter goes on if it is a package, else one
    is trained."""
    from specctl.export.package.manifest import MANIFEST, package_in

    words, package = target.training_words(), path_named(draft)
    if not (package_in(package) / MANIFEST).is_file():
        return command_line("distill", *words, "--data", folder)
    run = package.parent if package.name == "package" else package
    out = next(name for k in count(2) if not (name := Path(f"{run}-{k}")).exists())
    return command_line("train-draft", *words, "--follow", folder, "--init", run, "--out", out)


def _tell(console: Console, text: str) -> None:
    """What is done before the server is ready; a line of the log where nobody sits."""
    from specctl.server.logs import log

    if console.jsonl or console.stderr.isatty():
        console.say(text)
    else:
        log("starting", message=text)


def _defaults(console: Console, target: Target, choice: str | None) -> Sampling:
    """How a request is sampled that does not say it."""
    from specctl.runtime.sampling.generation_config import SETTINGS
    from specctl.server.requests.generate_request import DEFAULTS

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
    console: Console,
    target: Target,
    draft: LoadedDraft,
    batching: str,
    limits: Limits,
    keeps_features: bool = False,
) -> tuple[Service, str]:
    """The service, and what kind of verification its answers have."""
    from specctl.runtime.engine.engine import Engine
    from specctl.runtime.verify.choice import verification_of
    from specctl.server.engine_thread.service import Service
    from specctl.server.logs import log

    def say(text: str) -> None:
        log("engine", logging.WARNING, message=text)
        console.warnings.append(text)

    if draft.parallel:
        console.warn("drafting in parallel is left out: it serves one prompt at a time")
    rule = RULE if draft.rule == "auto" else draft.rule
    if rule != RULE and draft.drafter is not None:
        console.warn(f"with rule {rule}, an answer to a seed depends on what is drafted for it")
    if draft.drafter is not None:  # refuses what does not go together; a service would not draft
        Engine(target, draft.drafter, draft.policy, rule)
    draft = priced(target, draft, lambda text: _tell(console, text))
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
        drafter_name=draft.name if draft.drafter is not None else None,
        keeps_features=keeps_features,
    )
    mark = verification_of(rule, draft.drafter, service.policy, True, target)
    return service, str(mark["class"])


def _name_in(folder: Path | None, name: str) -> str:
    """The name of a drafter in the folder of those that may be served, by which /v1/drafter takes
    it; of any other its own."""
    place = Path(name).expanduser()
    if folder is None or not place.is_dir():
        return name
    root, place = folder.resolve(), place.resolve()
    return place.relative_to(root).as_posix() if place.is_relative_to(root) else name


def _shelf(
    console: Console,
    folder: Path | None,
    flags: DraftChoice,
    service: Service,
    batching: str,
    verification: str,
) -> Shelf | None:
    """How a package of the folder is read for a server that runs: by the flags with which that was
    started, under its name in the folder."""
    if folder is None:
        return None
    target, rule, rows = service.target, service.rule, service.limits.max_batch
    given = {**flags.given(), "parallel": False}
    from specctl.api.arguments.drafting import load_draft
    from specctl.runtime.verify.choice import verification_of
    from specctl.server.drafter_route import Shelf
    from specctl.server.engine_thread.exchange import Drafting

    def load(path: Path) -> Callable[[], Drafting]:
        # A tokenizer of transformers may be used by one thread at a time.
        own = replace(target, tokenizer=copy.deepcopy(target.tokenizer))
        draft = load_draft(str(path), own, **given)
        draft = replace(draft, name=_name_in(folder, str(path)))
        assert draft.drafter is not None, "a folder is a drafter"
        assert draft.policy is not None, "a drafter has a policy"
        mark = verification_of(rule, draft.drafter, draft.policy, True, target)["class"]
        if mark != verification or draft.rule not in ("auto", rule):
            raise SpecctlError(
                "another drafter would change what answers are",
                found=f"{draft.name}: {mark}, rule {draft.rule}",
                expected=f"{verification}, rule auto or {rule}, as this server was started",
                do="start a server with it",
            )

        def prepare() -> Drafting:
            served = priced(own, draft, lambda text: _tell(console, text))
            assert served.policy is not None, "a drafter has a policy"
            chosen = make_batching(console, batching, own, served, rows)
            return Drafting(served.drafter, served.policy, chosen, served.name)

        return prepare

    return Shelf(folder, load)


def _serving_json(service: Service) -> dict[str, Any]:
    now = service.status()
    room = {"slots": now.slots, "context": now.context, "cache_bytes": _reserved(service)}
    choice = {"drafters": list(now.drafters)} if len(now.drafters) > 1 else {}
    return {"draft": now.drafter or "plain", **choice, **room, "speculation": now.speculation}


def _reserved(service: Service) -> int:
    return service.room.slots * service.room.slot_bytes


def _serving_line(service: Service) -> str:
    now = service.status()
    drafts = "plain decoding, nothing is drafted (--draft auto drafts without training)"
    if now.drafter is not None:
        drafts = f"{now.drafter} drafts up to {service.policy.depth} tokens ahead"
        if len(now.drafters) > 1:
            drafts += f" (requests may choose {', '.join(now.drafters)})"
    size = f"{size_text(_reserved(service))} of caches"
    if (shared := service.room.shared_bytes) > 0:
        size += f" (and up to {size_text(shared)} for what the drafter remembers)"
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


def check_batching(name: str, drafts: bool) -> None:
    """Refuse a batch policy that does not exist, or would decide nothing, before anything loads."""
    if name not in BATCHINGS:
        raise unknown("batch policy", name, BATCHINGS, "--batching", kind=SpecctlError)
    if name != "auto" and not drafts:
        raise SpecctlError(
            "--batching says how long rows draft, but there is no drafter",
            where="--batching",
            found="--draft none",
            expected="a package folder, auto, or prompt-lookup",
            do="--draft auto",
        )


def make_batching(
    console: Console, name: str, target: Target, draft: LoadedDraft, max_batch: int
) -> Batching | None:
    """Who decides how long every row drafts; None where nothing is drafted. "auto" is goodput."""
    if draft.drafter is None or draft.policy is None:
        return None
    from specctl.runtime import batching as batch
    from specctl.runtime.policies.switch import Switch

    if name == "auto":  # a switch decides about lengths itself
        name = "fixed" if isinstance(draft.policy, Switch) else "goodput"
    costs = _costs(console, target, draft, max_batch) if name in MEASURED else None
    return batch.make_batching(name, draft.policy.depth, costs)


def priced(
    target: Target, draft: LoadedDraft, say: Callable[[str], None] = lambda text: None
) -> LoadedDraft:
    """The draft with measured prices, where its policy chooses by them (a switch of drafters)."""
    from specctl.runtime.measure.cost import equip
    from specctl.runtime.policies.switch import Switch

    if not isinstance(draft.policy, Switch):
        return draft
    say(
        "measuring what a round costs, unless that is known from an earlier start; with several "
        "drafters and on a busy CPU this takes minutes"
    )
    costs = draft.costs(target, [target.encode(SAMPLE)], sampled=True)
    return replace(draft, policy=equip(draft.policy, costs).policy)


def _costs(console: Console, target: Target, draft: LoadedDraft, max_batch: int) -> BatchCosts:
    """Round costs up to the largest batch; measured once, kept between runs."""
    from specctl.api.measured.cost_cache import describe, read_costs, write_costs
    from specctl.runtime.batching import BatchCosts
    from specctl.runtime.measure.cost import batch_sizes, measure_batch_costs
    from specctl.runtime.sampling.sampling import Sampling

    drafter, policy = draft.drafter, draft.policy
    assert drafter is not None, "plain decoding has no lengths"
    assert policy is not None, "a drafter has a policy"
    about = {
        size: {**describe(target, drafter, policy, draft.source, size), "serving": max_batch}
        for size in batch_sizes(max_batch)
    }
    kept = {size: found for size, one in about.items() if (found := read_costs(one)) is not None}
    if len(kept) == len(about):
        return BatchCosts(kept)
    rows = "1 row" if max_batch == 1 else f"1 to {max_batch} rows"
    _tell(console, f"measuring what a round costs with {rows} (kept for the next start)")
    costs = measure_batch_costs(
        target, drafter, policy, max_batch, sampling=Sampling(temperature=1.0)
    )
    for size, table in costs.tables.items():
        write_costs(about[size], table)
    return costs
