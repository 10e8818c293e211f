"""A recipe as one text that needs no other file: its parents' fields are written into it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from specctl.recipes.lineage import Layer, overlay
from specctl.recipes.notes import notes_of_recipe
from specctl.recipes.schema import section_at

WIDTH = 100


def whole_text(layers: list[Layer]) -> str:
    """The text of the last of these with what it has from the others, every value with its remark.
    A recipe without parents is as its file says, with its name."""
    last = layers[-1]
    if len(layers) == 1 and (last.source.path is not None or "name" in last.tree):
        return last.source.text
    lines = last.source.text.splitlines()
    count = next((n for n, line in enumerate(lines) if not line.startswith("#")), len(lines))
    if len(layers) == 1:
        return "\n".join([*lines[:count], f"name: {last.name}", *lines[count:]]) + "\n"
    tree = {"name": last.name, **overlay(layers)[0]}
    return "\n".join([*lines[:count], *_lines(tree, notes_of_recipe(layers))]) + "\n"


def _lines(tree: Mapping[str, Any], notes: Mapping[str, str], above: str = "") -> Iterator[str]:
    """The fields in the order of the schema, where that knows them."""
    indent = "  " * above.count(".")
    owner = section_at(tuple(above.split(".")))
    known = {key: place for place, key in enumerate(owner.model_fields if owner else ())}
    for key, value in sorted(tree.items(), key=lambda item: known.get(item[0], len(known))):
        field = f"{above}{key}"
        note = f"  # {notes[field]}" if field in notes else ""
        if isinstance(value, Mapping) and value and not note:
            yield f"{indent}{key}:"
            yield from _lines(value, notes, f"{field}.")
        elif key == "summary" and isinstance(value, str):
            yield f"{indent}{key}: >-"
            lines = textwrap.wrap(value, WIDTH - 2, break_on_hyphens=False, break_long_words=False)
            yield from (f"  {line}" for line in lines)
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=math.inf)
            yield f"{indent}{key}: {text.removesuffix('...' + chr(10)).strip()}{note}"
