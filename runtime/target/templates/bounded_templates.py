"""Chat templates under a bound of time and size: a template is somebody's program.

transformers compiles templates in jinja's sandbox, which bounds `range` and no more. Here the same
sandbox looks at a clock in every loop and call, and at the size of whatever a template makes before
or as it is made: texts, lists, numbers, what it writes. Outside of `written` nothing is changed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils as transformers_templates

from specctl.core.errors import IncompatibleError, SpecctlError, is_out_of_memory
from specctl.core.messages.foreign_calls import is_panic

SECONDS = 2.0  # of this thread's processor time: real templates take milliseconds
PROBE_SECONDS = 0.5  # for a conversation of ours, which is tried in several forms
MOST = 1 << 26  # characters of a value; no context holds as much
MOST_WRITTEN = 1 << 28  # characters that a template writes, in its macros as well
MOST_NUMBER, MOST_BITS = 1 << 24, 1 << 16  # an argument of a method, an integer
LONGEST_TEMPLATE = 1 << 20
ITEM = 16  # what a list's element counts beside its own size
_WIDE = re.compile(r"\d{7,}|\*|:[^{}]*\{")  # in a format: a width that is huge, or given elsewhere


class EndlessTemplateError(IncompatibleError):
    """A chat template ran on without end, or made more than a conversation can be."""


def written(tokenizer: Any, turns: Any, **fields: Any) -> Any:
    """`apply_chat_template` within the bounds. EndlessTemplateError beyond them, TemplateError for
    whatever else stops a template or what reads its text."""
    return _within(SECONDS, tokenizer, turns, fields)


def tried(tokenizer: Any, turns: Any) -> str:
    """The text of a short conversation by which a template is tried out, in less time."""
    return str(_within(PROBE_SECONDS, tokenizer, turns, {"tokenize": False}))


def _within(seconds: float, tokenizer: Any, turns: Any, fields: Mapping[str, Any]) -> Any:
    text = _text_of(tokenizer, fields)
    token = _BUDGET.set(RenderBudget(time.thread_time() + seconds))
    try:
        if isinstance(text, str):
            _compile(text)
        return tokenizer.apply_chat_template(turns, **fields)
    except (SpecctlError, TemplateError):
        raise
    except BaseException as error:
        is_foreign = isinstance(error, Exception) and not is_out_of_memory(error)
        if not (is_foreign or is_panic(error)):
            raise
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise TemplateRuntimeError(said) from error
    finally:
        _BUDGET.reset(token)


@dataclass(slots=True)
class RenderBudget:
    """What one rendering may still use. One writer: its own thread."""

    ends: float
    written: int = 0

    def tick(self) -> None:
        if time.thread_time() > self.ends:
            raise _beyond("it still runs when its time is over")

    def bounded(self, value: Any) -> Any:
        """The value, if it is not too large."""
        self.tick()
        check_size(weight(value))
        return value

    def write(self, count: int) -> None:
        self.written += count
        if self.written > MOST_WRITTEN:
            raise _beyond(f"it writes more than {MOST_WRITTEN:,} characters")


_BUDGET: ContextVar[RenderBudget | None] = ContextVar("budget of a chat template", default=None)
_COMPILING = threading.Lock()


def _beyond(found: str) -> EndlessTemplateError:
    return EndlessTemplateError(
        "the target's chat template does not end, or makes too much",
        found=found,
        expected=f"at most {SECONDS:g} seconds and {MOST:,} characters for a conversation",
        do="fetch the model again, or give plain prompts instead of conversations",
    )


def check_size(size: int) -> None:
    if size > MOST:
        raise _beyond(f"a value of more than {MOST:,} characters")


def weight(value: Any) -> int:
    """Characters and elements of a value, those in it included; counted no further than MOST."""
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack and total <= MOST:
        item = stack.pop()
        total += ITEM
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple, set)):
            stack += item
        elif type(item) is int and item.bit_length() > MOST_BITS:
            raise _beyond("an integer of more than 19,000 digits")
    return total


def _text_of(tokenizer: Any, fields: Mapping[str, Any]) -> Any:
    """The text of the template that will be used; None where there is none of jinja's."""
    choose = getattr(tokenizer, "get_chat_template", None)
    try:
        given = fields.get("chat_template")
        text = choose(given, fields.get("tools")) if choose else tokenizer.chat_template
    except (AttributeError, ValueError, TypeError, KeyError):
        return None  # apply_chat_template says the same
    if isinstance(text, str) and len(text) > LONGEST_TEMPLATE:
        raise _beyond(f"a template of {len(text):,} characters")
    return text


