"""A Llama-shaped target as a GGUF file: llama.cpp's own converter knows tokenizers by a hash of
published ones and refuses others, ours knows them by the steps in which they split text.
"""

from __future__ import annotations

from pathlib import Path

from specctl.core.errors import IncompatibleError
from specctl.export.layouts.engines import gate
from specctl.export.layouts.llama_cpp.model import GgufModel, write_gguf
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.layouts.llama_cpp.vocab import Vocabulary, vocabulary_of
from specctl.export.package.atomic import new_folder
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.target.target import Target

FILE = "target.gguf"


def export_target(target: Target, out: Path) -> tuple[str, ...]:
    """`target.gguf` in a folder of its own, read back: text becomes the tokenizer's own ids. What
    is to be known of it is returned. A folder that holds anything else is refused."""
    with new_folder(out, _own_files) as folder:
        write_target(target, folder / FILE)
        tokens, vocabulary = GgufReader(folder / FILE).tokens, _vocabulary(target)
        for text in filter(vocabulary.is_read_alike, PROBES):
            ours = target.tokenizer.encode(text, add_special_tokens=False)
            if tokens.encode(text) != ours:
                raise gate(f"{text!a} becomes {tokens.encode(text)[:12]}", f"{ours[:12]}")
    return () if vocabulary.deviation is None else (vocabulary.deviation,)


def _vocabulary(target: Target) -> Vocabulary:
    return vocabulary_of(target.tokenizer, target.spec)


def _own_files(folder: Path) -> tuple[str, ...] | None:
    return (FILE,) if [path.name for path in folder.iterdir()] == [FILE] else None


def write_target(target: Target, path: Path) -> None:
    """Weights in the dtype in which the target is loaded, and its tokenizer."""
    if not isinstance(target.lm, FastLlama):
        raise IncompatibleError(
            "the target cannot be written as GGUF by specctl",
            found=f"{target.name}, which is not of Llama's shape",
            expected="a Llama, Qwen2 or Qwen3",
            do="llama.cpp's convert_hf_to_gguf.py",
        )
    module = target.lm.module
    model = GgufModel(target.name, module.shape, dict(module.named_parameters()), target.spec)
    write_gguf(path, model, _vocabulary(target))
