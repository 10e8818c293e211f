"""Token ids for pre-training: made once from the corpus, kept in OUT, cut into rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specctl.train.data.corpus import heldout_texts, training_texts
from specctl.train.data.tokenizer import encode_documents, load_tokenizer, train_tokenizer
from specctl.train.pretrain.recipe import PretrainRecipe

Ids = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class PretrainData:
    """A tokenizer and the ids of both splits, documents as bos ... eos."""

    tokenizer: Any
    train: Ids
    heldout: Ids


def _write_ids(path: Path, ids: Ids) -> None:
    partial = path.with_name(path.name + ".partial")
    ids.tofile(partial)
    os.replace(partial, path)


def prepare_data(recipe: PretrainRecipe, out: Path) -> PretrainData:
    """Tokenizer and ids from OUT, made there from this machine's corpus where they are missing."""
    folder, data = out / "tokenizer", recipe.data
    if not (folder / "tokenizer.json").exists():
        sample = training_texts(data.tokenizer_bytes, data.seed + 1)
        config = recipe.model
        made = train_tokenizer(sample, config["vocab_size"], config["max_position_embeddings"])
        made.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    train, heldout = out / "train.bin", out / "heldout.bin"
    if not train.exists():
        _write_ids(train, encode_documents(tokenizer, training_texts(data.limit_bytes, data.seed)))
    if not heldout.exists():
        _write_ids(heldout, encode_documents(tokenizer, heldout_texts()))
    return PretrainData(
        tokenizer, np.fromfile(train, dtype=np.uint16), np.fromfile(heldout, dtype=np.uint16)
    )


def rows_of_phase(data: PretrainData, recipe: PretrainRecipe, is_decaying: bool) -> PretrainRows:
    """The training rows before or during the decay; the two orders are independent."""
    train, seed = recipe.train, recipe.data.seed
    if is_decaying:
        return PretrainRows(data.train, train.decay_seq_len, seed + 1)
    return PretrainRows(data.train, train.seq_len, seed)


class PretrainRows:
    """Rows of seq_len + 1 neighbouring ids, in an endless order that depends on the seed alone.

    Every epoch is one permutation of all rows, so that a resumed run needs only a row number.
    """

    def __init__(self, ids: Ids, seq_len: int, seed: int) -> None:
        self.num_rows = (len(ids) - 1) // seq_len
        assert self.num_rows > 0, f"{len(ids)} ids are less than one row of {seq_len} + 1"
        self.seq_len = seq_len
        self._ids, self._seed = ids, seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def take(self, first: int, count: int) -> Tensor:
        """Rows first .. first + count - 1 of the stream, int64, (count, seq_len + 1)."""
        picked = np.array([self._row(index) for index in range(first, first + count)])
        places = picked[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return torch.from_numpy(self._ids[places].astype(np.int64))

    def _row(self, index: int) -> int:
        epoch, place = divmod(index, self.num_rows)
        if self._epoch != epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)
            self._epoch = epoch
        return int(self._order[place])
