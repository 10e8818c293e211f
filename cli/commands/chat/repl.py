"""The chat at the terminal: what is typed, Ctrl-C, commands, and what is shown beside an answer."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import ACCEPTED, PLAIN_COLOUR, Console
from specctl.cli.commands.chat.session import ChatSession, ChatTurn
from specctl.cli.options.prompts import check_text
from specctl.core.errors import FileError, SpecctlError, nearest

BLOCK = '"""'
PROMPT, MORE = "> ", "... "
HELP = """\
/reset          begin anew
/system TEXT    what the model is told before everything else; without TEXT, nothing
/stats          what speculation has done so far
/save FILE      write the conversation as a line of JSON, which training takes as --data
/help           this list
/quit           leave (so does Ctrl-D)
A line that ends with \\ goes on in the next one; so does everything between two \"\"\".
A blank before the slash sends a line that is no command."""
ENDS = {
    "length": "the answer was cut at {limit:,} tokens (--max-new-tokens)",
    "context": "the context of the target is full: /reset begins anew",
    "grammar": "the answer broke off: its grammar could not be followed within the limits",
    "stopped": "stopped",
}


class Lines:
    """Turns of the user: typed at a prompt, or lines of a pipe. A line that ends with a backslash
    goes on in the next; a block begins and ends with three quotes. One writer: the chat."""

    def __init__(self, console: Console) -> None:
        self.is_typed = sys.stdin.isatty()
        self._shows_prompt = self.is_typed and not console.quiet
        self._edits = self.is_typed and console.stdout.isatty()
        self._stderr = console.stderr
        if self._edits:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (input() then has editing and history)

    def read(self) -> str | None:
        """The next turn; None at the end of the input."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.strip().startswith(BLOCK):
            return self._block(line.strip().removeprefix(BLOCK))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            more = self._line(MORE)
            if more is None:
                break
            lines.append(more)
        return "\n".join(lines)

    def _block(self, first: str) -> str:
        lines = [first] if first else []
        while not (lines and lines[-1].rstrip().endswith(BLOCK)):
            more = self._line(MORE)
            if more is None:
                return "\n".join(lines)
            lines.append(more)
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return "\n".join(lines if lines[-1] else lines[:-1])

    def _line(self, prompt: str) -> str | None:
        try:
            line = self._typed(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise FileError(
                "the input is not UTF-8 text",
                where="standard input",
                found=str(error),
                do="iconv -t utf-8 turns.txt | specctl chat",
            ) from error
        check_text(line, None)
        return line

    def _typed(self, prompt: str) -> str:
        if self._edits:
            return input(prompt if self._shows_prompt else "")
        if self._shows_prompt:
            print(prompt, end="", file=self._stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


class Interrupts:
    """Ctrl-C while a chat runs: the first stops the answer, the next one leaves.

    `with interrupts.answering():` around an answer; `is_stopped` is called between its rounds. A
    Ctrl-C at the prompt raises KeyboardInterrupt; so does the second one anywhere. `fresh()` when
    the user has said something. One writer: the chat and its signals, both in the main thread.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_answering = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *about: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def fresh(self) -> None:
        self.count = 0

    def is_stopped(self) -> bool:
        return self.count > 0

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1 or not self._is_answering:
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Look:
    """How answers are shown."""

    colours: bool
    stats: bool


