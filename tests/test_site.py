"""The site of the documentation: every page has its place, the reference is made of the code."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specctl.cli.main import COMMANDS
from specctl.recipes.files import recipe_names

ROOT = Path(__file__).parents[1]


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _leaves(part)


def _site() -> dict[str, Any]:
    text: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return text


def _hook() -> Any:
    place = ROOT / "docs" / "site" / "reference.py"
    spec = importlib.util.spec_from_file_location("site_reference", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_lists_every_page_exactly_once() -> None:
    made = {"reference/commands.md", "reference/recipes.md", "reference/api.md"}
    made |= {"reference/manifest.md"}
    docs = ROOT / "docs"
    written = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert Counter(_leaves(_site()["nav"])) == Counter(written | made)
    assert set(_hook().pages()) == made


def test_the_reference_names_every_command_flag_and_recipe() -> None:
    hook = _hook()
    commands, recipes = hook.commands_page(), hook.recipes_page()
    assert [name for name in COMMANDS if f"### {name}" not in commands] == []
    assert "`--max-new-tokens`" in commands
    assert [name for name in recipe_names() if f"| `{name}` |" not in recipes] == []
    assert "specctl.generate(" in hook.api_page()
    assert "| `family` | `string` | yes |" in hook.manifest_page()
    assert str(ROOT) not in commands + recipes + hook.api_page()


def test_the_site_asks_nothing_of_the_network() -> None:
    site = _site()
    assert site["theme"]["font"] is False
    assert not {"extra_javascript", "extra_css", "analytics"} & set(site)
    assert "plugins" in site
    assert site["plugins"] == ["search", "offline"]
    # what the plugin offline needs lies here; without that line it names a page elsewhere
    [script] = site["extra"]["polyfills"]
    assert "iframe-worker" in script
    text = (ROOT / "docs" / script).read_text()
    assert "Permission is hereby granted" in text  # its licence stays with it
