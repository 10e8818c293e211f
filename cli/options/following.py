"""`train-draft --follow`: a drafter goes on learning from what a server has verified."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from specctl.cli.app.console import Console
from specctl.cli.app.launch import is_launched
from specctl.cli.commands.adapt import drafter_fields, target_fields, tau_at_start
from specctl.cli.options.followed_features import (
    drop_features,
    features_beside,
    features_said,
    keep_features,
    write_private,
)
from specctl.cli.options.names import check_package
from specctl.cli.options.recipe_flags import RecipeFlags, TrainingFlags
from specctl.cli.options.training import run_training
from specctl.core.errors import FileError, IncompatibleError, ResourceError, SpecctlError
from specctl.core.storage.traffic_files import newest_lines, writer_of
from specctl.recipes.published import path_named

if TYPE_CHECKING:
    from specctl.api.train import TrainResult

RECIPE = "adapt"  # measures tau before the first step, and keeps the old weights if they are better
NEWEST = 2000  # records that are read: those that were kept last
VERIFIED = {"data.regenerate": False}  # the answers are the target's own
KEY = "SPECCTL_ADMIN_KEYS"
FIRST_KEY = f"export {KEY}=$(head -n 1 admin.txt)"
WAIT, TIMEOUT = 300.0, 900.0  # seconds for answers under way, and for all of it
KNOCK = 20.0  # seconds for the question whether there is such a server
ROUTE = "/v1/drafter"


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
    _check_writer(run, folder, source)
    if swap is not None and not is_launched():
        check_server(swap, os.environ.get(KEY, ""))
    given = {**drafter_fields(source), **VERIFIED}
    if run.target is None:
        given |= target_fields(source)
    flags = {item.name: getattr(run, item.name) for item in fields(run)}
    flags |= {"recipe": RECIPE, "init": None}
    if run.dry_run and not (out.exists() and _beside(out).is_file()):
        with TemporaryDirectory() as scratch:  # a plan reads no features, and leaves nothing here
            flags["data"] = [str(_newest(folder, Path(scratch) / out.name))]
            run_training(console, _Following(**flags, given=given), data=str(folder))
        return
    is_new = not out.exists() and not is_launched()
    kept = _newest(folder, out)
    flags["data"] = [str(kept)]

    def about(result: TrainResult) -> dict[str, Any]:
        before, after = tau_at_start(result.out), result.tau
        is_apart = _is_held_out(result.out)
        rose = before is not None and after is not None and after > before
        found = {"tau_before": before, "tau_after": after, "is_better": rose and is_apart}
        found |= features_said(out, kept)
        if not is_apart:
            console.warn("too little traffic to hold some out: tau is of other text, no gain on it")
        elif before is not None and after is not None:
            console.out(f"tau {before:.3f} before, {after:.3f} after, on held-out traffic")
        if swap is None:
            return found
        if not found["is_better"]:
            console.say("no better than before: the server keeps its drafter")
            return {**found, "swapped": False}
        answer = post_swap(swap, result.package, os.environ.get(KEY, ""))
        console.out(f"{swap} drafts with it now ({answer.get('drafter')})")
        return {**found, "swapped": True}

    try:
        if is_new:
            drop_features(out)  # of another run of that name
            part = _Following(**flags, given=given).load().data
            # Another target's, by --allow target, would be learned as this one's.
            if part.reads_kept and "target" not in (run.allow or ()):
                keep_features(folder, out, kept, part.train_on_prompt)
        if features_beside(out).is_dir():
            given["data.kept_features"] = str(features_beside(out))
        run_training(console, _Following(**flags, given=given), about)
    finally:
        if not out.exists() and not is_launched():  # the run was refused
            kept.unlink(missing_ok=True)
            drop_features(out)


def _is_held_out(out: Path) -> bool:
    """Whether tau was measured on rows of the run's own data, which are kept out of training; a
    single row is too few for that."""
    from specctl.train.data.rows.rows import read_manifest

    data = read_manifest(out / "data")
    return data is not None and data.held != 0


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
            FIRST_KEY,
        ),
    ]
    for what, is_one, do in mistakes:
        if is_one:
            raise SpecctlError(what, where="--follow", do=do)
    if swap is not None:
        _server(swap, KNOCK)
        _key(os.environ.get(KEY, ""))
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


def _check_writer(run: TrainingFlags, folder: Path, source: Path) -> None:
    """Refuse answers of another target than the drafter's own, where both are known: they would be
    learned as that target's."""
    from specctl.export.package.manifest import package_in, read_manifest

    writer, target = writer_of(folder), read_manifest(package_in(source)).target
    is_own = run.target in (None, target.name) and "target" not in (run.allow or ())
    if writer is not None and is_own and writer.fingerprint != target.fingerprint:
        raise IncompatibleError(
            "another target than the drafter's wrote this traffic",
            where="--follow",
            found=f"answers of {writer.name} ({writer.fingerprint[:12]})",
            expected=f"those of {target.name} ({target.fingerprint[:12]})",
            do=f"--target {writer.name} to change over to it, or --allow target",
        )


