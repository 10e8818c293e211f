"""The fast tier: which tests `make test-fast` runs, chosen by measured durations.

    python tests/specctl_testing/fast_tier.py build/tests.xml [build/fast.xml ...]

reads the junit files that `make test` and `make test-fast` leave (of a case that stands in several,
the last counts) and writes tests/fast_tier.json: the test functions that take more than their
share of the time, by file, each with how many of its cases run. The share is the same for every
function and as large as `--seconds` of all workers allow. What the list does not name runs whole:
new tests, until they are measured. A test marked `fast` runs whatever the list says.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "fast_tier.json"
SECONDS = 30.0  # of both workers together; with their start and what is marked, 90 on two cores
LEAST_SHARE = 0.02
Kept = dict[str, dict[str, int]]  # file -> function -> number of its cases that run


def kept_cases() -> Kept:
    kept: Kept = json.loads(LIST.read_text(encoding="utf-8"))
    return kept


def spread(count: int, num_kept: int) -> list[bool]:
    """Which of `count` cases run: `num_kept` of them at even distances, the first among them."""
    return [(i * num_kept) % count < num_kept for i in range(count)]


def parted(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of the fast tier, and the others; each in their order."""
    listed, functions = kept_cases(), defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        file, _, name = item.nodeid.partition("::")
        functions[file, name.partition("[")[0]].append(item)
    runs = set[pytest.Item]()
    for (file, name), cases in functions.items():
        num_kept = listed.get(file, {}).get(name, len(cases))
        is_kept = spread(len(cases), min(num_kept, len(cases)))
        runs |= {item for item, kept in zip(cases, is_kept, strict=True) if kept}
    runs |= {item for item in items if item.get_closest_marker("fast")}
    return [i for i in items if i in runs], [i for i in items if i not in runs]


def durations(paths: Sequence[Path]) -> dict[str, dict[str, list[float]]]:
    """File -> function -> seconds of each of its cases, those of their fixtures included."""
    cases: dict[tuple[str, str], float] = {}
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            file = case.attrib["classname"].replace(".", "/") + ".py"
            cases[file, case.attrib["name"]] = float(case.attrib["time"])
    functions: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (file, name), seconds in cases.items():
        functions[file][name.partition("[")[0]].append(seconds)
    return functions


def chosen(functions: Mapping[str, Mapping[str, Sequence[float]]], share: float) -> Kept:
    """The functions above the share, and how many of their cases fit into it."""
    return {
        file: slow
        for file, found in sorted(functions.items())
        if (slow := {n: int(share / fmean(s)) for n, s in sorted(found.items()) if sum(s) > share})
    }


def seconds_of(functions: Mapping[str, Mapping[str, Sequence[float]]], kept: Kept) -> float:
    """What the tier is expected to take, all workers together."""
    return sum(
        fmean(seconds) * kept.get(file, {}).get(name, len(seconds))
        for file, found in functions.items()
        for name, seconds in found.items()
    )


def fitting(functions: Mapping[str, Mapping[str, Sequence[float]]], seconds: float) -> Kept:
    """The largest share, to a hundredth of a second, with which the tier takes so long."""
    low, high = LEAST_SHARE, seconds
    while high - low > 0.01:
        middle = (low + high) / 2
        if seconds_of(functions, chosen(functions, middle)) <= seconds:
            low = middle
        else:
            high = middle
    return chosen(functions, low)


def missing(kept: Kept) -> list[str]:
    """What the list names and the tests no longer hold, as FILE or FILE::FUNCTION."""
    found = []
    for file, functions in kept.items():
        path = ROOT / file
        if not path.is_file():
            found.append(file)
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        found += [f"{file}::{name}" for name in functions if name not in defined]
    return found


def written(kept: Kept) -> str:
    """As JSON, one file a line: a change of a test's time is a change of its line."""
    lines = [f" {json.dumps(file)}: {json.dumps(functions)}" for file, functions in kept.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("junit", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    given = parser.parse_args()
    functions = durations(given.junit)
    kept = fitting(functions, given.seconds)
    for gone in missing(kept):  # measured before it was renamed
        file, _, name = gone.partition("::")
        kept[file].pop(name) if name else kept.pop(file)
    LIST.write_text(written(kept), encoding="utf-8")
    count = sum(len(found) for found in functions.values())
    slow = [number for found in kept.values() for number in found.values()]
    print(
        f"{LIST.relative_to(ROOT)}: of {count} test functions {slow.count(0)} are left out, "
        f"{len(slow) - slow.count(0)} run in part: {seconds_of(functions, kept):.0f} s of tests"
    )


if __name__ == "__main__":
    main()
