"""Words that this project once used in meanings of its own: there may only be fewer of them.

    python tests/specctl_testing/dialect.py     writes tests/dialect.json, where counts have fallen

Write the field's word instead: `told` is reported, observed or known; `heard` received; `asked`
requested, called or required; a `brain` a controller or an estimator; what `rests` is idle. They
are counted as parts of names (`is_told`), too, in sources, docs and tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "dialect.json"
ROOMS = (
    "api", "cli", "core", "diffusion", "drafters", "export", "models", "published", "recipes",
    "runtime", "server", "train",
)  # fmt: skip
AREAS = {
    "product": (*ROOMS, "README.md", "Makefile"),
    "docs": ("docs", "CONTRIBUTING.md"),
    "tests": ("tests",),
    "benchmarks": ("benchmarks",),
}
SUFFIXES = {".py", ".cpp", ".h", ".js", ".html", ".css", ".md", ".yaml", ""}
Counts = dict[str, dict[str, int]]  # word -> area -> how often


def allowed() -> Counts:
    counts: Counts = json.loads(LIST.read_text(encoding="utf-8"))
    return counts


def texts(area: str) -> list[Path]:
    """What is read of an area; this file and its test name the words themselves."""
    own = {Path(__file__), ROOT / "tests" / "test_dialect.py"}
    found = []
    for name in AREAS[area]:
        place = ROOT / name
        inside = sorted(place.rglob("*")) if place.is_dir() else [place]
        found += [path for path in inside if path.suffix in SUFFIXES and path.is_file()]
    return [path for path in found if path not in own and "__pycache__" not in path.parts]


def count(word: str, text: str) -> int:
    """As a word of the language or of a name: `told`, `is_told`, `Told`, not `retold`, `told2`."""
    return len(re.findall(rf"(?<![a-z0-9]){word}(?![a-z0-9])", text, re.IGNORECASE))


def counts(words: Mapping[str, object]) -> Counts:
    """How often each word stands in each area."""
    joined = {
        area: "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in texts(area))
        for area in AREAS
    }
    return {word: {area: count(word, text) for area, text in joined.items()} for word in words}


def risen(now: Counts, before: Counts) -> list[str]:
    """The words of which there are more, with where."""
    return [
        f"{word} in {area}: {now[word][area]} times, {most} are allowed"
        for word, areas in before.items()
        for area, most in areas.items()
        if now[word][area] > most
    ]


def main() -> None:
    """Counts that have risen stay: to allow them takes an edit that a reader sees."""
    before = allowed()
    now = counts(before)
    fewer = {w: {a: min(n, now[w][a]) for a, n in areas.items()} for w, areas in before.items()}
    lines = [f" {json.dumps(word)}: {json.dumps(areas)}" for word, areas in fewer.items()]
    LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print("\n".join(risen(now, before)) or f"{LIST.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
