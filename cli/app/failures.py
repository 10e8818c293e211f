"""Any exception -> what the user reads and the exit code of the process."""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from typing import Any, NoReturn

import typer

from specctl.api.failures import first_line, user_error
from specctl.cli.app.command import ClosedPipe, CommandInterrupted, settings_of
from specctl.cli.app.config_file import META
from specctl.cli.app.console import STOPPED, Console
from specctl.core.errors import Exit, SpecctlError, alike

# typer may carry its own copy of click; its BadParameter is the one public way to the base class.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143

# What other tools call our commands.
MEANT = {
    "train": "train-draft", "train-head": "train-draft", "finetune": "train-draft",
    "fine-tune": "train-draft", "fit": "train-draft", "distil": "distill", "tune": "adapt",
    "lora": "adapt", "refresh": "adapt", "trim": "vocab-trim", "benchmark": "bench",
    "eval": "bench", "evaluate": "bench", "compare": "bench", "measure": "bench",
    "profile": "bench", "time": "bench", "families": "bench-families", "convert": "export",
    "push": "export", "upload": "export", "publish": "export", "load": "import",
    "download": "import", "server": "serve", "start": "serve", "api": "serve", "run": "generate",
    "complete": "generate", "infer": "generate", "inference": "generate", "predict": "generate",
    "sample": "generate", "prove": "verify", "check": "verify", "test": "verify",
    "validate": "recipes validate", "rules": "recipes rules", "schema": "recipes schema",
    "inspect": "show", "info": "show", "list": "recipes", "ls": "recipes", "status": "runs",
    "resume": "runs resume", "tail": "runs tail", "logs": "runs tail", "clean": "runs clean",
    "init": "quickstart", "demo": "quickstart", "env": "doctor", "setup": "doctor",
    "install": "doctor", "estimate": "plan", "help": "", "version": "--version",
}  # fmt: skip
NEAR = 0.65  # a command less alike than this is not suggested

# Flags that are gone, and neither a setting now nor like another flag.
GONE = {
    "--json-schema": "use --grammar FILE.json",
    "--show-accepted": "leave it out: a terminal shows it",
    "--no-show-accepted": "use --no-color",
}

# What other tools call our flags, by what is typed first.
MEANT_FLAGS = {
    "--model": "--target", "-m": "--target", "--model-path": "--target", "--hf-repo": "--target",
    "-md": "--draft", "--model-draft": "--draft", "--assistant-model": "--draft",
    "--speculative-model": "--draft", "-n": "--max-new-tokens", "--n-predict": "--max-new-tokens",
    "--predict": "--max-new-tokens", "--temp": "--temperature", "--ctx-size": "--max-len",
    "-c": "--max-len", "--max-model-len": "--max-len", "-np": "--max-batch",
    "--parallel": "--max-batch", "--max-num-seqs": "--max-batch", "--api-key": "--api-key-file",
    "--served-model-name": "--name", "--alias": "--name", "--draft-max": "--length",
    "--num-speculative-tokens": "--length",
}  # fmt: skip

_SIGNALS: list[int] = []  # the signal that unwinds this command


class Terminated(KeyboardInterrupt):
    """SIGTERM; whatever unwinds for Ctrl-C unwinds for it."""


def listen() -> None:
    """Ctrl-C and SIGTERM unwind the command the first time and end the process the second time.

    An ignored Ctrl-C (a background job) stays ignored.
    """

    def end(number: int, frame: object) -> None:
        os.write(2, b"\n")  # a bar may stand on the line
        os._exit(128 + number)

    def unwind(number: int, frame: object) -> None:
        for other in (signal.SIGINT, signal.SIGTERM):
            signal.signal(other, end)
        _SIGNALS.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, unwind)
    signal.signal(signal.SIGTERM, unwind)


