"""An engine's process: started in a session of its own, watched, and stopped with its children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specctl.core.errors import ResourceError
from specctl.export.engines import Answers, EngineJob, ServingEngine, engines, find_engine

START_SECONDS, STOP_SECONDS = 600, 30
_HOSTS = Path(__file__).parent / "hosts"
_KEPT = 3000  # characters of a log that an error shows


def chosen_engine(name: str | None, to: str, python: str) -> ServingEngine:
    """The engine of that name, else one that reads the format and is installed in this Python;
    transformers last, which others bring along."""
    found = find_engine(name, to)
    if name is None:
        fits = [engine for engine in engines().working().values() if to in engine.reads]
        fits.sort(key=lambda engine: engine.module == "transformers")
        found = next((engine for engine in fits if is_installed(engine, python)), found)
    check_installed(found, python)
    return found


def is_installed(engine: ServingEngine, python: str) -> bool:
    words = [python, "-c", f"import importlib.util as u; assert u.find_spec({engine.module!r})"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:  # no such Python
        return False


def check_installed(engine: ServingEngine, python: str) -> None:
    """That this Python has the engine, or how it gets it."""
    if not is_installed(engine, python):
        raise ResourceError(
            f"{engine.name} is not installed there",
            where="--engine-python",
            found=f"{python} cannot import {engine.module}",
            expected="a Python that has the engine, in an environment of its own",
            do=f"python -m venv ENV && {engine.install}, then --engine-python ENV/bin/python",
        )


@contextmanager
def started(
    words: Sequence[str], log: Path, settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process; it and all that it started are gone afterwards."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | dict(settings or {})
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers; if it ends or takes too long, an error with the end of its log."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(url, timeout=2).read()
            return
        time.sleep(0.5)
    raise failed(process, log)


def failed(
    process: subprocess.Popen[bytes], log: Path, found: str = "no answer in time"
) -> ResourceError:
    text = log.read_text(encoding="utf-8", errors="replace")[-_KEPT:]
    code = process.poll()
    return ResourceError(
        "the engine did not serve",
        found=f"exit status {code}" if code is not None else found,
        expected="answers",
        do=f"read the end of its log: {text}",
    )


def run_host(engine: str, python: str, job: Mapping[str, Any], scratch: Path) -> Answers:
    """Answers by `hosts/answer_ENGINE.py` in the engine's Python."""
    body = run_script(f"answer_{engine}", python, job, scratch)
    misread = tuple(body.pop("misread", ()))
    return Answers(tuple(map(tuple, body.pop("ids"))), **body, misread=misread)


def run_converted(
    engine: str, job: EngineJob, drafts: bool, convert: Callable[..., object]
) -> Answers:
    """Answers of an engine that reads folders of a converter's, the target's made once a proof by
    `convert(folder, out, python, scratch)`."""
    target = job.scratch / f"target-{engine}"
    if not target.exists():
        convert(job.place, target, job.python, job.scratch)
    return run_pair(engine, job, drafts, str(target))


def run_pair(engine: str, job: EngineJob, drafts: bool, target: str) -> Answers:
    """Answers of an engine that reads two folders, the target's and the drafter's."""
    body = {
        "target": target,
        "draft": str(job.folder) if drafts else None,
        "prompts": [list(prompt) for prompt in job.prompts],
        "new_tokens": job.new_tokens,
        "length": job.length,
    }
    return run_host(engine, job.python, body, job.scratch)


def run_script(name: str, python: str, job: Mapping[str, Any], scratch: Path) -> dict[str, Any]:
    """What `hosts/NAME.py` says to a job in the engine's Python; both sides are JSON files."""
    job_file, answer_file, log = (scratch / f"{name}.{end}" for end in ("job", "answers", "log"))
    job_file.write_text(json.dumps(job), encoding="ascii")
    answer_file.unlink(missing_ok=True)
    words = [python, str(_HOSTS / f"{name}.py"), str(job_file), str(answer_file)]
    with started(words, log, {"TOKENIZERS_PARALLELISM": "false"}) as process:
        process.wait()
    if process.returncode != 0 or not answer_file.exists():
        raise failed(process, log)
    return dict(json.loads(answer_file.read_text(encoding="ascii")))


def post(url: str, body: Mapping[str, Any]) -> Any:
    """The JSON answer to a JSON request."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def own_python() -> str:
    return sys.executable
