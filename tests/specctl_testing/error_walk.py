"""Errors: every place of the product that raises one, and what the tests provoke of them.

    python -m pytest --errors=build/errors ...
    python tests/specctl_testing/error_walk.py build/errors [--unprovoked] [--json]

The first leaves a file of each process with every error that was made in it; those of programs
that a test starts are not among them. The second lists by room how many places there are and how
many the tests provoke, and then each error that they do with its remedy and what is wrong with
that: `specctl` commands and flags in it are those of the program. With `--unprovoked` it lists the
places that no test reaches.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError

ROOT = Path(__file__).parents[2]
PARTS = ("what", "where", "found", "expected", "do")
# Behind these words stands the command line of another program, with flags of its own.
OTHERS = r"(?:\b(?:hf|git|curl|pip|uv|torchrun|python|cmake|vllm)\b|\w+\.py\b|^\*)[^`;|]*"


@dataclass(frozen=True, slots=True)
class Place:
    """A call that makes an error: from its first line to its last, and the class."""

    path: str
    line: int
    end: int
    kind: str

    @property
    def room(self) -> str:
        return self.path.split("/", 1)[0]


@dataclass(frozen=True, slots=True)
class Provoked:
    """An error as a test saw it, by where it was made."""

    path: str
    line: int
    kind: str
    what: str
    where: str
    found: str
    expected: str
    do: str


def record(folder: Path) -> None:
    """From here on every error that this process makes is written to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
    make, seen = SpecctlError.__init__, set[tuple[str, int, str]]()

    def noted(self: SpecctlError, what: str, **more: Any) -> None:
        make(self, what, **more)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__init__" and frame.f_back is not None:
            frame = frame.f_back  # of a class of errors
        path = os.path.realpath(frame.f_code.co_filename)
        key = path, frame.f_lineno, self.do
        if path.startswith(f"{ROOT}{os.sep}") and key not in seen:
            seen.add(key)
            at = Path(path).relative_to(ROOT).as_posix(), frame.f_lineno, type(self).__name__
            error = Provoked(*at, *(str(getattr(self, part)) for part in PARTS))
            file.write(json.dumps(asdict(error)) + "\n")
            file.flush()

    SpecctlError.__init__ = noted  # type: ignore[method-assign]


def rooms() -> list[str]:
    return sorted(path.name for path in (ROOT / "src" / "specctl").iterdir() if path.is_symlink())


@cache
def _trees() -> dict[str, ast.Module]:
    """Of every module of the product, by its path."""
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for room in rooms()
        for path in sorted((ROOT / room).rglob("*.py"))
    }


def places() -> list[Place]:
    """Every call of a class of errors in the product."""
    trees = _trees()
    kinds, classes = {"SpecctlError"}, dict[str, set[str]]()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    while more := {name for name, bases in classes.items() if bases & kinds} - kinds:
        kinds |= more
    return [
        Place(path, node.lineno, node.end_lineno or node.lineno, node.func.id)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds
    ]


def remedies() -> Iterator[tuple[str, int, str]]:
    """Of every remedy that is written in the product: where, and its text, with * for what is
    filled in."""
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "do":
                for text in _texts(node.value):
                    yield path, node.value.lineno, text


def _texts(node: ast.expr) -> list[str]:
    """What an expression can say."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
        parts = (one.value if isinstance(one, ast.Constant) else "*" for one in node.values)
        return ["".join(map(str, parts))]
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.BinOp):
        return [a + b for a in _texts(node.left) for b in _texts(node.right)]
    return ["*"]


@cache
def _program() -> dict[str, set[str]]:
    """Every command and the flags that it takes; those below a command are written behind it."""
    from specctl.cli.main import COMMANDS, load_command

    found = dict[str, set[str]]()
    for name in COMMANDS:
        command = load_command(name)
        below = getattr(command, "commands", {})
        all_words = {name: command} | {f"{name} {sub}": below[sub] for sub in below}
        for words, each in all_words.items():
            flags = (flag for one in each.params for flag in (*one.opts, *one.secondary_opts))
            found[words] = {*flags, "--help", "--help-all"}
    return found


def wrong_words(do: str) -> list[str]:
    """The commands and flags of ours that a remedy names and the program does not have."""
    own = re.sub(OTHERS, "", do)
    commands, wrong = _program(), list[str]()
    for name, sub in re.findall(
        r"(?<!--to )(?<!the )\bspecctl ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", own
    ):
        is_group = any(words.startswith(f"{name} ") for words in commands)
        known = f"{name} {sub}" in commands if is_group and sub else name in commands
        wrong += [] if known else [f"specctl {name} {sub}".rstrip()]
    flags = set().union(*commands.values())
    wrong += [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", own) if flag not in flags]
    return wrong


def provoked(folder: Path) -> list[Provoked]:
    """What all processes wrote, each error once, in the order of the files."""
    lines = (line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines())
    errors = {Provoked(**json.loads(line)) for line in set(lines)}
    return sorted(errors, key=lambda error: (error.path, error.line, error.do))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unprovoked", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(words)
    by_file = defaultdict[str, list[Provoked]](list)
    for error in provoked(given.folder):
        by_file[error.path].append(error)
    seen = {
        place: [e for e in by_file[place.path] if place.line <= e.line <= place.end]
        for place in places()
    }
    if given.json:
        found = [
            {**asdict(error), "wrong": wrong_words(error.do)}
            for errors in by_file.values()
            for error in errors
        ]
        print(json.dumps({"places": len(seen), "errors": found}, indent=1))
        return
    if given.unprovoked:
        for place in (place for place, errors in seen.items() if not errors):
            print(f"{place.path}:{place.line}  {place.kind}")
        return
    for place, errors in seen.items():
        for error in errors[:1]:
            print(f"{place.path}:{place.line}  {place.kind}: {error.what}")
            print(f"    do: {error.do or '(nothing)'}")
            for wrong in wrong_words(error.do):
                print(f"    there is no {wrong}")
    total, reached = Counter(p.room for p in seen), Counter(p.room for p in seen if seen[p])
    silent = Counter(place.room for place, errors in seen.items() for e in errors[:1] if not e.do)
    print(f"\n{'room':12}{'places':>8}{'provoked':>10}{'without a remedy':>18}")
    for room in sorted(total):
        print(f"{room:12}{total[room]:8}{reached[room]:10}{silent[room]:18}")
    print(f"{'all':12}{total.total():8}{reached.total():10}{silent.total():18}")


if __name__ == "__main__":
    main()
