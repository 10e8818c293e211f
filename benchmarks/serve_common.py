"""What the proofs of serving share: servers in a thread or in a process, and what they weigh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from serve_wire import Heard, hear

from specctl.core.drafter import Drafter
from specctl.drafters import families
from specctl.runtime.target.target import Target, load_target
from specctl.server.auth import Keys
from specctl.server.engine_thread.service import Service
from specctl.server.requests.limits import Limits

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the stub, and the app on it
from specctl_testing.runtime.serving import StubService
from specctl_testing.runtime.web import Running, running

NAME = "tiny"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
START_SECONDS = 240.0
SETTLE_SECONDS = 1.0  # in which the slots of clients that left must be free


@dataclass(frozen=True, slots=True)
class Size:
    """What a process holds: bytes of memory, open files, threads; and the tasks of the server's
    loop, where it runs in a thread of ours."""

    memory: int
    files: int
    threads: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: in a thread of this process (`thread`), or in one of its own."""

    url: str
    pid: int
    key: str | None = None
    process: subprocess.Popen[bytes] | None = None
    thread: Running | None = None

    def hear(self, path: str, body: Any = None, **how: Any) -> Heard:
        """The answer to one request."""
        return hear(self.url, path, body, key=self.key, **how)

    def count(self, path: str) -> dict[str, Any]:
        """The JSON of a GET that must succeed."""
        heard = self.hear(path)
        assert heard.status == 200, heard
        found: dict[str, Any] = heard.json()
        return found

    def is_idle(self) -> bool:
        """Nobody is served, nobody waits."""
        now = self.count("/v1/status")
        return now["running"] == now["waiting"] == 0

    def counters(self) -> dict[str, float]:
        """The figures of /metrics, labels and all, without the histograms' buckets."""
        lines = self.hear("/metrics").body.decode().splitlines()
        pairs = [line.rpartition(" ") for line in lines if not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs if "_bucket" not in name}

    def terminate(self) -> None:
        """SIGTERM, or what comes of it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
        else:
            assert self.thread is not None
            self.thread.listener.end(signal.SIGTERM)

    def exit_code(self, seconds: float) -> int | None:
        """How the server ended; None if it has not within that time."""
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(seconds)
            return None
        assert self.thread is not None
        self.thread.thread.join(seconds)
        return self.thread.codes[0] if self.thread.codes else None

    def size(self) -> Size:
        """What the process holds now."""
        of = Path("/proc") / str(self.pid)
        pages = int((of / "statm").read_text().split()[1])
        held = len(list((of / "fd").iterdir())), len(list((of / "task").iterdir()))
        loop = self.thread.listener._loop if self.thread is not None else None
        tasks = len(asyncio.all_tasks(loop)) if loop is not None else 0
        return Size(pages * os.sysconf("SC_PAGE_SIZE"), *held, tasks)


def until(condition: Callable[[], bool], seconds: float) -> float | None:
    """Seconds until the condition held; None if it did not in time."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if condition():
            return time.monotonic() - began
        time.sleep(0.01)
    return None


@contextlib.contextmanager
def stub_server(service: StubService | None = None, key: str | None = None) -> Iterator[Server]:
    """The app on a stub of the engine, in a thread."""
    service = service if service is not None else StubService()
    keys = Keys.of([key]) if key is not None else None
    with running(service, keys=keys) as found:
        yield Server(found.url, os.getpid(), key, thread=found)


@cache
def tiny_target() -> Target:
    """The embedded target; in float32, so that answers do not depend on the batch."""
    return load_target("tiny", dtype="float32")


def make_drafter(target: Target, name: str = "prompt-lookup") -> Drafter:
    """A drafter that needs no training."""
    family = families()[name]
    return family.build(family.options(), target.spec, None)


@contextlib.contextmanager
def tiny_server(drafter: Any = None, limits: Limits | None = None) -> Iterator[Server]:
    """The app on the real service with the embedded target, in a thread."""
    target = tiny_target()
    drafter = drafter if drafter is not None else make_drafter(target)
    service = Service(target, drafter, limits=limits)
    with running(service, drain=30.0) as found:
        yield Server(found.url, os.getpid(), thread=found)


@contextlib.contextmanager
def serve_process(folder: Path, *flags: str, key: str | None = None) -> Iterator[Server]:
    """`specctl serve` on a free port, in a process of its own, ready to answer. Ended by SIGTERM,
    unless it has ended before."""
    words = [sys.executable, "-m", "specctl", "--jsonl", "serve", "--target", NAME, "--port", "0"]
    words += ["--dtype", "float32", *flags]
    if key is not None:
        (folder / "keys").write_text(key + "\n")
        (folder / "keys").chmod(0o600)
        words += ["--api-key-file", str(folder / "keys")]
    log = folder / f"server-{time.monotonic_ns()}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield Server(_url_said_by(process, log), process.pid, key, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(40)
        process.kill()
        process.communicate()


def _url_said_by(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that a server tells when it is ready."""
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS
    while line := process.stdout.readline():
        told = json.loads(line)
        if told.get("event") == "ready":
            return str(told["url"])
        assert time.monotonic() < deadline, "the server does not become ready: " + log.read_text()
    raise AssertionError("the server ended: " + log.read_text())
