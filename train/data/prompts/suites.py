"""The question sets that speculative decoding is measured on, as their files are laid out.

A suite is read from its file, from a folder that has it, or from the hub. Questions keep their
categories; those of MT-Bench and SPEED-Bench follow each other, and are asked one by one.

everyday     comes with specctl: 18 questions in six categories, written for it
Spec-Bench   arXiv 2401.07851, github.com/hemingkx/Spec-Bench: data/spec_bench/question.jsonl
SPEED-Bench  arXiv 2604.09557; a part of its questions must be fetched from their sources
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, NetworkError, RecipeError, did_you_mean, nearest
from specctl.train.data.files.hub_sets import hub_rows, saved_rows
from specctl.train.data.files.tables import decoded
from specctl.train.data.records.records import Message, Sample, sample_of, without_nulls
from specctl.train.data.sources.sources import HUB, SAVED, file_records, find_source

WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # how SPEED-Bench begins a text it may not ship
MT_BENCH = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SuiteSource:
    """Where a suite is published: `hub` as owner/name[:config] with its `split` ("" for one that is
    no data set of the hub: `address` says where its file is), `files` where a folder has it.
    `shipped`: a file of specctl's own, in recipes/. `request`: how a bare prompt is worded to a
    chat model; `joined`: categories under one name; `category` of questions that name none."""

    hub: str = ""
    split: str = "test"
    address: str = ""
    files: tuple[str, ...] = ("question.jsonl",)
    shipped: str = ""
    request: str = "{prompt}"
    category: str = ""
    joined: Mapping[str, str] = field(default_factory=dict)


SUITES = {
    "everyday": SuiteSource(shipped="questions.jsonl"),
    "spec-bench": SuiteSource(
        address="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/"
        "question.jsonl",
        files=(
            "question.jsonl", "spec_bench/question.jsonl", "data/spec_bench/question.jsonl",
            "specbench.jsonl",
        ),
        joined=dict.fromkeys(MT_BENCH, "mt_bench"),
    ),
    "mt-bench": SuiteSource(
        "HuggingFaceH4/mt_bench_prompts", "train",
        files=("question.jsonl", "mt_bench/question.jsonl", "data/mt_bench/question.jsonl"),
    ),
    "humaneval": SuiteSource(
        "openai/openai_humaneval",
        files=("HumanEval.jsonl", "HumanEval.jsonl.gz", "humaneval.jsonl", "question.jsonl"),
        request="Complete this Python function.\n\n```python\n{prompt}\n```",
        category="coding",
    ),
    "gsm8k": SuiteSource(
        "openai/gsm8k:main", files=("test.jsonl", "gsm8k.jsonl", "question.jsonl"), category="math"
    ),
    "alpaca": SuiteSource(
        "tatsu-lab/alpaca", "train",
        files=("alpaca_eval.json", "alpaca_data.json", "alpaca.jsonl", "question.jsonl"),
        category="instructions",
    ),
    "speed-bench": SuiteSource("nvidia/SPEED-Bench:qualitative", files=("qualitative.jsonl",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SuiteQuestion:
    """`turns`: the messages before each answer; `text`: what a base model continues."""

    category: str
    turns: tuple[tuple[Message, ...], ...]
    text: str


@dataclass(frozen=True, slots=True)
class SuiteQuestions:
    """A suite as it was read. `withheld`: questions whose text it does not ship."""

    name: str
    questions: tuple[SuiteQuestion, ...]
    withheld: int = 0


def check_suite(word: str) -> None:
    """Refuse what is no suite, and one whose file is not named or not there; nothing is read."""
    name, _, place = (part.strip() for part in word.partition("="))
    suite = SUITES.get(name.partition(":")[0])
    file = Path(place or name).expanduser()
    if place or suite is None:
        if file.exists():
            return
        if place:
            raise _no_such_place(place, file)
        raise RecipeError(
            f"unknown suite {name!r}",
            where="--suite",
            found=word,
            expected="one of " + ", ".join(SUITES) + ", NAME=FILE, or a file of questions",
            do=f"--suite {nearest(name, SUITES, 1)}",
        )
    if not suite.shipped and not suite.hub:
        raise RecipeError(
            f"suite {name} is no data set of the hub",
            where="--suite",
            found=name,
            expected="the file of its questions, or a folder that has it",
            do=f"curl -LO {suite.address} and give --suite {name}=question.jsonl",
        )


def read_suite(word: str) -> SuiteQuestions:
    """The suite of a word NAME[:CONFIG] (of the hub) or NAME=PATH (a file or folder), or a file of
    one's own."""
    name, has_path, place = word.partition("=")
    name = name.strip()
    if not has_path and name.partition(":")[0] not in SUITES and Path(name).expanduser().exists():
        place, name = name, Path(name).stem
    check_suite(word)
    suite = SUITES.get(name.partition(":")[0]) or SuiteSource()
    found, withheld = list[SuiteQuestion](), 0
    for where, record in _records(suite, name, place.strip()):
        question = _question(suite, where, record, name)
        if any(WITHHELD in str(turn[-1].get("content")) for turn in question.turns):
            withheld += 1
        else:
            found.append(question)
    if not found:
        raise FileError(
            f"suite {name} has no questions here",
            where=place or suite.hub,
            found=f"{withheld:,} questions whose text is not shipped" if withheld else "no record",
            expected="a question in every record",
            do="give the file that its authors' script prepares: --suite speed-bench=FILE"
            if withheld
            else "give the file of its questions: --suite NAME=FILE",
        )
    return SuiteQuestions(name, tuple(found), withheld)


