"""The fields of requests that concern tools: their definitions, the choice, calls, and results."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from specctl.server.requests.fields import Few, Strict, Text, Unused, Word
from specctl.server.tools.base import Tool

MAX_TOOLS = 128  # of a request, and calls of a message
FunctionName = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_./:-]+$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class FunctionDefinition(Strict):
    """A function that the model may call; `parameters` is a JSON schema of its arguments."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Whether arguments always fit the schema, held to it by a grammar."
    )


class FunctionTool(Strict):
    """A tool: functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition

    def as_tool(self) -> Tool:
        one = self.function
        schema = NO_PARAMETERS if one.parameters is None else one.parameters
        return Tool(one.name, schema, one.description or "", bool(one.strict))

    def as_written(self) -> dict[str, Any]:
        """As chat templates know it."""
        tool = self.as_tool()
        about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": about}


class NamedFunction(Strict):
    """The function that must be called."""

    name: FunctionName


class NamedChoice(Strict):
    """That function must be called."""

    type: Literal["function"]
    function: NamedFunction


def _choice_kind(value: Any) -> str:
    return "word" if isinstance(value, str) else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedChoice, Tag("named")],
    Discriminator(_choice_kind),
]
Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True), Few(MAX_TOOLS)]


class FunctionCall(Strict):
    """What was called, and with which arguments, as JSON text."""

    name: Word
    arguments: Text
    parsed_arguments: Unused = None


class ToolCall(Strict):
    """A call of an earlier turn, as it was got."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Unused = None


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True), Few(MAX_TOOLS)]