def leave(code: int) -> NoReturn:
    """End the process with this code.

    Python ends itself by SIGINT where a Ctrl-C once met code run from a string (which many modules
    do when they are imported), whatever has become of the exception; so it does not get to that.
    """
    if code in STOPPED:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def handle(error: BaseException, console: Console) -> int:
    """Tell the user, and return the exit code."""
    if isinstance(error, (KeyboardInterrupt, CommandInterrupted)):
        return _interrupted(error, console)
    if isinstance(error, (BrokenPipeError, ClosedPipe)):
        _close_quietly()
        return PIPE_CLOSED
    if type(error).__name__ == "NoArgsIsHelpError":
        return Exit.USAGE  # the help that it brings has been shown
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    shown = shown_error(error, console.command)
    if _SIGNALS and (shown is None or shown.exit != Exit.INTERRUPTED):
        return _interrupted(error, console)  # a library put its own error in the place of ours
    if shown is None:
        return _bug(error, console)
    if shown.exit == Exit.INTERRUPTED and not shown.found:
        shown.found = console.kept() or "nothing was written yet"
    console.fail(shown)
    is_plain = isinstance(error, (SpecctlError, USAGE_ERROR)) and error.__cause__ is None
    if console.verbose and not is_plain:
        console.say("".join(traceback.format_exception(error)))
    return int(shown.exit)


def _interrupted(error: BaseException, console: Console) -> int:
    """Ctrl-C and SIGTERM: what is on the disk now, and how to go on or to begin again."""
    command = shlex.join(["specctl", *sys.argv[1:]])
    kept = console.kept()
    if kept is not None:
        shown = SpecctlError("stopped on request", found=kept, do=command, exit=Exit.INTERRUPTED)
        console.fail(shown)
        return int(shown.exit)
    written = "what was done until then is written; " if console.result else ""
    remains = console.remains() or ("no file was saved" if written else "nothing was saved")
    is_terminated = Terminated in (type(error), type(error.__cause__)) or signal.SIGTERM in _SIGNALS
    shown = SpecctlError(
        "terminated" if is_terminated else "interrupted",
        found=f"{written}{remains}",
        do=command,
    )
    code = TERMINATED if is_terminated else INTERRUPTED
    console.fail(shown, code)
    return code


def shown_error(error: BaseException, command: str = "specctl") -> SpecctlError | None:
    """The error as a user meets it; None for a bug of ours."""
    if isinstance(error, SpecctlError):
        return error
    if isinstance(error, USAGE_ERROR):
        return _usage(error)
    return user_error(error, command)


