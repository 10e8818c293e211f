"""Plug-ins: what is read of their sources is what an import gives, and every entry says its own."""

from __future__ import annotations

from dataclasses import fields

import pytest

from specctl.core.plugins import Declared, declared, plugins
from specctl.runtime.policies import POLICIES

KINDS = {
    "specctl.drafters": "FAMILY",
    "specctl.drafters.losses": "LOSS",
    "specctl.export.formats": "FORMAT",
    "specctl.export.imports": "IMPORTER",
    "specctl.runtime.batching": "BATCHING",
    "specctl.runtime.controllers": "CONTROLLER",
    "specctl.runtime.policies": "POLICY",
    "specctl.runtime.stops": "STOP",
    "specctl.runtime.verify": "RULE",
    "specctl.train.vocab.selectors": "SELECTOR",
}


@pytest.mark.parametrize("package", KINDS)
def test_the_sources_say_what_an_import_gives(package: str) -> None:
    entries, read = plugins(package, KINDS[package]), declared(package, KINDS[package])
    assert list(read) == list(entries) == sorted(entries)
    for name, entry in entries.items():
        assert entry.summary, name
        assert getattr(entry, "paper", "") == "" or entry.paper.startswith("https://"), name
        said = read[name].values
        assert all(getattr(entry, word) == value for word, value in said.items()), name


@pytest.mark.parametrize("name", POLICIES)
def test_the_fields_of_a_class_are_read_with_those_it_inherits(name: str) -> None:
    read = declared("specctl.runtime.policies", "POLICY")[name].fields()
    assert list(read) == [field.name for field in fields(POLICIES[name]) if field.init]


def test_an_entry_without_a_class_has_no_fields() -> None:
    read: Declared = declared("specctl.runtime.batching", "BATCHING")["table"]
    assert read.fields() == {}
    assert read.values == {"setting": "table", "reads_costs": True}
