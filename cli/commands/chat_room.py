"""The chat as people meet it: turns, commands, what is said beside an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.api.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.commands.chat_input import Interrupts, Lines
from specctl.cli.commands.chat_talk import ChatSession, ChatTurn
from specctl.core.errors import FileError, SpecctlError, nearest

ACCEPTED, PLAIN = "\x1b[32m", "\x1b[0m"
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
                        self.console.colour(ACCEPTED if colour else PLAIN)
                    self.console.write(new)
            finally:
                self.console.colour(PLAIN if colour else "")
        self.console.out()
        self._after(self.talk.turns[before])

    def _after(self, turn: ChatTurn) -> None:
        """What else is to be said about an answer."""
        self.console.result = self.to_json()
        reason = ENDS.get(turn.completion.finish_reason)
        if reason is not None:
            self.console.say(f"({reason.format(limit=self.talk.sampling.max_new_tokens)})")
        if self.look.stats:
            told, speed = turn.to_json(), turn.completion.stats.tokens / max(turn.seconds, 1e-9)
            self.console.say(
                f"({told['tokens']:,} tokens | tau {told['tau'] or 0:.2f} | {speed:.1f} tokens/s | "
                f"{turn.reused:,} of {told['prompt_tokens']:,} prompt tokens were read before)"
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
        del rest
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
        del rest
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
        del rest
        self.console.say(HELP)

    def _refuse(self, error: SpecctlError) -> None:
        """An error that does not end a chat at a terminal."""
        parts = [error.what, error.found and f"found {error.found}", error.do and f"do: {error.do}"]
        self.console.say("(" + "; ".join(part for part in parts if part) + ")")
