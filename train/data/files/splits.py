"""Which files of a folder belong to which split, as the hub and `datasets` tell them apart.

In this order: what the README's `configs` say; names such as train_sft-00000-of-00001.parquet;
folders, then files, with a word such as train, validation or test in their name. A folder in which
no name says so has no splits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, RecipeError, alike
from specctl.core.messages.printable import counted
from specctl.core.storage.bounded_read import read_text
from specctl.recipes.files import parse_yaml

DEFAULT = "train"
ALL = "all"  # every split of a folder
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
ABOUT = ("readme", "license", "licence", "notice", "changelog", "dataset_info")  # file names

_SHARD = re.compile(r"(.+?)[-_.](\d{5})-of-(\d{5})\b", re.ASCII)
_FRONT = re.compile(r"---\s*\n(.*?)\n---\s*(?:\n|$)", re.DOTALL)
Splits = Mapping[str, Sequence[Path]]


@dataclass(frozen=True, slots=True)
class FolderSplits:
    """The files of each split, and those of none."""

    splits: Splits
    others: tuple[Path, ...] = ()

    def files(self, folder: Path, split: str) -> list[Path]:
        """The files of a split, of several ("train+test") or of all; RecipeError for one that is
        not there."""
        wanted = list(self.splits) if split == ALL else [s.strip() for s in split.split("+")]
        for name in wanted:
            if name not in self.splits:
                raise no_split(str(folder), name, self._listed(), self.others)
        return sorted({file for name in wanted for file in self.splits[name]})

    def _listed(self) -> dict[str, int]:
        return {name: len(files) for name, files in self.splits.items()}


def no_split(
    source: str, split: str, known: Mapping[str, int | None], others: Iterable[Path] = ()
) -> RecipeError:
    """The error for a split that a source does not have; `known`: those that it has, with the
    number of their files. Splits for measuring are named only where nothing else is there, or one
    of them was nearly written: nobody is advised to learn them."""
    measuring = {name for name in known if {*_words(name)} & {"validation", "test"}}
    close = alike(split, known)
    shown = [name for name in known if name not in measuring or name in close] or list(known)
    listed = [name + _counted(known[name]) for name in shown]
    hidden = len(known) - len(shown)
    more = f"; {counted(hidden, 'more is', 'more are')} for measuring" if hidden else ""
    rest = ", ".join(file.name for file in list(others)[:3])
    sliced = "; slices such as train[:10%] are for data sets of the hub" if "[" in split else ""
    return RecipeError(
        f"the data have no split {split!r}",
        where=f"data.split, {source}",
        found=f"{split!r}" + (f"; in no split: {rest}" if rest else ""),
        expected=("one of " if len(shown) > 1 else "") + ", ".join(listed) + more,
        do=f"--set data.split={close[0] if close else shown[0]}, or give the files themselves "
        f"with --data{sliced}",
    )


def _counted(files: int | None) -> str:
    return f" ({counted(files, 'file')})" if files else ""


def is_about(path: Path) -> bool:
    """Whether a file tells of the data beside it, by its name."""
    return path.stem.lower().startswith(ABOUT)


def folder_splits(
    folder: Path, files: Sequence[Path], config: str, must_be_all: bool
) -> FolderSplits:
    """The splits of a folder that holds those files; none where nothing tells them apart.
    `must_be_all`: only where every file belongs to one, as it must in folders of programs, which
    have tests, too."""
    declared = _declared(folder, files, config)
    return _sorted(declared, files) if declared else _by_names(folder, files, must_be_all)


def _by_names(folder: Path, files: Sequence[Path], must_be_all: bool) -> FolderSplits:
    for found in (_by_shard(folder, files), _by_folder(folder, files), _by_name(folder, files)):
        splits = _sorted(found, files)
        if found and not (must_be_all and splits.others):
            return splits
    return FolderSplits({})


def _sorted(found: Mapping[str, Sequence[Path]], files: Sequence[Path]) -> FolderSplits:
    used = {file for each in found.values() for file in each}
    return FolderSplits(found, tuple(file for file in files if file not in used))


def _by_shard(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file in files:
        match = _SHARD.match(file.name)
        if match is None:
            continue
        # datasets' own exports are NAME-SPLIT-00000-of-00001; the hub's are SPLIT-00000-of-00001.
        word = next(iter(_words(match[1], at_end=True)), match[1])
        found.setdefault(word, []).append(file)
    return found if any(_words(name) for name in found) else {}


def _by_folder(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    return _by_words((file, file.relative_to(folder).parts[:-1]) for file in files)


def _by_name(folder: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    return _by_words((file, (file.name,)) for file in files)


def _by_words(named: Iterable[tuple[Path, Sequence[str]]]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for file, names in named:
        for split in dict.fromkeys(word for name in names for word in _words(name)):
            found.setdefault(split, []).append(file)
    return {split: found[split] for split in WORDS if split in found}


def _words(name: str, at_end: bool = False) -> list[str]:
    """The splits of which a word stands in a name, between marks or digits."""
    end = "$" if at_end else r"(?=[-._ 0-9]|$)"
    return [
        split
        for split, words in WORDS.items()
        if re.search(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)}){end}", name, re.IGNORECASE)
    ]


# -- the README of a data set ---------------------------------------------------------------------


def _declared(folder: Path, files: Sequence[Path], config: str) -> dict[str, list[Path]]:
    """What the configuration of that name in the README says of the files; nothing without one."""
    chosen = _chosen(folder, config)
    named = _patterns(chosen.get("data_files"))
    base = folder / str(chosen.get("data_dir") or "")
    if "data_dir" in chosen and not named:
        below = [file for file in files if file.is_relative_to(base)]
        inside = _by_names(base, below, must_be_all=False).splits
        return {split: list(each) for split, each in inside.items()} or {DEFAULT: below}
    places = {file: file.relative_to(base).as_posix() for file in files if base in file.parents}
    found = {
        split: [file for file, place in places.items() if any(p.fullmatch(place) for p in patterns)]
        for split, patterns in named.items()
    }
    present = {split: held for split, held in found.items() if held}
    if named and not present:
        raise FileError(
            "the README of a data set names files that are not in its folder",
            where=f"{folder / 'README.md'}: configs",
            found="no file of " + ", ".join(named),
            expected="the data set as the hub has it",
            do="hf download OWNER/NAME --repo-type dataset --local-dir FOLDER",
        )
    return present


def _chosen(folder: Path, config: str) -> Mapping[str, Any]:
    """The configuration that is meant: that of the name, or the default, or the only one."""
    configs = {str(one.get("config_name", "default")): one for one in _configs(folder)}
    marked = [name for name, one in configs.items() if one.get("default") is True]
    names = [config] if config else [*marked, *(n for n in ("default", *configs) if n in configs)]
    if not config and len(configs) > 1 and not marked and "default" not in configs:
        names = []
    if names and names[0] in configs:
        return configs[names[0]]
    if not configs and not config:
        return {}
    first = next(iter(configs), "")
    raise RecipeError(
        f"the data set has no configuration {config!r}" if config else "which configuration?",
        where=f"data.source, {folder}",
        found=config or "no name, and several configurations in its README",
        expected="one of " + ", ".join(configs) if configs else "a folder without a name behind it",
        do=f"--data {folder}:{first}" if configs else f"--data {folder}",
    )


def _patterns(listed: Any) -> dict[str, list[re.Pattern[str]]]:
    """Patterns of paths by split, of the forms that `data_files` has."""
    found: dict[str, list[re.Pattern[str]]] = {}
    if isinstance(listed, Mapping):
        listed = [{"split": split, "path": path} for split, path in listed.items()]
    for one in listed if isinstance(listed, list) else [listed]:
        is_named = isinstance(one, Mapping)
        split = str(one.get("split", DEFAULT)) if is_named else DEFAULT
        paths = one.get("path") if is_named else one
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                found.setdefault(split, []).append(_pattern(path))
    return found


def _pattern(path: str) -> re.Pattern[str]:
    """A pattern of paths; that of a folder means all below it."""
    meant = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", path.removeprefix("./").rstrip("/"))
    words = (meant.get(p) or (p if p.startswith("[") else re.escape(p)) for p in parts)
    return re.compile("".join(words) + "(?:/.*)?")


def _configs(folder: Path) -> list[Mapping[str, Any]]:
    try:
        front = _FRONT.match(read_text(folder / "README.md", "utf-8-sig"))
        tree = parse_yaml(front[1], "README.md") if front is not None else None
    except (OSError, UnicodeDecodeError, RecipeError):
        return []
    configs = tree.get("configs") if isinstance(tree, Mapping) else None
    listed = configs if isinstance(configs, list) else []
    return [one for one in listed if isinstance(one, Mapping)]
