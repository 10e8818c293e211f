"""Text of this machine as token ids for pretraining: a tokenizer, the ids of both splits, rows.

The tokenizer is a byte-level BPE over Python text, with chat markers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specctl.core.errors import FileError, RecipeError
from specctl.core.storage.files import write_bytes
from specctl.images.codebook import Codebook
from specctl.recipes.targets import resolve
from specctl.runtime.target.templates.spoken_to import PRETRAINED_TEMPLATE
from specctl.train.data.rows.supply import Order
from specctl.train.data.sources.corpus import heldout_texts, training_texts
from specctl.train.pretrain.recipe import PretrainRecipe

Ids = npt.NDArray[np.uint16]

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
MOST_IDS = 2**16  # ids are kept in 16 bits
SPECIAL_TOKENS = [BOS, EOS, PAD, USER, ASSISTANT, END]

# Words with their leading space or underscore, up to three digits, runs of signs, runs of spaces:
# an indentation is one token, a newline never joins a word.
WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on `texts`; every byte string can be written in it."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT, END],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = PRETRAINED_TEMPLATE
    return tokenizer


def end_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that end a text: of a document, and of a turn where there is a chat template."""
    known = tokenizer.get_vocab()
    return [int(known[token]) for token in (EOS, END) if token in known]


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer saved in a folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def taken_tokenizer(recipe: PretrainRecipe) -> PreTrainedTokenizerFast:
    """The tokenizer of the target that the recipe names, an alias with files here or a folder."""
    name, size = recipe.data.tokenizer, recipe.model["vocab_size"]
    folder = resolve(str(name)).path
    if folder is None or not (folder / "tokenizer.json").is_file():
        raise RecipeError(
            "'data.tokenizer' of the pretraining recipe names no tokenizer",
            found=repr(name),
            expected="a target with tokenizer.json on this machine, e.g. tiny",
            do="name its folder, or leave the key out: a tokenizer is made then",
        )
    tokenizer = load_tokenizer(folder)
    if len(tokenizer) > size:
        raise RecipeError(
            "the model has too few words for its tokenizer",
            found=f"model.vocab_size {size:,}",
            expected=f"{len(tokenizer):,} or more, as the tokenizer of {name} has",
            do="enlarge model.vocab_size",
        )
    missing = [token for token in (BOS, EOS, END) if token not in tokenizer.get_vocab()]
    if missing or len(tokenizer) > MOST_IDS:
        raise RecipeError(
            f"the tokenizer of {name} cannot be taken for pretraining",
            where="data.tokenizer",
            found=f"{len(tokenizer):,} ids, without {' '.join(missing) or 'none missing'}",
            expected=f"at most {MOST_IDS:,} ids, with {BOS}, {EOS} and {END}, as of tiny",
            do="leave the key out: a tokenizer is made then",
        )
    return tokenizer


def check_kept(taken: PreTrainedTokenizerFast, out: Path) -> None:
    """Refuse ids in OUT that are of another tokenizer."""
    there = out / "tokenizer"
    if not (out / "train.bin").exists() or not (there / "tokenizer.json").exists():
        return
    kept = load_tokenizer(there).backend_tokenizer.to_str()
    if kept != taken.backend_tokenizer.to_str():
        raise FileError(
            f"{out} holds ids of another tokenizer",
            where="data.tokenizer",
            found=str(there),
            expected="the tokenizer that the recipe names, or none yet",
            do="choose another --out",
        )


def encode_documents(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], group: int = 256
) -> npt.NDArray[np.uint16]:
    """All documents as one row of ids: bos, text, eos, bos, text, eos, ..."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert len(tokenizer) <= MOST_IDS, f"{len(tokenizer)} ids do not fit in 16 bits"
    parts: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(texts), group):
        batch = tokenizer.backend_tokenizer.encode_batch(texts[start : start + group])
        parts += [np.array([bos, *encoding.ids, eos], dtype=np.uint16) for encoding in batch]
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class PretrainData:
    """A tokenizer and the ids of both splits, documents as bos ... eos; with a `codebook` they are
    pictures."""

    tokenizer: Any
    train: Ids
    heldout: Ids
    codebook: Codebook | None = None


def prepare_data(recipe: PretrainRecipe, out: Path) -> PretrainData:
    """Tokenizer and ids from OUT, made there from this machine's corpus where they are missing."""
    folder, data = out / "tokenizer", recipe.data
    if data.tokenizer is not None:
        taken = taken_tokenizer(recipe)
        check_kept(taken, out)
        taken.save_pretrained(folder)
    elif not (folder / "tokenizer.json").exists():
        sample = training_texts(data.tokenizer_bytes, data.seed + 1)
        config = recipe.model
        made = train_tokenizer(sample, config["vocab_size"], config["max_position_embeddings"])
        made.save_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    train, heldout = out / "train.bin", out / "heldout.bin"
    if not train.exists():
        texts = training_texts(data.limit_bytes, data.seed)
        write_bytes(train, encode_documents(tokenizer, texts).tobytes())
    if not heldout.exists():
        write_bytes(heldout, encode_documents(tokenizer, heldout_texts()).tobytes())
    return PretrainData(
        tokenizer, np.fromfile(train, dtype=np.uint16), np.fromfile(heldout, dtype=np.uint16)
    )


class PretrainRows:
    """Rows of seq_len + 1 neighbouring ids, in an endless order that depends on the seed alone."""

    def __init__(self, ids: Ids, seq_len: int, seed: int) -> None:
        self.num_rows, self.seq_len = (len(ids) - 1) // seq_len, seq_len
        self._ids, self._order = ids, Order(self.num_rows, seed)

    def take(self, first: int, count: int) -> Tensor:
        """Rows first .. first + count - 1 of the stream, int64, (count, seq_len + 1)."""
        picked = np.array(self._order.take(first, count))
        places = picked[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        return torch.from_numpy(self._ids[places].astype(np.int64))
