"""The program: commands by name, loaded when called; one error boundary; exit codes.

Neither torch nor transformers is imported here or by any `--help`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from specctl import __version__
from specctl.cli.app.bash_words import words_of_bash
from specctl.cli.app.command import Command, Group, command, configure, console_of, unwrap
from specctl.cli.app.console import Console
from specctl.cli.app.failures import handle, leave, listen
from specctl.cli.app.launch import leave_exit_code
from specctl.cli.options.flags import ConfigFile, Json, JsonLines, NoColor, Quiet, Verbose

START, TRAIN, USE, LOOK = "Start here", "Train and shape", "Use and measure", "Look and check"


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: the module of `commands/` that holds it, its panel and its line of help."""

    module: str
    panel: str
    help: str


COMMANDS = {
    "quickstart": Entry(
        "quickstart", START, "From nothing to a measured speed-up on this machine."
    ),
    "doctor": Entry("doctor", START, "Check this machine, and say what to fix."),
    "targets": Entry("targets", START, "List models of this machine, and drafts that fit."),
    "plan": Entry("plan", START, "Memory, disk and time of a training run, in advance."),
    "recipes": Entry("recipes", START, "List, show, copy and check recipes."),
    "regenerate": Entry("regenerate", TRAIN, "Let the target write the answers to train on."),
    "train-draft": Entry("train_draft", TRAIN, "Train a drafter for a target."),
    "distill": Entry("distill", TRAIN, "Train an independent small draft model."),
    "prune": Entry("prune", TRAIN, "Cut a drafter out of the target itself, and heal it."),
    "adapt": Entry("adapt", TRAIN, "Refresh a drafter for a tuned target or a new domain."),
    "train-stop": Entry("train_stop", TRAIN, "Train a stop rule for a drafter."),
    "datastore": Entry("datastore", TRAIN, "Fill the store that a drafter retrieves from."),
    "vocab-trim": Entry("vocab_trim", TRAIN, "Trim a drafter's vocabulary."),
    "pretrain": Entry("pretrain", TRAIN, "Train the embedded target from scratch."),
    "generate": Entry("generate", USE, "Continue prompts, faster and with the same answers."),
    "chat": Entry("chat", USE, "Chat with a target in the terminal."),
    "serve": Entry("serve", USE, "OpenAI's and Anthropic's APIs, for many users at once."),
    "bench": Entry("bench", USE, "Compare drafters: tau, tokens per second, speed-up."),
    "bench-families": Entry(
        "bench_families", USE, "Train drafter families alike and compare them."
    ),
    "verify": Entry("verify", LOOK, "Prove that a package is whole, compatible and lossless."),
    "show": Entry("show", LOOK, "Describe a package, a run, a model folder or a target."),
    "runs": Entry("runs", LOOK, "List, follow, resume, compare and clean run folders."),
    "export": Entry("export", USE, "Write a drafter for vLLM, SGLang, llama.cpp and others."),
    "import": Entry("import_", USE, "Make a package from a published drafter."),
}


class LazyCommands(Group):
    """Imports a command's module only when that command is called."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        entry = COMMANDS[cmd_name]
        if self._is_listing:
            return TyperCommand(cmd_name, help=entry.help, rich_help_panel=entry.panel)
        return load_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._is_listing = False


def load_command(name: str) -> Any:
    """The click command of that name: a module holds a function of its own name, or an `app`."""
    module = importlib.import_module(f"specctl.cli.commands.{COMMANDS[name].module}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name, cls=Command)(command(getattr(module, COMMANDS[name].module)))
    return typer.main.get_command(single)


app = typer.Typer(
    cls=LazyCommands,
    name="specctl",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(ctx: typer.Context, wanted: bool) -> None:
    if not wanted:
        return
    console = console_of(ctx)
    console.out(f"specctl {__version__}")
    versions = {"version": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "accelerate"):
        versions[name] = importlib.metadata.version(name)
    console.done(versions)
    raise typer.Exit


HELP = """
Make your language model answer faster, without changing its answers.

specctl trains a small drafter for your target model, trims its vocabulary, proves that generation
with it is lossless, measures the speed-up on your hardware, and packages it.

Start with quickstart (ten minutes on two CPU cores, no download), or with a model of yours, as a
GGUF file, folder or hub id:

  specctl quickstart
  specctl generate --target MODEL --draft auto --compare "TEXT"
"""


@app.callback(help=unwrap(HELP))
def _everywhere(
    ctx: typer.Context,
    json: Json = False,
    jsonl: JsonLines = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_color: NoColor = False,
    config_file: ConfigFile = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    flags = {"json": json, "jsonl": jsonl, "quiet": quiet, "verbose": verbose}
    configure(ctx, flags | {"no_color": no_color})


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run one command; returns the exit code and never raises."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = console if console is not None else Console()
    # Known before parsing, so that a mistake on the command line is answered in JSON as well.
    console.configure(
        json="--json" in arguments,
        jsonl="--jsonl" in arguments,
        color="--no-color" not in arguments,
    )
    console.rerun = lambda words: main(words, console)
    root = typer.main.get_command(app)
    try:
        # A library that prints must not spoil the one object on stdout.
        guard = contextlib.redirect_stdout(console.stderr) if console.json else _nothing()
        with guard, words_of_bash(os.environ):
            code = root.main(arguments, prog_name="specctl", standalone_mode=False, obj=console)
        console.stdout.flush()
    except BaseException as error:
        code = handle(error, console)
    code = code if isinstance(code, int) else 0
    leave_exit_code(code)
    return code


def _nothing() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def run() -> None:
    """The entry point of the program."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by whoever called: what is written there is lost
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
    listen()
    leave(main())
