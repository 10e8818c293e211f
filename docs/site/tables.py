"""The tables of docs/systems.md and docs/methods.md, written from the entries: make docs-tables.

    python docs/site/tables.py           writes them
    python docs/site/tables.py --check   says which are stale, and exits with 1 if one is

What stands above the mark of a page is written by hand. Below it, docs/systems.md has a row for
every `# system:` of a recipe and for every system of systems.yaml; docs/methods.md has every
plug-in, with the options of families and the settings of policies.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))
DOCS = ROOT / "docs"
COMMAND = "make docs-tables"
MARK = f"<!-- Below this line everything is written by {COMMAND}. -->\n"
LONGEST = 60  # characters of a default
ARXIV = re.compile(r"\d{4}\.\d{5}")


def main(words: list[str]) -> int:
    old, is_check = stale(), words == ["--check"]
    for name in old:
        if not is_check:
            (DOCS / name).write_text(written(name), encoding="utf-8")
        print(f"docs/{name} {'is stale: ' + COMMAND if is_check else 'is written'}")
    return 1 if old and is_check else 0


def stale() -> list[str]:
    """The pages that are not as the entries say."""
    return [name for name in PAGES if (DOCS / name).read_text(encoding="utf-8") != written(name)]


def written(name: str) -> str:
    """A page as it should be: what is written by hand, the mark, the tables."""
    by_hand, mark, _ = (DOCS / name).read_text(encoding="utf-8").partition(MARK)
    assert mark, f"docs/{name} has lost the line that ends what is written by hand: {MARK}"
    return by_hand + MARK + "\n".join(PAGES[name]()) + "\n"


def table(*titles: str) -> Iterator[str]:
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)


def row(*cells: str) -> str:
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def plain(text: str) -> str:
    """Text of the code as Markdown in one line; what stands in backticks is left as it is."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    marks = [r"\|" if part.startswith("`") else r"[|<>*_\[\]]" for part in parts]
    return "".join(re.sub(f"({m})", r"\\\1", part) for m, part in zip(marks, parts, strict=True))


# -- systems ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Listed:
    """A row of docs/systems.md: what provides the system (recipes or a command), what of the paper
    it lacks, and what was measured of it."""

    name: str
    entries: list[str]
    chapter: str
    paper: str
    state: str
    measured: str

    def order(self) -> tuple[bool, bool, str, str]:
        """Oldest papers first, what is not built last."""
        return self.state.startswith("not built"), self.paper == "-", self.paper, self.name

    def __str__(self) -> str:
        called = ", ".join(f"`{entry}`" for entry in self.entries)
        return row(self.name, called, self.paper, self.state, self.measured)


def systems_tables() -> Iterator[str]:
    systems = list(all_systems())
    for key, title in chapters().items():
        titles = ("system", "entry", "paper", "state", "measured")
        yield from ("", f"## {title}", "", *table(*titles))
        yield from (str(one) for one in sorted(systems, key=Listed.order) if one.chapter == key)


def chapters() -> dict[str, str]:
    return {key: chapter["title"] for key, chapter in _chapters().items()}


@cache
def _chapters() -> dict[str, Any]:
    text = (Path(__file__).parent / "systems.yaml").read_text(encoding="utf-8")
    known: dict[str, Any] = yaml.safe_load(text)
    return known


def all_systems() -> Iterator[Listed]:
    """Those of recipes, then those that no recipe stands for."""
    yield from _of_recipes().values()
    for key, chapter in _chapters().items():
        for one in chapter["systems"]:
            entries = [] if one["entry"] == "-" else [one["entry"]]
            said = (one["paper"], one["state"], one.get("measured", ""))
            yield Listed(one["name"], entries, key, *said)


def _of_recipes() -> dict[str, Listed]:
    """The recipe that says the chapter of a system comes first of those that provide it."""
    found: dict[str, Listed] = {}
    more: list[tuple[str, str]] = []
    for name, path in _recipe_files().items():
        for system, about in named_systems(path.read_text(encoding="utf-8"), path.name):
            if "chapter" not in about:
                more.append((system, name))
                continue
            assert system not in found, f"{path.name} and another recipe describe {system}"
            paper = about.get("paper") or ", ".join(ARXIV.findall(_recipe(name).paper)) or "-"
            said = (paper, about.get("state", "whole"), about.get("measured", ""))
            found[system] = Listed(system, [name], about["chapter"], *said)
    for system, name in more:
        assert system in found, f"{name}.yaml names {system}, of which no recipe says the chapter"
        found[system].entries.append(name)
    return found


def named_systems(text: str, file: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each `# system: NAME` of a recipe's head, with the `#   key: value` lines below it."""
    head = re.match(r"(?:#.*\n)*", text)
    blocks = re.findall(r"^# system: (.+)\n((?:#   .+\n)*)", head[0] if head else "", re.MULTILINE)
    for system, below in blocks:
        about = dict(re.findall(r"^#   (\w+): (.+)$", below, re.MULTILINE))
        extra = set(about) - {"chapter", "paper", "state", "measured"}
        assert not extra, f"{file}: {system} has {extra}"
        if "chapter" in about:
            known = ", ".join(chapters())
            assert about["chapter"] in chapters(), f"{file}: chapter {about['chapter']} ({known})"
        yield system, about


