"""A recipe as a file that a person reads and changes: what differs from the defaults, and beside
each value why it is so."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from specctl.recipes.schema import Recipe

PROSE = ("name", "summary", "paper")


def recipe_text(tree: Mapping[str, Any], reasons: Mapping[str, str], head: str) -> str:
    """The YAML of a recipe of these values. `reasons`: of dotted fields; `head`: lines of a comment
    in front."""
    default = Recipe().to_json()
    lines = [f"# {line}".rstrip() for line in head.splitlines()]
    lines += [f"{key}: {_value(tree[key])}" for key in PROSE if tree[key]]
    for section, fields in tree.items():
        if section in PROSE or fields == default[section]:
            continue
        lines.append(f"{section}:")
        lines += _lines(fields, default[section], section, reasons)
    return "\n".join(lines) + "\n"


def _lines(
    fields: Mapping[str, Any], default: Mapping[str, Any], section: str, reasons: Mapping[str, str]
) -> list[str]:
    """The fields of a section that differ, or have a reason."""
    found = []
    for key, value in fields.items():
        reason = "; ".join(
            text for field, text in reasons.items() if f"{field}.".startswith(f"{section}.{key}.")
        )
        if value != default.get(key) or reason:
            found.append(f"  {key}: {_value(value)}" + (f"  # {reason}" if reason else ""))
    return found


def _value(value: Any) -> str:
    """On one line, as YAML reads it back."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).split("\n...")[0].strip()
    )
