"""Plug-ins: what is read of their sources is what an import gives, and every entry says its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path

import pytest

from specctl.core.errors import Exit
from specctl.core.plugins import (
    PLACES,
    BrokenPlugin,
    Declared,
    LeftOut,
    Plugins,
    declared,
    plugins,
)
from specctl.runtime.policies import POLICIES, TREES

ROOT = Path(__file__).parents[2]
NUMBER = count()
GOOD = """
from specctl.core.plugins import Plugin

ENTRY = Plugin("good", "it loads", "", int)
"""
BROKEN = {  # a module, and what is said of it
    "raise RuntimeError('no such kernel')": ("RuntimeError: no such kernel", "bad.py:3"),
    "import no_such_library": ("ModuleNotFoundError: No module named 'no_such_library'", "py:3"),
    "import sys\nsys.exit(3)": ("SystemExit: 3", "bad.py:4"),
    "def wrong(:": ("SyntaxError", "bad.py:3"),
    "\x00": ("", ""),
}
ONE_OF_EACH = """
import sys
from specctl.core.plugins import PLACES, declared
from specctl.drafters import family
from specctl.runtime.policies import make_policy
from specctl.runtime.stops import make_stop
from specctl.runtime.verify import check_legal
from specctl.core.tree import NodeKind

family("eagle3"), make_policy({"policy": "dynamic-tree"}), make_stop("svip")
check_legal("chain", NodeKind.IID, True)
modules = {one.module for place in PLACES.items() for one in declared(*place).values()}
print(*sorted(modules & sys.modules.keys()))
"""


@pytest.mark.parametrize("package", PLACES)
def test_the_sources_say_what_an_import_gives(package: str) -> None:
    entries, read = plugins(package, PLACES[package]), declared(package, PLACES[package])
    assert list(read) == list(entries) == sorted(entries)
    for name, entry in entries.items():
        assert not read[name].problem, name
        assert getattr(entry, "summary", "an engine has none"), name
        assert getattr(entry, "paper", "") == "" or entry.paper.startswith("https://"), name
        said = read[name].values
        assert all(getattr(entry, word) == value for word, value in said.items()), name


@pytest.mark.parametrize("name", POLICIES)
def test_the_fields_of_a_class_are_read_with_those_it_inherits(name: str) -> None:
    read = declared("specctl.runtime.policies", "POLICY")[name].fields()
    assert list(read) == [field.name for field in fields(POLICIES[name]) if field.init]


def test_whether_a_policy_grows_trees_is_read_without_an_import() -> None:
    entries = plugins("specctl.runtime.policies", "POLICY")
    assert tuple(name for name, entry in entries.items() if entry.is_tree) == TREES


def test_an_entry_without_a_class_has_no_fields() -> None:
    read: Declared = declared("specctl.runtime.batching", "BATCHING")["table"]
    assert read.fields() == {}
    assert read.values == {"setting": "table", "reads_costs": True}


def test_a_method_is_loaded_without_the_others() -> None:
    words = [sys.executable, "-c", ONE_OF_EACH]
    done = subprocess.run(words, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "specctl.drafters.features.eagle3",
        "specctl.drafters.losses.divergences",
        "specctl.runtime.policies.dynamic_tree",
        "specctl.runtime.stops.svip",
        "specctl.runtime.verify.chain",
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that can be imported, with one plug-in that works."""
    package = tmp_path / f"toy_methods_{next(NUMBER)}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.partition(".")[0] == package.name]:
        del sys.modules[name]


def toys(folder: Path, **modules: str) -> Plugins[object]:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return plugins(folder.name, "ENTRY")


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_module_fails_alone_and_is_named(folder: Path, line: str) -> None:
    found, where = BROKEN[line]
    entry = GOOD.replace('"good"', '"bad"')
    entries = toys(folder, bad=f"\n\n{line}\n{entry}")
    assert list(entries) == ["bad", "good"]
    assert entries["good"]
    with pytest.raises(BrokenPlugin) as failure:
        entries["bad"]
    error = failure.value
    assert error.what == f"entry bad cannot be loaded: module {folder.name}.bad is broken"
    assert error.found.startswith(found)
    assert error.where.endswith(where)
    assert error.do
    assert error.exit is Exit.FILE
    with pytest.warns(LeftOut, match=f"entry bad .*{folder.name}.bad"):
        assert list(entries.working()) == ["good"]
    assert [one.what for one in entries.broken()] == [error.what]


def test_an_entry_whose_name_cannot_be_read_is_listed_by_its_file(folder: Path) -> None:
    made = "from specctl.core.plugins import Plugin\nENTRY = Plugin(str(1), '', '', int)\n"
    entries = toys(folder, made=made, other="ENTRY = 3\n")
    assert list(entries) == ["good", "made.py", "other.py"]
    for name in ("made.py", "other.py"):
        with pytest.raises(BrokenPlugin, match="no call with a literal name"):
            entries[name]


def test_the_last_line_of_a_module_needs_no_end(folder: Path) -> None:
    assert toys(folder, last=GOOD.replace('"good"', '"last"').rstrip("\n"))["last"]


def test_an_entry_that_is_named_anew_by_its_module_is_refused(folder: Path) -> None:
    entries = toys(folder, renamed=GOOD.replace('"good"', '"bad"') + "ENTRY = ()\n")
    with pytest.raises(BrokenPlugin, match="another name once the module is imported"):
        entries["bad"]


def test_two_modules_with_one_name_are_both_named(folder: Path) -> None:
    one = GOOD.replace('"good"', '"twin"')
    entries = toys(folder, first=one, second=one)
    assert list(entries) == ["good", "twin"]
    assert entries["good"]
    both = f"{folder.name}.first and {folder.name}.second both define it"
    with pytest.raises(BrokenPlugin, match=both):
        entries["twin"]


def test_a_program_may_bring_an_entry_of_its_own(folder: Path) -> None:
    entries = toys(folder)
    entries["own"] = own = object()
    assert list(entries) == ["good", "own"]
    assert entries["own"] is own
    del entries["own"]
    assert "own" not in entries
    with pytest.raises(KeyError):
        entries["own"]


def test_the_fields_of_a_class_that_cannot_be_parsed_are_none(folder: Path) -> None:
    toys(folder, bad="def wrong(:\n" + GOOD.replace('"good"', '"bad"'))
    assert declared(folder.name, "ENTRY")["bad"].fields() == {}
