"""Answers of a fixed form as requests name them: OpenAI's response_format, our grammar, and the
fields that vLLM has for the same (guided_json and its kin, structured_outputs)."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from specctl.runtime.sampling.grammar import GrammarError, GrammarSpec
from specctl.server.requests.fields import Few, Ignored, Strict, Text, Word, one_of

MAX_GRAMMAR = 1 << 16  # characters
Choices = Annotated[
    list[Annotated[str, Field(max_length=4096)]], Field(min_length=1, max_length=512), Few(512)
]
Written = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR)]


class JsonSchema(Strict):
    """A JSON schema with the name that OpenAI's API gives it."""

    name: Word
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class TextFormat(Strict):
    """No constraint."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object; with `schema`, as llama.cpp has it, one that the schema describes."""

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(None, alias="schema")


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexGrammar(Strict):
    """Text that a regular expression describes from its first to its last character."""

    type: Literal["regex"]
    pattern: Written


class LarkGrammar(Strict):
    """Text of a context-free grammar in llguidance's dialect of Lark."""

    type: Literal["lark"]
    grammar: Written


class SchemaGrammar(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
Grammar = Annotated[RegexGrammar | LarkGrammar | SchemaGrammar, Field(discriminator="type")]


class StructuredOutputs(Strict):
    """vLLM's: one of these forms."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Written | None = None
    choice: Choices | None = None
    grammar: Written | None = None
    json_object: bool | None = None
    structural_tag: Ignored = None
    disable_fallback: Ignored = None
    disable_any_whitespace: Ignored = None
    disable_additional_properties: Ignored = None
    whitespace_pattern: Ignored = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        one_of("json_", "regex", "choice", "grammar", "json_object")(self)
        return self


class FormFields(Strict):
    """What an answer must look like; at most one of these."""

    response_format: ResponseFormat | None = None
    grammar: Grammar | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Written | None = None
    guided_choice: Choices | None = None
    guided_grammar: Written | None = None

    @model_validator(mode="after")
    def _is_one_form(self) -> FormFields:
        one_of(*FORMS)(self)
        return self

    @property
    def form_field(self) -> str | None:
        """The field that names a form; None where any text will do."""
        return next((name for name in FORMS if getattr(self, name) is not None), None)

    def form(self) -> GrammarSpec | None:
        """That form; GrammarError if it cannot be one."""
        match self.grammar or self.response_format:
            case JsonObjectFormat(schema_=schema) if schema:
                return GrammarSpec.of_schema(schema)
            case JsonObjectFormat():
                return GrammarSpec("json_object")
            case JsonSchemaFormat(json_schema=found):
                return GrammarSpec.of_schema(found.schema_)
            case SchemaGrammar(schema_=schema):
                return GrammarSpec.of_schema(schema)
            case RegexGrammar(pattern=pattern):
                return GrammarSpec("regex", pattern)
            case LarkGrammar(grammar=text):
                return GrammarSpec("lark", text)
        guided = self.structured_outputs or StructuredOutputs(
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        return _guided(guided)


FORMS = tuple(FormFields.model_fields)


def _guided(one: StructuredOutputs) -> GrammarSpec | None:
    """What vLLM's fields say."""
    if one.json_ is not None:
        return _of_json(one.json_)
    if one.regex is not None:
        return GrammarSpec("regex", one.regex)
    if one.choice is not None:
        return GrammarSpec("lark", "start: " + " | ".join(map(json.dumps, one.choice)))
    if one.grammar is not None:
        return GrammarSpec("lark", _lark(one.grammar))
    return GrammarSpec("json_object") if one.json_object else None


def _of_json(schema: dict[str, Any] | str) -> GrammarSpec:
    if not isinstance(schema, str):
        return GrammarSpec.of_schema(schema)
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise GrammarError("the JSON schema is not valid JSON", found=str(error)[:200]) from error
    if not isinstance(found, dict):
        raise GrammarError("the JSON schema is no object", found=type(found).__name__)
    return GrammarSpec.of_schema(found)


def _lark(text: str) -> str:
    """vLLM takes GBNF as well as Lark."""
    if "::=" not in text:
        return text
    try:
        from llguidance.gbnf_to_lark import any_to_lark

        return str(any_to_lark(text))
    except ImportError:
        return text  # the compiler says what is missing
    except Exception as error:  # a converter of a stranger's text
        raise GrammarError("the grammar is no GBNF", found=str(error)[:200]) from error
