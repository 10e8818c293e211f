"""Options that families share, and the form in which packages keep them (stored_options.json holds
what packages of version 0.1.0 say of each family's defaults, in their spelling)."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from specctl.api.families import family_infos
from specctl.core.errors import RecipeError
from specctl.drafters import families
from specctl.drafters.losses.head_losses import LossOptions
from specctl.drafters.nets.options import ADDED, HeadOptions
from specctl.export.package.load import parse_options

STORED = json.loads(Path(__file__).with_name("stored_options.json").read_text())


@pytest.mark.parametrize("name", STORED)
def test_defaults_are_spelled_in_a_package_as_ever(name: str) -> None:
    """But for options that came later, which an older package need not have."""
    options = families()[name].options
    later = {field.name for field in fields(options) if field.metadata == ADDED}
    now = {key: value for key, value in asdict(options()).items() if key not in later}
    assert json.dumps(now, sort_keys=True) == json.dumps(STORED[name], sort_keys=True)


@pytest.mark.parametrize("name", STORED)
def test_options_of_an_older_package_are_read(name: str) -> None:
    family = families()[name]
    assert parse_options(family, STORED[name]) == family.options()


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
