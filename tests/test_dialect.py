"""Words of our own dialect: their numbers may only fall."""

from __future__ import annotations

import pytest

from specctl_testing import dialect


def test_no_word_of_the_dialect_stands_more_often_than_before() -> None:
    before = dialect.allowed()
    found = dialect.risen(dialect.counts(before), before)
    words = "|".join(before)
    assert not found, (
        f"{found}: take the field's word instead (tests/specctl_testing/dialect.py); "
        f"git diff main | grep -iE '^[+].*[^a-z0-9]({words})([^a-z0-9]|$)' shows your lines"
    )


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("It is told.", 1),
        ("is_told, TOLD and _told_1D", 3),
        ("retold, tolds, told2 and stolid", 0),
    ],
)
def test_a_word_is_counted_in_prose_and_in_names(text: str, times: int) -> None:
    assert dialect.count("told", text) == times


def test_one_more_is_named_and_one_fewer_is_not() -> None:
    before = {"told": {"product": 3, "docs": 2}}
    assert dialect.risen({"told": {"product": 2, "docs": 2}}, before) == []
    assert dialect.risen({"told": {"product": 4, "docs": 1}}, before) == [
        "told in product: 4 times, 3 are allowed"
    ]


def test_sources_pages_and_tests_are_read() -> None:
    names = {path.name for area in dialect.AREAS for path in dialect.texts(area)}
    assert {"engine.py", "step.cpp", "glossary.md", "Makefile", "eagle3.yaml"} <= names
    assert "test_dialect.py" not in names
