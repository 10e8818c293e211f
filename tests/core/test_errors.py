"""Errors about unknown names: the near ones as a question, long lists by the command for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specctl.core.errors import (
    LISTED,
    RecipeError,
    SpecctlError,
    alike,
    did_you_mean,
    nearest,
    one_of,
    unknown,
    write_instead,
)
from specctl.core.tree import NodeKind
from specctl.drafters import families, family
from specctl.export.package.find import locate
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl.runtime.policies import POLICIES, make_policy
from specctl.runtime.verify import RULES, check_legal

LS = "`specctl recipes ls --all`"


def test_names_are_listed_while_they_are_few_and_named_by_their_command_when_many() -> None:
    few = [f"name-{i}" for i in range(LISTED)]
    assert one_of(few, "specctl ls") == "one of " + ", ".join(few)
    assert one_of([*few, "more"], "specctl ls") == "one that `specctl ls` lists"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("eagel3", "did you mean eagle3 or eagle?"),
        ("EAGLE3", "did you mean eagle3 or eagle?"),
        (" chian", "did you mean chain?"),
        ("lookup", "did you mean prompt-lookup?"),
        ("qqq", "look"),
        ("le", "look"),
        ("", "look"),
    ],
)
def test_a_mistyped_word_is_asked_about(word: str, said: str) -> None:
    assert did_you_mean(word, ("chain", "eagle", "eagle3", "prompt-lookup"), "look") == said


def test_a_suggestion_is_never_what_was_typed() -> None:
    """Also where the same word is known in another place."""
    known = ("reasoning", "reasoning_effort", "seed")
    assert alike("reasoning", known) == ["reasoning_effort"]
    assert nearest("reasoning", known, 1) == "reasoning_effort"
    assert nearest("seed", ("seed",)) == ""
    assert did_you_mean("reasoning", known, "look") == "did you mean reasoning_effort?"
    assert did_you_mean("seed", ("seed", "stop"), "look") == "look"
    assert write_instead("seed", known).startswith("write reasoning")
    assert write_instead("seed", ("seed",)) == "leave seed out"
    error = unknown("rule", "chain", ("chain", "chains"), "serve.rule")
    assert error.do == "serve.rule chains"


def test_every_suggestion_comes_from_one_place() -> None:
    """The rooms look words up by `specctl.core.errors`, which leaves out what was typed."""
    root = Path(__file__).parents[2]
    rooms = (
        "api", "cli", "core", "drafters", "export", "models", "recipes", "runtime", "server",
        "train",
    )  # fmt: skip
    users = [
        str(path.relative_to(root))
        for room in rooms
        for path in (root / room).rglob("*.py")
        if "get_close_matches" in path.read_text()
    ]
    assert users == ["core/errors.py"]


def test_an_unknown_name_is_an_error_of_the_kind_that_is_asked_for() -> None:
    error = unknown("rule", "gredy", ("greedy", "chain"), "serve.rule", "specctl ls")
    assert isinstance(error, RecipeError)
    assert error.text() == (
        "unknown rule 'gredy' | in serve.rule | found: gredy | expected: one of greedy, chain"
        " | do: did you mean greedy?"
    )
    plain = unknown("rule", "x", ("greedy",), "serve.rule", "specctl ls", SpecctlError)
    assert not isinstance(plain, RecipeError)
    assert "`specctl ls`" in plain.do


LONG: dict[str, tuple[Callable[[], object], str, str]] = {
    "recipe": (lambda: load_recipe("eagel3"), LS, "eagle3"),
    "recipe file": (lambda: load_recipe("eagel3.yaml"), LS, "eagle3"),
    "family": (lambda: family("medsua"), LS, "medusa"),
    "drafter": (lambda: locate("prompt-lokup"), "training-free", "prompt-lookup"),
    "policy": (lambda: make_policy({"policy": "squoia"}), "--field serve", "sequoia"),
    "policy of a recipe": (
        lambda: load_recipe("eagle3", ["serve.policy=squoia"]), "--field serve", "sequoia"
    ),
    "rule": (lambda: check_legal("blok", NodeKind.IID, True), "recipes rules", "block"),
}  # fmt: skip


@pytest.mark.parametrize("case", LONG)
def test_no_error_lists_all_the_names_there_are(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, listed, near = LONG[case]
    with pytest.raises(SpecctlError) as caught:
        call()
    said = caught.value.text()
    assert listed in caught.value.expected
    assert caught.value.do.startswith("did you mean ")
    assert near in caught.value.do
    every = {*recipe_names(), *families(), *POLICIES, *RULES}
    assert sum(f" {name}" in said.replace(",", " ") for name in every) <= 4
