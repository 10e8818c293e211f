"""What the shell completes behind the --set of commands that take a recipe: dotted fields of the
schema, and the words that a field may be. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import typer

from specctl.cli.options.names import complete_family, complete_selector, complete_target

OPTIONS = "drafter.options."
RECIPE = "(.*_)?recipe"  # parameters of commands that name one
NAMED: Mapping[str, Callable[[str], list[str]]] = {  # fields of names that the schema leaves open
    "drafter.family": complete_family,
    "target.name": complete_target,
    "vocab.selector": complete_selector,
}


def complete_field(ctx: typer.Context, incomplete: str) -> list[str]:
    """Fields, then values of the one that is typed or left, and the settings of the command."""
    settings = getattr(ctx.command.callback, "settings", None)
    own = settings.complete(incomplete) if settings else []
    field, equals, text = incomplete.partition("=")
    fields = [*schema_fields(), *(_options(ctx) if field.startswith(OPTIONS) else ())]
    left = [known for known in fields if known.startswith(field) and (not equals or known == field)]
    if len(left) == 1 and not left[0].endswith("."):
        values = [f"{left[0]}={value}" for value in _values(left[0], text)]
        return [*own, *(values or ([] if equals else [f"{left[0]}="]))]
    found = [known if known.endswith(".") else f"{known}=" for known in left]
    return list(dict.fromkeys([*own, *([] if equals else found)]))


@cache
def schema_fields() -> dict[str, tuple[str, ...]]:
    """Dotted field -> the words that it may be, none where any value is possible. A section that
    holds any name ends in a dot."""
    from specctl.recipes.schema import Recipe

    schema = Recipe.model_json_schema()
    known = {"name", "summary", "paper", "based_on"}  # what a file says of itself
    parts = {key: part for key, part in schema["properties"].items() if key not in known}
    return dict(_below(parts, "", schema["$defs"]))


def _below(
    properties: Mapping[str, Any], prefix: str, sections: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key, part in properties.items():
        kinds = [_resolved(kind, sections) for kind in part.get("anyOf", [part])]
        below = [kind["properties"] for kind in kinds if "properties" in kind]
        if below:
            yield from _below(below[0], f"{prefix}{key}.", sections)
        elif any("additionalProperties" in kind for kind in kinds):
            yield f"{prefix}{key}.", ()
        else:
            yield f"{prefix}{key}", tuple(word for kind in kinds for word in _words(kind))


def _resolved(kind: Mapping[str, Any], sections: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = str(kind.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = sections.get(reference, kind)
    return found


def _words(kind: Mapping[str, Any]) -> list[str]:
    if kind.get("type") == "boolean":
        return ["true", "false"]
    words = kind.get("enum", [kind["const"]] if "const" in kind else [])
    return ["null" if kind.get("type") == "null" else str(word) for word in words]


def _values(field: str, text: str) -> list[str]:
    if field in NAMED:
        return NAMED[field](text)
    return [word for word in schema_fields().get(field, ()) if word.startswith(text)]


def _options(ctx: typer.Context) -> list[str]:
    """The options of the family that the recipe of this command line has; none where the recipe is
    not read."""
    from specctl.api.arguments.families import family_infos
    from specctl.core.errors import SpecctlError
    from specctl.recipes.load import load_recipe

    named = [value for name, value in ctx.params.items() if value and re.fullmatch(RECIPE, name)]
    try:
        family = load_recipe(str(named[0])).drafter.family if named else ""
    except SpecctlError:
        return []
    info = family_infos().get(family)
    return [] if info is None else [OPTIONS + option for option in info.options]
