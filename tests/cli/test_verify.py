"""`verify`, `recipes rules` and drafts of another tokenizer, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import Exit
from specctl.drafters import family
from specctl.export.package.folder import save_package
from specctl.runtime.proof import prove
from specctl.runtime.proof.proof_report import Check, Proof, ProofLevel
from specctl.runtime.verify import RULES
from specctl.runtime.verify.relaxed import RELAXED
from specctl.train.pretrain.data import train_tokenizer
from specctl_testing.cli import commands

GENERATE = (
    "generate",
    "def main(",
    "--dtype",
    "float32",
    "--max-new-tokens",
    "10",
    "--set",
    "sample.ignore_eos=true",
)
SMALL = ProofLevel(2, 6, samples=120, length=3, all_rules=False, enumeration="quick")


@pytest.fixture
def package(tiny_target: Any, tmp_path: Path) -> Path:
    """An untrained drafter for the embedded target."""
    entry = family("small-lm")
    options = entry.options(layers=1, width=32, heads=2, head_dim=16)
    out = tmp_path / "package"
    save_package(
        entry.build(options, tiny_target.spec, None),
        tiny_target,
        out,
        serve={"policy": "chain", "length": 3},
        recipe_digest="0" * 64,
        acceptance=None,
        command=["specctl", "train-draft"],
    )
    return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prove.LEVELS, "lossless", SMALL)
    monkeypatch.setattr(prove, "_enumerated", lambda level: (1, 0.0))


def test_the_rules_are_listed_with_what_they_are_lossless_for(run: Any) -> None:
    found = run("recipes", "rules", "--json").json["result"]
    listed = {rule["name"]: rule["lossless"] for rule in found["rules"]}
    assert listed == dict.fromkeys(RULES, True) | dict.fromkeys(RELAXED, False)
    (spectr,) = (rule for rule in found["rules"] if rule["name"] == "spectr")
    assert spectr["kinds"] == ["iid", "iid-paths"]
    assert spectr["paper"].endswith("2310.15141")
    assert found["auto"]["without-replacement"] == {"chain": "block", "tree": "traversal"}
    table = run("recipes", "rules").out
    assert all(name in table for name in RULES)


@pytest.mark.usefixtures("small")
def test_a_proof_is_kept_in_the_package_and_shown(run: Any, package: Path) -> None:
    words = ("verify", package, "--target", "tiny", "--dtype", "float32")
    answer = run(*words, "--json")
    assert answer.code == 0, answer.err[-2000:]
    kept = Path(answer.json["result"]["kept"])
    assert kept.parent == package
    report = json.loads((kept / "report.json").read_text())
    assert report["proof"]["passed"] is True
    again = report["command"][1:]
    assert commands.why_not(again) is None
    assert again[again.index("--target") + 1] == "tiny"
    assert again[again.index("--dtype") + 1] == "float32"
    assert "| cache rollback | passed" in (kept / "report.md").read_text()
    assert run("verify", package, "--level", "files").code == 0
    shown = run("show", package, "--json").json["result"]
    assert shown["proof"]["proof"]["verification"] == "lossless"
    assert shown["proof"]["proof"]["dtype"] == "float32"


@pytest.mark.usefixtures("small")
def test_a_proof_names_its_arithmetic_and_what_it_promises(run: Any, package: Path) -> None:
    proved = run("verify", package, "--target", "tiny", "--dtype", "bfloat16")
    assert proved.code == 0, proved.err[-2000:]
    prose = (package / ".verification" / "report.md").read_text()
    for text in (proved.out, prose):
        assert "lossless in bfloat16: the distribution of plain decoding up to rounding" in text
        assert "greedy texts may differ" in text
    shown = " ".join(run("show", package).out.split())
    assert "lossless in float32" in shown  # in which the package was made


def test_a_failed_proof_exits_with_8_and_is_kept_as_failed(
    run: Any, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Proof(
        "tiny", "small-lm", "lossless", (Check("distribution, Chain block", False, 100),)
    )
    monkeypatch.setattr(prove, "verify", lambda *_, **__: failed)
    answer = run("verify", package, "--target", "tiny")
    assert answer.code == Exit.GATE
    assert "FAILED" in answer.out
    assert "FAILED" in (package / ".verification" / "report.md").read_text()


def test_an_approximate_drafter_is_announced_and_refused_by_verify(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specctl.drafters.training_free.prompt_lookup import PromptLookup

    monkeypatch.setattr(PromptLookup, "lossless", False)
    answer = run(*GENERATE, "--draft", "prompt-lookup", "--json")
    assert answer.json["result"]["stats"]["verification"].startswith("approximate")
    assert any("approximate" in text for text in answer.json["warnings"])
    refused = run("verify", "prompt-lookup", "--target", "tiny")
    assert refused.code != 0
    assert "--allow approximate" in refused.err


@pytest.fixture
def foreign(make_model: Any, tmp_path: Path) -> Path:
    """A draft model with a small tokenizer of its own."""
    texts = ["def main(): return sum(values)", "for value in values: total += value"] * 20
    tokenizer = train_tokenizer(texts, 320, 256)
    folder = tmp_path / "foreign"
    make_model(num_layers=1, hidden=16, vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_draft_of_another_tokenizer_simply_works_and_says_how(run: Any, foreign: Path) -> None:
    plain = run(*GENERATE, "--json").json["result"]["outputs"][0]["token_ids"]
    for method, words in (("tli", "token-level"), ("slem", "string-level")):
        answer = run(
            *GENERATE, "--draft", foreign, "--set", f"drafter.translate={method}", "--json"
        )
        assert answer.code == 0, answer.err[-2000:]
        result = answer.json["result"]
        assert result["outputs"][0]["token_ids"] == plain
        assert words in result["note"]
        assert words in answer.err
    assert "(tli)" in run(*GENERATE, "--draft", foreign).err
    refused = run(*GENERATE, "--draft", foreign, "--set", "drafter.translate=none")
    assert refused.code == Exit.INCOMPATIBLE
    too_many = run(*GENERATE, "--draft", foreign, "--set", "drafter.translate=slrs")
    assert too_many.code == Exit.INCOMPATIBLE
    assert "sequences to read in every round" in too_many.err