def _compile(text: str) -> None:
    """Put the template into transformers' own cache, compiled for the bounded sandbox."""
    with _COMPILING:
        usual = transformers_templates.ImmutableSandboxedEnvironment
        transformers_templates.ImmutableSandboxedEnvironment = BoundedEnvironment
        try:
            made = transformers_templates._compile_jinja_template(text)
            if not isinstance(made.environment, BoundedEnvironment):
                transformers_templates._compile_jinja_template.cache_clear()
                transformers_templates._compile_jinja_template(text)
        finally:
            transformers_templates.ImmutableSandboxedEnvironment = usual


class BoundedTemplate(Template):
    """A template whose pieces are counted as they are written."""

    def generate(self, *given: Any, **fields: Any) -> Iterator[str]:
        return _counted(super().generate(*given, **fields))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox, with a look at the budget of this rendering wherever time or size can grow."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    template_class = BoundedTemplate

    def __init__(self, *given: Any, **fields: Any) -> None:
        super().__init__(*given, **fields)
        self.filters = BoundedFilters(self.filters)
        self.globals.pop("lipsum", None)
        self.finalize = _finalize

    @staticmethod
    def concat(parts: Iterable[str]) -> str:  # type: ignore[override]
        return "".join(_counted(parts))

    def _generate(self, source: nodes.Template, *given: Any, **fields: Any) -> str:
        return super()._generate(Watched(self).visit(source), *given, **fields)

    def each(self, values: Any) -> Iterator[Any]:
        """The values of a loop."""
        budget = _BUDGET.get()
        for value in values:
            if budget is not None:
                budget.tick()
            yield value

    def built(self, value: Any) -> Any:
        """A list or a mapping that the template wrote down."""
        budget = _BUDGET.get()
        return value if budget is None else budget.bounded(value)

    def joined(self, *parts: Any) -> str:
        """a ~ b"""
        check_size(sum(map(weight, parts)))
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _BUDGET.get()
        if budget is None:
            return super().call_binop(context, operator, left, right)
        _check_operation(operator, left, right)
        return budget.bounded(super().call_binop(context, operator, left, right))

    def call(  # type: ignore[override]
        __self, __context: Any, __called: Any, *given: Any, **fields: Any
    ) -> Any:
        budget = _BUDGET.get()
        if budget is None:
            return super().call(__context, __called, *given, **fields)
        budget.tick()
        if isinstance(__called, BuiltinMethodType):
            _check_numbers((*given, *fields.values()))
            given = _check_method(__called.__name__, __called.__self__, given)
        elif getattr(__called, "__name__", "") == "strftime_now":
            _check_format(*given, *fields.values())
        return budget.bounded(super().call(__context, __called, *given, **fields))

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def checked(*given: Any, **fields: Any) -> Any:
            _check_format(value.__self__)
            return wrapped(*given, **fields)

        return checked


