"""How many tokens a text has at least, so that one that cannot fit is refused before it is read.

Reading takes seconds for every few megabytes, and holds whoever waits for it. Where every byte of a
text is covered by a token, and the longest token covers B bytes, a text of n bytes has at least n/B
tokens. A tokenizer that may leave bytes out, or that has one token for any text that it does not
know, has no such B; nothing is said of its texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.runtime.cross_vocab.token_bytes import ALPHABET
from specctl.runtime.target.target import Target

# Steps before the model that keep every byte. NFC may make one letter of up to three, of as many
# bytes each.
KEEPING = {"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Sequence", "Split"}
NFC = 3


def least_tokens(tokenizer: Any, text: str) -> int:
    """So many tokens, at least, has the text; 0 where nothing can be said."""
    longest = bytes_per_token(tokenizer)
    return 0 if longest is None else -(-_num_bytes(tokenizer, text) // longest)


def check_room(target: Target, text: str) -> None:
    """Refuse a prompt that cannot fit the target's context however it is split."""
    context, longest = target.spec.max_positions, bytes_per_token(target.tokenizer)
    least = least_tokens(target.tokenizer, text)
    if longest is not None and least > context:
        raise SpecctlError(
            "the prompt does not fit the target's context",
            found=f"{len(text.encode()):,} bytes, which are at least {least:,} tokens",
            expected=f"at most {context:,} tokens, {context * longest:,} bytes",
            do="shorten the prompt, or choose a target with a longer context",
        )


@lru_cache(maxsize=8)
def bytes_per_token(tokenizer: Any) -> int | None:
    """The most bytes of a text that one token covers; None where there is no such number."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    if not all(_keeps(step) for step in steps):
        return None
    kinds, vocab = {step["type"] for step in steps}, tokenizer.get_vocab()
    is_byte_level = "ByteLevel" in kinds
    if is_byte_level:
        letters = set(ALPHABET)
    elif getattr(backend.model, "byte_fallback", False):
        letters = {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        return None
    if not letters <= set(vocab):
        return None
    spelled = vocab if not is_byte_level else set(tokenizer.get_added_vocab())
    sizes = [len(token.encode()) if token in spelled else len(token) for token in vocab]
    return max(sizes) * (NFC if "NFC" in kinds else 1)


def _num_bytes(tokenizer: Any, text: str) -> int:
    """Bytes that tokens must cover: added tokens may take in all the blanks beside them."""
    added = tokenizer.added_tokens_decoder.values()
    if any(token.lstrip or token.rstrip for token in added):
        text = "".join(text.split())
    return len(text.encode("utf-8", "surrogatepass"))


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or of a pre-tokenizer, those of sequences one by one."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        waiting += step.get("normalizers", []) + step.get("pretokenizers", [])
        yield step


def _keeps(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and len(step["content"].encode()) >= len(pattern.encode())
    return step["type"] in {*KEEPING, "NFC"} and step.get("behavior") != "Removed"
