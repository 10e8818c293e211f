"""What turns a function into a command: flags of every command, and groups of shared flags.

A parameter whose type is a dataclass stands for one option per field. The group's default is an
instance (its values are the defaults of the options), or the class's own defaults.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from specctl.cli.app.config_file import set_in_file
from specctl.cli.app.console import Console
from specctl.cli.app.examples import examples_fitted
from specctl.cli.app.settings import FLAG, MOST, Settings, print_settings, setting_of
from specctl.cli.options.flags import GLOBAL_FLAGS, ConfigFile
from specctl.core.errors import SpecctlError, one_of_two
from specctl.core.messages.printable import guarded_streams
from specctl.core.plugins import LeftOut
from specctl.recipes.built_in import HiddenName

P = ParamSpec("P")
_BOTH, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class ClosedPipe(Exception):
    """Whoever read our output has left."""


REPEATED = "specctl.repeated"  # warnings of flags that were given several times
SET = "specctl.set"  # parameter -> value of what --set says


class CommandInterrupted(Exception):
    """Ctrl-C or SIGTERM, as an error that typer does not answer itself."""


def console_of(ctx: typer.Context) -> Console:
    """The console that main() made for this run of the program."""
    console = ctx.find_root().obj
    assert isinstance(console, Console), "main() hands the console over as obj"
    return console


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """A parameter of a command that stands for several options."""

    name: str
    kind: Any
    options: tuple[inspect.Parameter, ...]

    def gather(self, given: dict[str, Any]) -> Any:
        """Takes the group's options out of `given` and builds the dataclass."""
        start = len(self.name) + 1
        return self.kind(**{p.name[start:]: given.pop(p.name) for p in self.options})


def command(
    body: Callable[Concatenate[Console, P], None], name: str | None = None
) -> Callable[..., None]:
    """`body(console, ...)` as a typer callback that also takes the flags of every command."""
    every, groups = _options(body)
    own = [option for option in every if setting_of(option.annotation) is None]
    has_recipe = any(option.name == SETS for option in own)
    set_ones = [option for option in every if setting_of(option.annotation) is not None]
    called = name or body.__name__.strip("_").replace("_", "-")
    settings = Settings(set_ones, is_beside_recipe=has_recipe, command=called)
    if settings and not has_recipe:
        own.append(_set_option(settings))

    @functools.wraps(body)
    def run(ctx: typer.Context, **given: Any) -> None:
        console = console_of(ctx)
        console.command = called
        configure(ctx, {flag: bool(given.pop(flag)) for flag in GLOBAL_FLAGS})
        del given["help_all"], given["config_file"]  # their callbacks have done their work
        for option in own:
            _check_numbers(ctx, option, given[option.name])
        if settings and not has_recipe:
            del given[SETS]
        given |= settings.defaults() | ctx.meta.get(SET, {})
        given |= {group.name: group.gather(given) for group in groups}
        for repeated in ctx.meta.get(REPEATED, ()):
            console.warn(repeated)
        try:
            with guarded_streams(), hidden_names_said(console):
                body(console, **given)  # type: ignore[call-arg]
        except BrokenPipeError as error:
            raise ClosedPipe from error  # typer would turn it into exit code 1
        except KeyboardInterrupt as error:
            raise CommandInterrupted from error  # typer would end without a word

    params = [inspect.Parameter("ctx", _BOTH, annotation=typer.Context), *own, *_everywhere()]
    run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in params} | {"return": None}
    run.__doc__ = _indentation_kept(unwrap(body.__doc__ or ""))
    run.settings = settings  # type: ignore[attr-defined]
    del run.__wrapped__
    return run


SETS = "sets"  # the parameter that --set fills


def _set_option(settings: Settings) -> inspect.Parameter:
    """--set, of a command that has settings and no recipe that is changed by it."""
    option = typer.Option(
        FLAG,
        metavar="KEY=VALUE",
        help="Change one of the settings that --help-all lists (repeatable).",
        autocompletion=settings.complete,
    )
    annotation = Annotated[list[str] | None, option]
    return inspect.Parameter(SETS, _KEYWORD, default=None, annotation=annotation)


