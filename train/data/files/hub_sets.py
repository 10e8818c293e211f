"""Data sets of the library `datasets`: of the hub, and what `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, NetworkError, RecipeError
from specctl.core.messages.installed import library
from specctl.core.storage.hub_access import forbidden_by, way_online
from specctl.train.data.files.tables import BATCH, batch_records


def _rows(rows: Any) -> Iterator[Any]:
    """The rows of a data set of `datasets`, as Arrow holds them: images are not decoded."""
    for table in rows.with_format("arrow").iter(batch_size=BATCH):
        yield from batch_records(table)


def saved_rows(path: Path, split: str | None) -> Iterator[Any]:
    """The rows of those splits ("train", "train+test") of a folder that `save_to_disk` wrote."""
    datasets = library("datasets", "this data source", "data")
    is_one = not (path / "dataset_dict.json").is_file()
    folders = [path] if is_one else [path / name for name in (split or "").split("+")]
    try:
        parts = [datasets.load_from_disk(str(folder)) for folder in folders]
    except (OSError, ValueError, KeyError) as error:
        raise FileError(
            "what save_to_disk wrote cannot be read",
            where=str(path),
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="a whole folder of Dataset.save_to_disk or DatasetDict.save_to_disk",
            do="save it again",
        ) from error
    for part in parts:
        yield from _rows(part)


def hub_rows(name: str, split: str) -> Iterator[Any]:
    """The rows of a split of `owner/name[@revision][:config]`."""
    yield from _rows(_loaded(name, split))


def _loaded(name: str, split: str) -> Any:
    datasets = library("datasets", "this data source", "data")
    head, _, config = name.partition(":")
    repo, _, revision = head.partition("@")
    try:
        return datasets.load_dataset(repo, config or None, split=split, revision=revision or None)
    except ValueError as error:
        raise RecipeError(
            "the hub data set has no such part",
            where="data.source, data.split",
            found=f"{name} split {split}: {error}",
            expected="owner/name[@revision][:config] and one of its splits",
            do="correct data.source, or --set data.split=NAME",
        ) from error
    except OSError as error:
        forbidden = forbidden_by(is_data=True)
        raise NetworkError(
            f"cannot load the hub data set {repo!r}",
            found=f"{type(error).__name__}: {error}",
            expected="a reachable hub that has this data set and lets you read it",
            do=(f"{way_online(forbidden)}" if forbidden else "check the name and the connection")
            + ", or download it and set data.source to the folder, which is read by its splits; "
            "data.source=corpus needs no network",
        ) from error
    except datasets.exceptions.DatasetsError as error:
        raise FileError(
            f"the records of {repo!r} do not fit one table",
            where="data.source",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            expected="columns that hold the same kind of value in every record",
            do=f"download its files and read those: hf download {repo} --repo-type dataset "
            "--local-dir FOLDER, then --data FOLDER",
        ) from error
