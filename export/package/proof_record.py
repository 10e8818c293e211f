"""The record of a proof, kept inside the package it is about.

    .verification/report.json   what was checked, on which target, with which package and versions
    .verification/report.md     the same for people

Entries that begin with a dot are no part of a package: they are neither listed nor hashed, so a
record changes no digest, and a package that is written anew starts without one. The record names
the digest it is about; about another package it says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, IntegrityError
from specctl.core.storage.files import Disk, replace_file
from specctl.export.package.card import scrub
from specctl.export.package.files import parse_json, read_bounded
from specctl.export.package.manifest import read_manifest
from specctl.export.package.origin import redacted, utc_now, versions

FOLDER, REPORT, PROSE = ".verification", "report.json", "report.md"
RECORDS = (f"{FOLDER}/{REPORT}", f"{FOLDER}/{PROSE}")


def write_record(
    package: Path,
    body: Mapping[str, Any],
    rows: Sequence[tuple[str, str]],
    command: Sequence[str],
) -> Path:
    """Write both files and return the folder; a record of before is replaced."""
    manifest = read_manifest(package)
    about = {
        "package_digest": manifest.digest,
        "created": utc_now(),
        "command": redacted(command),
        "versions": versions(),
    }
    folder = package / FOLDER
    folder.mkdir(exist_ok=True)
    report = json.dumps({**about, **body}, indent=1, sort_keys=True, ensure_ascii=True)
    replace_file(Disk(), folder / REPORT, (report + "\n").encode())
    title = f"# Verification of {manifest.family} for {manifest.target.name}"
    facts = [f"- package {manifest.digest}", f"- {about['created']}: {' '.join(about['command'])}"]
    table = [
        "| check | result |",
        "|---|---|",
        *(f"| {name} | {' '.join(found.split())} |" for name, found in rows),
    ]
    prose = scrub("\n".join([title, "", *facts, "", *table])) + "\n"
    replace_file(Disk(), folder / PROSE, prose.encode())
    return folder


def read_record(package: Path) -> dict[str, Any] | None:
    """The record of this very package; None without one, or if it is about another."""
    file = package / FOLDER / REPORT
    if not file.is_file() or file.is_symlink():
        return None
    try:
        body = parse_json(read_bounded(file), REPORT)
    except (FileError, IntegrityError):
        return None
    is_ours = body.get("package_digest") == read_manifest(package).digest
    return dict(body) if is_ours else None
