"""The fast tier is chosen by measured durations, and its list names tests that are there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from specctl_testing import fast_tier

MEASURED = """<?xml version="1.0"?><testsuites><testsuite name="pytest">
<testcase classname="tests.cli.test_words" name="test_a" time="0.05"/>
<testcase classname="tests.cli.test_words" name="test_b[x]" time="0.1"/>
<testcase classname="tests.cli.test_words" name="test_b[y::z]" time="0.3"/>
<testcase classname="tests.test_site" name="test_c" time="9"/>
</testsuite></testsuites>"""


@dataclass(frozen=True)
class Case:
    """As much of a collected test as the choice looks at."""

    nodeid: str
    mark: str = ""

    def get_closest_marker(self, name: str) -> str | None:
        return name if name == self.mark else None


def test_every_test_that_the_list_names_is_there() -> None:
    gone = fast_tier.missing(fast_tier.kept_cases())
    assert not gone, f"renamed or deleted: {gone}; make fast-tier writes the list anew"


def test_a_test_that_is_gone_is_named() -> None:
    here = "tests/test_fast_tier.py"
    listed = {here: {"test_gone": 0, "test_a_test_that_is_gone_is_named": 1}, "tests/no.py": {}}
    assert fast_tier.missing(listed) == [f"{here}::test_gone", "tests/no.py"]


def test_the_list_is_as_the_command_writes_it() -> None:
    kept = fast_tier.kept_cases()
    assert fast_tier.written(kept) == fast_tier.LIST.read_text(encoding="utf-8")


@pytest.mark.parametrize(("count", "num_kept"), [(1, 0), (1, 1), (7, 3), (102, 5), (4, 4)])
def test_so_many_cases_are_kept_at_even_distances(count: int, num_kept: int) -> None:
    at = [i for i, is_kept in enumerate(fast_tier.spread(count, num_kept)) if is_kept]
    assert len(at) == num_kept
    assert at[:1] == [0][:num_kept]
    gaps = [after - before for before, after in pairwise([*at, count])]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_functions_above_the_share_keep_the_cases_that_fit(tmp_path: Path) -> None:
    (tmp_path / "all.xml").write_text(MEASURED)
    functions = fast_tier.durations([tmp_path / "all.xml"])
    kept = fast_tier.chosen(functions, 0.2)
    assert kept == {"tests/cli/test_words.py": {"test_b": 1}, "tests/test_site.py": {"test_c": 0}}
    assert fast_tier.seconds_of(functions, kept) == pytest.approx(0.05 + 0.2)
    assert fast_tier.seconds_of(functions, fast_tier.fitting(functions, 0.3)) <= 0.3
    assert fast_tier.fitting(functions, 10.0) == {}


def test_a_newer_measurement_of_a_case_counts(tmp_path: Path) -> None:
    (tmp_path / "all.xml").write_text(MEASURED)
    (tmp_path / "fast.xml").write_text(MEASURED.replace('time="0.05"', 'time="2"'))
    functions = fast_tier.durations([tmp_path / "all.xml", tmp_path / "fast.xml"])
    assert functions["tests/cli/test_words.py"]["test_a"] == [2.0]


def test_the_tier_is_what_is_listed_what_is_new_and_what_is_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_tier, "kept_cases", lambda: {"t.py": {"slow": 0, "some": 1}})
    items: list[Any] = [
        Case("t.py::slow"),
        Case("t.py::some[a::b]"),
        Case("t.py::some[c]"),
        Case("t.py::some[d]", "fast"),
        Case("t.py::new"),
        Case("u.py::slow"),
    ]
    kept, others = fast_tier.parted(items)
    assert kept == [items[1], *items[3:]]
    assert others == [items[0], items[2]]
