"""llama.cpp beside specctl: a target as a GGUF file, and a server process on it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from specctl.export.layouts.llama_cpp.model import GgufModel, write_gguf
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.models.fast_llama import FastLlama
from specctl.runtime.target.target import Target

SERVER = Path(__file__).with_name("load_llama.py")


class NoServer(Exception):
    """llama.cpp does not start here, or cannot hold this target."""


def write_target(target: Target, path: Path) -> None:
    """A Llama-shaped target in its own dtype. A known tokenizer's split has a name; one that has
    none is asked in token ids only."""
    if not isinstance(target.lm, FastLlama):
        raise NoServer(f"{target.name} is not of Llama's shape")
    module = target.lm.module
    model = GgufModel(target.name, module.shape, dict(module.named_parameters()), target.spec)
    write_gguf(path, model, vocabulary_of(target.tokenizer, target.spec))


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
