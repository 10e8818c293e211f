"""Corpus: texts that a drafter retrieves from, end to end, and the drafters that hold one.

A package stores the corpus as a tensor beside its manifest, which names tokenizer and target: so it
is written whole or not at all, hashed, and refused by any other pair.
Letters: R flat rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IntegrityError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap

BREAK = -1  # stands behind every text; no token has this id
Ids32 = npt.NDArray[np.int32]


def joined(texts: Iterable[Sequence[int]]) -> Ids32:
    """The texts end to end, each with a break behind it; empty ones are left out."""
    return np.array([i for text in texts if len(text) for i in (*text, BREAK)], dtype=np.int32)


class CorpusDrafter(Drafter):
    """A training-free drafter that may hold a corpus; `index` is called whenever it changes."""

    holds_data = True
    max_tokens: ClassVar[int] = (1 << 31) - 1

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self.corpus_R: Ids32 = joined([])
        self.index()

    def index(self) -> None:
        """Make ready to be searched what `corpus_R` holds."""

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None:
        """Retrieve from these texts (token ids) from now on; states of the target are not kept."""
        self.load_tensors({"corpus": torch.from_numpy(joined(texts))})

    def tensors(self) -> dict[str, Tensor]:
        return {"corpus": torch.from_numpy(self.corpus_R)} if len(self.corpus_R) else {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            return
        corpus = tensors.get("corpus")
        if corpus is None or len(tensors) > 1 or corpus.dtype != torch.int32 or corpus.dim() != 1:
            raise _damaged(", ".join(sorted(tensors)), "one int32 vector, corpus")
        ids_R = corpus.cpu().numpy()
        if len(ids_R) and not BREAK <= ids_R.min() <= ids_R.max() < self.spec.vocab_size:
            raise _damaged(
                f"ids {ids_R.min()} to {ids_R.max()}", f"0 to {self.spec.vocab_size - 1}"
            )
        if len(ids_R) > self.max_tokens:
            raise RecipeError(
                f"the texts are too long for family {self.family}",
                found=f"{len(ids_R):,} tokens",
                expected=f"at most {self.max_tokens:,}",
                do="take fewer texts, or family rest, which searches large stores",
            )
        self.corpus_R = ids_R
        self.index()


def _damaged(found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        "this is no corpus of this target",
        found=found,
        expected=expected,
        do="build the store again",
    )
