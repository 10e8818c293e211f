"""The site of the documentation: every page has its place, the reference is made of the code."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.cli.main import COMMANDS
from specctl.core.plugins import PLACES
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


def _hook(name: str = "reference") -> Any:
    place = ROOT / "docs" / "site" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"site_{name}", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for dataclasses, which look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> Any:
    return _hook("tables")


def test_the_navigation_lists_every_page_exactly_once() -> None:
    made = {"reference/commands.md", "reference/recipes.md", "reference/api.md"}
    made |= {"reference/manifest.md"}
    docs = ROOT / "docs"
    written = {str(page.relative_to(docs)) for page in docs.rglob("*.md")}
    assert Counter(_leaves(_site()["nav"])) == Counter(written | made)
    assert set(_hook().pages()) == made


def test_what_links_out_of_the_docs_names_the_file() -> None:
    without_links_out = _hook().without_links_out
    assert without_links_out("[a](../README.md)", "faq.md") == "a (`README.md`)"
    text = "[a](../index.md), [b](../../README.md)"
    assert without_links_out(text, "benchmarks/serving.md") == "[a](../index.md), b (`README.md`)"


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


@pytest.mark.parametrize("page", ["systems.md", "methods.md"])
def test_a_page_of_tables_is_as_the_entries_say(tables: Any, page: str) -> None:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    new = tables.written(page).splitlines()
    wrong = next((pair for pair in zip_longest(lines, new) if pair[0] != pair[1]), None)
    if wrong is not None:
        pytest.fail(f"docs/{page} is stale; do: {tables.COMMAND}\n- {wrong[0]}\n+ {wrong[1]}")


def test_a_stale_page_is_named_and_written_anew(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for page in tables.PAGES:
        shutil.copy(ROOT / "docs" / page, tmp_path)
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    tables.main([])
    capsys.readouterr()
    page = tmp_path / "systems.md"
    right = page.read_text().replace("# Systems\n", "# Systems, by hand\n")
    page.write_text(right.replace("| EAGLE-3 |", "| EAGLE-4 |"))
    assert tables.main(["--check"]) == 1
    assert capsys.readouterr().out == "docs/systems.md is stale: make docs-tables\n"
    assert tables.main([]) == 0
    assert page.read_text() == right
    assert tables.main(["--check"]) == 0


def test_every_kind_of_method_has_a_table(tables: Any) -> None:
    elsewhere = {"specctl.drafters", "specctl.export.engines"}  # the latter in docs/export.md
    assert set(tables.KINDS) == PLACES.keys() - elsewhere


def test_a_recipe_names_its_systems(tables: Any) -> None:
    head = "# specctl plan\n# system: A, B\n#   chapter: trees\n#   state: partly: x\n"
    head += "#   measured: tau 2.1 +- .1 ([figures](x.md#y))\n"
    text = head + "# system: C\nsummary: x\n# system: D\n"
    about = {"chapter": "trees", "state": "partly: x"}
    about["measured"] = "tau 2.1 +- .1 ([figures](x.md#y))"
    assert list(tables.named_systems(text, "x.yaml")) == [("A, B", about), ("C", {})]
    for wrong in ("chapter: forest", "page: 3"):
        with pytest.raises(AssertionError, match=r"x\.yaml"):
            list(tables.named_systems(f"# system: A\n#   {wrong}\n", "x.yaml"))
