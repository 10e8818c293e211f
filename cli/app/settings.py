"""--set KEY=VALUE: what a command takes beyond its flags, under the names that recipes use.

A field of a group of flags, or a parameter of a command, is a setting where its type says
`Annotated[kind, Setting(key, help)]`; else it is a flag. Values are checked by their kind, and keys
that nothing has are refused, before anything loads.
"""

from __future__ import annotations

import inspect
import os.path
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from specctl.core.errors import RecipeError, alike

FLAG = "--set"
MOST = 10**9  # of a number that names no largest value of its own
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is set by that key. `was`: the flag that it had, which is refused with the key; a key
    that ends in `.` takes any name behind it (drafter.options.window=512). `only`: commands
    that can do it (none: all that have it); others do not list it, and say why if it is set."""

    key: str
    help: str
    was: str = ""
    min: float | None = None
    max: float | None = None
    metavar: str = ""
    complete: Callable[[str], list[str]] | None = None  # what the shell completes a value to
    only: tuple[str, ...] = ()


def setting_of(annotation: Any) -> Setting | None:
    """The setting that a type describes; None for a flag."""
    note = getattr(annotation, "__metadata__", (None,))[0]
    return note if isinstance(note, Setting) else None


def words_of(setting: Setting, value: Any) -> list[str]:
    """The setting as it is typed."""
    several = value if isinstance(value, (list, tuple)) else [value]
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in several]
    mark = "" if setting.key.endswith(".") else "="
    return [word for text in texts for word in (FLAG, f"{setting.key}{mark}{text}")]


class Settings:
    """The settings of one command. `is_beside_recipe`: its --set also changes a recipe; `command`:
    its name."""

    def __init__(
        self,
        parameters: Iterable[inspect.Parameter],
        is_beside_recipe: bool = False,
        command: str = "",
    ) -> None:
        self.is_beside_recipe, self.command = is_beside_recipe, command
        self._all: dict[str, tuple[Setting, inspect.Parameter]] = {}
        for parameter in parameters:
            setting = setting_of(parameter.annotation)
            assert setting is not None, f"{parameter.name} is a flag"
            self._all[setting.key] = setting, parameter

    def __bool__(self) -> bool:
        return bool(self._all)

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def shown(self) -> list[tuple[str, str]]:
        """For help: each key and what it sets, by section."""
        listed = [self._all[key] for key in self._listed]
        sections = list(dict.fromkeys(map(_section, self._listed)))
        by_section = sorted(listed, key=lambda e: sections.index(_section(e[0].key)))
        return [_help(setting, parameter) for setting, parameter in by_section]

    def defaults(self) -> dict[str, Any]:
        """Parameter -> value where nothing is set."""
        return {parameter.name: parameter.default for _, parameter in self._all.values()}

    def own(self, words: Sequence[str]) -> list[str]:
        """Those of the words that name a setting of this command."""
        return [word for word in words if self._entry(word.partition("=")[0]) is not None]

    def read(self, words: Sequence[str], path: str, flags: Mapping[str, str]) -> dict[str, Any]:
        """Parameter -> value for what is set. `path`: the command as it is typed; `flags`: its
        flags by the names of recipes' fields, as they are typed, for the remedy."""
        given: dict[str, Any] = {}
        for word in words:
            key, equals, text = word.partition("=")
            entry = self._entry(key)
            if not (key and equals and text):
                raise _no_value(word, key, entry)
            if entry is None:
                raise self._unknown(key, text, path, flags)
            setting, parameter = entry
            if get_origin(_kind(parameter)) is list:
                value = f"{key[len(setting.key) :]}={text}" if setting.key[-1] == "." else text
                given.setdefault(parameter.name, []).append(value)
            elif text == "null":
                given[parameter.name] = parameter.default
            else:
                given[parameter.name] = _value(setting, _kind(parameter), text, path)
        return given

    def over(self, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
        """What is set by both, key by key; above wins. Options of a drafter are keys of their own,
        and the last of a name counts."""
        opened = {p.name for setting, p in self._all.values() if setting.key.endswith(".")}
        joined = {k: [*below.get(k, ()), *above[k]] for k in opened & above.keys()}
        return {**below, **above, **joined}

    def repeated(self, words: Sequence[str]) -> list[str]:
        """What is remarked of settings of one value that are given several times."""
        times = Counter(word.partition("=")[0] for word in words)
        single = [k for k, (_, p) in self._all.items() if get_origin(_kind(p)) is not list]
        return [
            f"{FLAG} {key} is given {times[key]} times: of its values the last one counts"
            for key in single
            if times[key] > 1
        ]

    def instead_of(self, flag: str, value: str = "") -> str:
        """How what a flag of that name said is set now; empty where no setting was that flag."""
        for setting, parameter in self._all.values():
            yes, _, no = setting.was.partition("/")
            if flag not in (yes, no):
                continue
            if _kind(parameter) is bool:
                is_on = (flag == yes) != (value == "false")
                return f"{FLAG} {setting.key}={'true' if is_on else 'false'}"
            is_open = setting.key.endswith(".")
            word = value or "NAME=VALUE" if is_open else f"={value or 'VALUE'}"
            return f"{FLAG} {shlex.quote(setting.key + word)}"
        return ""

    def complete(self, incomplete: str) -> list[str]:
        """What the shell completes: keys, then values, which are there with the last key that is
        left, so that no shell ends the word behind its equals sign."""
        key, equals, text = incomplete.partition("=")
        keys = [known for known in self._listed if known.startswith(key)]
        if not equals and len(keys) != 1:
            return [known if known.endswith(".") else f"{known}=" for known in keys]
        key = key if equals else keys[0]
        entry = self._entry(key)
        found = [] if entry is None else _complete(entry[0], _kind(entry[1]), text)
        whole = [f"{key}={value}" for value in found]
        return whole or ([] if equals else [key if key.endswith(".") else f"{key}="])

    @property
    def _listed(self) -> list[str]:
        """The keys that the command can do."""
        every = [(key, setting.only) for key, (setting, _) in self._all.items()]
        return [key for key, only in every if not only or self.command in only]

    def _entry(self, key: str) -> tuple[Setting, inspect.Parameter] | None:
        if key in self._all and not key.endswith("."):
            return self._all[key]
        opened = (k for k in self._all if k.endswith(".") and key.startswith(k) and key != k)
        return next((self._all[k] for k in opened), None)

    def _unknown(self, key: str, text: str, path: str, flags: Mapping[str, str]) -> RecipeError:
        from specctl.recipes.foreign_keys import right_field

        name = (right_field(key) or key).rpartition(".")[2]
        flag = flags.get(name.replace("_", "-"), "").replace("VALUE", shlex.quote(text))
        known = [f"{k}NAME" if k.endswith(".") else k for k in self._listed]
        named = [k for k in known if k.rpartition(".")[2] == name]
        longer = [f for word, f in flags.items() if len(name) > 2 and word.startswith(name)]
        near = f"{path} --help-all"
        if named or not longer:
            named = named or alike(key, known)
            near = f"write {named[0]} instead of {key}" if named else near
        else:
            near = longer[0].replace("VALUE", shlex.quote(text))
        return RecipeError(
            f"{key} is a flag of its own" if flag else f"unknown setting {key!r}",
            where=FLAG,
            found=f"{key}={text}"[:120],
            expected=f"a key that `{path} --help-all` lists",
            do=flag or near,
        )


def print_settings(settings: Settings) -> None:
    """The panel of a help screen that lists them."""
    import typer.rich_utils as screen
    from rich.panel import Panel
    from rich.table import Table

    table = Table(box=None, show_header=False, expand=True, pad_edge=False)
    table.add_column(style=screen.STYLE_OPTION, no_wrap=True)
    table.add_column()
    for key, text in settings.shown:
        table.add_row(key, text)
    title, style = f"Settings ({FLAG} KEY=VALUE)", screen.STYLE_OPTIONS_PANEL_BORDER
    console = screen._get_rich_console()
    console.print(Panel(table, title=title, title_align="left", border_style=style))


def _help(setting: Setting, parameter: inspect.Parameter) -> tuple[str, str]:
    """Key and text: what it sets, which values, the default."""
    key = f"{setting.key}NAME" if setting.key.endswith(".") else setting.key
    about = [setting.metavar or _metavar(setting, _kind(parameter))]
    if parameter.default is not None:
        default = parameter.default
        shown = f"{default:g}" if isinstance(default, float) else str(default).lower()
        about.append(f"default {shown}")
    return key, f"{setting.help} [{', '.join(about)}]".replace("[", r"\[")


def _complete(setting: Setting, kind: Any, text: str) -> list[str]:
    """Values of a setting that begin so, where only some are possible."""
    if setting.complete is not None:
        return setting.complete(text)
    known = ["true", "false"] if kind is bool else setting.metavar.split("|")
    return [name for name in known if name.islower() and name.startswith(text)]


def _section(key: str) -> str:
    return key.partition(".")[0]


def _kind(parameter: inspect.Parameter) -> Any:
    """The type of the value that is set: of `int | None`, int."""
    kind = get_args(parameter.annotation)[0]
    others = [one for one in get_args(kind) if one is not type(None)]
    return others[0] if type(None) in get_args(kind) else kind


def _metavar(setting: Setting, kind: Any) -> str:
    if setting.min is not None and setting.max is not None:
        return f"{setting.min:g}..{setting.max:g}"
    return {bool: "true|false", int: "a count", float: "a number", Path: "a path"}.get(kind, "text")


def _value(setting: Setting, kind: Any, text: str, path: str) -> Any:
    """The text as that kind, within its bounds."""
    from pydantic import Field, TypeAdapter, ValidationError

    if kind in (int, float):
        most = MOST if setting.max is None else setting.max
        least = -MOST if setting.min is None else setting.min
        kind = Annotated[kind, Field(ge=least, le=most, allow_inf_nan=False)]
    if kind is Path or "FILE" in setting.metavar:
        text = os.path.expanduser(text)  # a shell leaves ~ behind an equals sign as it is
    try:
        return TypeAdapter(kind).validate_python(text)
    except ValidationError as error:
        raise RecipeError(
            f"{setting.key} is not valid",
            where=f"{FLAG} {setting.key}",
            found=text[:120],
            expected=_expected(setting, kind),
            do=f"{path} --help-all",
        ) from error


def _expected(setting: Setting, kind: Any) -> str:
    plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    what = _KINDS.get(plain, "a text")
    if plain not in (int, float):
        return what
    least = -MOST if setting.min is None else setting.min
    return f"{what} from {least:,.12g} to {MOST if setting.max is None else setting.max:,.12g}"


def _no_value(word: str, key: str, entry: tuple[Setting, Any] | None) -> RecipeError:
    shown = key if entry is not None else "serve.nodes"
    return RecipeError(
        f"{FLAG} {word} sets nothing",
        where=FLAG,
        found=word[:120],
        expected="a key, an equals sign, a value",
        do=f"{FLAG} {shown}=VALUE",
    )
