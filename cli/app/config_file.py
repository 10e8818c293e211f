"""--config-file: a YAML file of defaults for flags, by command; what is typed wins.

target: qwen3-8b            # for every command that has --target
generate:
  temperature: 0.8
  stop: ["###"]
recipes:
  show: {set: [train.steps=40]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from specctl.core.errors import RecipeError, unreadable, write_instead
from specctl.core.storage.bounded_read import read_text

META = "specctl.config_file"  # where the contexts of one command line keep the file


def apply(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config-file, which may stand before or after the command: the file's
    values become the defaults of the command that is parsed."""
    path = path or ctx.meta.get(META)
    if path is None:
        return None
    ctx.meta[META] = path
    program: Any = ctx.find_root().command  # the group of all commands
    tree = read(path, program.list_commands(ctx))
    if ctx.parent is not None and not _below(ctx.command):
        ctx.default_map = defaults(ctx, tree, path, program)
    return path


def read(path: Path, commands: Sequence[str]) -> dict[str, Any]:
    """The file as plain values; a section must be named after a command."""
    from specctl.recipes.files import parse_yaml

    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        flag, expected = "--config-file", "a YAML file of defaults for flags"
        do = "give an existing file, or leave --config-file out"
        raise unreadable("the configuration", path, error, flag, expected, do) from error
    tree = _mapping(parse_yaml(text, str(path)) or {}, str(path))
    for key, value in tree.items():
        if isinstance(value, dict) and key not in commands:
            raise _unknown("command", key, commands, str(path))
    return tree


def defaults(
    ctx: typer.Context, tree: Mapping[str, Any], path: Path, program: Any
) -> dict[str, Any]:
    """Values by parameter name: those for every command, then those of this one."""
    names = ctx.command_path.split()[1:]
    own: Mapping[str, Any] = tree
    for name in names:
        own = _mapping(own.get(name) or {}, f"{path}:{' '.join(names)}")
    common = {k: v for k, v in tree.items() if not isinstance(v, dict)}
    known = _options(ctx.command)
    settings = getattr(ctx.command.callback, "settings", None)
    for key in common:
        if key in known:
            continue
        all_, instead = _all_options(ctx, program), _set_instead(key, common[key], [ctx.command])
        if instead and key in all_:
            instead += f", or {key} below the commands that have that flag"
        if instead or key not in all_:
            instead = instead or _set_instead(key, common[key], _leaves(ctx, program))
            raise _unknown("flag", key, all_, str(path), instead)
    for key in own:
        if key not in known:
            where = f"{path}:{' '.join(names)}"
            raise _unknown("flag", key, known, where, _set_instead(key, own[key], [ctx.command]))
    values = {**common, **own}
    if settings and "set" in values and not settings.is_beside_recipe:
        values["set"] = _both(settings.own(_words(common.get("set"))), _words(own.get("set")))
    return {known[key]: value for key, value in values.items() if key in known}


def _both(common: list[str], own: list[str]) -> list[str]:
    """The words of --set for every command (those for recipes left out) and for one, which win."""
    keys = {word.partition("=")[0] for word in own}
    return [word for word in common if word.partition("=")[0] not in keys] + own


def set_in_file(ctx: typer.Context, parameter: str) -> list[str]:
    """What the file gives for --set, where words were typed beside it."""
    return _words((ctx.default_map or {}).get(parameter))


def _words(given: Any) -> list[str]:
    several = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return [str(word) for word in several]


def _options(command: Any) -> dict[str, str]:
    """Long flags without dashes -> names of parameters."""
    return {
        flag.removeprefix("--"): parameter.name
        for parameter in command.params
        for flag in parameter.opts
        if flag.startswith("--")
    }


def _all_options(ctx: typer.Context, program: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for leaf in _leaves(ctx, program):
        found |= _options(leaf)
    return found


def _leaves(ctx: typer.Context, program: Any) -> Iterator[Any]:
    """Every command, and not the groups of them."""
    for name in program.list_commands(ctx):
        command = program.get_command(ctx, name)
        yield from (_below(command) or {name: command}).values()


def _below(command: Any) -> dict[str, Any]:
    """The commands of a group of commands; empty for a command."""
    return dict(getattr(command, "commands", {}))


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecipeError(
            "a configuration maps flags to values",
            where=where,
            found=repr(value)[:80],
            expected="lines such as target: tiny, or a command with its flags below it",
            do="write for example: generate: {temperature: 0.8}",
        )
    return {str(key): part for key, part in value.items()}


def _set_instead(key: str, value: Any, commands: Iterable[Any]) -> str:
    """What to write where the key is a flag that has become a setting; empty where it is none."""
    for command in commands:
        settings = getattr(command.callback, "settings", None)
        typed = _words(value) or [""]
        texts = [text.lower() if text in ("True", "False") else text for text in typed]
        words = [settings.instead_of(f"--{key}", text) for text in texts] if settings else []
        if all(words) and words:
            shown = ", ".join(word.partition(" ")[2] for word in words)
            return f"write set: [{shown}] instead of {key}"
    return ""


def _unknown(
    kind: str, key: str, known: Iterable[str], where: str, instead: str = ""
) -> RecipeError:
    return RecipeError(
        f"the configuration names an unknown {kind}",
        where=where,
        found=key,
        expected=f"a {kind} of specctl, written without dashes in front",
        do=instead or write_instead(key, known),
    )
