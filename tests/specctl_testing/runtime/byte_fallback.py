"""A tokenizer with byte fallback, as Llama 2 has it."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast


def byte_fallback_tokenizer():
    """As Llama 2 has it: words with a mark for the space in front, and bytes for all the rest."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "\u2581",
        *"abcdefghijklmnopqrstuvwxyz",
        "\u2581wor",
        "ds",
        "\u2581end",
        "\u2581th",
        "en",
    ]
    merges = [("\u2581", "wor")][:0]
    model = models.BPE(
        {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
