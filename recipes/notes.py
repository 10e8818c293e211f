"""The remarks beside the figures of a recipe: where each is from, or why it is ours.

A remark is a comment behind a value: `learning_rate: 5e-5  # eagle3: ds_config.json`. Its first
word is a source (`sources.yaml`), or `ours`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files

import yaml

from specctl.recipes.lineage import Layer, overlay

OURS = "ours"


@cache
def sources() -> dict[str, str]:
    """Word -> the paper or trainer that it stands for."""
    text = (files("specctl.recipes") / "sources.yaml").read_text(encoding="utf-8")
    table: dict[str, str] = yaml.safe_load(text)
    return table


def notes_of(text: str) -> dict[str, str]:
    """Dotted field -> the comment behind its value, of the YAML text of a recipe."""
    lines = text.splitlines()
    found = {}
    for field, mark in _values(yaml.compose(text, yaml.SafeLoader), ""):
        rest = lines[mark.line][mark.column :] if mark.line < len(lines) else ""
        comment = re.match(r"\s+# (.+)$", rest)
        if comment is not None:
            found[field] = comment[1].strip()
    return found


def notes_of_recipe(layers: list[Layer]) -> dict[str, str]:
    """The same of a recipe and its parents: a remark stands as long as the value before it does."""
    _, origin = overlay(layers)
    found = {}
    for layer in layers:
        for field, note in notes_of(layer.source.text).items():
            below = (origin[f] for f in origin if f == field or f.startswith(f"{field}."))
            if any(one is layer for one in below):
                found[field] = note
    return found


def source_of(note: str) -> str:
    """The first word of a remark."""
    return re.split(r"[:;,\s]", note, maxsplit=1)[0]


def named_sources(notes: Iterable[str]) -> Mapping[str, str]:
    """The sources that these remarks begin with, by word."""
    words = {source_of(note) for note in notes}
    return {word: sources()[word] for word in sorted(words & sources().keys())}


def _values(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Mark]]:
    """Field and end of every value that is no mapping in block style."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        field = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _values(value, f"{field}.")
        else:
            yield field, value.end_mark
