"""Codebook: a picture as a grid of tokens, each the nearest of K patches found by k-means.

It lies beside the weights of the target whose tokens these are (`codebook.safetensors`), so that a
grid can be shown as a picture. The patches are the plainest of vector quantisers: pixels
themselves, no encoder.
Letters: B rows, K draft vocabulary, L positions, Q picked rows, X any axes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from specctl.core.errors import FileError, IncompatibleError
from specctl.core.storage.bounded_read import read_text
from specctl.core.storage.files import write_bytes, write_json
from specctl.core.storage.model_folder import CONFIG
from specctl.images.digits import Floats, Pixels

CODEBOOK = "codebook.safetensors"
DIGEST = "codebook_sha256"  # in the target's config.json: the codebook that its tokens are of
SAMPLE, TURNS = 20_000, 25  # patches that k-means reads, and its iterations
MOST_SIZE = 4096  # pixels along a side of a picture
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Codebook:
    """`patch_KX` float32 [K, side * side] in 0 .. 255; a picture is `grid` x `grid` patches, and
    code k is token `first_id` + k of the target."""

    patch_KX: npt.NDArray[np.float32]
    grid: int
    first_id: int

    @property
    def side(self) -> int:
        """Pixels along a patch."""
        return math.isqrt(self.patch_KX.shape[1])

    @property
    def num_tokens(self) -> int:
        """Tokens of a picture."""
        return self.grid**2

    @classmethod
    def learned(cls, pictures: Pixels, codes: int, side: int, first_id: int, seed: int) -> Self:
        """k-means over the patches of pictures [B, size, size]; `codes` of them."""
        patch_LX = patches(pictures, side).reshape(-1, side * side)
        random = np.random.default_rng(seed)
        patch_LX = patch_LX[random.permutation(len(patch_LX))[:SAMPLE]]
        distinct_LX = np.unique(patch_LX, axis=0)
        if len(distinct_LX) < codes:
            raise IncompatibleError(
                "the pictures have too few different patches for the codebook",
                where="images.codes",
                found=f"{len(distinct_LX)} patches",
                expected=f"{codes} or more",
                do="lower images.codes, or raise images.pictures",
            )
        centre_KX = distinct_LX[random.permutation(len(distinct_LX))[:codes]]
        for _ in range(TURNS):
            code_L = nearest(patch_LX, centre_KX)
            for code in np.unique(code_L):
                centre_KX[code] = patch_LX[code_L == code].mean(0)
        return cls(centre_KX.astype(np.float32), pictures.shape[1] // side, first_id)

    def encode(self, pictures: Pixels) -> Codes:
        """Token ids [B, L] of pictures [B, size, size], in raster order."""
        patch_BLX = patches(pictures, self.side)
        code_L = nearest(patch_BLX.reshape(-1, patch_BLX.shape[-1]), self.patch_KX)
        return self.first_id + code_L.reshape(len(pictures), -1)

    def decode(self, ids: Sequence[int]) -> tuple[Pixels, int]:
        """The picture [size, size] of a grid's tokens in raster order, and how many of its places
        have none: those behind the last token, and those with a token that is no patch; they are
        black."""
        picture_LX = np.zeros((self.num_tokens, self.side**2))
        missing = self.num_tokens
        for place, token in enumerate(ids[: self.num_tokens]):
            if 0 <= token - self.first_id < len(self.patch_KX):
                picture_LX[place] = self.patch_KX[token - self.first_id]
                missing -= 1
        rows = picture_LX.reshape(self.grid, self.grid, self.side, self.side)
        size = self.grid * self.side
        pixels = rows.transpose(0, 2, 1, 3).reshape(size, size)
        return pixels.round().clip(0, 255).astype(np.uint8), missing

    @property
    def digest(self) -> str:
        """SHA-256 of the patches and of what their tokens are."""
        words = f"{self.grid} {self.first_id} {list(self.patch_KX.shape)} "
        return hashlib.sha256(words.encode() + self.patch_KX.tobytes()).hexdigest()

    def save_with_target(self, folder: Path) -> None:
        """Write it beside a target, and its digest into the target's config.json, so that another
        codebook of the same sizes is refused there."""
        self.save(folder)
        write_json(folder / CONFIG, {**_config(folder), DIGEST: self.digest})

    def save(self, folder: Path) -> None:
        """Write it into the folder of its target, whole or not at all."""
        words = {"grid": str(self.grid), "first_id": str(self.first_id)}
        write_bytes(folder / CODEBOOK, save({"patches": self.patch_KX}, metadata=words))

    def check_target(self, name: str, vocab_size: int) -> None:
        """Refuse a target that lacks some of these tokens: it is that of another one."""
        if self.first_id + len(self.patch_KX) > vocab_size:
            raise IncompatibleError(
                "the codebook is that of another target",
                where=CODEBOOK,
                found=f"tokens up to {self.first_id + len(self.patch_KX) - 1:,}",
                expected=f"at most {vocab_size - 1:,}, the last token of {name}",
                do="name the folder that specctl pretrain wrote with --target",
            )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """The codebook of a target's folder. Raises FileError where there is none, or where it is
        another file than `save` writes, IncompatibleError where the target names another one."""
        path = folder / CODEBOOK
        try:
            with safe_open(path, framework="np") as file:
                words, patch_KX = file.metadata() or {}, file.get_tensor("patches")
            made = cls(patch_KX.astype(np.float32), int(words["grid"]), int(words["first_id"]))
            is_whole = patch_KX.ndim == 2 and made.side**2 == patch_KX.shape[1]
            is_whole &= min(len(patch_KX), made.grid, made.side) >= 1
            is_whole &= made.grid * made.side <= MOST_SIZE
            is_whole &= made.first_id >= 0 and bool(np.isfinite(made.patch_KX).all())
        except (OSError, SafetensorError, KeyError, ValueError, IndexError, TypeError) as error:
            raise _unread(path, f"{type(error).__name__}: {error}"[:120]) from error
        if not is_whole:
            raise _unread(path, f"patches {list(patch_KX.shape)}, {words}"[:120])
        if (named := _config(folder).get(DIGEST, made.digest)) != made.digest:
            raise IncompatibleError(
                "the codebook is that of another target",
                where=str(path),
                found=f"SHA-256 {made.digest[:12]}",
                expected=f"{str(named)[:12]}, which {CONFIG} beside it names",
                do="copy the codebook that was trained with these weights, or run specctl "
                "pretrain again",
            )
        return made


def _config(folder: Path) -> dict[str, Any]:
    """The target's config.json; nothing where none can be read."""
    try:
        found = json.loads(read_text(folder / CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def has_codebook(folder: Path | None) -> bool:
    """Whether a target's folder holds one."""
    return folder is not None and (folder / CODEBOOK).is_file()


def patches(pictures: Pixels, side: int) -> Floats:
    """[B, L, side * side]: the patches of pictures [B, size, size] in raster order."""
    count, size = len(pictures), pictures.shape[1] // side
    cut = pictures.reshape(count, size, side, size, side).transpose(0, 1, 3, 2, 4)
    return cut.reshape(count, size * size, side * side).astype(np.float64)


def nearest(patch_LX: Floats, centre_KX: npt.NDArray[np.floating]) -> Codes:
    """[L]: the number of the nearest of K centres."""
    found = [
        ((centre_KX**2).sum(1) - 2 * part @ centre_KX.T).argmin(1)
        for part in np.array_split(patch_LX, len(patch_LX) // 4096 + 1)
    ]
    return np.concatenate(found)


def _unread(path: Path, found: str) -> FileError:
    return FileError(
        "the target has no codebook of image tokens",
        where=str(path),
        found=found,
        expected="a file that specctl pretrain --recipe tiny-digits writes beside the weights",
        do="name such a folder with --target: docs/images-out.md",
    )
