"""What the answer to a request must be, as one grammar: thoughts, calls, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specctl.runtime.sampling.grammar import GrammarSpec
from specctl.server.requests.chat_template import ChatStyle
from specctl.server.requests.protocol import ChatRequest, Common
from specctl.server.tools.rules import AnswerForm, literal

MOST_CALLS = 8  # of an answer whose calls are held to a grammar


def answer_form(body: Common, style: ChatStyle, is_thinking: bool) -> GrammarSpec | None:
    """The grammar of an answer; None where any text will do. Calls are held to their schemas where
    they must come, where a tool is strict, and where the answer has a form otherwise.
    GrammarError if the request's own grammar cannot be one."""
    form = body.form()
    if not isinstance(body, ChatRequest):
        return form
    return AnswerForm(
        thinks=is_thinking,
        think_tags=style.think_tags,
        calls=_calls(body, style, spelled := speller(style), form is not None),
        must_call=body.must_call,
        form=form,
    ).grammar(spelled)


def _calls(
    body: ChatRequest, style: ChatStyle, spelled: Callable[[str], str], has_form: bool
) -> Any:
    """How the answer may call; None where its calls are free, or there are none."""
    tools = [tool.as_tool() for tool in body.called]
    if style.tool_format is None or not tools:
        return None
    if not (body.must_call or has_form or any(tool.strict for tool in tools)):
        return None
    if body.named_tool is not None:
        tools = [tool for tool in tools if tool.name == body.named_tool]
    is_single = body.parallel_tool_calls is False or body.named_tool is not None
    most = 1 if is_single else MOST_CALLS
    return style.tool_format.rules(tools, spelled, most, style.template)


def speller(style: ChatStyle) -> Callable[[str], str]:
    """A marker as a term of a grammar: its token, where it is one, else its characters. (llguidance
    keeps added tokens out of any other text.)"""

    def spelled(marker: str) -> str:
        return f"<[{style.added[marker]}]>" if marker in style.added else literal(marker)

    return spelled


def shown_ids(style: ChatStyle, has_tools: bool) -> frozenset[int]:
    """The control tokens that the parser of an answer must see in its text."""
    markers = list(style.think_tags or ())
    if has_tools and style.tool_format is not None:
        markers += style.tool_format.markers
    return style.special & {style.added[marker] for marker in markers if marker in style.added}
