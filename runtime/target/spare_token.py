"""A token that no text of a target contains: what stands for a place that is not known yet."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from specctl.core.spec import ModelSpec

# <|reserved_special_token_7|>, <unused7>, [unused7], [control_7], <SPECIAL_7>
_RESERVED = re.compile(r"[<\[]\|?(reserved|unused|control_|special_)\w*\d\|?[>\]]", re.IGNORECASE)
_NAMED = ("bos", "eos", "unk", "pad", "sep", "cls")  # roles that texts may give a token


def spare_token(tokenizer: Any, spec: ModelSpec, ends: Collection[int]) -> int | None:
    """A row of the embedding without a token, else a token that the tokenizer keeps in reserve,
    else the padding, where it ends nothing, else a special token that neither has a role nor stands
    in the chat template (of code sets: <empty_output>); None without any. Where a text contains it
    after all, that costs acceptance, never correctness."""
    ids: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if ids and max(ids.values()) < spec.vocab_size - 1:
        return spec.vocab_size - 1
    reserved = [number for word, number in ids.items() if _RESERVED.fullmatch(word)]
    if reserved:
        return max(reserved)
    if spec.pad_id is not None and spec.pad_id not in (spec.bos_id, *ends):
        return spec.pad_id
    return max(_idle(tokenizer, spec, ends), default=None) if ids else None


def _idle(tokenizer: Any, spec: ModelSpec, ends: Collection[int]) -> list[int]:
    """Special tokens without a role that the chat template does not write."""
    taken = {spec.bos_id, spec.pad_id, *ends}
    taken |= {getattr(tokenizer, f"{role}_token_id", None) for role in _NAMED}
    written = str(getattr(tokenizer, "chat_template", None) or "")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [
        number
        for number, token in added.items()
        if token.special and number not in taken and token.content not in written
    ]
