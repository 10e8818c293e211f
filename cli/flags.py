"""The options that several commands share, and what turns a function into a command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, get_type_hints

import typer

from specctl.cli.console import Console

P = ParamSpec("P")

EVERYWHERE = "Everywhere"
SAMPLING = "Sampling"
DRAFTING = "Drafting"
TARGET = "Target"

Json = Annotated[
    bool, typer.Option("--json", help="One JSON object on stdout.", rich_help_panel=EVERYWHERE)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Only results.", rich_help_panel=EVERYWHERE)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say more.", rich_help_panel=EVERYWHERE)
]
NoColor = Annotated[
    bool, typer.Option("--no-color", help="Plain text, no bars.", rich_help_panel=EVERYWHERE)
]

TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        help="Alias (tiny, qwen3-8b), hub id, or folder.",
        rich_help_panel=TARGET,
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Commit of the hub repository.", rich_help_panel=TARGET)
]
Dtype = Annotated[
    str,
    typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=TARGET),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.", rich_help_panel=TARGET)]
Inflate = Annotated[
    str | None,
    typer.Option(
        help="Grow the target to this cost (100m, 300m, 1b, 8b) with the same answers.",
        rich_help_panel=TARGET,
    ),
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Never ask the hub.", rich_help_panel=TARGET)
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FIELD",
        help="Accept a mismatch of this field of the package (repeatable).",
        rich_help_panel=DRAFTING,
    ),
]
PolicyFlag = Annotated[
    str | None,
    typer.Option(help="chain, static-tree, dynamic-tree or direct.", rich_help_panel=DRAFTING),
]
LengthFlag = Annotated[
    int | None,
    typer.Option(min=1, max=64, help="Tokens drafted (depth of a tree).", rich_help_panel=DRAFTING),
]
NodesFlag = Annotated[
    int | None,
    typer.Option(min=1, max=1024, help="Nodes of a tree.", rich_help_panel=DRAFTING),
]
RuleFlag = Annotated[
    str | None,
    typer.Option(
        help="Verification rule: auto, greedy, target-only, one-hot, chain, block, recursive, "
        "traversal.",
        rich_help_panel=DRAFTING,
    ),
]
AdaptiveFlag = Annotated[
    bool | None,
    typer.Option(
        "--adaptive/--fixed",
        help="Choose each round's draft length (or none) from measured costs.",
        rich_help_panel=DRAFTING,
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a field of the recipe, e.g. train.steps=200."
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=SAMPLING)]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, help="Longest continuation.", rich_help_panel=SAMPLING)
]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 = greedy.", rich_help_panel=SAMPLING)]

GLOBAL_FLAGS = {"json": Json, "quiet": Quiet, "verbose": Verbose, "no_color": NoColor}


class ClosedPipe(Exception):
    """Whoever read our output has left."""


def console_of(ctx: typer.Context) -> Console:
    """The console that main() made for this run of the program."""
    console = ctx.find_root().obj
    assert isinstance(console, Console), "main() hands the console over as obj"
    return console


def command(
    body: Callable[Concatenate[Console, P], None], name: str | None = None
) -> Callable[..., None]:
    """`body(console, ...)` as a typer callback that also takes the flags of every command."""
    hints = get_type_hints(body, include_extras=True)
    own = [p.replace(annotation=hints[p.name]) for p in _parameters(body)[1:]]
    context = inspect.Parameter("ctx", _BOTH, annotation=typer.Context)
    extra = [
        inspect.Parameter(flag, _KEYWORD, default=False, annotation=kind)
        for flag, kind in GLOBAL_FLAGS.items()
    ]

    @functools.wraps(body)
    def run(ctx: typer.Context, **given: Any) -> None:
        console = console_of(ctx)
        flags = {flag: given.pop(flag) for flag in GLOBAL_FLAGS}
        console.command = name or body.__name__.strip("_").replace("_", "-")
        console.configure(
            json=flags["json"],
            quiet=flags["quiet"],
            verbose=flags["verbose"],
            color=not flags["no_color"],
        )
        try:
            body(console, **given)  # type: ignore[call-arg]
        except BrokenPipeError as error:
            raise ClosedPipe from error  # typer would turn it into exit code 1

    params = [context, *(p.replace(kind=_KEYWORD) for p in own), *extra]
    run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in params} | {"return": None}
    run.__doc__ = unwrap(body.__doc__ or "")
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def unwrap(doc: str) -> str:
    """Help text with the lines of each paragraph joined; indented paragraphs stay as they are."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    return "\n\n".join(p if p.startswith(" ") else " ".join(p.split("\n")) for p in paragraphs)


_BOTH = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _parameters(body: Callable[..., None]) -> list[inspect.Parameter]:
    return list(inspect.signature(body).parameters.values())
