"""How llama.cpp splits text in front of byte-level BPE, and which `tokenizer.ggml.pre` says so.

llama.cpp knows splits by name only. A tokenizer is given a name when its own steps are those that
the name stands for. One split that no name stands for has a near one (`NEAREST`), and what differs
is told; others have none. Source of the splits and of `ignore_merges`:
llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPELLED = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_OTHER = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
# words as they begin with capitals, then words of capitals; marks and letters without case fit both
_CAPITALS, _SMALL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_CASED_WORDS = f"{_BEFORE}{_CAPITALS}*{_SMALL}+|{_BEFORE}{_CAPITALS}+{_SMALL}*"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _split(contractions: str, word: str, digits: str, other: str) -> str:
    return "|".join((contractions, word, digits, other, _END))


@dataclass(frozen=True, slots=True)
class Pre:
    """`splits` are applied one after the other; with `ignore_merges` a piece that is a token is
    taken whole; `has_bos`: texts begin with the token for it where a file does not say."""

    splits: tuple[str, ...]
    ignore_merges: bool = False
    has_bos: bool = False


_THREE = _split(_SPELLED, _WORD, r"\p{N}{1,3}", _OTHER)
KNOWN: Mapping[str, Pre] = {
    "gpt-2": Pre((_GPT2,)),
    "starcoder": Pre((r"\p{N}", _GPT2)),
    "llama-bpe": Pre((_THREE,), ignore_merges=True, has_bos=True),
    "smaug-bpe": Pre((_THREE,)),
    "qwen2": Pre((_split(_SPELLED, _WORD, r"\p{N}", _OTHER),)),
    "qwen35": Pre((_split(_SPELLED, _MARKED_WORD, r"\p{N}", _MARKED_OTHER),)),
    "tekken": Pre(
        ("|".join((_CASED_WORDS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _END)),),
        ignore_merges=True,
        has_bos=True,
    ),
    "seed-coder": Pre((_split(_SPELLED, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
}
# Other names that llama.cpp has for the same.
ALSO: Mapping[str, tuple[str, ...]] = {
    "gpt-2": (
        "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "gigachat", "a.x-4.0",
        "granite-docling",
    ),
    "starcoder": (
        "smollm", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "smaug-bpe": ("dbrx", "glm4", "chatglm-bpe"),
    "qwen2": ("stablelm2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open", "kormo"),
}  # fmt: skip
_NAMED = {other: KNOWN[name] for name, others in ALSO.items() for other in others}


def pre_named(name: str) -> Pre | None:
    """What llama.cpp does for that name; None for one that is not known here."""
    return KNOWN.get(name, _NAMED.get(name))


_STEPS: Mapping[tuple[tuple[str, ...], bool], str] = {
    (("gpt2",), False): "gpt-2",
    (("digits", "gpt2"), False): "starcoder",
    ((_split(_CASELESS, _WORD, r"\p{N}{1,3}", _OTHER), "bytes"), True): "llama-bpe",
    ((_split(_CASELESS, _WORD, r"\p{N}{1,3}", _OTHER), "bytes"), False): "smaug-bpe",
    ((_split(_CASELESS, _WORD, r"\p{N}", _OTHER), "bytes"), False): "qwen2",
    ((_split(_CASELESS, _MARKED_WORD, r"\p{N}", _MARKED_OTHER), "bytes"), False): "qwen35",
}

# Like smaug-bpe but for contractions: 't of 'tell is no piece of its own.
NEAREST: Mapping[tuple[tuple[str, ...], bool], str] = {
    (("|".join((_WORD, r"\p{N}{1,3}", _OTHER, _END)), "bytes"), False): "smaug-bpe",
}
# The steps of a tokenizer that was read from a file.
_READ = {((*pre.splits, "bytes"), pre.ignore_merges): name for name, pre in KNOWN.items()}


def nearest_pre(tokenizer: Mapping[str, Any]) -> str | None:
    """The name of the split that differs in contractions alone, if `pre_of` finds none."""
    return NEAREST.get(_steps(tokenizer)) if tokenizer.get("normalizer") is None else None


def pre_of(tokenizer: Mapping[str, Any]) -> str | None:
    """The name of a tokenizer.json's split, None where llama.cpp has no name for it.

    NFC is let pass: llama.cpp does not normalise, and text is nearly always in that form.
    """
    normalizer = tokenizer.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    steps = _steps(tokenizer)
    return _STEPS.get(steps, _READ.get(steps))


def _steps(tokenizer: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    steps = tuple(_step(step) for step in _flat(tokenizer.get("pre_tokenizer")))
    return steps, bool(tokenizer["model"].get("ignore_merges", False))


def _flat(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [part for inner in step["pretokenizers"] for part in _flat(inner)]
    return [step]


def _step(step: Mapping[str, Any]) -> str:
    """A step in one word, or its regular expression; anything else as a word nothing matches."""
    kind = step["type"]
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return "gpt2" if step.get("use_regex", True) else "bytes"
    if kind == "Digits" and step.get("individual_digits"):
        return "digits"
    if kind == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
        return str(step["pattern"].get("Regex", "a fixed text"))
    return f"unknown {kind}"
