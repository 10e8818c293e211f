"""Measured costs between commands: bench keeps them, generate chooses draft lengths by them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specctl.api.measured.cost_cache import read_costs, write_costs
from specctl.runtime.measure.cost_table import CostTable

BENCH = ("bench", "--num-prompts", "1", "--max-new-tokens", "4", "--repeats", "1")
WORDS = (
    "generate",
    "--max-new-tokens",
    "24",
    "--set",
    "sample.ignore_eos=true",
    "--dtype",
    "float32",
)
PROMPT = "import os\nimport sys\nimport os\nimport "
TABLE = CostTable({0: 0.0, 2: 0.1}, {0: 1.0, 2: 1.1}, "cpu x", "float32", 1)
ABOUT = {"device": "cpu x", "dtype": "float32", "batch": 1, "target": "abc"}


@pytest.fixture(scope="module", autouse=True)
def whole_costs(little_beside_a_run: None) -> Iterator[None]:
    """As many rounds of each draft length as the commands time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specctl.api.arguments.drafting.COST_ROUNDS", 16)
        yield


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "specctl" / "costs").glob("*.json"))


def test_a_table_is_read_back_for_the_same_pair_only(cache: Path) -> None:
    path = write_costs(ABOUT, TABLE)
    assert path is not None
    assert kept(cache) == [path]
    assert read_costs(ABOUT) == TABLE
    assert read_costs({**ABOUT, "target": "abd"}) is None


def spelled(**costs: str) -> str:
    """A table of these costs as the file spells them; the others are those of TABLE."""
    about = json.dumps(ABOUT)
    draft = '{{"0": 0.0, "2": {}}}'.format(costs.get("draft", "0.1"))
    verify = '{{"0": {}, "2": 1.1}}'.format(costs.get("verify", "1.0"))
    return f'{{"about": {about}, "draft": {draft}, "verify": {verify}}}'


ABYSS = "[" * 100_000 + "]" * 100_000
NO_COSTS = ["NaN", "Infinity", "-Infinity", "1e999", "-0.1", '"x"', "null", "9" * 5000, ABYSS]
DAMAGED = [
    "",
    "[]",
    "{}",
    '{"about": 1}',
    "\x00",
    ABYSS,
    '{"about":' * 5000,
    " " * (1 << 20) + "{}",
]
DAMAGED += [spelled(**{name: cost}) for name in ("draft", "verify") for cost in NO_COSTS]
DAMAGED += [spelled(verify="0")]


def test_a_table_is_spelled_as_below(cache: Path) -> None:
    path = write_costs(ABOUT, TABLE)
    assert path is not None
    path.write_text(spelled())
    assert read_costs(ABOUT) == TABLE


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_table_counts_as_not_measured(text: str, cache: Path) -> None:
    path = write_costs(ABOUT, TABLE)
    assert path is not None
    path.write_text(text)
    assert read_costs(ABOUT) is None


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_no_file_counts_as_not_measured(kind: str, cache: Path) -> None:
    path = write_costs(ABOUT, TABLE)
    assert path is not None
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path)
    assert read_costs(ABOUT) is None
    assert (write_costs(ABOUT, TABLE) is None) == (kind == "folder")


def test_what_a_killed_writer_left_is_swept(cache: Path) -> None:
    path = write_costs(ABOUT, TABLE)
    assert path is not None
    left, other = path.with_name(f".{path.name}.99"), path.with_name(".other.json.99")
    left.write_text("half")
    other.write_text("half")
    write_costs(ABOUT, TABLE)
    assert not left.exists()
    assert other.exists()


def test_a_cache_that_cannot_be_written_is_no_error(cache: Path) -> None:
    (cache / "specctl").mkdir(exist_ok=True)
    (cache / "specctl" / "costs").write_text("a file where the folder should be")
    assert write_costs(ABOUT, TABLE) is None
    assert read_costs(ABOUT) is None


def test_bench_measures_and_generate_switches_off_what_does_not_pay(run: Any, cache: Path) -> None:
    words = (*WORDS, "-d", "prompt-lookup", PROMPT, "--json")
    fixed = run(*words).json["result"]
    assert fixed["adaptive"] is None, "nothing was measured yet"
    assert run(*BENCH, "-d", "prompt-lookup", "--dtype", "float32", "--temperature", "0").code == 0
    (path,) = kept(cache)
    table = json.loads(path.read_text())
    table["draft"] = {k: 0.0 if k == "0" else 9.0 for k in table["draft"]}
    path.write_text(json.dumps(table))
    ran = run(*words)
    chosen = ran.json["result"]
    assert chosen["adaptive"]["rounds_off"] > 0
    assert "speculation was off in" in ran.err
    assert ("assumed: none was drafted" in ran.err) == (chosen["stats"]["drafted"] == 0)
    assert chosen["stats"]["drafted"] < fixed["stats"]["drafted"]
    assert chosen["outputs"][0]["token_ids"] == fixed["outputs"][0]["token_ids"]
    assert run(*words, "--no-adaptive").json["result"]["adaptive"] is None


def test_bench_against_transformers_runs_the_same_weights(run: Any) -> None:
    words = (*BENCH, "-d", "none", "--against", "ngram,hf", "--dtype", "float32")
    rows = run(*words, "--temperature", "0", "--json").json["result"]["rows"]
    names = ["plain", "prompt-lookup", "transformers plain", "transformers with prompt-lookup"]
    assert [row["name"] for row in rows] == names
    assert all(row["identical_to_plain"] for row in rows)