class ChatRepl:
    """The chat as people meet it. One writer: the command; `saved` are the files of /save."""

    def __init__(self, console: Console, talk: ChatSession, look: Look, lines: Lines) -> None:
        self.console, self.talk, self.look, self.lines = console, talk, look, lines
        self.saved: set[Path] = set()
        self.commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset,
            "/system": self._system,
            "/stats": self._stats,
            "/save": self._save,
            "/help": self._help,
        }

    def open(self) -> None:
        if not self.talk.has_template:
            name = self.talk.target.name
            self.console.say(
                f"{name} has no chat template: it goes on with what you write, as text"
            )
        if self.lines.is_typed:
            self.console.say("/help lists the commands; Ctrl-C stops an answer, /quit leaves")

    def run(self, interrupts: Interrupts) -> None:
        """Turns until the end of the input, /quit, or a second Ctrl-C."""
        while True:
            try:
                text = self.lines.read()
                interrupts.fresh()
                if text is None or text.strip() in ("/quit", "/exit"):
                    break
                if text.startswith("/"):
                    self._command(text)
                elif text.strip():
                    self._answer(text, interrupts)
            except KeyboardInterrupt as error:
                if type(error) is not KeyboardInterrupt or interrupts.count > 1:
                    raise
                self.console.say("\nonce more, Ctrl-D or /quit leaves")
            except SpecctlError as error:
                if not self.lines.is_typed:
                    raise
                self._refuse(error)
        if self.lines.is_typed and text is None:
            self.console.say("")

    def to_json(self) -> dict[str, Any]:
        talk = self.talk
        turns = [*talk.past, *talk.turns]
        return {
            "turns": [turn.to_json() for turn in turns],
            "stats": talk.stats().to_json() if turns else None,
            "system": talk.system,
            "template": talk.has_template,
            "target": target_json(talk.target),
            "draft": talk.draft.name,
        }

    # -- an answer --------------------------------------------------------------------------------

    def _answer(self, text: str, interrupts: Interrupts) -> None:
        before = len(self.talk.turns)
        colour = False
        with interrupts.answering():
            try:
                for new, accepted in self.talk.answer(text, interrupts.is_stopped):
                    if self.look.colours and new and accepted != colour:
                        colour = accepted
                        self.console.colour(ACCEPTED if colour else PLAIN_COLOUR)
                    self.console.write(new)
            finally:
                self.console.colour(PLAIN_COLOUR if colour else "")
        self.console.out()
        self._after(self.talk.turns[before])

    def _after(self, turn: ChatTurn) -> None:
        """What else is to be said about an answer."""
        self.console.result = self.to_json()
        reason = ENDS.get(turn.completion.finish_reason)
        if reason is not None:
            self.console.say(f"({reason.format(limit=self.talk.sampling.max_new_tokens)})")
        if self.look.stats:
            shown, speed = turn.to_json(), turn.completion.stats.tokens / max(turn.seconds, 1e-9)
            self.console.say(
                f"({shown['tokens']:,} tokens | tau {shown['tau'] or 0:.2f} | "
                f"{speed:.1f} tokens/s | "
                f"{turn.reused:,} of {shown['prompt_tokens']:,} prompt tokens were read before)"
            )

    # -- commands ---------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        word, _, rest = text.strip().partition(" ")
        if word not in self.commands:
            raise SpecctlError(
                f"there is no command {word}",
                where="the chat",
                found=text[:80],
                expected="one of " + ", ".join([*self.commands, "/quit"]),
                do=f"{nearest(word, list(self.commands), 1)}; a blank before the slash sends it",
            )
        self.commands[word](rest.strip())

    def _reset(self, rest: str) -> None:
        self.talk.reset()
        self.console.say("(begun anew)")

    def _system(self, rest: str) -> None:
        self.tell_system(rest or None)
        self.console.say("(told)" if rest else "(nothing is told)")

    def tell_system(self, text: str | None) -> None:
        if text is not None and not self.talk.has_template:
            raise SpecctlError(
                f"target {self.talk.target.name} has no chat template: nothing can be told to it",
                where="--system",
                found=text[:80],
                expected="no system message",
                do="write it at the beginning of your first line instead",
            )
        self.talk.system = text

    def _stats(self, rest: str) -> None:
        if self.talk.past or self.talk.turns:
            self.console.say(str(self.talk.stats()))
        else:
            self.console.say("(nothing was answered yet)")

    def _save(self, rest: str) -> None:
        path = Path(rest).expanduser()
        if not rest or not self.talk.turns:
            raise SpecctlError(
                "there is nothing to save" if rest else "/save needs the name of a file",
                where="the chat",
                found=f"{len(self.talk.turns)} turns",
                expected="/save FILE, once something was answered",
                do="/save chat.jsonl",
            )
        if path.exists() and path not in self.saved:
            raise FileError(
                f"{path} exists already",
                where="/save",
                found=f"a file of {path.stat().st_size:,} bytes",
                expected="a name that is free",
                do=f"/save {path.with_stem(path.stem + '-2')}",
            )
        path.write_text(json.dumps(self.talk.record()) + "\n", encoding="utf-8")
        self.saved.add(path)
        self.console.say(f"({len(self.talk.turns)} turns in {path})")

    def _help(self, rest: str) -> None:
        self.console.say(HELP)

    def _refuse(self, error: SpecctlError) -> None:
        """An error that does not end a chat at a terminal."""
        parts = [error.what, error.found and f"found {error.found}", error.do and f"do: {error.do}"]
        self.console.say("(" + "; ".join(part for part in parts if part) + ")")
