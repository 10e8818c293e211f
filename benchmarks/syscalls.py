"""The file system calls that Python code makes through `os`: recorded, and failed on demand.

What strace does for a process, without a tracer: the functions of the `os` module are replaced
while the block runs, so that every call of pathlib, shutil and our own code on paths below `root`
is seen in order and can be made to fail with an error of the operating system.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Calls that take a path (a second one after it), and calls that take a descriptor.
ON_PATHS = ("open", "mkdir", "rmdir", "unlink", "rename", "replace", "link", "statvfs")
ON_DESCRIPTORS = ("write", "fsync")
CHANGING = ("open", "mkdir", "write", "fsync", "rename", "replace", "link", "symlink", "unlink")


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its name, the path it is about, and where a rename leads to."""

    name: str
    path: str
    to: str = ""

    @property
    def kind(self) -> str:
        """As a proof counts it: rename and replace are one system call."""
        return {"replace": "rename"}.get(self.name, self.name)


@dataclass(slots=True)
class Syscalls:
    """What happened below `root`. Call number `fail_at` raises OSError(code). One writer: the
    replaced functions."""

    root: Path
    fail_at: int = -1
    code: int = 0
    calls: list[Call] = field(default_factory=list)
    _paths: dict[int, str] = field(default_factory=dict)

    def _note(self, call: Call) -> None:
        if not str(call.path or call.to).startswith(str(self.root)):
            return
        self.calls.append(call)
        if len(self.calls) - 1 == self.fail_at:
            raise OSError(self.code, os.strerror(self.code), call.path)

    def _full(self, path: Any, dir_fd: int | None) -> str:
        if isinstance(path, int):
            return self._paths.get(path, "")
        text = os.fsdecode(path)
        return os.path.join(self._paths.get(dir_fd, ""), text) if dir_fd is not None else text

    def on_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            full = self._full(path, named.get("dir_fd"))
            to = os.fsdecode(rest[0]) if name in ("rename", "replace", "link") else ""
            is_read = name == "open" and not rest[0] & (os.O_WRONLY | os.O_RDWR)
            if not is_read:
                self._note(Call(name, full, to))
            result = real(path, *rest, **named)
            if name == "open":
                self._paths[result] = full
            return result

        return call

    def on_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(descriptor: int, *rest: Any) -> Any:
            self._note(Call(name, self._paths.get(descriptor, "")))
            return real(descriptor, *rest)

        return call

    def on_symlink(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, path: Any, *rest: Any, **named: Any) -> Any:
            self._note(Call("symlink", os.fsdecode(path)))
            return real(source, path, *rest, **named)

        return call

    @contextmanager
    def watching(self) -> Iterator[Syscalls]:
        """Replace the functions of `os` until the block ends."""
        real = {name: getattr(os, name) for name in (*ON_PATHS, *ON_DESCRIPTORS, "symlink")}
        for name in ON_PATHS:
            setattr(os, name, self.on_path(name, real[name]))
        for name in ON_DESCRIPTORS:
            setattr(os, name, self.on_descriptor(name, real[name]))
        os.symlink = self.on_symlink(real["symlink"])
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)


def unflushed_renames(calls: list[Call]) -> list[str]:
    """Renames of something written before and not flushed since, or whose folder is not flushed
    after them: what a power cut could undo or tear."""
    wrong: list[str] = []
    for at, call in enumerate(calls):
        if call.kind != "rename":
            continue
        inside = [
            c for c in calls[:at] if c.path == call.path or c.path.startswith(call.path + "/")
        ]
        for path in {c.path for c in inside if c.name == "write"}:
            names = [c.name for c in inside if c.path == path and c.name in ("write", "fsync")]
            if names[-1] != "fsync":
                wrong.append(f"{path} was renamed unflushed")
        is_folder = any(c.name == "mkdir" and c.path == call.path for c in inside)
        if is_folder and Call("fsync", call.path) not in inside:
            wrong.append(f"the folder {call.path} was renamed unflushed")
        is_new = any(c.name == "write" for c in inside)
        if is_new and Call("fsync", os.path.dirname(call.to)) not in calls[at:]:
            wrong.append(f"the folder of {call.to} was not flushed after the rename")
    return wrong
