"""docs/systems.md: every system that is claimed has an entry, which names the system's paper, and a
measured effect, which stands in the section that it links. Pages that repeat figures of others, in
tables of links, have theirs."""

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

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "systems.md"
STATES = ("whole", "partly: ", "not built", "ours", "hardware: ")
ABOUT_NO_SYSTEM = {"adapt", "quickstart"}  # specctl's own ways to use what stands in the table
SYSTEMS = 154  # rows of the page; one may be added, none dropped
NOT_MEASURED = 3  # rows without a figure: may fall, not rise
LINK = re.compile(r"\[[^\]]+\]\(([\w/-]+\.md)#([\w-]+)\)")
NUMBER = r"(?<![\w.,])[-+]?(?:\d[\d,]*)?\.?\d+"  # not in names, such as SmolLM2
UNIT = r"(?: ?(?:s|ms|x|%))?"
DIFFERENCE = r"[\d.]+ (?:against|and) [\d.]+ [^+();]*\([-+.\d]+ \+- [.\d]+\)"  # a line of a table


@dataclass(frozen=True, slots=True)
class System:
    """A row of the page."""

    name: str
    entries: tuple[str, ...]
    paper: str
    state: str
    measured: str


def systems() -> list[System]:
    cells = r" \| ".join(["(.+)"] * 5)
    rows = re.findall(rf"^\| {cells} \|$", PAGE.read_text(), re.MULTILINE)
    return [
        System(name, tuple(re.findall(r"`([^`]+)`", entry)), paper, state, measured)
        for name, entry, paper, state, measured in rows
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


@pytest.mark.parametrize("system", systems(), ids=lambda system: system.name)
def test_what_was_measured_stands_in_the_section_that_is_linked(system: System) -> None:
    parts = linked_parts(system.measured)
    is_missing = system.measured.startswith("not measured: ")
    assert is_missing or parts, f"{system.name}: a link to a section, or 'not measured: REASON'"
    assert is_missing or re.search(r"\+- |95 %|no error", system.measured), system.measured
    behind = LINK.sub("\0", system.measured).rpartition("\0")[2]
    assert is_missing or not figures(behind), "a link stands behind the last figure"
    assert "[figures](" not in system.state, "a link to figures stands in `measured`"
    for text, page, anchor in parts:
        stale = figures(re.sub(r"`[^`]*`", "", text)) - figures(section(page, anchor))
        assert not stale, f"docs/{page}#{anchor} does not have {stale}"
        lines = [figures(line) for line in section(page, anchor).splitlines()]
        for difference in re.findall(DIFFERENCE, text):
            wanted = figures(difference)
            assert any(wanted <= line for line in lines), f"no line of docs/{page} has {wanted}"


@pytest.mark.parametrize("page", ["benchmarks.md", "benchmarks/chat-model.md"])
def test_a_summary_has_the_figures_of_the_sections_that_it_links(page: str) -> None:
    """Of every row of the table below a page's title the cell with such links."""
    text = (DOCS / page).read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| .*\d.* \|$", re.split(r"^#+ ", text, flags=re.MULTILINE)[1])
    assert len(rows) > 6
    for row in rows:
        [cell] = [cell for cell in row.split(" | ") if "](" in cell and "#" in cell]
        *parts, behind = re.split(r"\]\(([\w/-]+\.md)?#([\w-]+)\)", cell)
        parts[-3] += behind
        for said, there, anchor in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            stale = figures(re.sub(r"`[^`]*`", "", said)) - figures(section(there or page, anchor))
            assert not stale, f"docs/{there or page}#{anchor} does not have {stale}"


def test_how_many_systems_have_no_figure() -> None:
    without = [row.name for row in systems() if row.measured.startswith("not measured: ")]
    assert len(without) <= NOT_MEASURED, without


def linked_parts(cell: str) -> list[tuple[str, str, str]]:
    """The text in front of each link, behind the link before, with the link's page and heading."""
    found: list[tuple[str, str, str]] = []
    start = 0
    for link in LINK.finditer(cell):
        found.append((cell[start : link.start()], link[1], link[2]))
        start = link.end()
    return found


def section(page: str, anchor: str) -> str:
    """What stands below a heading, up to the next heading of any level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    text = re.sub(r"(?ms)^```.*?^```", lambda code: code[0].replace("\n#", "\n"), text)
    for part in re.split(r"^#+ +", text, flags=re.MULTILINE):
        title = re.sub(r"[^\w\s-]", "", part.partition("\n")[0].lower())
        if re.sub(r"[\s-]+", "-", title).strip("-") == anchor:
            return part
    raise AssertionError(f"docs/{page} has no section {anchor}")


def figures(text: str) -> set[str]:
    """Numbers with their errors as one, such as `-.05 +- .03`, and those without; written alike."""
    text = text.replace("±", "+-").replace("*", "")
    pair = rf"({NUMBER}){UNIT}\s*\+-\s*({NUMBER})"
    pairs = {f"{alike(mean)} +- {alike(error)}" for mean, error in re.findall(pair, text)}
    alone = re.findall(NUMBER, re.sub(pair, "", text))
    return pairs | {alike(number).lstrip("-") for number in alone}


def alike(number: str) -> str:
    return re.sub(r"^(-?)0+(?=\.)", r"\1", number.replace(",", "").lstrip("+"))


def test_figures_are_compared_with_their_errors_and_signs() -> None:
    found = figures("tau 0.32 ± 0.05, -0.1 +- .02, 35.7 s +- 2.8 s, 1,024 tokens of SmolLM2")
    assert found == {".32 +- .05", "-.1 +- .02", "35.7 +- 2.8", "1024"}


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
