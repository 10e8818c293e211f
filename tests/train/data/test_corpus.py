"""The corpus: what is taken, what is held out, what the listing and the prompts say about it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from specctl.train.data.sources.corpus import (
    CODE,
    DISTRIBUTIONS,
    HELDOUT_FROM,
    MODELS_FOLDER,
    PROSE,
    STDLIB,
    CorpusFile,
    capped,
    collect,
    is_prose_or_code,
    read_source,
    regions,
    split_of,
    training_texts,
    without_licence_header,
    write_listing,
)

SMALL = (STDLIB, "networkx", "click")


@pytest.fixture(scope="module")
def sources() -> tuple[CorpusFile, ...]:
    return collect(SMALL)


def made(name: str, num_bytes: int, split: str = "train") -> CorpusFile:
    return CorpusFile("made", name, name, num_bytes, "0" * 64, split)


def test_heldout_files_are_never_in_train(sources: tuple[CorpusFile, ...]) -> None:
    heldout = [s for s in sources if s.split == "heldout"]
    train = {s.text for s in sources if s.split == "train"}
    assert len(heldout) >= 10
    assert not train.intersection(s.text for s in heldout)
    assert not {s.name for s in heldout} & {s.name for s in sources if s.split == "train"}


def test_split_depends_on_the_name_alone() -> None:
    names = [f"package/module_{i}.py" for i in range(2000)]
    splits = [split_of(STDLIB, name, 5000) for name in names]
    assert splits == [split_of(STDLIB, name, 60_000) for name in names]
    assert 60 <= splits.count("heldout") <= 140


def test_nothing_is_held_out_from_repetitive_packages() -> None:
    assert {STDLIB, *DISTRIBUTIONS} >= HELDOUT_FROM
    for distribution in ("transformers", "torch"):
        splits = {split_of(distribution, f"x/m{i}.py", 5000) for i in range(500)}
        assert splits == {"train"}


def test_model_files_keep_to_their_share() -> None:
    sources = [made(f"{MODELS_FOLDER}m{i}.py", 100) for i in range(500)]
    sources += [made(f"torch/m{i}.py", 100) for i in range(400)]
    kept = capped(sources, share=0.2)
    assert sum(s.name.startswith(MODELS_FOLDER) for s in kept) == 100
    assert capped(list(reversed(sources)), share=0.2) == kept


def test_tables_and_generated_files_are_left_out() -> None:
    code = "def one() -> int:\n    return 1\n" * 20
    assert is_prose_or_code(code)
    assert not is_prose_or_code("# Automatically generated, do not edit.\n" + code)
    assert not is_prose_or_code("TABLE = [\n" + "    0x10ffff, 123456,\n" * 50 + "]\n")
    assert not is_prose_or_code(code + "x = '" + "a" * 2000 + "'\n")


def test_licence_header_is_dropped_and_other_comments_stay() -> None:
    header = "# Copyright 2020 Somebody\n# Licensed under the Apache License\n\n"
    assert without_licence_header(header + "import os\n") == "import os\n"
    assert without_licence_header("# What this is for\nimport os\n").startswith("# What")


def test_unreadable_files_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"name = '\xe9'\n" * 100)
    assert read_source("made", "latin.py", tmp_path / "latin.py") is None
    assert read_source("made", "gone.py", tmp_path / "gone.py") is None


def test_training_texts_respect_limit_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = collect(SMALL)
    monkeypatch.setattr("specctl.train.data.sources.corpus.collect", lambda: found)
    first = training_texts(200_000, seed=1)
    assert 0 < sum(len(text.encode()) for text in first) <= 200_000
    assert first == training_texts(200_000, seed=1)
    assert first != training_texts(200_000, seed=2)


def test_listing_names_version_licence_and_split(
    sources: tuple[CorpusFile, ...], tmp_path: Path
) -> None:
    write_listing(tmp_path / "corpus.json.gz", sources)
    listing = json.loads(gzip.decompress((tmp_path / "corpus.json.gz").read_bytes()))
    by_name = {entry["distribution"]: entry for entry in listing["distributions"]}
    assert set(by_name) == set(SMALL)
    assert all(entry["version"] and entry["licence"] for entry in by_name.values())
    rows = by_name["networkx"]["files"]
    assert sum(row[1] for row in rows) == by_name["networkx"]["bytes"]
    assert {row[3] for row in rows} == {"train", "heldout"}


def test_regions_separate_docstrings_from_code() -> None:
    text = 'def f():\n    """One.\n\n    Two words.\n\n    >>> f()\n    1\n    """\n    return 1\n'
    found = {region.domain: text[region.begin : region.end] for region in regions(text)}
    assert found[PROSE] == '    """One.\n\n    Two words.\n\n'
    assert found[CODE] == "    return 1\n"
