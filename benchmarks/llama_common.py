"""llama.cpp beside specctl: a server process on a GGUF file."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("load_llama.py")


class NoServer(Exception):
    """llama.cpp does not start here, or cannot hold this target."""


@contextmanager
def serving(
    python: str,
    model: Path,
    users: int,
    context: int,
    threads: int,
    draft: Sequence[str] = (),
    cache: str = "f16",
) -> Iterator[str]:
    """The address of a server; `draft` is a GGUF file and how many tokens it drafts, `cache` the
    type of keys and values (llama.cpp's own choice is f16)."""
    sizes = map(str, (users, context, threads))
    words = [python, str(SERVER), str(model), *sizes, cache, *draft]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise NoServer(f"it did not start; run by hand: {' '.join(words)}")
            yield url
        finally:
            process.stdin.close()
