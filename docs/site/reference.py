"""A hook of mkdocs: the reference pages, written from the code while the site is built.

reference/commands.md   every command and flag, from the program itself
reference/recipes.md    every recipe, from its YAML
reference/api.md        the public functions, from their signatures and docstrings
reference/manifest.md   the fields of manifest.json, from the type that reads them
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))
UPWARDS = re.compile(r"\[([^\]]*)\]\((\.\./[^)]*)\)")


def pages() -> dict[str, str]:
    """Every page that is made, by its place in the site."""
    return {
        "reference/commands.md": commands_page(),
        "reference/recipes.md": recipes_page(),
        "reference/api.md": api_page(),
        "reference/manifest.md": manifest_page(),
    }


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs once the files of docs/ are known."""
    from mkdocs.structure.files import File

    for place, text in pages().items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page: what links out of docs/ names the file instead, as the
    repository is not part of the site."""
    return without_links_out(markdown, page.file.src_uri)


def without_links_out(markdown: str, place: str) -> str:
    """The text of the page at `place` in docs/; links to other pages of docs/ stay."""

    def shown(link: re.Match[str]) -> str:
        there = posixpath.normpath(posixpath.join(posixpath.dirname(place), link[2]))
        is_outside = there.startswith("../")
        return f"{link[1]} (`{there.removeprefix('../')}`)" if is_outside else link[0]

    return UPWARDS.sub(shown, markdown)


def commands_page() -> str:
    """Every command with its arguments and flags."""
    from specctl.cli.main import COMMANDS, load_command

    lines = ["# Commands", "", "Written from the program; `specctl NAME --help-all` says the same."]
    panels: dict[str, list[str]] = {}
    for name, entry in COMMANDS.items():
        panels.setdefault(entry.panel, []).append(name)
    for panel, names in panels.items():
        lines += ["", f"## {panel}"]
        for name in names:
            loaded: Any = load_command(name)
            below = getattr(loaded, "commands", None)
            for words, one in _leaves(name, loaded, below):
                lines += ["", f"### {words}", "", *_command(words, one)]
    return "\n".join(lines) + "\n"


def _leaves(name: str, loaded: Any, below: Any) -> Iterator[tuple[str, Any]]:
    if not below:
        yield name, loaded
        return
    for word, one in below.items():
        yield f"{name} {word}", one


def _command(words: str, one: Any) -> Iterator[str]:
    text = inspect.cleandoc(one.help or "")
    for part in text.split("\n\n"):
        if part.startswith(" "):
            yield from ("```text", inspect.cleandoc(part), "```", "")
        else:
            yield from (_plain(part), "")
    rows = [found for found in map(_parameter, one.params) if found is not None]
    if rows:
        yield from ("| Argument or flag | Means | Default |", "|---|---|---|")
        yield from (f"| {a} | {b} | {c} |" for a, b, c in rows)


def _parameter(parameter: Any) -> tuple[str, str, str] | None:
    panel = getattr(parameter, "rich_help_panel", None)
    if getattr(parameter, "hidden", False) or panel == "Everywhere" or "--help" in parameter.opts:
        return None
    names = (
        [parameter.metavar or parameter.name.upper()]
        if parameter.param_type_name == "argument"
        else [*parameter.opts, *parameter.secondary_opts]
    )
    default = parameter.default
    shown = "" if default is None or default is False or callable(default) else f"`{default}`"
    called = ", ".join(f"`{name}`" for name in names)
    return called, _plain(getattr(parameter, "help", "") or ""), shown


def _plain(text: str) -> str:
    """Text of help as Markdown: one line, with what Markdown would read otherwise escaped."""
    joined = " ".join(text.split())
    return re.sub(r"([|<>*_\[\]])", r"\\\1", joined)


def recipes_page() -> str:
    """Every recipe by target."""
    from specctl.recipes.load import list_recipes
    from specctl.recipes.made_for import CHATS, UNTESTED

    lines = ["# All recipes", "", "Written from the YAML; `specctl recipes show NAME` tells more."]
    lines += ["", f"Of the recipes for other targets than `tiny`: {CHATS}{UNTESTED}"]
    by_target: dict[str, list[Any]] = {}
    for info in list_recipes():
        by_target.setdefault(info.target, []).append(info)
    for target in sorted(by_target, key=lambda name: (name != "tiny", name)):
        lines += ["", f"## {target}", "", "| Recipe | Family | What | Paper |", "|---|---|---|---|"]
        for info in by_target[target]:
            name, url = info.paper.rpartition(", ")[0], info.paper.rpartition(", ")[2]
            is_link = url.startswith("https://") and " " not in url
            paper = f"[{_plain(name or 'paper')}]({url})" if is_link else _plain(info.paper)
            cells = (f"`{info.name}`", f"`{info.family}`", _plain(info.summary), paper)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """What `import specctl` offers."""
    import specctl

    lines = [
        "# Python API: signatures",
        "",
        "Written from the code; [Python API](../python-api.md)",
    ]
    lines[-1] += " explains and shows it."
    for name in specctl.__all__:
        thing = getattr(specctl, name)
        if name.startswith("_"):
            continue
        signature = _signature(thing)
        doc = inspect.getdoc(thing) or ""
        lines += ["", f"## {name}", "", "```python", f"specctl.{name}{signature}", "```", ""]
        lines += ["```text", doc, "```"]
    return "\n".join(lines) + "\n"


def _signature(thing: Any) -> str:
    """The signature with a parameter a line; places of this machine never show."""
    found = inspect.signature(thing)
    if not found.parameters:
        return "()"
    parts, is_bare = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_bare:
            is_bare = True
            parts.append("    *,")
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_bare = True
        parts.append(f"    {parameter},".replace(str(ROOT) + os.sep, ""))
    after = found.return_annotation
    tail = "" if after is inspect.Signature.empty else f" -> {after}".replace("'", "")
    return "(\n" + "\n".join(parts) + "\n)" + tail


def manifest_page() -> str:
    """The fields of a package's manifest and of the records in it."""
    from specctl.export.package import manifest

    lines = ["# Manifest: fields", "", "Written from the types that read `manifest.json`;"]
    lines[-1] += " [Package format](../package-format.md) says what they mean."
    schema = manifest.Manifest.model_json_schema()
    lines += ["", "## manifest.json", "", *_fields(schema)]
    for name, part in sorted(schema.get("$defs", {}).items()):
        lines += ["", f"## {name}", "", *_fields(part)]
    return "\n".join(lines) + "\n"


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    yield from ("| Field | Type | Required |", "|---|---|---|")
    required = schema.get("required", [])
    for name, about in schema.get("properties", {}).items():
        is_needed = "yes" if name in required else "no"
        yield f"| `{name}` | {_type(about)} | {is_needed} |"


def _type(about: dict[str, Any]) -> str:
    if "$ref" in about:
        return "`" + about["$ref"].rpartition("/")[2] + "`"
    if "anyOf" in about:
        return " or ".join(_type(part) for part in about["anyOf"])
    kind = str(about.get("type", about.get("const", "any")))
    if kind == "array" and isinstance(about.get("items"), dict):
        return f"list of {_type(about['items'])}"
    if kind == "object" and isinstance(about.get("additionalProperties"), dict):
        return f"map to {_type(about['additionalProperties'])}"
    return f"`{kind}`"