def evenly(questions: Sequence[SuiteQuestion], limit: int | None) -> list[SuiteQuestion]:
    """At most `limit` questions of every category, at even distances, categories together."""
    groups: dict[str, list[SuiteQuestion]] = {}
    for question in questions:
        groups.setdefault(question.category, []).append(question)
    return [
        group[i * len(group) // count]
        for group in groups.values()
        for count in [min(limit or len(group), len(group))]
        for i in range(count)
    ]


def _records(suite: SuiteSource, name: str, place: str) -> Iterator[tuple[str, Any]]:
    """Place and value of every record."""
    if suite.shipped and not place:
        place = str(files("specctl.recipes") / suite.shipped)
    repo, _, config = suite.hub.partition(":")
    config = name.partition(":")[2] or config
    source = find_source(*_source(suite, place, config, repo))
    if source.kind in (HUB, SAVED):
        is_hub, kept = source.kind == HUB, source.path
        rows = (
            _hub_rows(source.name, suite.split, name) if is_hub else saved_rows(kept, source.split)
        )
        for number, row in enumerate(rows):
            yield f"{source.name}: row {number}", without_nulls(row)
        return
    for file, kind in source.files:
        for where, record in file_records(file, kind, source.split):
            yield where, record if isinstance(record, ValueError) else without_nulls(record)


def _hub_rows(repo: str, split: str, name: str) -> Iterator[Any]:
    """Rows of the hub's data set; where it cannot be had, a suite may be given as a file."""
    try:
        yield from hub_rows(repo, split)
    except (NetworkError, RecipeError) as error:
        raise type(error)(
            f"suite {name} cannot be read from the hub",
            where=f"--suite {name}",
            found=f"{repo}: {error.found or error.what}",
            expected="a reachable hub that has this data set, or the file of its questions",
            do=f"check the connection, or give the file: --suite {name.partition(':')[0]}=FILE",
        ) from error


def _source(suite: SuiteSource, place: str, config: str, repo: str) -> tuple[str, str, str]:
    """Name, format and split, as `find_source` takes them."""
    if not place:
        return f"{repo}:{config}" if config else repo, HUB, suite.split
    path = Path(place).expanduser()
    if not path.exists():
        raise _no_such_place(place, path)
    own = next((path / one for one in suite.files if (path / one).is_file()), None)
    if own is not None:
        return str(own), "auto", "all"
    if config and (path / config).is_dir():
        return str(path / config), "auto", suite.split
    return str(path), "auto", suite.split if path.is_dir() else "all"


def _no_such_place(place: str, path: Path) -> FileError:
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    return FileError(
        "the questions of a suite are not there",
        where="--suite",
        found=place,
        expected="a file or folder of questions behind NAME=",
        do=did_you_mean(path.name, names, "correct the path, or leave =PATH out for the hub"),
    )


def _question(suite: SuiteSource, where: str, record: Any, name: str) -> SuiteQuestion:
    try:
        if isinstance(record, ValueError):
            raise record
        record = decoded(record)
        bare = record.get("prompt") if isinstance(record, Mapping) else None
        if isinstance(bare, list) and all(isinstance(one, str) for one in bare):
            record = {"turns": bare, "category": record.get("category")}
        sample = sample_of(record, where, suite.category or name)
        turns = _turns(sample)
    except ValueError as error:
        raise FileError(
            f"a question of suite {name} cannot be read",
            where=where,
            found=str(error)[:200],
            expected="turns, messages, a prompt or a question, as in the published file",
            do="correct that record, or fetch the file again",
        ) from error
    text = str(turns[0][-1].get("content", ""))
    if isinstance(bare, str):
        text = bare
        said = suite.request.format(prompt=bare.rstrip("\n"))
        turns = (({"role": "user", "content": said},),)
    category = suite.joined.get(sample.domain, sample.domain)
    return SuiteQuestion(category, turns, text)


def _turns(sample: Sample) -> tuple[tuple[Message, ...], ...]:
    """The messages before each answer that nobody has given; else before the last answer."""
    messages = sample.messages or ({"role": "user", "content": sample.text},)
    ends = list(sample.unanswered)
    if not ends:
        spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        is_answered = bool(spoken) and spoken[-1] == len(messages) - 1
        ends = [spoken[-1] if is_answered else len(messages)]
    starts = [0, *(end + 1 for end in ends[:-1])]
    turns = tuple(tuple(messages[a:b]) for a, b in zip(starts, ends, strict=True))
    if not all(turns):
        raise ValueError("nothing stands before the assistant's turn")
    return turns
