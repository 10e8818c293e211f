"""A token that no text of a target contains: what stands for a place that is not known yet."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from specctl.core.spec import ModelSpec

# <|reserved_special_token_7|>, <unused7>, [unused7], [control_7], <SPECIAL_7>
_RESERVED = re.compile(r"[<\[]\|?(reserved|unused|control_|special_)\w*\d\|?[>\]]", re.IGNORECASE)
_ROLES = re.compile(r"system|user|assistant|tool|developer|human|observation|role", re.IGNORECASE)
_NAMED = ("bos", "eos", "unk", "pad", "sep", "cls")  # roles that texts may give a token


def spare_token(tokenizer: Any, spec: ModelSpec, ends: Collection[int]) -> int | None:
    """A row of the embedding without a token, else a token that the tokenizer keeps in reserve,
    else the padding, where it ends nothing, else a special token that neither has a role nor stands
    in the chat template (of code sets: <empty_output>); None without any. Where a text contains it
    after all, that costs acceptance, never correctness."""
    ids: dict[str, int] = {} if tokenizer is None else tokenizer.get_vocab()
    if ids and max(ids.values()) < spec.vocab_size - 1:
        return spec.vocab_size - 1
    written, taken = _template(tokenizer), {spec.bos_id, *ends}
    reserved = [
        number
        for word, number in ids.items()
        if _RESERVED.fullmatch(word)
        and number < spec.vocab_size
        and number not in taken
        and word not in written
    ]
    if reserved:
        return max(reserved)
    if _is_padding(tokenizer, spec) and spec.pad_id not in taken:
        return spec.pad_id
    return max(_idle(tokenizer, spec, ends), default=None) if ids else None


def _template(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def _is_padding(tokenizer: Any, spec: ModelSpec) -> bool:
    """Whether the padding of the configuration is a row of the embedding, and not a word: some
    configurations say -1, or 0 where that is an ordinary token of the tokenizer."""
    pad = spec.pad_id
    if pad is None or not 0 <= pad < spec.vocab_size:
        return False
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if not added or pad == getattr(tokenizer, "pad_token_id", None):
        return True
    return pad in added and bool(added[pad].special)


def _idle(tokenizer: Any, spec: ModelSpec, ends: Collection[int]) -> list[int]:
    """Special tokens without a role that the chat template does not write, neither as they are nor
    around the name of whoever speaks ('<|' + message.role + '|>')."""
    taken = {spec.bos_id, spec.pad_id, *ends}
    taken |= {getattr(tokenizer, f"{role}_token_id", None) for role in _NAMED}
    written = _template(tokenizer)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return [
        number
        for number, token in added.items()
        if token.special
        and number < spec.vocab_size
        and number not in taken
        and token.content not in written
        and not _ROLES.search(token.content)
    ]
