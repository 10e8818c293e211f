"""generate() on strings where lists, drafters and targets are meant; results that print well."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import specctl
from specctl.api.arguments.drafting import load_draft
from specctl.api.train import TrainResult
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.team import Team
from specctl.runtime.measure.reporter import EventReporter
from specctl.runtime.target.target import Target

SHORT: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}


def test_one_string_is_one_prompt(tiny_target: Target, capfd: pytest.CaptureFixture[str]) -> None:
    result = specctl.generate(tiny_target, "import os\n", "prompt-lookup", **SHORT)
    assert len(result.outputs) == 1
    assert result.outputs[0].prompt == "import os\n"
    listed = specctl.generate(tiny_target, ["import os\n"], **SHORT)
    assert result.text == listed.text
    ids = specctl.generate(tiny_target, tiny_target.encode("import os\n"), **SHORT)
    assert ids.text == listed.text
    assert capfd.readouterr() == ("", "")


def test_a_conversation_is_one_prompt_too(tiny_target: Target) -> None:
    talk = [{"role": "user", "content": "write a loop"}]
    result = specctl.generate(tiny_target, talk, **SHORT)
    wrapped = specctl.generate(tiny_target, "write a loop", chat=True, **SHORT)
    assert [o.prompt for o in result.outputs] == ["write a loop"]
    assert result.text == wrapped.text


def test_a_target_is_a_name_or_a_transformers_model() -> None:
    named = specctl.generate("tiny", "def main(", **SHORT)
    model = AutoModelForCausalLM.from_pretrained("recipes/tiny")
    assert specctl.generate(model, "def main(", **SHORT).text == named.text
    assert specctl.load_target(model).name == "recipes/tiny"
    with pytest.raises(specctl.SpecctlError, match="no target"):
        specctl.load_target(3)


def test_a_result_prints_its_text_and_is_a_table_in_a_notebook(tiny_target: Target) -> None:
    result = specctl.generate(tiny_target, ["if a < b:\n", "x"], "prompt-lookup", **SHORT)
    assert str(result).startswith(result.texts[0])
    assert "tau" in repr(result)
    html = result._repr_html_()
    assert "<table>" in html
    assert "if a &lt; b:" in html
    assert f"tau {result.stats.tau:.2f}" in repr(result.stats)
    assert "tokens_per_second" in result.stats._repr_html_()


def test_a_package_drafts_as_it_was_trained_to_by_name_and_as_an_object(
    tiny_target: Target, run: TrainResult
) -> None:
    drafter = specctl.load_drafter(run.package, tiny_target)
    assert drafter.serve["length"] == 2
    given: list[Any] = [run.package, run.out, drafter]
    for one in given:
        result = specctl.generate(tiny_target, "import os\n", one, **SHORT)
        assert 0 < result.stats.drafted <= 2 * result.stats.rounds
        assert len(result.stats.accepted_per_position) <= 2
    longer = specctl.generate(tiny_target, "import os\n", drafter, length=5, **SHORT)
    assert longer.stats.drafted > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temprature": 1.0}, "temperature"),
        ({"drafter": "prompt-lookup", "nodes": 3, "policy": "sequoia"}, "policy"),
        ({"drafter": "prompt-lookup", "policy": {"policy": "chain"}}, "no tree policy"),
        ({"length": 3}, "no drafter"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(
    tiny_target: Target, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(specctl.SpecctlError, match=named):
        specctl.generate(tiny_target, "x", **settings)


def test_errors_of_the_system_are_errors_of_ours(tiny_target: Target, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(specctl.SpecctlError, match="cannot use"):
        specctl.train(tiny_target, out=tmp_path / "file" / "run")


@pytest.mark.parametrize(("positions", "context", "is_said"), [
    (64, None, True), (64, 128, False), (None, None, False),
])  # fmt: skip
def test_a_draft_model_of_a_shorter_context_says_so(
    tiny_target: Target, positions: int | None, context: int | None, is_said: bool
) -> None:
    """Not where it reads a part of the prompt, whose positions are its own."""
    lm, whole = copy(tiny_target.lm), tiny_target.spec.max_positions
    lm.spec = replace(lm.spec, max_positions=positions or whole)
    drafter = SmallLm.from_lm(lm, tiny_target.spec)
    drafter.options = replace(drafter.options, context=context)
    team = Team.of([drafter, load_draft("prompt-lookup", tiny_target).drafter])
    for one in (drafter, team):
        said = list[dict[str, Any]]()
        load_draft(one, tiny_target).announce(EventReporter(said.append))
        found = [
            f"made for 64 positions, the target for {whole:,}:" in line["text"] for line in said
        ]
        assert any(found) == is_said


def test_another_policy_has_a_rule_of_its_own(tiny_target: Target) -> None:
    """The packaged rule was chosen for the packaged policy, and may not be lossless for others."""
    drafter = SmallLm.from_lm(tiny_target.lm, tiny_target.spec)
    drafter.serve = {"policy": "mcsd", "branch": [2, 1], "rule": "spectr", "length": 2}
    assert load_draft(drafter, tiny_target).rule == "spectr"
    other = load_draft(drafter, tiny_target, policy="dynamic-tree")
    assert other.rule == "auto"
    assert other.policy is not None
    assert other.policy.depth == 2
    assert load_draft(drafter, tiny_target, policy="chain", rule="chain").rule == "chain"
