"""`train-draft --follow`: a drafter goes on learning from what a server has verified."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specctl.cli.app.console import Console
from specctl.cli.app.launch import is_launched
from specctl.cli.commands.adapt import drafter_fields, target_fields, tau_at_start
from specctl.cli.options.names import check_package
from specctl.cli.options.recipe_flags import RecipeFlags, TrainingFlags
from specctl.cli.options.training import run_training
from specctl.core.errors import FileError, ResourceError, SpecctlError
from specctl.core.files import write_bytes
from specctl.core.traffic_files import newest_lines
from specctl.recipes.published import path_named

if TYPE_CHECKING:
    from specctl.api.train import TrainResult

RECIPE = "adapt"  # measures tau before the first step, and keeps the old weights if they are better
NEWEST = 2000  # records that are read: those that were kept last
VERIFIED = {"data.regenerate": False}  # the answers are the target's own
KEY = "SPECCTL_ADMIN_KEYS"
WAIT, TIMEOUT = 300.0, 900.0  # seconds for answers under way, and for all of it


@dataclass(frozen=True, slots=True)
class _Following(TrainingFlags):
    """The flags, and what the drafter itself says."""

    given: Mapping[str, Any] = field(default_factory=dict)

    def _fields(self) -> dict[str, Any]:
        return {**self.given, **TrainingFlags._fields(self)}


def run_following(console: Console, run: TrainingFlags, folder: Path, swap: str | None) -> None:
    """Train the drafter `--init` on the newest traffic of a folder, and say what it gained on held
    out traffic; let the server at `swap` draft with it if it gained."""
    draft, out = _checked(run, folder, swap)
    source = path_named(draft)
    check_package(str(source))
    given = {**drafter_fields(source), **VERIFIED}
    if run.target is None:
        given |= target_fields(source)
    flags = {item.name: getattr(run, item.name) for item in fields(run)}
    flags |= {"recipe": RECIPE, "data": [str(_newest(folder, out))], "init": None}

    def about(result: TrainResult) -> dict[str, Any]:
        before, after = tau_at_start(result.out), result.tau
        is_better = before is not None and after is not None and after > before
        found = {"tau_before": before, "tau_after": after, "is_better": is_better}
        if before is not None and after is not None:
            console.out(f"tau {before:.3f} before, {after:.3f} after, on held-out traffic")
        if swap is None:
            return found
        if not is_better:
            console.say("no better than before: the server keeps its drafter")
            return {**found, "swapped": False}
        answer = post_swap(swap, result.package, os.environ.get(KEY, ""))
        console.out(f"{swap} drafts with it now ({answer.get('drafter')})")
        return {**found, "swapped": True}

    run_training(console, _Following(**flags, given=given), about)


def _checked(run: TrainingFlags, folder: Path, swap: str | None) -> tuple[str, Path]:
    """The drafter and the run's folder; refuses what does not go together before anything loads."""
    usual = RecipeFlags()
    mistakes = [
        ("--init names the drafter that goes on", run.init is None, "--init runs/NAME"),
        ("--out names the folder of the run", run.out is None, "--out runs/NAME-2"),
        ("--follow is the data", run.data is not None, "leave out --data"),
        (
            "--follow trains by the recipe adapt",
            run.recipe not in (usual.recipe, RECIPE),
            "leave out --recipe, and change it with --set",
        ),
        (
            f"a swap needs the server's admin key in {KEY}",
            swap is not None and not os.environ.get(KEY),
            f"export {KEY}=$(cat admin.txt)",
        ),
    ]
    for what, is_one, do in mistakes:
        if is_one:
            raise SpecctlError(what, where="--follow", do=do)
    if swap is not None:
        _server(swap)
    if not folder.is_dir():
        raise FileError(
            "there is no such folder of kept traffic",
            where="--follow",
            found=str(folder),
            expected="the folder of specctl serve --keep-traffic",
            do="let the server keep some first",
        )
    assert run.init is not None
    assert run.out is not None
    return run.init, run.out


def _newest(folder: Path, out: Path) -> Path:
    """A copy of the newest records beside the run, since the server goes on evicting them; the one
    that is there where a run goes on."""
    kept = out.with_name(f"{out.name}.traffic.jsonl")
    if kept.is_file() and (out.exists() or is_launched()):
        return kept
    lines = newest_lines(folder, NEWEST)
    if not lines:
        raise FileError(
            "no traffic has been kept yet",
            where="--follow",
            found=f"{folder} without a record",
            expected="some hundred answers",
            do="let the server answer requests that do not say store: false",
        )
    before = os.umask(0o077)
    try:
        write_bytes(kept, b"".join(lines))
    finally:
        os.umask(before)
    return kept


def _server(url: str) -> http.client.HTTPConnection:
    """A connection that is not open yet; it follows no redirect, so the key goes nowhere else."""
    parts = urlsplit(url)
    kinds: dict[str, type[http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in kinds or not host or parts.path not in ("", "/"):
        raise SpecctlError(
            "this is not the address of a server",
            where="--swap",
            found=url,
            expected="http://HOST:PORT",
            do="--swap http://127.0.0.1:8000",
        )
    return kinds[parts.scheme](host, port, timeout=TIMEOUT)


def post_swap(url: str, package: Path, keys: str) -> dict[str, Any]:
    """Let that server draft with a package; what it answers."""
    server = _server(url)
    body = json.dumps({"path": str(package.resolve()), "wait": WAIT})
    key = keys.split(",")[0].strip()
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        server.request("POST", "/v1/drafter", body, sent)
        response = server.getresponse()
        text = response.read(1 << 16).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        raise ResourceError(
            "the server was not reached; the package is written",
            where=url,
            found=str(error) or type(error).__name__,
            expected="a server that was started with --admin-key-file",
            do=f"post {package} to /v1/drafter when it runs",
        ) from error
    finally:
        server.close()
    if response.status != 200:
        raise SpecctlError(
            "the server keeps its drafter; the package is written",
            where=url,
            found=f"{response.status}: {text[:300]}",
            expected="200",
            do=f"correct that, and post {package} to /v1/drafter",
        )
    answer: dict[str, Any] = json.loads(text)
    return answer
