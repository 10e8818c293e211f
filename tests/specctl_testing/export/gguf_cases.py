"""Small tokenizers of the kinds that llama.cpp knows."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPACE = "\u2581"
SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
BLANK = "\u0120"  # how bytes of BPE show a blank
# In this order, so that text of the probes is joined in some places and not in others.
MERGES = [
    *(("t", "h"), ("th", "e"), (BLANK, "t"), (BLANK, "a"), ("r", "e"), ("h", "e"), ("'", "t")),
    *(("'", "l"), ("'l", "l"), ("l", "l"), ("e", "l"), ("1", "4"), ("3", "6"), ("36", "5")),
    *((BLANK, BLANK), ("'t", "e"), (BLANK, "'"), ("'", "L"), ("'L", "L"), ("1", "2"), ("12", "3")),
]


def fast(backend: Tokenizer) -> Any:
    backend.add_special_tokens([text for text in SPECIAL if backend.token_to_id(text) is None])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )


def byte_tokenizer(
    split: str | None = LLAMA3, digits: bool = False, ignore_merges: bool = False
) -> Any:
    """BPE over bytes behind a split by that regular expression, or GPT-2's."""
    texts = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    texts += [left + right for left, right in MERGES]
    vocab = {text: number for number, text in enumerate(texts)}
    backend = Tokenizer(models.BPE(vocab, MERGES, ignore_merges=ignore_merges))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return fast(backend)


PIECES = ("th", "the", f"{SPACE}the", "er", "re", f"{SPACE}a", "in", "ing", f"{SPACE}{SPACE}")


def piece_tokenizer(style: str = "prepend", pieces: tuple[str, ...] = PIECES) -> Any:
    """BPE with byte fallback as sentencepiece's tokenizers become: every pair that forms a piece is
    a merge, in the order of the pieces."""
    letters = [SPACE, *"abcdefghijklmnopqrstuvwxyz0123456789.,'"]
    texts = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *pieces]
    vocab = {text: number for number, text in enumerate(texts)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    blanks = normalizers.Replace(" ", SPACE)
    if style == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), blanks])
    elif style == "replace":
        backend.normalizer = blanks
    elif style == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=False)
    elif style == "words":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first", split=True)
    return fast(backend)
