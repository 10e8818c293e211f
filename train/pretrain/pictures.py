"""Pre-training of a target whose tokens are pictures: rendered digits as grids of a codebook.

A document is the digit's token, the picture's codes in raster order, and the end of text; all have
the same length, which is that of a row, so that every row is one picture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specctl.core.errors import FileError, RecipeError
from specctl.images.codebook import Codebook, has_codebook
from specctl.images.digits import CLASSES, Pixels, digits
from specctl.train.pretrain.data import EOS, PAD, Ids, PretrainData, load_tokenizer
from specctl.train.pretrain.recipe import ImageRecipe, PretrainRecipe

FIRST_CLASS = 2  # behind padding and the end of text
FIRST_CODE = FIRST_CLASS + CLASSES
HELDOUT_SEED = 1_000_003  # added to the seed of what is learned from
LEARNED_FROM = 1000  # pictures of which the codebook is made


def image_tokenizer(codes: int, max_length: int) -> PreTrainedTokenizerFast:
    """Words with spaces between: 0 to 9 name what is shown, v0, v1, ... are patches; any other word
    is padding."""
    words = [PAD, EOS, *map(str, range(CLASSES)), *(f"v{code}" for code in range(codes))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def save_codebook(data: PretrainData, export: Path) -> None:
    """Write the codebook beside the weights, where the data are pictures."""
    if data.codebook is not None:
        data.codebook.save(export)


def prepare_pictures(recipe: PretrainRecipe, out: Path) -> PretrainData:
    """Tokenizer, codebook and ids from OUT, made there where they are missing."""
    images = recipe.images
    assert images is not None, "a recipe of pictures"
    check_sizes(recipe, images)
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        most = recipe.model["max_position_embeddings"]
        image_tokenizer(images.codes, most).save_pretrained(folder)
    seed, size = recipe.data.seed, images.grid * images.side
    tokenizer = load_tokenizer(folder)
    if (known := len(tokenizer)) != FIRST_CODE + images.codes:
        raise FileError(
            f"{out} holds the tokens of another recipe",
            where=str(folder),
            found=f"{known:,} tokens",
            expected=f"{FIRST_CODE + images.codes:,}, or no tokenizer yet",
            do="choose another --out",
        )
    if not has_codebook(out):
        pictures, _ = digits(min(images.pictures, LEARNED_FROM), size, seed)
        Codebook.learned(pictures, images.codes, images.side, FIRST_CODE, seed).save(out)
    codebook = Codebook.load(out)
    parts = {"train": (images.pictures, seed), "heldout": (images.heldout, seed + HELDOUT_SEED)}
    ids: dict[str, Ids] = {}
    for name, (count, part_seed) in parts.items():
        path = out / f"{name}.bin"
        if not path.exists():
            documents(codebook, *digits(count, size, part_seed)).tofile(path)
        ids[name] = np.fromfile(path, dtype=np.uint16)
    return PretrainData(tokenizer, ids["train"], ids["heldout"], codebook)


def documents(codebook: Codebook, pictures: Pixels, shown: np.ndarray) -> Ids:
    """All pictures as one row of ids: digit, codes, end, digit, codes, end, ..."""
    codes = codebook.encode(pictures)
    ends = np.ones((len(codes), 1), dtype=np.int64)
    return np.concatenate([FIRST_CLASS + shown[:, None], codes, ends], 1).astype(np.uint16).ravel()


def check_sizes(recipe: PretrainRecipe, images: ImageRecipe) -> None:
    """Refuse rows that are no whole picture, and a model with another number of tokens."""
    train, length = recipe.train, images.grid**2 + 2
    tokens = FIRST_CODE + images.codes
    wrong = [
        ("train.seq_len", train.seq_len, length),
        ("train.decay_seq_len", train.decay_seq_len, length),
        ("model.vocab_size", recipe.model.get("vocab_size"), tokens),
    ]
    for name, found, expected in wrong:
        if found != expected:
            raise RecipeError(
                "the recipe's sizes are not those of its pictures",
                where=name,
                found=str(found),
                expected=f"{expected}: a row is a picture, {FIRST_CODE} tokens are no codes",
                do=f"write {name.split('.')[1]}: {expected}",
            )
