"""What `specctl recipes ls` prints of the recipes that come with specctl: one screen of the usual
ones with counts of the others, or tables of all. No torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Any

from specctl.api.arguments.families import family_infos
from specctl.cli.app.console import Console
from specctl.core.errors import unknown
from specctl.core.storage.model_folder import CONFIG, is_adapter_alone
from specctl.recipes.load import EMBEDDED, RecipeInfo
from specctl.recipes.made_for import is_same
from specctl.recipes.targets import resolve

RECOMMENDED = (
    "quickstart",
    "auto",
    "distill",
    "eagle3",
)  # to begin with; docs/choosing.md says why
USUAL = (*RECOMMENDED, "prompt-lookup", "token-recycling", "quantspec", "medusa", "prune", "adapt")
GROUPS = ("recommended", "trained", "no training", "for real targets")
FIELDS = ("name", "family", "target", "summary", "paper")
MOST_TARGETS = 6  # that are named with their number of recipes
TIED = "\N{NO-BREAK SPACE}"  # between words that stay on one line
MORE = (
    ("every recipe", "specctl recipes ls --all"),
    ("what fits a target", "specctl recipes ls --target llama3-8b"),
    ("by family or word", "specctl recipes ls --search tree"),
)


def every_recipe() -> list[RecipeInfo]:
    """The recipes that come with specctl: group by group, in each by target and name."""
    from specctl.recipes.load import list_recipes

    infos = sorted(list_recipes(), key=lambda i: (i.target != EMBEDDED, i.target, i.name))
    return sorted(infos, key=lambda info: GROUPS.index(group_of(info)))


def wanted(
    infos: Sequence[RecipeInfo], target: str | None, family: str | None, search: str | None
) -> Sequence[RecipeInfo]:
    """Of these the recipes made for this target, of this family, with this word."""
    if target is not None:
        check_target(target)
        same = {name for name in {i.target for i in infos} if is_same(target, name)}
        infos = [info for info in infos if info.target in same]
    if family is not None:
        if family not in family_infos():
            raise unknown("drafter family", family, family_infos(), "--family")
        infos = [info for info in infos if info.family == family]
    if search is not None:
        infos = [i for i in infos if search.lower() in f"{i.name} {i.summary} {i.paper}".lower()]
    return infos


def check_target(name: str) -> None:
    """Refuse a name that means no target, and a folder that holds none. The hub is left alone."""
    from specctl.runtime.target.folders.checkpoint_folder import read_object

    path = resolve(name).path
    if path is not None and not is_adapter_alone(path):
        read_object(path / CONFIG)


def group_of(info: RecipeInfo) -> str:
    """The group in which a recipe is listed."""
    return "recommended" if info.name in RECOMMENDED else _kind(info)


def _kind(info: RecipeInfo) -> str:
    if info.target != EMBEDDED:
        return "for real targets"
    return "trained" if is_trained(info) else "no training"


def is_trained(info: RecipeInfo) -> bool:
    """Whether something learns: the drafter, or the target."""
    return info.is_joint or family_infos()[info.family].trainable


def as_json(infos: Sequence[RecipeInfo]) -> list[dict[str, Any]]:
    """The recipes as objects."""
    return [{**{f: getattr(i, f) for f in FIELDS}, "group": group_of(i)} for i in infos]


def first_of(infos: Sequence[RecipeInfo]) -> str | None:
    """The recipe to look at first; None where there is none."""
    return infos[0].name if infos else None


def first_sentence(text: str) -> str:
    """What a summary begins with, without its full stop."""
    return text.split(". ")[0].removesuffix(".")


# -- one screen ------------------------------------------------------------------------------------


def show_overview(console: Console, infos: Sequence[RecipeInfo]) -> None:
    """The usual recipes, how many others there are, and what lists them."""
    summaries = {info.name: first_sentence(info.summary) for info in infos}
    width = console.columns - 2 - max(map(len, USUAL))
    rows = [(name, console.cut(summaries[name], width)) for name in USUAL if name in summaries]
    console.table(("recipe", "what"), rows)
    console.out()
    console.out(f"{len(infos)} recipes:")
    kinds = Counter(map(_kind, infos))
    published = Counter(info.target for info in infos if info.target != EMBEDDED)
    _item(console, f"trained for the embedded target: {kinds['trained']}")
    _item(console, f"without training: {kinds['no training']}")
    _item(console, f"for published targets: {published.total()} ({_counts(published)})")
    console.out()
    for what, command in MORE:
        _item(console, f"{what + ':':20}{command}", "")


def _counts(targets: Counter[str]) -> str:
    """Targets with their numbers of recipes, those with most of them first."""
    most = targets.most_common(MOST_TARGETS)
    rest = len(targets) - len(most)
    named = ", ".join(f"{name}{TIED}{count}" for name, count in most)
    return f"{named}, and {rest} more targets" if rest else named


def _item(console: Console, text: str, indent: str = "  ") -> None:
    """A line, or several below each other where it is longer than the terminal."""
    lines = textwrap.wrap(
        text,
        console.columns,
        initial_indent=indent,
        subsequent_indent="    ",
        break_on_hyphens=False,
        break_long_words=False,
    )
    for line in lines:
        console.out(line.replace(TIED, " "))


# -- every recipe ----------------------------------------------------------------------------------


def show_tables(console: Console, infos: Sequence[RecipeInfo]) -> None:
    """A table of each group."""
    for title in GROUPS:
        found = [info for info in infos if group_of(info) == title]
        if found:
            _show_group(console, title, found)
            console.out()


def _show_group(console: Console, title: str, infos: Sequence[RecipeInfo]) -> None:
    """One table; the target is a column where there are several, else it stands in the title."""
    targets = {info.target for info in infos}
    if len(targets) > 1:
        columns = ["recipe", "family", "target", "what"]
        rows = [[i.name, i.family, i.target, first_sentence(i.summary)] for i in infos]
    else:
        columns = ["recipe", "family", "what"]
        rows = [[i.name, i.family, first_sentence(i.summary)] for i in infos]
        title = f"{title}, target {targets.pop()}"
    console.table(columns, rows, title=f"{title}:")