def settings_of(command: Any) -> Settings:
    """What --set changes of a command, beside the fields of a recipe."""
    return getattr(command.callback, "settings", None) or Settings(())


@contextmanager
def hidden_names_said(console: Console) -> Iterator[None]:
    """Where a built-in name and a folder are called alike, or a list lacks a broken plug-in, the
    console warns of it; all other warnings of Python go where they went."""
    with warnings.catch_warnings():
        shown = warnings.showwarning
        said = (HiddenName, LeftOut)
        for kind in said:
            warnings.simplefilter("always", kind)

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, said):
                console.warn(str(message))
            else:
                shown(message, category, *where, **more)

        warnings.showwarning = show
        yield


class Command(TyperCommand):
    """A command whose help names no type beside a switch, which takes no value. `--help` leaves out
    the less usual flags of the shared panels, `--help-all` shows all there are."""

    is_whole = False

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual; a flag of one value that was given several times is remarked: the last one
        counts, which nobody means who takes it for a list."""
        given = list(args)
        rest: list[str] = super().parse_args(ctx, args)
        _, _, order = self.make_parser(ctx).parse_args(list(given))
        _refuse_both_ways(order, given)
        once = [p for p in order if not (p.multiple or getattr(p, "is_flag", False))
                and p.param_type_name == "option" and not getattr(p, "count", False)]  # fmt: skip
        ctx.meta[REPEATED] = [
            f"{max(p.opts, key=len)} is given {times} times: of its values the last one counts"
            for p, times in Counter(once).items()
            if times > 1
        ]
        if (settings := settings_of(self)) and not ctx.resilient_parsing:  # the shell completes
            self._read_settings(ctx, settings)
        return rest

    def _read_settings(self, ctx: Any, settings: Settings) -> None:
        """Take the settings out of --set; what is left there changes a recipe. What is typed wins
        over a file of defaults, key by key."""
        typed = list(ctx.params.get(SETS) or ())
        in_file = [] if not _is_typed(ctx, SETS) else set_in_file(ctx, SETS)
        if settings.is_beside_recipe:
            ctx.params[SETS] = [w for w in typed if w not in settings.own(typed)] or None
            typed, in_file = settings.own(typed), settings.own(in_file)
        ctx.meta[REPEATED] += settings.repeated(typed)
        flags = {opt[2:]: _as_typed(p, opt) for p in self.params for opt in p.opts if opt != FLAG}
        read = functools.partial(settings.read, path=ctx.command_path, flags=flags)
        ctx.meta[SET] = settings.over(read(in_file), read(typed))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """[OPTIONS], then every argument in the words of its metavar: typer would put brackets
        around those that a metavar brings."""
        pieces: list[str] = ["[OPTIONS]"]
        for parameter in self.get_params(ctx):
            named = parameter.param_type_name == "argument" and parameter.metavar is not None
            pieces += [parameter.metavar] if named else parameter.get_usage_pieces(ctx)
        return pieces

    def format_help(self, ctx: Any, formatter: Any) -> None:
        settings = settings_of(self)
        rare: list[Any] = [p for p in self.params if not self.is_whole and _is_rare(p)]
        if len(rare) < FEW:
            rare = []
        for parameter in rare:
            parameter.hidden = True
        try:
            with _short_names(self.params), examples_fitted(self):
                super().format_help(ctx, formatter)
        finally:
            for parameter in rare:
                parameter.hidden = False
        if settings and self.is_whole:
            print_settings(settings)
        more = [f"{len(rare)} more flags"] if rare else []
        more += [f"{len(settings)} settings"] if settings and not self.is_whole else []
        if more:
            typer.echo(f" {' and '.join(more)}: {ctx.command_path} --help-all\n")


def _as_typed(option: Any, flag: str) -> str:
    """How a flag is written: with a value, or the ways of a switch."""
    is_switch = getattr(option, "is_flag", False)
    return " or ".join([flag, *option.secondary_opts]) if is_switch else f"{flag} VALUE"


FEW = 8  # flags that need no help screen of their own
RARE_PANELS = (
    "Drafting", "Sampling", "Target", "Hardware", "Everywhere", "Run", "Access", "Load"
)  # fmt: skip
USUAL = {
    "--draft", "--length", "--adaptive", "--temperature", "--max-new-tokens", "--target", "--dtype",
    "--device", "--json", "--quiet", "--gpus", "--steps", "--time", "--lr", "--batch-size",
    "--dry-run", "--resume", "--help-all", "--host", "--port", "--api-key-file", "--max-batch",
    "--max-len",
}  # fmt: skip


def _is_rare(parameter: Any) -> bool:
    panel = getattr(parameter, "rich_help_panel", None)
    return panel in RARE_PANELS and USUAL.isdisjoint(parameter.opts) and not parameter.hidden


def show_whole_help(ctx: typer.Context, wanted: bool) -> None:
    """The callback of --help-all."""
    if wanted:
        command: Any = ctx.command
        command.is_whole = True
        try:
            typer.echo(ctx.get_help())
        finally:
            command.is_whole = False
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option(
        "--help-all",
        is_eager=True,
        callback=show_whole_help,
        rich_help_panel="Everywhere",
        help="Show every flag and setting, and exit.",
    ),
]


class Group(TyperGroup):
    """The same for a group of commands."""

    is_whole = False

    def get_params(self, ctx: Any) -> list[Any]:
        return _untyped(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with examples_fitted(self):
            super().format_help(ctx, formatter)


def _untyped(params: list[Any]) -> list[Any]:
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.metavar is None and _range(parameter) is not None:
            parameter.metavar = _range(parameter)
        elif parameter.metavar is None and getattr(parameter, "multiple", False):
            parameter.metavar = "<str>"  # rather than <list[str]>
    return params


def _range(parameter: Any) -> str | None:
    """How help writes a number within bounds: 1..64, or its kind where only one end is set."""
    bounds = parameter if hasattr(parameter, "min") else getattr(parameter, "type", None)
    least, most = getattr(bounds, "min", None), getattr(bounds, "max", None)
    if least is None and most is None:
        return None
    if least is not None and most is not None and most <= MOST:
        return f"{least}..{most}"
    return "<float>" if isinstance(most if least is None else least, float) else "<int>"


@contextmanager
def _short_names(params: Sequence[Any]) -> Iterator[None]:
    """While help is written: --[no-]adaptive for a pair of switches, no range beside a kind that
    names it, and no list[str] beside an argument that stands for several. Two columns less, which
    the text needs on a narrow terminal."""
    import typer.rich_utils as screen

    pairs = [(p, p.opts, p.secondary_opts) for p in params if _is_pair(p)]
    several = [p for p in params if p.param_type_name == "argument" and p.nargs != 1]
    shown, screen.RANGE_STRING = screen.RANGE_STRING, ""
    for parameter, opts, _ in pairs:
        parameter.opts = [f"--[no-]{opts[0][2:]}", *opts[1:]]
        parameter.secondary_opts = []
    for parameter in several:
        parameter.display_type_rich = _no_kind
    try:
        yield
    finally:
        screen.RANGE_STRING = shown
        for parameter, opts, others in pairs:
            parameter.opts, parameter.secondary_opts = opts, others
        for parameter in several:
            del parameter.display_type_rich


def _no_kind(ctx: Any) -> None:
    del ctx


def _is_pair(parameter: Any) -> bool:
    return [*parameter.secondary_opts] == [f"--no-{parameter.opts[0][2:]}"]


def command_group(name: str, help: str, bodies: Sequence[Callable[..., None]]) -> typer.Typer:
    """`specctl NAME BODY` for each of these functions."""
    app = typer.Typer(
        cls=Group,
        name=name,
        help=help,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
    )

    def group(console: Console) -> None:
        del console

    app.callback()(command(group, name))
    for body in bodies:
        app.command(body.__name__, cls=Command)(command(body, f"{name}-{body.__name__}"))
    return app


def _check_numbers(ctx: typer.Context, option: inspect.Parameter, value: Any) -> None:
    """Refuse nan, infinities, and numbers beyond MOST where the option has no `max` of its own."""
    info = getattr(option.annotation, "__metadata__", (None,))[0]
    most = MOST if getattr(info, "max", None) is None else math.inf
    for number in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(number, (int, float)) and not abs(number) <= min(most, sys.float_info.max):
            flag: Any = next(p for p in ctx.command.params if p.name == option.name)
            wrong = f"{number} is not a finite number of at most {MOST:,}"
            raise typer.BadParameter(wrong, ctx=ctx, param=flag)


def _refuse_both_ways(order: Sequence[Any], words: Sequence[str]) -> None:
    """Of a switch that was given more than once, both ways: --adaptive --no-adaptive."""
    for parameter, times in Counter(order).items():
        ways = [[w for w in words if w in part] for part in (parameter.opts, _others(parameter))]
        if times > 1 and all(ways):
            raise _exclusive(ways[0][0], ways[1][0])


def _others(parameter: Any) -> Sequence[str]:
    """The flags that switch it off."""
    return parameter.secondary_opts if getattr(parameter, "is_flag", False) else ()


# Flags of every command that say the opposite of each other, or two forms of one thing.
OPPOSITES = (("quiet", "verbose"), ("json", "jsonl"))
_TYPED = "specctl.typed"  # those that were typed so far: they may stand before or after a name


def configure(ctx: typer.Context, given: dict[str, bool]) -> None:
    """Apply the flags of every command. What is typed wins over its opposite in a file of defaults;
    two that exclude each other are refused."""
    typed: list[str] = ctx.meta.setdefault(_TYPED, [])
    typed += [flag for flag in given if given[flag] and _is_typed(ctx, flag)]
    for first, second in OPPOSITES:
        given[first] &= first in typed or second not in typed
        given[second] &= second in typed or first not in typed
        if all(given[flag] or flag in typed for flag in (first, second)):
            raise _exclusive(f"--{first}", f"--{second}")
    console_of(ctx).configure(color=not given.pop("no_color"), **given)


def _is_typed(ctx: typer.Context, flag: str) -> bool:
    source = ctx.get_parameter_source(flag)
    return source is not None and source.name == "COMMANDLINE"


def _exclusive(first: str, second: str) -> SpecctlError:
    what = f"{first} and {second} exclude each other"
    return one_of_two(what, f"{first} {second}", f"leave out {second}, or {first}")


def unwrap(doc: str) -> str:
    """Help text with the lines of each paragraph joined; indented paragraphs stay as they are."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


