"""Where a package comes from: when, by which versions and by which command it was written."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
from collections.abc import Sequence
from functools import cache

import specctl


def utc_now() -> str:
    """The present second, as packages write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@cache
def versions() -> dict[str, str]:
    """Versions of what wrote a package."""
    names = ("torch", "transformers", "safetensors", "tokenizers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {"specctl": specctl.__version__, "python": platform.python_version(), **found}


def redacted(command: Sequence[str]) -> list[str]:
    """A command line without the values of secret-looking options and hub tokens."""
    shown: list[str] = []
    hide = False
    for word in map(str, command):
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and any(
            s in name for s in ("token", "key", "secret", "passw")
        )
        secret = secret and not name.endswith(("tokens", "-file"))
        if hide or word.startswith(("hf_", "sk-")):
            word = "***"
        elif secret and equals:
            word = f"{name}=***"
        hide = secret and not equals
        shown.append(word)
    return shown
