"""Hidden states in safetensors files, as vLLM's hidden-state connector writes them.

A file holds `hidden_states` [N, K, D] and `token_ids` [N] of one text, whatever its name. The file
of a text is the one whose ids begin with it: states look back only, so a longer text will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.core.errors import FileError, IntegrityError

KEY_TOKENS = 16  # by which the files of a text are looked up
STATES, IDS = "hidden_states", "token_ids"


class StateFiles:
    """The files of a folder and of those in it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser()
        self._files: dict[tuple[int, ...], list[Path]] = {}
        for path in sorted(self.folder.rglob("*.safetensors")):
            ids = read_ids(path)
            for count in range(1, min(len(ids), KEY_TOKENS) + 1):
                if count == KEY_TOKENS or count == len(ids):
                    self._files.setdefault(tuple(ids[:count]), []).append(path)
        if not self._files:
            raise FileError(
                "no files of hidden states here",
                where="data.states",
                found=str(self.folder),
                expected=f"safetensors files with {STATES} and {IDS}",
                do="write them with an engine (docs/multi-gpu.md), or give another folder",
            )

    def states(self, texts: Sequence[tuple[int, ...]], layers: tuple[int, ...]) -> list[Tensor]:
        return [self._of(text, layers) for text in texts]

    def _of(self, text: tuple[int, ...], layers: tuple[int, ...]) -> Tensor:
        key = text[:KEY_TOKENS]
        for path in self._candidates(key):
            if tuple(read_ids(path)[: len(text)]) == text:
                return checked(path, len(text), layers)
        raise FileError(
            "no file holds the states of a text",
            where=str(self.folder),
            found=f"a text of {len(text):,} tokens that begins with {list(text[:8])}",
            expected="a file whose token_ids begin with it",
            do="write the states of the very rows: --set data.target_source=endpoint, or train on "
            "the answers whose states these are",
        )

    def _candidates(self, key: tuple[int, ...]) -> list[Path]:
        if len(key) == KEY_TOKENS:
            return self._files.get(key, [])
        return [p for ids, paths in self._files.items() if ids[: len(key)] == key for p in paths]


def read_ids(path: Path) -> list[int]:
    """The text of a file."""
    try:
        with safe_open(path, framework="pt") as file:
            found: list[int] = file.get_tensor(IDS).tolist()
            return found
    except (SafetensorError, OSError, KeyError) as error:
        raise _damaged(path, str(error).split("\n")[0][:160]) from error


def checked(path: Path, count: int, layers: tuple[int, ...]) -> Tensor:
    """The states [count, K, D] of a file's first tokens."""
    try:
        with safe_open(path, framework="pt") as file:
            states: Tensor = file.get_tensor(STATES)
    except (SafetensorError, OSError) as error:
        raise _damaged(path, str(error).split("\n")[0][:160]) from error
    if states.ndim != 3 or states.shape[1] != len(layers) or len(states) < count:
        raise IntegrityError(
            "a file of hidden states holds others than the drafter needs",
            where=str(path),
            found=f"{STATES} of shape {list(states.shape)}",
            expected=f"{count} tokens or more, {len(layers)} states each: of layers {list(layers)}",
            do=f'start the engine with "eagle_aux_hidden_state_layer_ids": {list(layers)}',
        )
    return states[:count]


def _damaged(path: Path, found: str) -> IntegrityError:
    return IntegrityError(
        "a file of hidden states cannot be read",
        where=str(path),
        found=found,
        expected=f"a safetensors file with {STATES} and {IDS}",
        do="delete it and have it written again",
    )
