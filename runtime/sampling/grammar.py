"""Grammars: a text that must follow a JSON schema, a regular expression or a context-free grammar.

`compile_grammar` checks a grammar and makes it ready for one target; `Sampling.grammar` takes the
result. llguidance turns it into the set of tokens that may follow a text, at every node of a draft
tree (`grammar_mask.py`). A grammar from a stranger is compiled in another process first
(`grammar_worker.py`): deep nesting or a costly expression is an error there, never a crash here.
What outgrows llguidance's limits at its first tokens is refused there, too; behind that the row
ends with the finish reason "grammar", never as if its text were whole (`cut.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from specctl.core.errors import Exit, SpecctlError, nearest
from specctl.core.messages.installed import library
from specctl.core.spec import ModelSpec
from specctl.core.storage.bounded_read import read_text
from specctl.runtime.sampling import grammar_worker
from specctl.runtime.sampling.grammar_worker import make_matcher, make_tokenizer

Kind = Literal["json_object", "json_schema", "regex", "lark"]
KINDS: tuple[Kind, ...] = ("json_object", "json_schema", "regex", "lark")
ENDINGS: Mapping[str, Kind] = {".json": "json_schema", ".regex": "regex", ".lark": "lark"}
MAX_TEXT, MAX_DEPTH = 64 << 10, 64  # characters; brackets inside one another
SECONDS, START_SECONDS = 2.0, 60.0  # for one grammar, and for the tokenizer before the first
KEPT = 32  # grammars kept compiled, of at most 20 MiB each
WHITESPACE = r"( ?|\n[ \t]{0,16})"  # between JSON tokens: a model that only indents comes to an end


class GrammarError(SpecctlError):
    """A grammar that cannot be used; the request that carries it is at fault."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as written: a JSON schema, a regular expression, llguidance's Lark dialect; or any
    JSON object (no text)."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            do = f"write {nearest(self.kind, KINDS, 1)}"
            raise GrammarError(f"unknown kind of grammar {self.kind!r}", expected=_list(), do=do)
        if len(self.text) > MAX_TEXT:
            found, expected = f"{len(self.text):,} characters", f"at most {MAX_TEXT:,}"
            raise GrammarError("the grammar is too long", found=found, expected=expected)
        if (depth := _depth(self.text)) > MAX_DEPTH:
            found, expected = f"{depth:,} levels", f"at most {MAX_DEPTH}"
            raise GrammarError("the grammar is nested too deeply", found=found, expected=expected)

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> GrammarSpec:
        """Of a JSON schema that has been parsed already."""
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            raise GrammarError("the schema is not JSON", found=type(error).__name__) from error

    @classmethod
    def read(cls, path: Path, kind: Kind | None = None) -> GrammarSpec:
        """From a file; its ending says what it is: .json, .regex or .lark."""
        if kind is None and path.suffix not in ENDINGS:
            raise GrammarError(
                f"cannot tell what kind of grammar {path} is",
                found=path.suffix or "no ending",
                expected=", ".join(ENDINGS),
                do="rename it: .json for a JSON schema, .regex, or .lark",
            )
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise GrammarError(
                f"cannot read the grammar {path}",
                where=str(path),
                found=getattr(error, "strerror", None) or str(error),
                expected="a file in UTF-8",
                do="correct the path, or leave the grammar out",
                exit=Exit.FILE,
            ) from error
        kind = kind or ENDINGS[path.suffix]
        return cls(kind, text.rstrip("\n") if kind == "regex" else text)

    def source(self) -> str:
        """What llguidance compiles."""
        matcher = _library().LLMatcher
        if self.kind == "lark":
            return str(matcher.grammar_from_lark(self.text))
        if self.kind == "regex":
            return str(matcher.grammar_from_regex(self.text))
        schema = '{"type": "object"}' if self.kind == "json_object" else self.text
        spaces = {"whitespace_pattern": WHITESPACE}
        try:
            return str(matcher.grammar_from_json_schema(schema, overrides=spaces))
        except ValueError as error:
            raise GrammarError(
                "the JSON schema is not valid JSON",
                found=str(error),
                expected='a JSON object such as {"type": "object"}',
                do="correct the schema",
            ) from error


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar, shared by every row that uses it; each row copies the matcher."""

    spec: GrammarSpec
    eos_ids: frozenset[int]
    vocab_size: int
    matcher: Any

    def start(self) -> Any:
        """A matcher at the beginning of a text."""
        return self.matcher.deep_copy()

    def accepts(self, text: Sequence[int], end: int) -> bool:
        """The tokens of `text`, which the token `end` follows, are a text of the grammar. False as
        well where the matcher gave up on the way: nobody knows then. Some 1 us per token."""
        matcher = self.start()
        if text and not matcher.consume_tokens(list(text)):
            return False
        if matcher.is_accepting():
            return True
        return bool(matcher.consume_tokens([end]) and matcher.is_accepting())  # it names the token


class GrammarTarget(Protocol):
    """What a grammar needs to know of the target whose answers it binds."""

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def spec(self) -> ModelSpec: ...


def compile_grammar(spec: GrammarSpec, target: GrammarTarget) -> Grammar:
    """Ready for that target; GrammarError if it is wrong, too large or takes too long. Blocks for
    up to two seconds the first time (the GIL is free meanwhile), then remembers. Thread-safe."""
    if target.tokenizer is None or not target.eos_ids:
        missing = "tokenizer" if target.tokenizer is None else "end-of-text token"
        raise GrammarError(
            f"target {target.name} cannot be held to a grammar",
            found=f"no {missing}",
            expected="a tokenizer and an end-of-text token, which a grammar needs to end a text",
        )
    compiler = _compiler(target.tokenizer, target.spec.vocab_size, target.eos_ids)
    return compiler.compile(spec)


@lru_cache(maxsize=2)
def _compiler(tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> Compiler:
    return Compiler(tokenizer, vocab_size, eos_ids)


class Compiler:
    """Compiles for one tokenizer, one grammar at a time. Any thread may call it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.vocab_size, self.eos_ids = vocab_size, eos_ids
        self._about: dict[str, Any] = {
            "backend": _backend(tokenizer, vocab_size),
            "vocab_size": vocab_size,
            "eos_ids": list(eos_ids),
        }
        self._tokenizer: Any = None
        self._made: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._guard = CompilerProcess(self._about)
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        with self._lock:
            if spec in self._made:
                self._made.move_to_end(spec)
                return self._made[spec]
            source = spec.source()
            self._guard.check(source)
            if self._tokenizer is None:
                self._tokenizer = make_tokenizer(**self._about)
            matcher = make_matcher(self._tokenizer, source)
            if matcher.is_error():
                raise GrammarError("the grammar is not valid", found=_brief(matcher.get_error()))
            self._made[spec] = Grammar(spec, frozenset(self.eos_ids), self.vocab_size, matcher)
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
            return self._made[spec]


