"""docs/systems.md: every system that is claimed has an entry, which names the system's paper."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from specctl.core.plugins import plugins
from specctl.recipes.files import recipe_names
from specctl.recipes.load import EMBEDDED, list_recipes, load_recipe
from specctl_testing.cli import commands

PAGE = Path(__file__).parents[2] / "docs" / "systems.md"
STATES = ("whole", "partly: ", "not built", "ours", "hardware: ")
ABOUT_NO_SYSTEM = {"adapt", "quickstart"}  # specctl's own ways to use what stands in the table
SYSTEMS = 127  # rows of the page; one may be added, none dropped


@dataclass(frozen=True, slots=True)
class System:
    """A row of the page."""

    name: str
    entries: tuple[str, ...]
    paper: str
    state: str


def systems() -> list[System]:
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return [
        System(name, tuple(re.findall(r"`([^`]+)`", entry)), paper, state)
        for name, entry, paper, state in rows
        if name != "system"
    ]


def papers(text: str) -> set[str]:
    return set(re.findall(r"\d{4}\.\d{5}|prompt-lookup-decoding", text))


def test_no_system_was_dropped() -> None:
    names = [system.name for system in systems()]
    assert len(names) == len(set(names)) >= SYSTEMS
    assert all(system.state.startswith(STATES) for system in systems())


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_a_system_has_its_entry_and_the_entry_its_paper(system: System) -> None:
    if not system.entries:
        assert system.state.startswith(("not built", "partly: ", "hardware: "))
        return
    assert not system.state.startswith("not built")
    for entry in system.entries:
        if entry.startswith("specctl "):
            words = shlex.split(entry)[1:]
            assert commands.why_not(words) is None, entry
            assert named_paper(words) in (None, system.paper), entry
        else:
            assert papers(system.paper) <= papers(load_recipe(entry).paper), entry


def named_paper(words: list[str]) -> str | None:
    """The paper of the plug-in that a flag names."""
    kinds = {
        "--batching": ("specctl.runtime.batching", "BATCHING"),
    }
    for flag, name in pairwise(words):
        if flag in kinds:
            found = plugins(*kinds[flag])[name].paper
            return "".join(papers(found))
    return None


def test_every_recipe_for_the_embedded_target_is_of_a_system() -> None:
    named = {entry for system in systems() for entry in system.entries}
    ours = {info.name for info in list_recipes() if info.target == EMBEDDED}
    missing = ours - named - ABOUT_NO_SYSTEM
    assert not missing, (
        f"{missing} has no row: `# system: NAME` in the recipe, then make docs-tables"
    )
    assert not ABOUT_NO_SYSTEM & named
    assert {entry for entry in named if not entry.startswith("specctl ")} <= set(recipe_names())


def test_recipes_name_the_paper_of_what_they_do() -> None:
    """Three that once named another's."""
    assert "2401.06706" in load_recipe("mcsd").paper
    assert "2401.10774" in load_recipe("hardware-tree").paper
    assert "2502.05609" not in load_recipe("cascade").paper