@cache
def _recipe_files() -> dict[str, Path]:
    from specctl.recipes.files import recipe_names

    return {name: ROOT / "recipes" / f"{name}.yaml" for name in sorted(recipe_names())}


@cache
def _recipe(name: str) -> Any:
    from specctl.recipes.load import load_recipe

    return load_recipe(name)


# -- methods ---------------------------------------------------------------------------------------

KINDS = {  # package: title, and how one is set
    "specctl.runtime.policies": ("Tree policies", "`serve.policy`"),
    "specctl.runtime.stops": ("Stop rules of chains", "`serve.stop`"),
    "specctl.runtime.controllers": ("Controllers of a team", "`serve.controller`"),
    "specctl.runtime.verify": ("Verification rules", "`serve.rule`, `--rule`"),
    "specctl.runtime.verify.relaxed": (
        "Relaxed rules (approximate)",
        "`serve.rule`, `--rule`, with numbers as in `fly:0.5:4`",
    ),
    "specctl.runtime.batching": ("Batch policies", "`specctl serve --batching`"),
    "specctl.drafters.losses": ("Losses of a draft head", "`drafter.options.loss`"),
    "specctl.train.vocab.selectors": ("Vocabulary selectors", "`vocab.selector`"),
    "specctl.export.formats": ("Export formats", "`specctl export --to`"),
    "specctl.export.imports": ("Importers", "`specctl import`"),
    "specctl.server.tools": ("Formats of tool calls", "`specctl serve --set api.tool_parser=NAME`"),
}


def methods_tables() -> Iterator[str]:
    from specctl.core.plugins import PLACES, plugins

    yield from _families()
    for package, (title, way) in KINDS.items():
        is_policy = package == "specctl.runtime.policies"
        settings = ["settings"] if is_policy else []
        yield from ("", f"## {title}", "", f"Set by {way}.", "")
        yield from table("name", "what", "paper", *settings)
        for name, entry in plugins(package, PLACES[package]).items():
            more = [_settings(name, entry.make)] if is_policy else []
            yield row(f"`{name}`", plain(entry.summary), link(getattr(entry, "paper", "")), *more)


def link(url: str) -> str:
    return f"[{url.removeprefix('https://').removeprefix('arxiv.org/abs/')}]({url})" if url else ""


def _settings(name: str, kind: type[Any]) -> str:
    """What a recipe can set of a policy, with its defaults."""
    from specctl.recipes.serve import POLICY_FIELDS

    return ", ".join(
        f"`{one.name}: {shown(default_of(one))}`"
        for one in fields(kind)
        if one.name in POLICY_FIELDS[name]
    )


