"""The book of results: what is kept of a benchmark, the page and the CSV made of it."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
MACHINE = {"chip": "a chip", "cores": 2, "memory_gib": 24.0, "system": "Linux x86_64"}


@pytest.fixture(scope="module")
def book() -> Any:
    spec = importlib.util.spec_from_file_location("results", ROOT / "docs" / "site" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def row(book: Any, name: str, speedup: float, **more: Any) -> dict[str, Any]:
    blank = dict.fromkeys(book.ROW)
    return blank | {"name": name, "setting": "greedy", "speedup": speedup} | {
        "tokens_per_second": 25.0 * speedup, "identical_to_plain": True, "draft_share": 0.1,
    } | more  # fmt: skip


def said(book: Any) -> dict[str, Any]:
    """As `specctl bench --json` answers."""
    rows = [
        row(book, "plain", 1.0, tau=1.0),
        row(book, "<slow>", 0.5, tau=1.25, tau_error=0.05, speedup_error=0.02),
        row(book, "eagle3", 1.4, tau=2.0, identical_to_plain=None, notes="not kept"),
    ]
    command = ["specctl", "bench", "/home/me/runs/eagle3", "--suite", "x=/data/x.jsonl,y=a/y.jsonl"]
    made = {"date": "2026-11-30", "command": command, "machine": MACHINE}
    result = {
        "target": {"name": "/home/me/model.gguf", "fingerprint": "f"}, "dtype": "gguf",
        "device": "cpu", "threads": 1, "suites": ["x", "y"], "num_prompts": 24,
        "categories": {"qa": 24}, "new_tokens": 64, "batch": 1, "made": made, "rows": rows,
    }  # fmt: skip
    return {"schema": book.READ, "ok": True, "result": result}


def test_the_page_and_the_csv_hold_every_line(book: Any, tmp_path: Path) -> None:
    record = book.taken(said(book), {"eagle3": "200 steps"}, "abc")
    assert "/home" not in json.dumps(record)
    assert record["made"]["command"][-1] == "x=x.jsonl,y=a/y.jsonl"
    assert "notes" not in record["rows"][-1]
    (tmp_path / "smol.json").write_text(json.dumps(record))
    assert book.main([], tmp_path) == 0
    page = (tmp_path / "index.html").read_text()
    lines = re.findall(r"<tr data-.*</tr>", page)
    names = [re.findall(r'<th scope="row">(.*?)</th>', line)[0] for line in lines]
    assert names == ["plain", "eagle3", "&lt;slow&gt;"]
    assert "1.25 ± 0.05" in lines[2]
    assert 'data-trained="trained"' in lines[1]
    assert 'data-trained="none"' in lines[2]
    assert "3 lines of 1 run" in page
    assert "http" not in page
    with (tmp_path / "results.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["drafter"] for line in read] == ["plain", "eagle3", "<slow>"]
    assert [line["tau_error"] for line in read] == ["", "", "0.05"]
    assert [line["same_text"] for line in read] == ["yes", "drawn", "yes"]
    assert {line["machine"] for line in read} == {"a chip, 2 cores"}
    assert book.main(["--check"], tmp_path) == 0
    (tmp_path / "results.csv").write_text("")
    assert book.main(["--check"], tmp_path) == 1


def test_what_does_not_say_its_machine_is_refused(book: Any) -> None:
    answer = said(book)
    del answer["result"]["made"]
    with pytest.raises(AssertionError, match="do not say when"):
        book.taken(answer, {}, "abc")
    with pytest.raises(AssertionError, match="not measured here"):
        book.taken(said(book), {"medusa": "x"}, "abc")


def test_the_committed_book_is_not_stale(book: Any) -> None:
    assert book.main(["--check"]) == 0, book.COMMAND
    assert book.results(book.RESULTS)
