"""Plug-ins: methods that are found by the entry their module defines: `FAMILY = Family(...)`.

An entry is a call (or a tuple of calls) at the top of a module whose name is a literal. `plugins`
imports the modules that have one. `declared` reads the same from their sources, named by package
("specctl.runtime.policies") and never imported: recipes must not load torch, and may know of rooms
above theirs no more than the names.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry of the simplest kind: `make` is the class of the method."""

    name: str
    summary: str
    paper: str
    make: type[Any]


def plugins(package: str, attribute: str) -> dict[str, Any]:
    """Entries by name, in alphabetical order: what the modules of `package` define as
    `attribute`."""
    found: list[Any] = []
    for module in _sources(package, attribute):
        entry = getattr(importlib.import_module(module), attribute)
        found += entry if isinstance(entry, tuple) else (entry,)
    by_name = {entry.name: entry for entry in sorted(found, key=lambda entry: str(entry.name))}
    assert len(by_name) == len(found), f"two {attribute} of one name in {package}"
    return by_name


@dataclass(frozen=True, slots=True)
class Declared:
    """An entry by its source: its module, and what it says in keywords, as far as literal."""

    name: str
    module: str
    values: Mapping[str, Any]
    call: ast.Call

    def fields(self) -> dict[str, str]:
        """Of the dataclass that the entry names: what it is built from, and each one's type."""
        for word in (*self.call.args, *(keyword.value for keyword in self.call.keywords)):
            found = _class(word.id, self.module) if isinstance(word, ast.Name) else None
            if found is not None:
                return _fields(*found)
        return {}


@cache
def declared(package: str, attribute: str) -> Mapping[str, Declared]:
    """The entries of `plugins` by their sources, in the same order."""
    found: dict[str, Declared] = {}
    for module, source in _sources(package, attribute).items():
        statement = ast.parse(source).body[0]
        assert isinstance(statement, ast.Assign), f"{attribute} of {module} is no entry"
        value = statement.value
        for call in value.elts if isinstance(value, ast.Tuple) else (value,):
            entry = _entry(call, module)
            found[entry.name] = entry
    return dict(sorted(found.items()))


def _entry(call: ast.expr, module: str) -> Declared:
    assert isinstance(call, ast.Call), f"an entry of {module} is no call"
    words = {word.arg: word.value for word in call.keywords if word.arg is not None}
    values = {arg: word.value for arg, word in words.items() if isinstance(word, ast.Constant)}
    name = values.get("name") or (call.args and ast.literal_eval(call.args[0]))
    assert isinstance(name, str), f"an entry of {module} has no name"
    return Declared(name, module, values, call)


def _sources(package: str, attribute: str) -> dict[str, str]:
    """The modules of a package that define an entry, and the lines that do so."""
    entry = re.compile(rf"^{attribute} = .*\n(?:[ )].*\n)*", re.MULTILINE)
    files = sorted(_folder(package).iterdir(), key=lambda file: str(file.name))
    texts = {f.name: f.read_text(encoding="utf-8") for f in files if f.name.endswith(".py")}
    found = {name.removesuffix(".py"): entry.search(text) for name, text in texts.items()}
    return {f"{package}.{name}": match[0] for name, match in found.items() if match}


def _folder(package: str) -> Any:
    top, *rooms = package.split(".")
    return resources.files(top).joinpath(*rooms)


@cache
def _parsed(module: str) -> ast.Module:
    package, _, name = module.rpartition(".")
    file = _folder(package) / f"{name}.py"
    return ast.parse(file.read_text(encoding="utf-8") if file.is_file() else "")


def _class(name: str, module: str) -> tuple[ast.ClassDef, str] | None:
    """A class that a module defines, or imports from another one of ours, and its own module."""
    for node in _parsed(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            is_ours = (node.module or "").partition(".")[0] == module.partition(".")[0]
            return _class(name, str(node.module)) if is_ours else None
    return None


def _fields(node: ast.ClassDef, module: str) -> dict[str, str]:
    """What a dataclass is built from, inherited fields first."""
    found: dict[str, str] = {}
    for base in node.bases:
        above = _class(base.id, module) if isinstance(base, ast.Name) else None
        found |= {} if above is None else _fields(*above)
    if not any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
        return found
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            kind = ast.unparse(item.annotation)
            is_built = item.value is None or "init=False" not in ast.unparse(item.value)
            if is_built and not kind.startswith("ClassVar"):
                found[item.target.id] = kind
    return found
