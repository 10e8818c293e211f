"""verify, bench, export and prune on a package, as objects and by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import specctl
from specctl.api.train import TrainResult
from specctl.export.package.proof_record import read_record
from specctl.runtime.proof import prove
from specctl.runtime.proof.proof_report import ProofLevel
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import mixed
from specctl.runtime.target.variants.mixture import parse


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    level = ProofLevel(2, 6, samples=120, length=3, all_rules=False, enumeration="quick")
    monkeypatch.setitem(prove.LEVELS, "lossless", level)
    monkeypatch.setattr(prove, "_enumerated", lambda level: (1, 0.0))


@pytest.mark.usefixtures("small")
def test_verify_is_a_result_that_is_kept_in_the_package(
    tiny_target: Target, run: TrainResult
) -> None:
    found = specctl.verify(tiny_target, run.package)
    assert found.passed
    assert found.kept is not None
    assert [check.name for check in found.checks[:2]] == ["files", "compat"]
    assert "cache rollback" in repr(found)
    assert "<table>" in found._repr_html_()
    assert found.to_json()["proof"]["passed"] is True
    files = specctl.verify(None, str(run.package), "files")
    assert (files.passed, files.proof) == (True, None)
    free = specctl.verify(tiny_target, "prompt-lookup", "compat")
    assert free.checks[0].note == "nothing stored"
    both = specctl.verify(None, f"{run.out}+prompt-lookup")
    assert both.passed
    assert both.kept is None, "the proof of a team is none of its package"
    with pytest.raises(specctl.SpecctlError, match="level"):
        specctl.verify(tiny_target, "prompt-lookup", "lossles")


@pytest.mark.usefixtures("small")
def test_the_proof_of_a_mixture_names_it_and_is_none_of_the_package(
    tiny_target: Target, run: TrainResult
) -> None:
    before = read_record(run.package)
    whole = mixed(tiny_target, tiny_target, parse("product:0.5=tiny"))
    found = specctl.verify(whole, run.package)
    assert found.passed
    assert (found.kept, read_record(run.package)) == (None, before)
    assert found.to_json()["proof"]["mixture"] == "product:0.5=tiny"
    assert "of product:0.5=tiny: " in str(found.proof and found.proof.claim)


def test_bench_is_a_table_of_all_drafters(tiny_target: Target, run: TrainResult) -> None:
    lookup = specctl.load_drafter("prompt-lookup", tiny_target)
    short: dict[str, Any] = {"max_new_tokens": 2, "repeats": 1, "adaptive": False}
    short["samplings"] = specctl.Sampling()
    report = specctl.bench(
        tiny_target, [run.package, lookup, lookup, lookup], prompts="import os\n", **short
    )
    names = ["plain", str(run.package), "prompt-lookup", "prompt-lookup 2", "prompt-lookup 3"]
    assert [row.name for row in report.rows] == names
    assert "speed-up" in repr(report)
    assert "tiny" in report._repr_html_()
    one = specctl.bench(tiny_target, "prompt-lookup", prompts="x", **short)
    assert [row.name for row in one.rows] == ["plain", "prompt-lookup"]


def test_a_run_is_exported_for_the_target_it_was_made_for(run: TrainResult, tmp_path: Path) -> None:
    made = specctl.export(run.out, "hf", tmp_path / "hf")
    assert "config.json" in made.files
    assert "hf" in repr(made)
    with pytest.raises(specctl.SpecctlError, match="format"):
        specctl.export(run.package, "hff", tmp_path / "no")


def test_prune_cuts_and_says_what_was_cut(
    tiny_target: Target, small_data: dict[str, Any], tmp_path: Path
) -> None:
    cuts: list[object] = []
    made = specctl.prune(
        tiny_target, out=tmp_path / "cut", layers=2, width=0.5, heal_steps=0,
        on_cut=cuts.append, **small_data,
    )  # fmt: skip
    assert len(cuts) == 1
    assert made.report["after"]["num_layers"] == 2
    assert made.report["after"]["hidden_size"] == 128
    assert (made.package / "manifest.json").is_file()
    assert "alpha before healing" in repr(made)
    with pytest.raises(specctl.SpecctlError, match="importance"):
        specctl.prune(tiny_target, out=tmp_path / "no", importance="luck")