def _families() -> Iterator[str]:
    from specctl.drafters import families

    known = dict(families())
    recipes: dict[str, list[str]] = {name: [] for name in known}
    for name in _recipe_files():
        recipes.get(_recipe(name).drafter.family, []).append(name)
    yield from ("", "## Drafter families", "")
    yield "Set by `drafter.family`, options by `drafter.options`. The first policy is the default."
    places = _places(known)
    for name, family in known.items():
        kind = "trained" if family.trainable else "not trained"
        policies = ", ".join(f"`{policy}`" for policy in family.policies)
        named = ", ".join(f"`{recipe}`" for recipe in recipes[name]) or "none"
        yield from ("", f"### {name}", "", plain(family.summary), "")
        yield f"Paper {link(family.paper)}; {kind}; policies {policies}; recipes {named}."
        yield from _options(family.options, places)
    yield from ("", "## Options that families share")
    for kind, place in places.items():
        if kind.__name__ == place:
            yield from ("", f"### {place}", *_own_options(kind))


def _places(families: Mapping[str, Any]) -> dict[type[Any], str]:
    """Under which heading the options that a class adds are described: that of the first family
    whose class it is, else that of the class."""
    found: dict[type[Any], str] = {}
    for name, family in families.items():
        found.setdefault(family.options, name)
    above = {base for kind in found for base in _bases(kind)} - set(found)
    return found | {kind: kind.__name__ for kind in sorted(above, key=lambda kind: kind.__name__)}


def _bases(kind: type[Any]) -> list[type[Any]]:
    """A class and those above it that add options."""
    return [one for one in kind.__mro__ if _added(one)]


def _added(kind: type[Any]) -> list[Field[Any]]:
    """The options that a class adds, or whose default it changes."""
    if "__dataclass_fields__" not in kind.__dict__:
        return []
    names = inspect.get_annotations(kind)
    return [one for one in fields(kind) if one.name in names and one.init]


def _options(kind: type[Any], places: Mapping[type[Any], str]) -> Iterator[str]:
    yield from _own_options(kind)
    inherited = [one for one in _bases(kind) if one is not kind]
    if inherited:
        links = ", ".join(f"[{places[one]}](#{places[one].lower()})" for one in inherited)
        yield from ("", f"Other options: those of {links}.")
    elif not _added(kind):
        yield from ("", "No options.")


def _own_options(kind: type[Any]) -> Iterator[str]:
    if not _added(kind):
        return
    doc = kind.__doc__ or ""
    hints = get_type_hints(kind, include_extras=True)
    if not doc.startswith(f"{kind.__name__}("):  # what dataclass writes where there is none
        yield from ("", plain(doc))
    yield from ("", *table("option", "values", "default"))
    for one in _added(kind):
        yield row(f"`{one.name}`", _values(hints[one.name]), f"`{shown(default_of(one))}`")


def _values(hint: Any) -> str:
    """The type of an option and the values that it may have, from its annotation."""
    from specctl.drafters.option_checks import OneOf, limits_of

    limits = list(limits_of(hint))
    choices = [", ".join(map(str, one.choices)) for one in limits if isinstance(one, OneOf)]
    ranges = [
        f"{_number(one.least)} to {_number(one.most)}"
        for one in limits
        if not isinstance(one, OneOf)
    ]
    return plain(": ".join([_type(hint), *choices, *ranges]))


def _number(value: float) -> str:
    return f"{int(value) if value == int(value) else value:,}"


def _type(hint: Any) -> str:
    """An annotation without its limits, in words."""
    if isinstance(hint, UnionType) or get_origin(hint) is Union:
        return " or ".join(map(_type, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_type(get_args(hint)[0])}"
    hint = getattr(hint, "__origin__", hint)
    return "null" if hint is NoneType else str(hint.__name__)


def default_of(one: Field[Any]) -> Any:
    if one.default is not MISSING:
        return one.default
    return one.default_factory() if one.default_factory is not MISSING else None


def shown(value: Any) -> str:
    """A default as a recipe writes it; of a long one the beginning."""
    text = yaml.safe_dump(_plain_value(value), default_flow_style=True, width=10**6)
    text = text.removesuffix("...\n").strip()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _plain_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain_value(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return float(f"{value:.6g}") if isinstance(value, float) else value


PAGES = {"systems.md": systems_tables, "methods.md": methods_tables}

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