class CompilerProcess:
    """The other process. Started when first needed, and again after it had to be killed."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._about = dict(about)
        self._process: subprocess.Popen[str] | None = None

    def check(self, source: str) -> None:
        """Raises GrammarError unless `source` compiles in time."""
        if self._process is None:
            error = self._ask(self._start(), self._about, START_SECONDS)
            if error is not None:
                raise GrammarError("the tokenizer cannot serve grammars", found=_brief(error))
        assert self._process is not None
        error = self._ask(self._process, {"grammar": source}, SECONDS)
        if error is not None:
            raise GrammarError("the grammar is not valid", found=_brief(error))

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", grammar_worker.__file__]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        return self._process

    def _ask(
        self, process: subprocess.Popen[str], message: Mapping[str, Any], seconds: float
    ) -> str | None:
        assert process.stdin is not None
        assert process.stdout is not None
        clock = threading.Timer(seconds, process.kill)
        clock.start()
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        is_late = not clock.is_alive()
        clock.cancel()
        if is_late or not line:
            self._end(process)
        if line:
            return cast("str | None", json.loads(line)["error"])
        return f"it took more than {seconds:g} s" if is_late else "it brought its compiler down"

    def _end(self, process: subprocess.Popen[str]) -> None:
        self._process = None
        process.kill()
        process.communicate()


def _library() -> Any:
    return library("llguidance", "a grammar", "grammar", kind=GrammarError)


def _backend(tokenizer: Any, vocab_size: int) -> str:
    """The tokenizer's file, without added tokens that the model does not have."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise GrammarError(
            "the target's tokenizer cannot serve grammars",
            found=type(tokenizer).__name__,
            expected="a tokenizer of the `tokenizers` library",
            do="load a target that has a tokenizer.json",
        )
    state = json.loads(backend.to_str())
    added = [token for token in state["added_tokens"] if token["id"] < vocab_size]
    return json.dumps({**state, "added_tokens": added, "padding": None, "truncation": None})


def _depth(text: str) -> int:
    """Most brackets open at once, escaped ones aside."""
    depth = deepest = 0
    is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth -= 1
    return deepest


def _brief(error: str) -> str:
    """The first lines of a parser's message: some repeat the whole grammar."""
    return " ".join(error.split())[:300]


def _list() -> str:
    return "one of " + ", ".join(KINDS)