class Watched(NodeTransformer):
    """Calls of the environment around loops, literals and joined texts."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self.environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        values = node.iter
        assert isinstance(values, nodes.Expr), "what a loop walks through is an expression"
        node.iter = self._called("each", [values], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._called("joined", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._called("built", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return self._called("built", [node], node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else self._called("built", [node], node)

    def _called(self, name: str, given: list[Any], node: nodes.Node) -> nodes.Call:
        about = {"lineno": node.lineno, "environment": self.environment}
        function = nodes.EnvironmentAttribute(name, **about)
        return nodes.Call(function, given, [], None, None, **about)


class BoundedFilters(dict[str, Callable[..., Any]]):
    """Filters by name, each of which looks at what it is given and what it makes."""

    def __init__(self, filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        for name, function in filters.items():
            self[name] = function

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def checked(*given: Any, **fields: Any) -> Any:
            budget = _BUDGET.get()
            if budget is None:
                return function(*given, **fields)
            budget.tick()
            value, *more = given[skipped:] or (None,)
            _check_numbers((*more, *fields.values()))
            value = _check_filter(name, value, more, fields)
            return budget.bounded(function(*given[:skipped], value, *more, **fields))

        super().__setitem__(name, checked)


def _counted(parts: Iterable[str]) -> Iterator[str]:
    budget, total = _BUDGET.get(), 0
    for part in parts:
        total += len(part)
        if budget is not None:
            check_size(total)
        yield part


def _finalize(value: Any) -> Any:
    """What is written: a list is spelled out only where it is not too long."""
    budget = _BUDGET.get()
    if budget is not None:
        size = weight(value)
        check_size(size)
        budget.write(size)
    return value


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse a product, a power or a format whose result would be too large."""
    is_number = type(left) in (int, bool), type(right) in (int, bool)
    if operator == "**" and all(is_number):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "*" and all(is_number):
        _check_bits(left.bit_length() + right.bit_length())
    elif operator == "*" and any(is_number):
        times, value = (left, right) if is_number[0] else (right, left)
        check_size(weight(value) * max(times, 0))
    elif operator == "%":
        _check_format(left)
    elif operator == "+" and isinstance(left, str) and isinstance(right, str):
        check_size(len(left) + len(right))


def _check_bits(count: int) -> None:
    if count > MOST_BITS:
        raise _beyond("an integer of more than 19,000 digits")


def _check_numbers(given: Iterable[Any]) -> None:
    """Widths, counts and lengths."""
    for value in given:
        if type(value) is int and abs(value) > MOST_NUMBER:
            raise _beyond(f"the number {str(value)[:40]} as an argument")


def _check_format(*texts: Any) -> None:
    for text in texts:
        if isinstance(text, str) and _WIDE.search(text):
            raise _beyond("a format of great width")


def _check_method(name: str, owner: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a text's method is given, if it makes nothing too large of it."""
    if not isinstance(owner, str) or not given:
        return given
    if name == "join":
        items = list(given[0])
        check_size(weight(items) + len(owner) * len(items))
        return (items, *given[1:])
    if name == "replace" and len(given) > 1 and all(isinstance(g, str) for g in given[:2]):
        check_size(len(owner) + owner.count(given[0]) * len(given[1]))
    elif name == "expandtabs" and isinstance(given[0], int):
        check_size((owner.count("\t") + 1) * max(given[0], 0) + len(owner))
    elif name == "translate" and isinstance(given[0], Mapping):
        check_size(len(owner) * max((len(str(v)) for v in given[0].values()), default=1))
    return given


def _check_filter(name: str, value: Any, more: list[Any], fields: Mapping[str, Any]) -> Any:
    """What a filter is given, if it makes nothing too large of it."""
    texts = [each for each in (*more, *fields.values()) if isinstance(each, str)]
    longest = max(map(len, texts), default=0)
    numbers = [each for each in (*more, *fields.values()) if type(each) is int]
    widest = max((longest, *numbers))
    if name == "join" and value is not None and not isinstance(value, (str, Mapping)):
        value = list(value)
        check_size(weight(value) + longest * len(value))
    elif name == "format":
        _check_format(value)
    elif name == "replace" and texts:
        check_size(weight(value) + str(value).count(texts[0]) * longest)
    elif name in ("indent", "wordwrap"):
        check_size(weight(value) + (str(value).count("\n") + 1) * widest)
        check_size(weight(value) * max(1, longest))
    elif name == "tojson":
        check_size(weight(value) * max(1, widest // 8))
    return value
