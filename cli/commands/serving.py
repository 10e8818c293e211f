"""The flags of `specctl serve`, and what they stand for: limits, keys, host names, batching."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.app.console import Console
from specctl.core.errors import SpecctlError, nearest

if TYPE_CHECKING:
    from specctl.api.drafting import LoadedDraft
    from specctl.runtime.batching import BatchCosts, Batching
    from specctl.runtime.server.auth import Door
    from specctl.runtime.server.limits import Limits
    from specctl.runtime.target.target import Target

LOAD, ACCESS = "Load", "Access"
BATCHINGS = ("auto", "goodput", "tetris", "table", "fixed", "bass")
MEASURED = ("goodput", "table")  # batchings that read measured costs
SAMPLE = 'class Node:\n    """A value and what follows it."""\n\n    def __init__(self, value):\n'


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """What the server takes on."""

    max_batch: Annotated[
        int,
        typer.Option("--max-batch", min=1, max=1024, help="Rows at once.", rich_help_panel=LOAD),
    ] = 8
    max_queue: Annotated[
        int,
        typer.Option(
            "--max-queue", min=0, help="Waiting requests; more get 429.", rich_help_panel=LOAD
        ),
    ] = 64
    queue_timeout: Annotated[
        float,
        typer.Option(
            "--queue-timeout", min=0.1, help="Longest wait in seconds.", rich_help_panel=LOAD
        ),
    ] = 60.0
    max_len: Annotated[
        int | None,
        typer.Option(
            "--max-len",
            min=2,
            help="Tokens of prompt and answer together; else the context, at most 4,096.",
            rich_help_panel=LOAD,
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", min=1, help="Longest answer.", rich_help_panel=LOAD),
    ] = None
    memory: Annotated[
        float | None,
        typer.Option(
            "--memory",
            min=0.001,
            help="GiB for caches; else half of what is free.",
            show_default=False,
            rich_help_panel=LOAD,
        ),
    ] = None
    drain: Annotated[
        float,
        typer.Option(
            "--drain",
            min=0.0,
            help="Seconds that answers may take to finish after SIGTERM.",
            rich_help_panel=LOAD,
        ),
    ] = 30.0
    control_tokens: Annotated[
        bool,
        typer.Option(
            "--control-tokens/--no-control-tokens",
            help="Whether prompts of /v1/completions may hold the target's control tokens.",
            rich_help_panel=ACCESS,
        ),
    ] = True

    def limits(self) -> Limits:
        from specctl.runtime.server.limits import Limits

        return Limits(
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            queue_timeout=self.queue_timeout,
            max_len=self.max_len,
            max_new_tokens=self.max_new_tokens,
            memory=None if self.memory is None else int(self.memory * (1 << 30)),
            drain=self.drain,
            control_tokens=self.control_tokens,
        )


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Who may ask, and where."""

    host: Annotated[
        str, typer.Option("--host", help="Address to listen on.", rich_help_panel=ACCESS)
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, help="0 takes a free one.", rich_help_panel=ACCESS
        ),
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            help="One key per line. Keys may also stand in SPECCTL_API_KEYS, by commas.",
            rich_help_panel=ACCESS,
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool,
        typer.Option(
            "--insecure-no-auth", help="Serve other machines without keys.", rich_help_panel=ACCESS
        ),
    ] = False
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            metavar="NAME",
            help="A host name under which a proxy forwards requests to loopback (repeatable).",
            rich_help_panel=ACCESS,
        ),
    ] = None

    def door(self, console: Console) -> Door:
        """Keys and host names; refuses to serve other machines without keys."""
        from specctl.runtime.server.auth import Door, is_loopback, read_keys

        keys, warning = read_keys(self.api_key_file, os.environ)
        if warning is not None:
            console.warn(warning)
        is_local = is_loopback(self.host)
        if not is_local and not keys.digests:
            if not self.insecure_no_auth:
                raise SpecctlError(
                    "other machines would be served without an API key",
                    where="--host",
                    found=f"{self.host}, which is not this machine alone, and no keys",
                    expected="--api-key-file or SPECCTL_API_KEYS",
                    do="python -c 'import secrets; print(secrets.token_urlsafe(32))' > keys.txt, "
                    "then --api-key-file keys.txt; or --insecure-no-auth in a network you trust",
                )
            console.warn("anybody who reaches this address is served: --insecure-no-auth")
        names = tuple(name.lower() for name in self.allow_host or ())
        return Door(keys, names if is_local or names else None)


def check_batching(name: str, drafts: bool) -> None:
    """Refuse a batch policy that does not exist, or would decide nothing, before anything loads."""
    if name not in BATCHINGS:
        raise SpecctlError(
            f"unknown batch policy {name!r}",
            where="--batching",
            found=name,
            expected="one of " + ", ".join(BATCHINGS),
            do=f"--batching {nearest(name, BATCHINGS, 1)}",
        )
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


def priced(target: Target, draft: LoadedDraft) -> LoadedDraft:
    """The draft with measured prices, where its policy chooses by them (a switch of drafters)."""
    from specctl.runtime.measure.cost import equip
    from specctl.runtime.policies.switch import Switch

    if not isinstance(draft.policy, Switch):
        return draft
    costs = draft.costs(target, [target.encode(SAMPLE)], sampled=True)
    return replace(draft, policy=equip(draft.policy, costs).policy)


def _costs(console: Console, target: Target, draft: LoadedDraft, max_batch: int) -> BatchCosts:
    """Round costs up to the largest batch; measured once, kept between runs."""
    from specctl.api.cost_cache import describe, read_costs, write_costs
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
    console.say(
        f"measuring what a round costs with 1 to {max_batch} rows (kept for the next start)"
    )
    costs = measure_batch_costs(
        target, drafter, policy, max_batch, sampling=Sampling(temperature=1.0)
    )
    for size, table in costs.tables.items():
        write_costs(about[size], table)
    return costs
