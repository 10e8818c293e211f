"""Every excerpt of somebody else's work that we ship is noticed, with the text of its licence."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes" / "tiny"
ROW = re.compile(r"^\| (\S+) \| (\S+) \| (\d+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", re.M)


def listing() -> dict[str, tuple[str, str]]:
    """Held-out file -> the distribution that it came from, and its version."""
    corpus = json.loads(gzip.decompress((TINY / "corpus.json.gz").read_bytes()))
    return {
        name: (each["distribution"], each["version"])
        for each in corpus["distributions"]
        for name, _, _, split in each["files"]
        if split == "heldout"
    }


def test_the_notice_counts_the_excerpts_of_every_work() -> None:
    origin = listing()
    lines = (TINY / "prompts.jsonl").read_text().splitlines()
    files = [json.loads(line)["file"] for line in lines]
    excerpts = Counter(origin[name] for name in files)
    distinct = Counter(origin[name] for name in set(files))
    rows = {(r[0], r[1]): (int(r[2]), int(r[3])) for r in ROW.findall(_notice())}
    assert rows == {work: (excerpts[work], distinct[work]) for work in excerpts}
    assert f"holds {len(files)} excerpts of {len(set(files))} Python files" in _notice()


def _notice() -> str:
    return (TINY / "NOTICE.md").read_text()


def test_every_work_has_the_text_of_its_licence_and_its_holder() -> None:
    works = {row[0]: row for row in ROW.findall(_notice())}
    texts = {path.stem: path.read_text() for path in (TINY / "licences").iterdir()}
    assert texts.keys() == works.keys()
    marks = {"BSD": "Redistribution", "MIT": "Permission is hereby", "PSF": "PYTHON SOFTWARE"}
    marks |= {"Apache": "Apache License", "matplotlib": "LICENSE AGREEMENT"}
    for name, row in works.items():
        [mark] = [text for start, text in marks.items() if row[4].startswith(start)]
        assert mark in texts[name], name
        assert row[5].startswith("Copyright"), name


def test_the_notices_are_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]["specctl.recipes"]
    patterns = [[f"recipes/{each}" for each in data], project["project"]["license-files"]]
    shipped = [{path for each in some for path in ROOT.glob(each)} for some in patterns]
    for path in (TINY / "NOTICE.md", *(TINY / "licences").iterdir()):
        assert all(path in found for found in shipped), path
