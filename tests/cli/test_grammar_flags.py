"""`generate` with a grammar: answers that parse, and mistakes that are named."""

import json
import re

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def test_answers_are_held_to_the_schema_that_is_named(run, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    ran = run("generate", "--grammar", path, "--draft", "prompt-lookup", "--json", "data = ")
    assert ran.code == 0
    [output] = ran.json["result"]["outputs"]
    assert output["finish_reason"] == "eos"
    assert set(json.loads(output["text"])) == {"name", "ok"}


def test_answers_are_held_to_the_expression_in_a_file(run, tmp_path):
    path = tmp_path / "number.regex"
    path.write_text("[0-9]{2,5}\n")
    ran = run("generate", "--grammar", path, "--temperature", 1, "--json", "x = ")
    assert re.fullmatch("[0-9]{2,5}", ran.json["result"]["outputs"][0]["text"])


def test_a_wrong_grammar_and_an_unknown_kind_are_refused(run, tmp_path):
    path = tmp_path / "bad.regex"
    path.write_text("[0-9")
    wrong = run("generate", "--grammar", path, "x = ")
    assert wrong.code == 2
    assert "unclosed character class" in wrong.err
    unknown = run("generate", "--grammar", tmp_path / "schema.txt", "x = ")
    assert unknown.code == 2
    assert "rename it: .json for a JSON schema" in unknown.err


@pytest.mark.parametrize("more", [(), ("--compare",)])
def test_a_text_that_broke_off_in_its_grammar_is_shown_and_an_error(run, tmp_path, more):
    """Behind the first field the schema outgrows what the matcher takes on."""
    wide = {"type": "object", "properties": {f"property_{i}": {} for i in range(250)}}
    both = {"name": {"type": "string", "maxLength": 3}, "rest": wide}
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({"properties": both, "type": "object", "required": [*both]}))
    ran = run("generate", "--grammar", path, "--max-new-tokens", 80, *more, "--json", "data = ")
    assert ran.code == 2
    assert "broke off inside their grammar" in ran.err
    [output] = ran.json["result"]["outputs"]
    assert output["finish_reason"] == "grammar"
    assert output["text"].startswith("{")
