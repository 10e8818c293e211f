"""VocabMap: which target ids a trimmed draft head covers, in the EAGLE-3 convention.

`d2t` is an offset table (target id = i + d2t[i]), `t2d` a mask over the target vocabulary; rows of
a trimmed head stand in ascending target-id order. V target vocabulary, K kept ids.
Letters: K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.core.forward.only_shapes import has_only_shapes


@dataclass(frozen=True, slots=True)
class VocabMap:
    """Kept target ids, strictly ascending int64 [K], of a target vocabulary of `target_size`."""

    ids_K: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.ids_K
        if ids.dtype != torch.long or ids.dim() != 1 or ids.numel() == 0:
            raise SpecctlError(
                "vocabulary map is not a non-empty int64 vector",
                found=f"{ids.dtype} of shape {tuple(ids.shape)}",
                expected="int64 of shape [K]",
                do="rebuild it with `specctl vocab-trim`",
            )
        if ids.is_meta or has_only_shapes():
            return
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.target_size:
            raise SpecctlError(
                "vocabulary map is not ascending inside the target vocabulary",
                found=f"ids {int(ids.min())}..{int(ids.max())} for {self.target_size:,} target ids",
                expected="strictly ascending target ids",
                do="rebuild it with `specctl vocab-trim`",
            )

    @property
    def size(self) -> int:
        return self.ids_K.numel()

    @property
    def is_prefix(self) -> bool:
        """Whether the kept ids are the first ones, all of them: only padding was cut."""
        if self.ids_K.is_meta or has_only_shapes():
            return False
        return int(self.ids_K[-1]) == self.size - 1

    def d2t(self) -> Tensor:
        """int64 [K] offsets: target id = i + d2t[i]."""
        return self.ids_K - torch.arange(self.size, device=self.ids_K.device)

    def t2d(self) -> Tensor:
        """bool [V]: True where the target id is kept."""
        mask_V = torch.zeros(self.target_size, dtype=torch.bool, device=self.ids_K.device)
        mask_V[self.ids_K] = True
        return mask_V

    def to_draft(self) -> Tensor:
        """int64 [V]: draft row of each target id, -1 where it was cut."""
        row_V = torch.full((self.target_size,), -1, dtype=torch.long, device=self.ids_K.device)
        row_V[self.ids_K] = torch.arange(self.size, device=self.ids_K.device)
        return row_V

    def to(self, device: torch.device) -> VocabMap:
        return VocabMap(self.ids_K.to(device), self.target_size)

    def digest(self) -> str:
        """sha256 over the target size and the kept ids."""
        body = self.ids_K.cpu().numpy().astype("<i8").tobytes()
        return hashlib.sha256(f"{self.target_size}:".encode() + body).hexdigest()

    @classmethod
    def from_d2t(cls, d2t_K: Tensor, target_size: int) -> VocabMap:
        return cls(d2t_K.long() + torch.arange(d2t_K.numel(), device=d2t_K.device), target_size)
