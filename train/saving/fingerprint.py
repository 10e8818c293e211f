"""What a run is made of, and whether a resumed run is still made of the same."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.recipes.schema import DataPart, Recipe, TargetPart, TrainPart
from specctl.recipes.section import Section, flatten

# Recipe fields that change what is written or shown, never what is learned.
FREE = frozenset(
    {
        "name", "train.save_every", "train.keep", "train.lora.keep", "train.log_every",
        "train.nan_patience", "train.trackers", "train.tau_suite",
        "data.endpoint", "data.endpoint_model",
        "data.endpoint_requests", "data.states", "data.features_at", "target.device_map",
        "target.tensor_parallel",
    }
)  # fmt: skip
# Recipe fields that say how much is learned, and from what: part of the config, and allowed by
# `data` as well, by which a run goes on with more.
MORE = frozenset(
    {
        "data.source", "data.format", "data.split", "data.prompts", "data.limit_tokens",
        "data.text_tokens", "data.max_left_out", "train.steps", "train.tau_every",
    }
)  # fmt: skip
PARTS = ("config", "target", "data", "vocab", "init", "world-size")  # of a run's fingerprint
RESTART = "restart"  # allows a run that has lost every checkpoint to begin again
SECTIONS: Mapping[str, type[Section]] = {"target": TargetPart, "data": DataPart, "train": TrainPart}
DECIDING = ("target", "drafter", "data", "train", "vocab")
PACKAGED = ("serve", "export")  # decide besides what is packaged of it


def config_fields(recipe: Recipe, is_packaged: bool = False) -> dict[str, Any]:
    """Dotted field -> value of everything in a recipe that decides what is learned, and, if it
    `is_packaged`, what the package is."""
    tree = recipe.to_json()
    learned = flatten({name: tree[name] for name in tree if name in DECIDING})
    packaged = flatten({name: tree[name] for name in PACKAGED}) if is_packaged else {}
    return {key: value for key, value in learned.items() if key not in FREE} | packaged


def learned_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `config_fields` of a package that decide what is learned."""
    return {key: fields[key] for key in fields if key.partition(".")[0] not in PACKAGED}


def run_fingerprint(
    config: Mapping[str, Any],
    target: str,
    tokenizer: str | None,
    data: str,
    vocab: str | None,
    ranks: int,
    init: str | None = None,
) -> dict[str, Any]:
    """The parts that a resumed run must share with the run it continues; `config` are the fields
    of its recipe that decide what is learned."""
    return {
        "config": config,
        "target": {"target": target, "tokenizer": tokenizer},
        "data": data,
        "vocab": vocab,
        "init": init,
        "world-size": ranks,
    }


def changed_fields(saved: Mapping[str, Any], now: Mapping[str, Any], part: str) -> list[str]:
    """`field: saved -> present` of every difference inside one part."""
    old, new = saved.get(part), now.get(part)
    before = old if isinstance(old, Mapping) else {part: old}
    after = new if isinstance(new, Mapping) else {part: new}
    changed = []
    for key in sorted({*before, *after}):
        was, now_is = (fields.get(key, default_of(key)) for fields in (before, after))
        if was != now_is:
            changed.append(f"{key}: {_short(was)} -> {_short(now_is)}")
    return changed


def _short(value: Any) -> Any:
    """A digest in as many characters as it is called by elsewhere; any other value as it is."""
    is_digest = isinstance(value, str) and re.fullmatch(r"(sha256:)?[0-9a-f]{64}", value)
    return value.removeprefix("sha256:")[:12] if is_digest else value


def default_of(field: str) -> Any:
    """Of a field as `data.source`, as JSON has it: what a run has that was started before the field
    was known."""
    section, _, name = field.partition(".")
    info = SECTIONS[section].model_fields.get(name) if section in SECTIONS else None
    found = None if info is None or info.is_required() else info.get_default()
    return list(found) if isinstance(found, tuple) else found


def check_same_run(
    saved: Mapping[str, Any], now: Mapping[str, Any], allow: Collection[str] = ()
) -> list[str]:
    """Raise unless each part of `now` is as saved or named in `allow`; returns what was allowed."""
    allowed: list[str] = []
    for part in now:
        changed = changed_fields(saved, now, part)
        fields = {change.partition(":")[0] for change in changed}
        is_more = part == "config" and fields <= MORE
        if part in allow or (is_more and "data" in allow):
            allowed += changed
        elif changed:
            word = "data" if is_more and any(name.startswith("data.") for name in fields) else part
            raise IncompatibleError(
                "this folder holds a run that was started differently",
                found="; ".join(changed),
                expected=f"the same {part} as when the run began",
                do=f"choose another --out, or continue on purpose with --allow {word}",
                where=part,
            )
    return allowed
