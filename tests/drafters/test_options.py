"""Options that families share, and the form in which packages keep them (stored_options.json holds
what packages of version 0.1.0 say of each family's defaults, in their spelling)."""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from specctl.api.arguments.families import family_infos
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters import families
from specctl.drafters.losses.head_losses import LossOptions
from specctl.drafters.nets.options import HeadOptions
from specctl.export.package.load import REMOVED, parse_options

STORED = json.loads(Path(__file__).with_name("stored_options.json").read_text())


# Defaults that are no longer those of version 0.1.0; packages name theirs and keep it.
CHANGED: dict[str, dict[str, object]] = {
    "coral": {"align_weight": 1.0, "top_weight": 10.0},
    "dflash": {"layers": 5},
    "dspark": {"layers": 5},
    "hass": {"top_weight": 10.0},
    "moa": {"feature_weight": 10.0},
}


def spelled(options: Any, but: Set[str] = frozenset()) -> str:
    """As a package has them, without those options."""
    kept = {key: value for key, value in asdict(options).items() if key not in but}
    return json.dumps(kept, sort_keys=True)


def later(name: str) -> set[str]:
    """Options that came after version 0.1.0."""
    options = families()[name].options
    return {field.name for field in fields(options) if field.metadata.get("added")}


@pytest.mark.parametrize("name", STORED)
def test_defaults_are_spelled_in_a_package_as_ever(name: str) -> None:
    """But for options that came later, which an older package need not have, and new defaults."""
    wanted = json.dumps({**STORED[name], **CHANGED.get(name, {})}, sort_keys=True)
    assert spelled(families()[name].options(), later(name)) == wanted


@pytest.mark.parametrize("name", STORED)
def test_options_of_an_older_package_are_read(name: str) -> None:
    """With the values that it names, whatever the defaults are by now."""
    read = parse_options(families()[name], STORED[name])
    assert spelled(read, later(name)) == json.dumps(STORED[name], sort_keys=True)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_is_passed_over_if_it_has_the_fixed_value(name: str) -> None:
    own, (gone, fixed) = families()[name], next(iter(REMOVED[name].items()))
    stored = asdict(own.options())
    assert gone not in stored
    assert parse_options(own, {**stored, gone: fixed}) == own.options()
    with pytest.raises(IncompatibleError, match=f"missing or unknown: {gone}"):
        parse_options(own, {**stored, gone: 7})


def test_a_glide_package_of_before_has_keys_of_its_own() -> None:
    assert parse_options(families()["glide"], STORED["glide"]).own_keys
    assert not families()["glide"].options().own_keys


@pytest.mark.parametrize("name", families())
def test_options_read_from_the_source_are_the_fields(name: str) -> None:
    assert family_infos()[name].options == tuple(f.name for f in fields(families()[name].options))


def test_the_shared_options_say_how_a_head_is_compared() -> None:
    options = HeadOptions(loss="tv", temperature=0.5, chunk=64)
    assert options.compared() == LossOptions("tv", 0.5, 64)


@pytest.mark.parametrize("wrong", [{"loss": "kll"}, {"num_heads": 0}])
@pytest.mark.parametrize("name", ["blockwise", "chimera", "glide", "mlp-speculator", "p-eagle"])
def test_a_family_refuses_wrong_shared_options(name: str, wrong: dict[str, object]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        families()[name].options(**wrong)


@pytest.mark.parametrize(
    ("family", "given"),
    [("aded", {"maker": None}), ("medusa", {"num_heads": None}), ("eagle3", {"taps": 2})],
)
def test_an_option_is_none_or_a_list_only_where_it_may_be(family: str, given: Any) -> None:
    with pytest.raises((RecipeError, TypeError)):
        families()[family].options(**given)


def test_entries_of_a_list_are_of_the_options_kind() -> None:
    assert repr(families()["superposed"].options(weights=[1, 2]).weights) == "(1.0, 2.0)"
