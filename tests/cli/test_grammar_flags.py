"""`generate` with a grammar: answers that parse, and mistakes that are named."""

import json
import re

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


def test_answers_are_held_to_the_schema_that_is_named(run, tmp_path):
    path = tmp_path / "schema.txt"
    path.write_text(json.dumps(SCHEMA))
    ran = run("generate", "--json-schema", path, "--draft", "prompt-lookup", "--json", "data = ")
    assert ran.code == 0
    [output] = ran.json["result"]["outputs"]
    assert output["finish_reason"] == "eos"
    assert set(json.loads(output["text"])) == {"name", "ok"}


def test_answers_are_held_to_the_expression_in_a_file(run, tmp_path):
    path = tmp_path / "number.regex"
    path.write_text("[0-9]{2,5}\n")
    ran = run("generate", "--grammar", path, "--temperature", 1, "--json", "x = ")
    assert re.fullmatch("[0-9]{2,5}", ran.json["result"]["outputs"][0]["text"])


def test_a_wrong_grammar_and_two_grammars_are_refused(run, tmp_path):
    path = tmp_path / "bad.regex"
    path.write_text("[0-9")
    wrong = run("generate", "--grammar", path, "x = ")
    assert wrong.code == 2
    assert "unclosed character class" in wrong.err
    both = run("generate", "--grammar", path, "--json-schema", path, "x = ")
    assert both.code == 2
    assert "one of them" in both.err