def _indentation_kept(text: str) -> str:
    """typer takes the indentation away from examples that follow the first paragraph at once. One
    more empty line keeps it."""
    paragraphs = text.split("\n\n")
    if [p.startswith(" ") for p in paragraphs[1:]] == [False, True]:
        paragraphs[1] = f"\n{paragraphs[1]}"
    return "\n\n".join(paragraphs)


def _options(body: Callable[..., None]) -> tuple[list[inspect.Parameter], list[FlagGroup]]:
    """The options of a command's own parameters, groups spread out in their places."""
    hints = get_type_hints(body, include_extras=True)
    options: list[inspect.Parameter] = []
    groups: list[FlagGroup] = []
    for parameter in list(inspect.signature(body).parameters.values())[1:]:
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups.append(FlagGroup(parameter.name, kind, tuple(_spread(parameter, kind))))
            options += groups[-1].options
        else:
            options.append(parameter.replace(annotation=kind, kind=_KEYWORD))
    return options, groups


def _spread(parameter: inspect.Parameter, kind: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for field in sorted(fields(kind), key=lambda f: f.kw_only is True):
        default = field.default
        if parameter.default is not inspect.Parameter.empty:
            default = getattr(parameter.default, field.name)
        yield inspect.Parameter(
            f"{parameter.name}_{field.name}",
            _KEYWORD,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=hints[field.name],
        )


def _everywhere() -> list[inspect.Parameter]:
    """The flags of every command."""
    whole = inspect.Parameter("help_all", _KEYWORD, default=False, annotation=HelpAll)
    config = inspect.Parameter("config_file", _KEYWORD, default=None, annotation=ConfigFile)
    return [
        config,
        whole,
        *(
            inspect.Parameter(flag, _KEYWORD, default=False, annotation=kind)
            for flag, kind in GLOBAL_FLAGS.items()
        ),
    ]
