"""The `Next:` lines that commands print: whether each runs as it stands, where it was printed."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specctl.cli.options.names import check_drafter
from specctl.core.errors import SpecctlError
from specctl.recipes.load import load_recipe
from specctl.recipes.made_for import PLACEHOLDER
from specctl.recipes.targets import resolve
from specctl.train.data.sources.sources import check_source
from specctl_testing.cli.commands import parsed


def wrong_lines(lines: Sequence[str]) -> list[str]:
    """What is wrong with each line that does not run as printed; what an earlier one writes is
    taken to be there for those after it."""
    found, made = [], list[str]()
    for line in lines:
        if not line.startswith("specctl "):
            continue  # of an engine, or of pip
        try:
            words = shlex.split(line, comments=True)[1:]
        except ValueError as error:
            found.append(f"{line}: {error}")
            continue
        context = parsed(words)
        if isinstance(context, str):
            found.append(f"{line}: {context}")
            continue
        why = None if context is None else _unresolved(context, made)
        found += [f"{line}: {why}"] if why else []
        made += [] if context is None else [str(_option(context, "--out") or "")]
    return found


def _option(context: Any, flag: str) -> Any:
    """What an option has in a context, None where the command has no such option."""
    for each in context.command.params:
        if flag in each.opts:
            return context.params[each.name]
    return None


def _unresolved(context: Any, made: Sequence[str]) -> str | None:
    """Which of the names on a command line means nothing here."""
    target, recipe = _option(context, "--target"), _option(context, "--recipe")
    given = _option(context, "--data") or ()
    # A plan may be made before its data are there.
    data = [each for each in given if each != PLACEHOLDER and Path(str(each)).exists()]
    try:
        if target is not None and not str(target).startswith("the package's own"):
            resolve(str(target))
        if recipe is not None and context.info_name != "pretrain":
            endpoint, sets = _option(context, "--endpoint"), [*(_option(context, "--set") or ())]
            sets += [] if endpoint is None else [f"data.endpoint={endpoint}"]
            load_recipe(str(recipe), sets)
        if data:
            check_source(data, "auto", "train")
        for name in _drafters(context):
            if not any(out and Path(name).is_relative_to(out) for out in made):
                check_drafter(name)
        for path in _paths(context):
            if not Path(path).exists() and context.info_name != "show":
                return f"{path} is not there"
    except SpecctlError as error:
        return error.text()
    return None


def _drafters(context: Any) -> list[str]:
    """The drafters that a command line names."""
    names: list[str] = []
    for each in context.command.params:
        value = context.params.get(each.name)
        is_word = each.param_type_name == "argument" and each.name in (
            "drafter", "drafters", "package", "draft"
        )  # fmt: skip
        if value and (is_word or "--draft" in each.opts):
            names += [value] if isinstance(value, str) else [*value]
    words = context.params.get("words") or ()
    return names + ([words[0]] if len(words) == 2 else [])


def _paths(context: Any) -> list[str]:
    """The folders and files that its arguments name."""
    named = ("path", "run", "runs", "folders", "file")
    found: list[str] = []
    for each in context.command.params:
        value = context.params.get(each.name)
        if each.param_type_name == "argument" and each.name in named and value:
            found += [str(one) for one in (value if isinstance(value, (list, tuple)) else [value])]
    return found
