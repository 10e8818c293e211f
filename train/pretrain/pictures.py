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
from specctl.core.storage.diffusion_kinds import diffusion_kind
from specctl.core.storage.files import write_bytes
from specctl.images.codebook import CODEBOOK, Codebook, has_codebook
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
        data.codebook.save_with_target(export)


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
    check_kept(out, folder, "tokens", len(tokenizer), FIRST_CODE + images.codes)
    if not has_codebook(out):
        pictures, _ = digits(min(images.pictures, LEARNED_FROM), size, seed)
        Codebook.learned(pictures, images.codes, images.side, FIRST_CODE, seed).save(out)
    codebook = Codebook.load(out)
    kept = f"{codebook.grid} x {codebook.grid} patches with {codebook.side} pixels a side"
    check_kept(out, out / CODEBOOK, "codes", len(codebook.patch_KX), images.codes)
    wanted = f"{images.grid} x {images.grid} patches with {images.side} pixels a side"
    check_kept(out, out / CODEBOOK, "pictures", kept, wanted)
    parts = {"train": (images.pictures, seed), "heldout": (images.heldout, seed + HELDOUT_SEED)}
    ids: dict[str, Ids] = {}
    for name, (count, part_seed) in parts.items():
        path = out / f"{name}.bin"
        if not path.exists():
            made = documents(codebook, *digits(count, size, part_seed))
            write_bytes(path, made.tobytes())
        ids[name] = np.fromfile(path, dtype=np.uint16)
        check_kept(out, path, "ids", len(ids[name]), count * (images.grid**2 + 2))
    return PretrainData(tokenizer, ids["train"], ids["heldout"], codebook)


def check_kept(out: Path, path: Path, what: str, found: int | str, expected: int | str) -> None:
    """Refuse what lies in OUT from another recipe."""
    if found != expected:
        raise FileError(
            f"{out} holds the {what} of another recipe",
            where=str(path),
            found=str(found),
            expected=f"{expected}, or no such file yet",
            do="choose another --out",
        )


def documents(codebook: Codebook, pictures: Pixels, shown: np.ndarray) -> Ids:
    """All pictures as one row of ids: digit, codes, end, digit, codes, end, ..."""
    codes = codebook.encode(pictures)
    ends = np.ones((len(codes), 1), dtype=np.int64)
    return np.concatenate([FIRST_CLASS + shown[:, None], codes, ends], 1).astype(np.uint16).ravel()


def check_sizes(recipe: PretrainRecipe, images: ImageRecipe) -> None:
    """Refuse rows that are no whole picture, and a model with another number of tokens, without
    room for a picture, or that does not write from left to right."""
    train, length = recipe.train, images.grid**2 + 2
    if (kind := diffusion_kind(recipe.model)) is not None:
        raise RecipeError(
            "pictures are learned by causal models alone",
            where="images",
            found=f"model_type {kind}",
            expected="a causal model, as in recipes/tiny-digits.yaml",
            do="leave out the section",
        )
    if (most := recipe.model.get("max_position_embeddings", 0)) < length:
        raise RecipeError(
            "the model has no room for a picture",
            where="model.max_position_embeddings",
            found=str(most),
            expected=f"{length} or more: the digit, the codes and the end",
            do=f"write max_position_embeddings: {length}",
        )
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
