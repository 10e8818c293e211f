"""`specctl vocab-trim` on prompts of one's own, with a search over several knobs and a recipe."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.api.vocab_trim import split
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.export.package.folder import save_package
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt


@pytest.fixture
def package(tiny_target: Target, tmp_path: Path) -> Path:
    """An untrained draft of the embedded target."""
    torch.manual_seed(0)
    drafter = SmallLm(SmallLmOptions(layers=1, width=32), tiny_target.spec)
    folder = tmp_path / "run" / "package"
    folder.parent.mkdir()
    serve = {"policy": "chain", "length": 3}
    about = {"recipe_digest": "", "acceptance": None, "command": ["specctl"]}
    save_package(drafter, tiny_target, folder, serve=serve, **about)
    return folder


def test_own_domains_are_reported_and_a_searched_length_is_packaged(
    package: Path, run: Any, tmp_path: Path
) -> None:
    prompts = tmp_path / "mine.jsonl"
    texts = {"imports": "import os", "classes": "class A:", "loops": "for x in range("}
    lines = [json.dumps({"prompt": text, "domain": name}) for name, text in texts.items()]
    prompts.write_text("\n".join(lines * 2))
    words = ("vocab-trim", "-d", package, "-o", tmp_path / "t", "--prompts", prompts)
    more = ("--search", "tpe", "--trials", "4", "--num-prompts", "1", "--max-new-tokens", "8")
    ran = run(*words, *more, "--recipe", "vocab-trim", "--min-coverage", "0.1", "--json")
    assert ran.code == 0
    report = ran.json["result"]["report"]
    assert (report["search"], report["selector"]) == ("tpe", "vocab-trim")
    assert {row["domain"] for row in report["domains"]} <= {"all", *texts}
    assert report["min_coverage"] == 0.1
    manifest = run("show", tmp_path / "t" / "package", "--json").json["result"]["manifest"]
    assert manifest["serve"]["length"] == report["length"]
    assert manifest["vocabulary"]["draft_size"] == report["size"]
    again = manifest["acceptance"]["command"].replace("THIS_FOLDER", str(tmp_path / "t/package"))
    rows = run(*shlex.split(again)[1:], "--repeats", "1", "--json").json["result"]["rows"]
    assert rows[-1]["tau"] == pytest.approx(manifest["acceptance"]["tau"], abs=1e-9)
    assert str(prompts) in again


def test_prompts_are_split_without_overlap_unless_there_are_too_few() -> None:
    pool = [HeldoutPrompt((i,), "", "d") for i in range(12)]
    parts = split(pool)
    assert [len(part) for part in parts] == [1, 6, 5]
    assert [p for part in parts for p in part] == pool
    assert split(pool[:2]) == (pool[:2], pool[:2], pool[:2])
    assert all(split(pool[:3]))