def _beside(out: Path) -> Path:
    """Where a run has the texts that it reads."""
    return out.with_name(f"{out.name}.traffic.jsonl")


def _newest(folder: Path, out: Path) -> Path:
    """A copy of the newest records beside the run, since the server goes on evicting them; the one
    that is there where a run goes on."""
    kept = _beside(out)
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
    write_private(kept, b"".join(lines))
    return kept


def _server(url: str, timeout: float) -> http.client.HTTPConnection:
    """A connection that is not open yet; it follows no redirect, so the key goes nowhere else."""
    kinds: dict[str, type[http.client.HTTPConnection]] = {
        "http": http.client.HTTPConnection,
        "https": http.client.HTTPSConnection,
    }
    try:
        parts = urlsplit(url)
        scheme, host, port, path = parts.scheme, parts.hostname, parts.port, parts.path
    except ValueError:
        scheme = path = ""
        host = port = None
    if scheme not in kinds or not host or path not in ("", "/"):
        raise SpecctlError(
            "this is not the address of a server",
            where="--swap",
            found=url,
            expected="http://HOST:PORT",
            do="--swap http://127.0.0.1:8000",
        )
    return kinds[scheme](host, port, timeout=timeout)


def _key(keys: str) -> str:
    """The first of these keys, as a header can carry it."""
    key = keys.split(",")[0].strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise SpecctlError(
            "this is no admin key",
            where=KEY,
            found="nothing" if not key else "several lines, blanks or letters beside ASCII",
            expected="one key of the server's access.admin_key_file",
            do=FIRST_KEY,
        )
    return key


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a server answered: its status and the beginning of the body."""

    status: int
    text: str

    def body(self) -> dict[str, Any] | None:
        """The JSON of the route; None of anything else."""
        try:
            found = json.loads(self.text)
        except ValueError:
            return None
        return found if isinstance(found, dict) and "drafter" in found else None

    def shown(self) -> str:
        """The message of an error in the shape of the API, else the text."""
        try:
            return f"{self.status}: {json.loads(self.text)['error']['message']}"[:600]
        except (ValueError, TypeError, KeyError):
            return f"{self.status}: {ascii(self.text[:200])[1:-1]}"


def _call(server: http.client.HTTPConnection, method: str, key: str, body: str | None) -> _Reply:
    """One request to the route. OSError and HTTPException where no answer came."""
    sent = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    try:
        server.request(method, ROUTE, body, sent)
        response = server.getresponse()
        return _Reply(response.status, response.read(1 << 16).decode("utf-8", "replace"))
    finally:
        server.close()


def check_server(url: str, keys: str) -> None:
    """Refuse a swap that could not be made, before there is anything to swap."""
    do = (
        "specctl serve ... --set access.admin_key_file=admin.txt --set access.drafter_folder=runs; "
    )
    do += "or leave out --swap"
    try:
        reply = _call(_server(url, KNOCK), "GET", _key(keys), None)
    except (OSError, http.client.HTTPException) as error:
        raise ResourceError(
            "the server of --swap does not answer",
            where=url,
            found=str(error) or type(error).__name__,
            expected="a server that runs",
            do=do,
        ) from error
    if reply.status != 200 or reply.body() is None:
        raise SpecctlError(
            "the server of --swap would not change its drafter",
            where=url,
            found=reply.shown(),
            expected=f"{ROUTE}, and a key of it in {KEY}",
            do=FIRST_KEY if reply.status == 401 else do,
        )


def post_swap(url: str, package: Path, keys: str) -> dict[str, Any]:
    """Let that server draft with a package; what it answers."""
    body = json.dumps({"path": str(package.resolve()), "wait": WAIT})
    try:
        reply = _call(_server(url, TIMEOUT), "POST", _key(keys), body)
    except (OSError, http.client.HTTPException) as error:
        raise ResourceError(
            "the server did not say whether it drafts with the package, which is written",
            where=url,
            found=str(error) or type(error).__name__,
            expected="an answer",
            do=f"see GET {ROUTE}, and post {package} there",
        ) from error
    answer = reply.body()
    if reply.status != 200 or answer is None:
        raise SpecctlError(
            "the server keeps its drafter; the package is written",
            where=url,
            found=reply.shown(),
            expected="200, and which drafter it has now",
            do=f"copy {package} into its access.drafter_folder if it lies elsewhere, and post its "
            f"path there to {ROUTE}",
        )
    return answer
