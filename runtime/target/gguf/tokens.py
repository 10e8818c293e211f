"""The tokenizer in a GGUF file, as a tokenizer of transformers, and where its texts end.

Byte-level BPE (`gpt2`) is read; how text is split in front of it is a name that must be known
(`pretokenizers.py`), since another split makes other tokens without an error. Control tokens and
those that were added by users are found whole. Every other kind of tokenizer is refused.
llama.cpp ends texts at what the file names and at any token that is spelled like a known end
(src/llama-vocab.cpp), as converters often name one end of several; so are they here, but for
words that are ordinary text to the tokenizer, such as Qwen's `</s>`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specctl.core.errors import IncompatibleError
from specctl.core.messages.foreign_calls import is_panic
from specctl.core.storage.gguf_header import GgufHeader
from specctl.runtime.target.folders.tokenizer_files import TokenizerFiles
from specctl.runtime.target.gguf.pretokenizers import Pre, pre_named
from specctl.runtime.target.templates.ends import GGUF, SPELLING, EndsOfText, NamedEnds, united

FIELD = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)
WHOLE = (UNKNOWN, CONTROL, USER_DEFINED)  # types that are found whole in a text
NAMES = {  # of transformers -> of the file
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
ENDS = ("eos", "eot", "eom")
# Spellings that nothing but an end has, and those that are words where their type is none of WHOLE.
SURE_ENDS = frozenset(
    [
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>",
        "<|end_of_text|>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "<|return|>", "<|call|>",
    ]
)  # fmt: skip
LIKELY_ENDS = frozenset(["</s>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"])
OTHER_KINDS = {
    "llama": "sentencepiece's",
    "gemma4": "Gemma 4's",
    "bert": "WordPiece",
    "t5": "unigram",
    "rwkv": "RWKV's",
}
ELSEWHERE = "give the folder of safetensors that the file was made from, which has its tokenizer"


def tokenizer_of(header: GgufHeader) -> Any:
    """The tokenizer of transformers. IncompatibleError for a kind, or a split, that is not read."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(
        tokenizer_object=_backend(header),
        clean_up_tokenization_spaces=False,
        **_special(header),
    )
    found.chat_template = _template(header)
    found.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return found


def tokens_in(header: GgufHeader) -> TokenizerFiles:
    """As much of it as tells where texts end; no torch."""
    return TokenizerFiles(_backend(header), _special(header), _template(header))


def ends_in_file(header: GgufHeader, vocab_size: int) -> EndsOfText:
    """Where the texts of the model in a file end; no torch."""
    return united(named_in(header), tokens_in(header), vocab_size)


def named_in(header: GgufHeader) -> list[NamedEnds]:
    """The ends that the file names, and those that its tokens are spelled as."""
    named = [id_named(header, name) for name in ENDS]
    spelled = [number for number, token in enumerate(_tokens(header)) if token in SURE_ENDS]
    types = _types(header)
    spelled += [
        number
        for number, token in enumerate(_tokens(header))
        if token in LIKELY_ENDS and types[number] in WHOLE
    ]
    return [NamedEnds(GGUF, [n for n in named if n is not None]), NamedEnds(SPELLING, spelled)]


# -- fields ----------------------------------------------------------------------------------------


def _tokens(header: GgufHeader) -> list[str]:
    if f"{FIELD}tokens" not in header.fields:
        raise _refused(header, "no tokenizer in the file", "a file with its tokenizer", ELSEWHERE)
    found = header.need(f"{FIELD}tokens", list)
    if not found or not all(isinstance(token, str) for token in found):
        raise header.damaged(f"{FIELD}tokens is no list of texts", f"{len(found)} of another kind")
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(found)]


def _types(header: GgufHeader) -> Sequence[int]:
    size = len(header.fields[f"{FIELD}tokens"])
    found = header.get(f"{FIELD}token_type", list, [NORMAL] * size)
    if len(found) != size or not all(type(kind) is int for kind in found):
        raise header.damaged(
            f"{FIELD}token_type does not fit the tokens", f"{len(found):,} types", f"{size:,}"
        )
    return found


def id_named(header: GgufHeader, name: str) -> int | None:
    """The id of a special token that the file names."""
    key = f"{FIELD}{name}_token_id"
    if key not in header.fields:
        return None
    found, size = header.need(key, int), len(_tokens(header))
    if not 0 <= found < size:
        raise header.damaged(f"{key} is no token of the file", f"{found:,}", f"ids below {size:,}")
    return found


