"""The tokenizer that lies beside a checkpoint's weights, refused where it is not this model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.messages.foreign_calls import is_panic


def has_tokenizer(folder: Path) -> bool:
    """Whether the files of a tokenizer lie in a folder."""
    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    return any((folder / name).exists() for name in known)


def load_tokenizer(folder: Path, config: Any) -> Any:
    """The tokenizer of a folder, refused where it is not this model's."""
    if not has_tokenizer(folder):
        raise FileError(
            "the folder holds no tokenizer",
            expected="tokenizer.json beside the weights",
            do="copy tokenizer.json and tokenizer_config.json of the model into the folder",
            where=str(folder),
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        tokenizer.decode(tokenizer.encode("a"))  # settings of a wrong kind show in use only
    except BaseException as error:  # tokenizers raises plain Exception for a damaged file
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise IntegrityError(
            "the tokenizer cannot be read",
            found=str(error).split("\n")[0][:160],
            do="fetch the tokenizer files again",
            where=str(folder),
        ) from error
    # A text longer than the context is cut or refused where it is used: no warning beside that.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    _check_ids(tokenizer, config.get_text_config().vocab_size, folder)
    return tokenizer


def _check_ids(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Refuse another model's tokenizer. Tokens added behind the model's own are let pass (Gemma 3's
    image marker): the model never says them, and a text that spells one is refused or left out."""
    added = tokenizer.added_tokens_decoder
    top = max((i for i in tokenizer.get_vocab().values() if i not in added), default=-1)
    if top >= vocab_size:
        raise IncompatibleError(
            "the tokenizer has ids that the model lacks",
            found=f"token id {top:,}",
            expected=f"ids below {vocab_size:,}",
            do="use the tokenizer that belongs to these weights",
            where=str(folder),
        )
