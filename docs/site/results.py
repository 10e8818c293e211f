"""The book of results: docs/results, a page and a CSV of measured drafters: make docs-tables.

    python docs/site/results.py                    writes index.html and results.csv
    python docs/site/results.py --check            says which is stale, and exits with 1 if one is
    python docs/site/results.py --add bench.json --about eagle3="200 steps on 1,196 answers"

--add takes what `specctl bench --json` or `--out` wrote, with the commit of this checkout (or
--commit), and keeps what the page shows in docs/results/NAME.json (NAME: that of the file).
`--about` says how a drafter was trained; one without it is one that needs no training. Of absolute
paths the last part is kept.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from specctl.core.messages.printable import counted  # noqa: E402

RESULTS = ROOT / "docs" / "results"
PAGE = Path(__file__).with_name("results.html")
COMMAND = "make docs-tables"
SCHEMA, READ = "specctl.results/1", "specctl.bench/1"
NO_TRAINING = "none"
ROW = (  # fields of a row of `specctl bench` that are kept
    "name", "setting", "tau", "tau_error", "tokens_per_second", "speedup", "speedup_error",
    "identical_to_plain", "verification", "repetition_rate", "draft_share", "accepted_per_position",
    "by_category",
)  # fmt: skip
FILTERS = {  # columns that readers choose from, and their titles
    "target": "Target", "suite": "Questions", "setting": "Sampling", "trained": "Training",
    "machine": "Machine",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """A drafter, or plain decoding, in one setting of one run. Errors are standard errors over
    questions, None where there is none."""

    drafter: str
    training: str
    target: str
    suite: str
    setting: str
    batch: int
    tau: float | None
    tau_error: float | None
    speedup: float
    speedup_error: float | None
    tokens_per_second: float
    same_text: str
    verification: str
    questions: int
    new_tokens: int
    machine: str
    threads: int
    date: str
    commit: str
    command: str
    file: str

    @property
    def trained(self) -> str:
        return "none" if self.training in (NO_TRAINING, "") else "trained"


def results(folder: Path) -> list[Result]:
    """Of all files, plain decoding first in each run, then the fastest."""
    found = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["schema"] == SCHEMA, f"{path.name} is {record.get('schema')}, not {SCHEMA}"
        rows = sorted(record["rows"], key=lambda row: (row["name"] != "plain", -row["speedup"]))
        found += [_result(record, row, path.name) for row in rows]
    return found


def _result(record: Mapping[str, Any], row: Mapping[str, Any], file: str) -> Result:
    made = record["made"]
    same = {True: "yes", False: "no", None: "drawn"}[row["identical_to_plain"]]
    training = "" if row["name"] == "plain" else record["about"].get(row["name"], NO_TRAINING)
    on = made["machine"]
    return Result(
        row["name"], training, f"{record['target']} {record['dtype']}", record["suite"],
        row["setting"], record["batch"], row["tau"], row["tau_error"], row["speedup"],
        row["speedup_error"], row["tokens_per_second"], same, row["verification"] or "",
        record["questions"], record["new_tokens"], f"{on['chip']}, {counted(on['cores'], 'core')}",
        record["threads"], made["date"], record["commit"], shlex.join(made["command"]), file,
    )  # fmt: skip


def taken(said: Mapping[str, Any], about: Mapping[str, str], commit: str) -> dict[str, Any]:
    """The record of what `specctl bench --json` answered, or `--out` wrote."""
    result = said.get("result", said)
    assert "made" in result, "the figures do not say when, by what and on what they were made"
    names = {row["name"] for row in result["rows"]}
    assert about.keys() <= names, f"--about names {about.keys() - names}, not measured here"
    made = result["made"]
    return {
        "schema": SCHEMA,
        "commit": commit,
        "made": {**made, "command": [_without_folders(word) for word in made["command"]]},
        "target": Path(result["target"]["name"]).name,
        "fingerprint": result["target"]["fingerprint"],
        "dtype": result["dtype"],
        "device": result["device"],
        "threads": result["threads"],
        "suite": ", ".join(result["suites"]) or "prompts",
        "questions": result["num_prompts"],
        "categories": result["categories"],
        "new_tokens": result["new_tokens"],
        "batch": result["batch"],
        "about": dict(about),
        "rows": [{key: row[key] for key in ROW} for row in result["rows"]],
    }


def _without_folders(word: str) -> str:
    return re.sub(r"(^|[=,])/(?:[^/,=]+/)*", r"\1", word)


def page(rows: Sequence[Result]) -> str:
    """The static page; without JavaScript it is the whole table."""
    choices = "\n".join(_choice(name, title, rows) for name, title in FILTERS.items())
    body = "\n".join(map(_line, rows))
    text = Template(PAGE.read_text(encoding="utf-8"))
    runs = len({row.file for row in rows})
    return text.substitute(
        filters=choices, rows=body, shown=f"{counted(len(rows), 'line')} of {counted(runs, 'run')}"
    )


def _choice(name: str, title: str, rows: Sequence[Result]) -> str:
    values = dict.fromkeys(str(getattr(row, name)) for row in rows)
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    return (
        f'<label>{title} <select data-filter="{name}"><option value="">all</option>'
        f"{options}</select></label>"
    )


def _line(row: Result) -> str:
    data = " ".join(f'data-{name}="{escape(str(getattr(row, name)))}"' for name in FILTERS)
    about = f"{row.questions} questions x {row.new_tokens} tokens, {row.machine}, "
    about += f"{counted(row.threads, 'thread')}, {row.date}, commit {row.commit}"
    cells = [
        f'<th scope="row">{escape(row.drafter)}</th>',
        f"<td>{escape(row.training) or '-'}</td>",
        f"<td>{escape(row.target)}</td>",
        f"<td>{escape(row.suite)}</td>",
        f"<td>{escape(row.setting)}</td>",
        f'<td class="number">{row.batch}</td>',
        _number(row.tau, row.tau_error, 2),
        _number(row.speedup, row.speedup_error, 2),
        _number(row.tokens_per_second, None, 1),
        f"<td>{row.same_text}</td>",
        f"<td>{escape(row.verification)}</td>",
        f"<td><details><summary>how</summary><p>{escape(about)}</p>"
        f"<code>{escape(row.command)}</code></details></td>",
    ]
    return f"<tr {data}>{''.join(cells)}</tr>"


def _number(value: float | None, error: float | None, places: int) -> str:
    if value is None:
        return '<td class="number" data-value="">-</td>'
    spread = "" if error is None else f" ± {error:.{places}f}"
    return f'<td class="number" data-value="{value}">{value:.{places}f}{spread}</td>'


def table(rows: Sequence[Result]) -> str:
    """The same as CSV."""
    text = io.StringIO()
    names = list(Result.__dataclass_fields__)
    written = csv.writer(text, lineterminator="\n")
    written.writerow(names)
    for row in rows:
        values = [getattr(row, name) for name in names]
        written.writerow("" if value is None else value for value in values)
    return text.getvalue()


def made(folder: Path) -> Iterator[tuple[Path, str]]:
    """The files of the book, as they should be."""
    rows = results(folder)
    yield folder / "index.html", page(rows)
    yield folder / "results.csv", table(rows)


def add(path: Path, about: Sequence[str], commit: str | None, folder: Path) -> Path:
    pairs = dict(word.split("=", 1) for word in about)
    said = json.loads(path.read_text(encoding="utf-8"))
    if commit is None:
        head = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    kept = folder / f"{path.stem}.json"
    kept.write_text(json.dumps(taken(said, pairs, commit), indent=1) + "\n", encoding="utf-8")
    return kept


def main(words: Sequence[str] | None = None, folder: Path = RESULTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", type=Path, metavar="BENCH.json")
    parser.add_argument("--commit", help="that was measured, if it is not that of this checkout")
    parser.add_argument("--about", action="append", default=[], metavar="DRAFTER=TRAINING")
    given = parser.parse_args(words)
    if given.add is not None:
        print(f"{add(given.add, given.about, given.commit, folder)} is written")
    stale = 0
    for path, text in made(folder):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if not given.check:
            path.write_text(text, encoding="utf-8")
        print(f"docs/results/{path.name} {f'is stale: {COMMAND}' if given.check else 'is written'}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    raise SystemExit(main())