def _special(header: GgufHeader) -> dict[str, str]:
    tokens = _tokens(header)
    numbers = {ours: id_named(header, theirs) for ours, theirs in NAMES.items()}
    return {name: tokens[number] for name, number in numbers.items() if number is not None}


def _template(header: GgufHeader) -> str | None:
    return header.get("tokenizer.chat_template", str, "") or None


# -- the tokenizer ---------------------------------------------------------------------------------


def _backend(header: GgufHeader) -> Any:
    from tokenizers import Tokenizer

    body = tokenizer_json(header)
    try:
        return Tokenizer.from_str(json.dumps(body))
    except BaseException as error:  # the library raises plain Exception for what it cannot build
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise header.damaged(
            "the tokenizer of the file cannot be built", str(error).split("\n")[0][:160]
        ) from None


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """The tokenizer as a tokenizer.json says it."""
    pre = _pre(header)
    tokens, types = _tokens(header), _types(header)
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        raise header.damaged("a token is there twice", ascii(twice)[:80])
    merges = _merges(header, vocab)
    made = {left + right for left, right in merges}
    splits: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        for split in pre.splits
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*splits, {**level, "use_regex": False}],
        },
        "post_processor": _around(header, pre),
        "decoder": {**level, "add_prefix_space": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            # padding of the vocabulary is nobody's token
            "vocab": {t: n for t, n in vocab.items() if types[n] != UNUSED or t in made},
            "merges": [list(pair) for pair in merges],
        },
    }


def _pre(header: GgufHeader) -> Pre:
    _tokens(header)
    kind = header.need(f"{FIELD}model", str)
    if kind != "gpt2":
        name = f"{OTHER_KINDS[kind]} tokenizer" if kind in OTHER_KINDS else "a tokenizer"
        raise _refused(
            header,
            f"{name} ({FIELD}model {ascii(kind)[1:-1][:40]})",
            "byte-level BPE (gpt2)",
            ELSEWHERE,
        )
    name = header.get(f"{FIELD}pre", str, "")
    found = pre_named(name)
    if found is None:
        shown = f"{FIELD}pre {ascii(name)[1:-1][:60]}" if name else f"no {FIELD}pre"
        raise _refused(
            header,
            f"{shown}: how text is split is not known",
            "a split that specctl knows, else prompts become other tokens",
            ELSEWHERE,
        )
    return found


def _merges(header: GgufHeader, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    given = header.need(f"{FIELD}merges", list)
    found = []
    for merge in given:
        # the first character may be a blank in files whose tokens hold blanks
        at = merge.find(" ", 1) if isinstance(merge, str) else -1
        left, right = (merge[:at], merge[at + 1 :]) if at > 0 else ("", "")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise header.damaged(
                "a merge of the tokenizer is of no tokens", ascii(merge)[:80], "two tokens of three"
            )
        found.append((left, right))
    return found


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens that are found whole; all but those of users are left out of texts."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **plain, "special": types[number] != USER_DEFINED}
        for number, token in enumerate(tokens)
        if types[number] in WHOLE or token in SURE_ENDS
    ]


def _around(header: GgufHeader, pre: Pre) -> dict[str, Any]:
    """What is put around a text: the first token and the last, where the file says so."""
    tokens = _tokens(header)
    text: dict[str, Any] = {"Sequence": {"id": "A", "type_id": 0}}
    pieces, named = [text], {}
    for name, default in (("bos", pre.has_bos), ("eos", False)):
        if not header.get(f"{FIELD}add_{name}_token", bool, default):
            continue
        number = id_named(header, name)
        if number is None:
            raise header.damaged(
                f"texts are to have a token that the file does not name ({name})",
                f"{FIELD}add_{name}_token true, no {FIELD}{name}_token_id",
            )
        token = tokens[number]
        piece = {"SpecialToken": {"id": token, "type_id": 0}}
        pieces = [piece, *pieces] if name == "bos" else [*pieces, piece]
        named[token] = {"id": token, "ids": [number], "tokens": [token]}
    pair = [*pieces, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pair,
        "special_tokens": named,
    }


def _refused(header: GgufHeader, found: str, expected: str, do: str) -> IncompatibleError:
    return IncompatibleError(
        "the tokenizer of the GGUF file cannot be read",
        found=found,
        expected=expected,
        do=do,
        where=str(header.path),
    )
