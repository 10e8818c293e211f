"""SpecctlError: every failure a user can cause states what, found, expected, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Self

LISTED = 12  # names that are taken in at a glance; of more, the command that lists them is named


class Exit(IntEnum):
    """Exit codes of the command line (docs: CLI reference)."""

    OK = 0
    BUG = 1
    USAGE = 2
    RECIPE = 3
    FILE = 4
    INCOMPATIBLE = 5
    RESOURCES = 6
    INTEGRITY = 7
    GATE = 8
    NETWORK = 9
    DIVERGED = 10
    INTERRUPTED = 75


class SpecctlError(Exception):
    """A failure with its remedy. `where` is file:field; `code` the exit code of the process."""

    exit: Exit = Exit.USAGE

    def __init__(
        self,
        what: str,
        *,
        found: str = "",
        expected: str = "",
        do: str = "",
        where: str = "",
        exit: Exit | None = None,
    ) -> None:
        self.what, self.found, self.expected, self.do, self.where = what, found, expected, do, where
        if exit is not None:
            self.exit = exit
        super().__init__(self.text())

    def text(self) -> str:
        parts = [self.what]
        if self.where:
            parts.append(f"in {self.where}")
        if self.found:
            parts.append(f"found: {self.found}")
        if self.expected:
            parts.append(f"expected: {self.expected}")
        if self.do:
            parts.append(f"do: {self.do}")
        return " | ".join(parts)


class RecipeError(SpecctlError):
    """The recipe or a --set value is not valid."""

    exit = Exit.RECIPE


class FileError(SpecctlError):
    """A file is missing, locked or unreadable."""

    exit = Exit.FILE


class IncompatibleError(SpecctlError):
    """Target and drafter do not belong together, or a target cannot be supported."""

    exit = Exit.INCOMPATIBLE


class ResourceError(SpecctlError):
    """Not enough memory, disk or devices."""

    exit = Exit.RESOURCES


class IntegrityError(SpecctlError):
    """A hash, a format or a security rule does not hold."""

    exit = Exit.INTEGRITY


class GateError(SpecctlError):
    """A measured threshold was missed."""

    exit = Exit.GATE


class NetworkError(SpecctlError):
    """The hub cannot be reached or refuses access."""

    exit = Exit.NETWORK


class DivergedError(SpecctlError):
    """Training produced NaN or Inf too often."""

    exit = Exit.DIVERGED


class RowsError(SpecctlError):
    """A round failed for some of its rows alone: `rows` are the indices of their requests, and the
    others may go on."""

    def __init__(
        self,
        what: str,
        *,
        found: str = "",
        expected: str = "",
        do: str = "",
        rows: tuple[int, ...] = (),
        exit: Exit | None = None,
    ) -> None:
        super().__init__(what, found=found, expected=expected, do=do, exit=exit)
        self.rows = rows

    def of_rows(self, rows: tuple[int, ...]) -> Self:
        """The same finding for other rows."""
        about = {"found": self.found, "expected": self.expected, "do": self.do}
        return type(self)(self.what, **about, rows=rows, exit=self.exit)


class NumbersError(RowsError):
    """The target's logits are NaN or infinite: nothing follows from them."""

    exit = Exit.INCOMPATIBLE


class BannedError(RowsError):
    """Bias, banned words, processors or a grammar leave no token that may come next."""


# What torch and its libraries say of an allocation that failed, where the type does not.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "could not create a primitive",  # oneDNN, whose descriptors and kernels did not fit
    "could not create a memory object",
    "DefaultCPUAllocator",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the host or on a device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _NO_MEMORY)


def alike(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known words most alike to `word`, best first; never `word` itself: what was refused is no
    remedy, also where it is known in another place. Every suggestion comes from here."""
    others = [name for name in dict.fromkeys(known) if name != word]
    return difflib.get_close_matches(word, others, n=count, cutoff=cutoff)


def nearest(word: str, known: Iterable[str], count: int = 3) -> str:
    """The known words nearest to `word`, for error messages; any of them rather than none."""
    names = [name for name in known if name != word]
    return ", ".join(alike(word, names, count, 0.3) or names[:count])


def write_instead(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown key: the nearest known one, or to leave it out where none is."""
    close = nearest(word, known)
    if not close:
        return f"leave {word} out"
    return f"write {close.split(', ')[0]} instead of {word}  (nearest: {close})"


def one_of(known: Iterable[str], listed: str) -> str:
    """What was expected where a name is unknown: the names, or by which command they are listed."""
    names = list(known)
    return f"one that `{listed}` lists" if len(names) > LISTED else "one of " + ", ".join(names)


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """The known names that a mistyped word is near to, as a question; `otherwise` without any."""
    names = [name for name in known if name != word]
    word = word.lower().strip()
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    close = close or [name for name in names if len(word) > 2 and word in name][:3]
    if not close:
        return otherwise
    *first, last = close
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"


def unknown(
    what: str,
    name: str,
    known: Iterable[str],
    where: str,
    listed: str = "",
    kind: type[SpecctlError] = RecipeError,
) -> SpecctlError:
    """The error for a name that is none of the known ones, at the key or flag `where`; `listed` is
    the command that shows them, where `where` is not a flag with few of them."""
    names = list(known)
    close = alike(name, names, cutoff=0.55) or ["NAME, one of those"]
    mark = "=" if where.startswith("--set ") else " "
    expected, do = "one of " + ", ".join(names), f"{where}{mark}{close[0]}"
    if listed:
        expected = one_of(names, listed)
        do = did_you_mean(name, names, f"`{listed}` shows what there is")
    what = f"unknown {what} {name!r}"
    return kind(what, where=where, found=name, expected=expected, do=do)


def one_of_two(what: str, found: str, do: str) -> SpecctlError:
    """The error for flags or arguments that exclude each other."""
    return SpecctlError(
        what, where="the command line", found=found, expected="one of the two", do=do
    )


def no_folder(path: Path, expected: str, do: str) -> FileError:
    """The error for a path that should be a folder and is a file, or nothing."""
    found = "a file" if path.exists() else "no such folder"
    return FileError(
        f"{path} is not a folder", where=str(path), found=found, expected=expected, do=do
    )


def unreadable(
    what: str, path: Path, error: Exception, where: str, expected: str, do: str
) -> FileError:
    """The error for a text file that could not be read, from what Python said of it."""
    state, found = "cannot be read", getattr(error, "strerror", None) or str(error)
    if isinstance(error, FileNotFoundError):
        state, found = "does not exist", "no such file"
    elif isinstance(error, UnicodeDecodeError):
        state, do = "is not UTF-8 text", f"{do}; if it is Latin-1: iconv -f latin1 -t utf-8 {path}"
    elif path.is_dir():
        found = "a folder"
    return FileError(f"{what} {path} {state}", where=where, found=found, expected=expected, do=do)
