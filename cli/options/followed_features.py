"""Of the traffic that a drafter follows, the texts whose features the server has kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from specctl.core.storage.files import write_bytes
from specctl.core.storage.kept_features import RECORD_OF_IDS, copy_features, text_key


def features_beside(out: Path) -> Path:
    """Where a run has those of its texts, out of reach of the server that evicts them."""
    return out.with_name(f"{out.name}.features")


def keep_features(folder: Path, out: Path, kept: Path, is_whole: bool) -> None:
    """Link the features of the records in `kept` beside the run, and write in the place of each
    such record the ids that the server read and wrote: the text as it is tokenized anew may have
    others. Records of which nothing whole is kept stay texts. `is_whole`: prompts are learned, too.
    """
    features, lines = features_beside(out), kept.read_bytes().splitlines(keepends=True)
    drop_features(out)
    found = copy_features(folder, features, lines)
    if found:
        files = [found.get(text_key(line)) for line in lines]
        made = [
            line if file is None else file.record(is_whole)
            for line, file in zip(lines, files, strict=True)
        ]
        write_private(kept, b"".join(made))


def drop_features(out: Path) -> None:
    """Those of a run that was not begun."""
    shutil.rmtree(features_beside(out), ignore_errors=True)


def features_said(out: Path, kept: Path) -> dict[str, int]:
    """For the result: records that were read, and those whose features were kept."""
    lines = kept.read_bytes().splitlines()
    count = sum(line.startswith(RECORD_OF_IDS) for line in lines)
    return {"records": len(lines), "records_with_features": count}


def write_private(path: Path, body: bytes) -> None:
    """A file that its owner alone may read."""
    before = os.umask(0o077)
    try:
        write_bytes(path, body)
    finally:
        os.umask(before)
