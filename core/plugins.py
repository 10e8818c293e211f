"""Plug-ins: methods that are found by the entry their module defines: `FAMILY = Family(...)`.

An entry is a call (or a tuple of calls) at the top of a module whose name is a literal. `declared`
reads the entries from the sources of a package, which is named ("specctl.runtime.policies") and
never imported: recipes must not load torch, and may know of rooms above theirs no more than the
names. `plugins` gives the entries themselves. It imports the module of an entry when that entry is
taken, and no other one, so a module that fails to import stops nobody but the users of its methods.
"""

from __future__ import annotations

import ast
import importlib
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Generic, TypeVar

from specctl.core.errors import FileError, SpecctlError

T = TypeVar("T")

# Every package with plug-ins, and the attribute that holds the entries of its modules.
PLACES: Mapping[str, str] = {
    "specctl.drafters": "FAMILY",
    "specctl.drafters.losses": "LOSS",
    "specctl.export.engines": "ENGINE",
    "specctl.export.formats": "FORMAT",
    "specctl.export.imports": "IMPORTER",
    "specctl.runtime.batching": "BATCHING",
    "specctl.runtime.controllers": "CONTROLLER",
    "specctl.runtime.policies": "POLICY",
    "specctl.server.tools": "TOOL_FORMAT",
    "specctl.runtime.stops": "STOP",
    "specctl.runtime.verify": "RULE",
    "specctl.runtime.verify.relaxed": "RELAXED",
    "specctl.train.vocab.selectors": "SELECTOR",
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry of the simplest kind: `make` is the class of the method."""

    name: str
    summary: str
    paper: str
    make: type[Any]


class BrokenPlugin(FileError):
    """The module of an entry cannot be imported, or does not define the entry that it declares."""


class LeftOut(UserWarning):
    """A list lacks a plug-in that is broken."""


class Plugins(MutableMapping[str, T], Generic[T]):
    """Entries by name, in alphabetical order; `part` of each is what the mapping holds.

    Taking an entry imports its module and may raise BrokenPlugin; names alone import nothing. An
    entry may be set by a program that brings a method of its own; deleting takes that back.
    """

    def __init__(self, package: str, attribute: str, part: Callable[[Any], T]) -> None:
        self._declared, self._attribute, self._part = declared(package, attribute), attribute, part
        self._loaded: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._loaded[name] = self._part(_entry_of(self._declared[name], self._attribute))
        return self._loaded[name]

    def __setitem__(self, name: str, entry: T) -> None:
        self._loaded[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._declared or name in self._loaded

    def __iter__(self) -> Iterator[str]:
        return iter(sorted({*self._declared, *self._loaded}))

    def __len__(self) -> int:
        return len({*self._declared, *self._loaded})

    def working(self) -> dict[str, T]:
        """Every entry that can be loaded, for lists and searches; a warning names the others."""
        found: dict[str, T] = {}
        for name in self:
            try:
                found[name] = self[name]
            except BrokenPlugin as error:
                warnings.warn(f"left out: {error.what} ({error.found})", LeftOut, stacklevel=2)
        return found

    def broken(self) -> list[BrokenPlugin]:
        """Why each of the others cannot be loaded."""
        found = []
        for name in self:
            try:
                self[name]
            except BrokenPlugin as error:
                found.append(error)
        return found


def plugins(
    package: str, attribute: str, part: Callable[[Any], Any] = lambda entry: entry
) -> Plugins[Any]:
    """The entries, or a `part` of each, that the modules of `package` define as `attribute`."""
    return Plugins(package, attribute, part)


def _entry_of(entry: Declared, attribute: str) -> Any:
    """Import the module of an entry, and give what it defines under the entry's name."""
    try:
        entries = getattr(importlib.import_module(entry.module), attribute)
    except (Exception, SystemExit) as error:
        raise _broken(entry, attribute, error) from error
    for one in entries if isinstance(entries, tuple) else (entries,):
        if not entry.problem and getattr(one, "name", None) == entry.name:
            return one
    raise _broken(entry, attribute, None)


def _broken(entry: Declared, attribute: str, error: BaseException | None) -> BrokenPlugin:
    kind = attribute.lower().replace("_", " ")
    found = entry.problem or f"{attribute} has another name once the module is imported"
    if error is not None:
        text = error.what if isinstance(error, SpecctlError) else str(error)
        found = f"{type(error).__name__}: {text}"[:300]
    return BrokenPlugin(
        f"{kind} {entry.name} cannot be loaded: module {entry.module} is broken",
        where=entry.module if error is None else _line_of(error) or entry.module,
        found=found,
        expected=f"a module that imports, and an entry {attribute} whose name is a literal",
        do=getattr(error, "do", "")
        or f"correct that module, or use another {kind}; `specctl doctor` names all broken ones",
    )


def _line_of(error: BaseException) -> str:
    """FILE:LINE where an import failed; nothing if it failed in no file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


@dataclass(frozen=True, slots=True)
class Declared:
    """An entry by its source: its module, and what it says in keywords, as far as literal.

    `problem`: why it cannot be taken, if so. An entry whose name cannot be read has that of its
    file.
    """

    name: str
    module: str
    values: Mapping[str, Any] = field(default_factory=dict)
    call: ast.Call | None = None
    problem: str = ""

    def fields(self) -> dict[str, str]:
        """Of the dataclass that the entry names: what it is built from, and each one's type."""
        if self.call is None:
            return {}
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
        for entry in _entries(source, module):
            other = found.get(entry.name)
            if other is not None:
                problem = f"{other.module} and {module} both define it"
                entry = replace(other, problem=problem)
            found[entry.name] = entry
    return dict(sorted(found.items()))


def _entries(source: str, module: str) -> Iterator[Declared]:
    """The entries of a module, from the lines that define them."""
    try:
        value = getattr(ast.parse(source).body[0], "value", None)
    except (SyntaxError, ValueError):  # the latter of null bytes
        value = None
    for call in value.elts if isinstance(value, ast.Tuple) else (value,):
        yield _entry(call, module)


def _entry(call: ast.expr | None, module: str) -> Declared:
    if isinstance(call, ast.Call):
        words = {word.arg: word.value for word in call.keywords if word.arg is not None}
        values = {arg: word.value for arg, word in words.items() if isinstance(word, ast.Constant)}
        first = call.args[0] if call.args else None
        name = first.value if isinstance(first, ast.Constant) else values.get("name")
        if isinstance(name, str):
            return Declared(name, module, values, call)
    file = module.rpartition(".")[2] + ".py"  # the name of no other entry
    return Declared(file, module, problem="the entry is no call with a literal name")


def _sources(package: str, attribute: str) -> dict[str, str]:
    """The modules of a package, and of those in it, that define an entry, and the lines that do
    so."""
    entry = re.compile(rf"^{attribute} = .*\n(?:[ )].*\n)*", re.MULTILINE)
    found = {name: entry.search(text + "\n") for name, text in _modules(_folder(package), package)}
    return {name: match[0] for name, match in found.items() if match}


def _modules(folder: Any, package: str) -> Iterator[tuple[str, str]]:
    """Every module with its source, those of packages within behind their names."""
    for file in sorted(folder.iterdir(), key=lambda file: str(file.name)):
        if file.name.endswith(".py"):
            yield f"{package}.{file.name.removesuffix('.py')}", _text(file)
        elif file.is_dir() and file.joinpath("__init__.py").is_file():
            yield from _modules(file, f"{package}.{file.name}")


def _text(file: Any) -> str:
    """A source; a file that is not UTF-8 fails when it is imported, one that is gone defines
    nothing."""
    try:
        return str(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""


def _folder(package: str) -> Any:
    top, *rooms = package.split(".")
    return resources.files(top).joinpath(*rooms)


@cache
def _parsed(module: str) -> ast.Module:
    """A module of ours; empty where it is no Python."""
    package, _, name = module.rpartition(".")
    file = _folder(package) / f"{name}.py"
    try:
        return ast.parse(_text(file) if file.is_file() else "")
    except (SyntaxError, ValueError):
        return ast.parse("")


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