def _usage(error: Exception) -> SpecctlError:
    """A mistake on the command line, in four parts."""
    message = str(getattr(error, "format_message", lambda: str(error))()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else _typed()
    usage = context.get_usage().removeprefix("Usage: ") if context is not None else f"{path} ..."
    config = context.meta.get(META) if context is not None else None
    close = as_word = ""
    if context is not None and message.startswith("No such command"):
        wanted = message.split("'")[1] if "'" in message else ""
        near = alike(wanted, context.command.list_commands(context), cutoff=NEAR)
        meant = MEANT if context.parent is None else {}
        close = meant.get(wanted, "".join(near))
        message = f"unknown command {wanted!r}"
        if wanted == "help":
            commands = context.command.list_commands(context)
            close = next((word for word in sys.argv[2:3] if word in commands), "")
        elif context.parent is None and not close:
            as_word = _use_of(wanted)
    option = getattr(error, "option_name", None)
    if option is not None and context is not None and message.startswith("No such option"):
        as_word = _instead_of(option, path, context.command)
        is_set = as_word.startswith("use --set ")
        shown = _typed_flag(option)
        message = f"{shown} is a setting now" if is_set else f"unknown flag {shown}"
    if context is not None and message.startswith("Got unexpected extra argument"):
        close = _meant_recipe(message, context.command.params)
    is_flag = close.startswith("-")
    verb = f"{path} {close} --help" if close and not is_flag else f"{path} --help"
    return SpecctlError(
        message,
        where=f"the command line or {config}" if config else "the command line",
        found=" ".join(["specctl", *sys.argv[1:]])[:200],
        expected=" ".join(usage.split()),
        do=as_word or (f"use {close}  ({verb})" if is_flag else verb),
        exit=Exit.USAGE,
    )


def _instead_of(flag: str, path: str, command: Any) -> str:
    """The one hint for a flag that a command has not: how the setting is set that it was, else the
    flag most like it; nothing where none is."""
    behind = dict(zip(sys.argv, [*sys.argv[1:], ""], strict=True))
    joined = (word.partition("=")[2] for word in sys.argv if word.startswith(f"{flag}="))
    value = next(joined, behind.get(flag, ""))
    dashed = flag[:2] + flag[2:].replace("_", "-")
    if setting := settings_of(command).instead_of(dashed, "" if value.startswith("-") else value):
        return f"use {setting}  ({path} --help-all)"
    if flag in GONE and any("--grammar" in p.opts for p in command.params):
        return GONE[flag]
    options = [p for p in command.params if p.param_type_name == "option"]
    flags = {f.strip("-"): f for p in options for f in (*p.opts, *p.secondary_opts)}
    typed = _typed_flag(flag)
    meant = MEANT_FLAGS.get(typed, typed.replace("_", "-"))
    if meant != typed and meant in flags.values():
        return f"use {meant}  ({path} --help)"
    if typed in ("-p", "--prompt") and any(p.name == "words" for p in command.params):
        return f'give the text as the last word: {path} "TEXT"'
    near = alike(flag.strip("-"), flags)
    return f"use {flags[near[0]]}  ({path} --help)" if near else ""


def _typed_flag(option: str) -> str:
    """The flag as it was typed: of `-md FILE` the parser reports `-m`."""
    return next((w for w in sys.argv if w.startswith(option)), option).partition("=")[0]


def _typed() -> str:
    """The command that was typed, where the error does not say."""
    words = ["specctl", *sys.argv[1:3], "", ""]
    is_group = words[1] in ("runs", "recipes")
    return " ".join(w for w in words[: 3 if is_group else 2] if w and not w.startswith("-"))


def _meant_recipe(message: str, params: Iterable[Any]) -> str:
    """`--recipe NAME` where the word too many is the name of a recipe, or nothing."""
    word = _recipe_named(message.rpartition("(")[2].rstrip(")").split(" ")[0])
    takes_one = any("--recipe" in parameter.opts for parameter in params)
    return f"--recipe {word}" if takes_one and word else ""


def _use_of(name: str) -> str:
    """The command for the name of a drafter or a recipe, or nothing."""
    from specctl.cli.options.names import free_drafters

    if name in free_drafters():
        return f'specctl generate --draft {name} "TEXT"'
    return f"specctl train-draft --recipe {name}" if _recipe_named(name) else ""


def _recipe_named(word: str) -> str:
    """The word where it is the name of a recipe, or nothing."""
    from specctl.recipes.files import recipe_names

    return word if word in recipe_names() else ""


def _bug(error: BaseException, console: Console) -> int:
    """A fault of specctl: the trace goes to a file; with how to report it."""
    text = "".join(traceback.format_exception(error))
    lines = [f"specctl {' '.join(sys.argv[1:])}", f"python {sys.version.split()[0]}", "", text]
    folder = tempfile.gettempdir()
    handle, path = tempfile.mkstemp(prefix="specctl-trace-", suffix=".txt", dir=folder)
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines))
    console.fail(
        SpecctlError(
            "this is a bug in specctl",
            found=f"{type(error).__name__}: {first_line(error)}",
            expected="a result, or an error with a remedy",
            do=f"report it with the trace in {path}",
            where=path,
            exit=Exit.BUG,
        )
    )
    if console.verbose:
        console.say(text)
    return int(Exit.BUG)


def _close_quietly() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)
