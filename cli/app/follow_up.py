"""The command lines that are printed for what comes next: they run as they stand, from the same
folder, with every flag of the command before that still matters. No torch."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import fields
from typing import Any, get_type_hints

from specctl.cli.app.settings import Setting, words_of

TEXT = '"..."'  # stands for a prompt, and is one


def command_line(*words: object) -> str:
    """`specctl WORDS`, each quoted where a shell would read it otherwise."""
    return shlex.join(["specctl", *map(str, words)])


def with_text(*words: object) -> str:
    """The same with a prompt behind it."""
    return f"{command_line(*words)} {TEXT}"


def noted(command: str, why: str) -> str:
    """A command with a remark that a shell leaves out."""
    return f"{command}  # {why}"


def given_flags(group: Any, default: Any, but: Collection[str] = ()) -> list[str]:
    """The flags of a group of options whose values differ from those of `default`, as they are
    typed; the fields `but` are left out."""
    hints = get_type_hints(type(group), include_extras=True)
    words: list[str] = []
    for field in fields(group):
        value = getattr(group, field.name)
        if field.name in but or value is None or value == getattr(default, field.name, None):
            continue
        option = getattr(hints[field.name], "__metadata__", (None,))[0]
        if isinstance(option, Setting):
            words += words_of(option, value)
        elif option is not None:
            words += _words(_flag(field.name, option), value)
    return words


def _flag(name: str, option: Any) -> str:
    """The long name of an option; of a pair of switches both: --adaptive/--no-adaptive."""
    declared = (option.default, *(option.param_decls or ()))  # the first name stands as a default
    named = [word for word in declared if isinstance(word, str) and word.startswith("--")]
    return str(named[0]) if named else "--" + name.rstrip("_").replace("_", "-")


def _words(flag: str, value: Any) -> list[str]:
    yes, _, no = flag.partition("/")
    if isinstance(value, bool):
        return [yes] if value else [no] if no else []
    several = value if isinstance(value, (list, tuple)) else (value,)
    return [word for one in several for word in (yes, str(one))]
