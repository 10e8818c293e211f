"""Completion in bash, which splits words at `=` and `:`: `--set serve.policy=dyn` comes as four.

They are joined before they are read, and of each answer goes out what stands behind the sign, as
bash puts it there.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, redirect_stdout

SIGNS = frozenset("=:")
SWITCH, BASH = "_SPECCTL_COMPLETE", "complete_bash"


@contextmanager
def words_of_bash(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Answers inside to a question of bash are about words as they were typed."""
    if environ.get(SWITCH) != BASH or not environ.get("COMP_CWORD", "").isdecimal():
        yield
        return
    start, held = _join(environ), io.StringIO()
    try:
        with redirect_stdout(held):
            yield
    finally:
        lines = held.getvalue().splitlines()
        if len(lines) == 1 and lines[0].endswith("="):
            lines.append(f"{lines[0]}...")  # behind the only answer bash puts a blank
        for line in lines:
            print(line.removeprefix(start))


def _join(environ: MutableMapping[str, str]) -> str:
    """Join what was split up to the word under the cursor; returns what bash has of it already."""
    text = environ.get("COMP_WORDS", "")
    words = text.split("\n") if "\n" in text else text.split()
    joined, kept = list[str](), ""
    for word in words[: int(environ["COMP_CWORD"]) + 1]:
        is_sign = bool(word) and {*word} <= SIGNS
        if joined and (is_sign or (kept and kept == joined[-1])):
            joined[-1] += word
            kept = joined[-1] if is_sign else kept
        else:
            joined.append(word)
            kept = ""
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(joined), str(len(joined) - 1)
    return kept
