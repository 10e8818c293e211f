"""A draft as one GGUF file, which llama.cpp's server takes beside its target (`-md`): a small
language model of its own, an EAGLE-3 layer (`specctl.export.layouts.llama_cpp.eagle3`), or a block
of DFlash, DFlash2 or DSpark (`specctl.export.layouts.llama_cpp.blocks`).

llama.cpp refuses a draft whose vocabulary is not the target's, text by text, so the file holds the
target's own tokenizer and one LM-head row per target token; a trimmed draft is widened as for
transformers (`specctl.export.layouts.widen`). Requests are split into tokens by the target's file,
never by the draft's. Float32 keeps what widening built; a file quantised afterwards may not.
Letters: K draft vocabulary, S sequence.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import torch
from torch import Tensor

from specctl.core.errors import SpecctlError
from specctl.export.formats import TARGET, ExportSource, Format
from specctl.export.formats.hf import (
    compare_logits,
    own_logits,
    probe_ids,
    refuse_other_architectures,
    widened,
)
from specctl.export.layouts.blocks import check_confidence, mask_row
from specctl.export.layouts.engines import draft_length, gate
from specctl.export.layouts.llama_cpp import blocks, eagle3, library
from specctl.export.layouts.llama_cpp.block_reader import GgufBlocks
from specctl.export.layouts.llama_cpp.model import GgufModel, architecture, write_gguf
from specctl.export.layouts.llama_cpp.reader import GgufEagle3, GgufReader
from specctl.export.layouts.llama_cpp.target import FILE as TARGET_FILE
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.export.package.manifest import check_files
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    head_of,
    twin,
    without_router,
)
from specctl.models.llama.fast_llama import FastLlama
from specctl.recipes.targets import resolve

FILE = "draft.gguf"
SPEC_TYPES = {
    "dflash": "draft-dflash",
    "dflash2": "draft-dflash",
    "dspark": "draft-dspark",
    "eagle3": "draft-eagle3",
    "small-lm": "draft-simple",
}
BLOCKS = ("dflash", "dflash2", "dspark")
ENGINE = "llama.cpp b11549"
FED_BACK = 3  # states of the drafter's own that the check of EAGLE-3 compares
DRAFTED = 4  # tokens that the file drafts on its own in `check`


def write(source: ExportSource, folder: Path) -> None:
    library()
    if source.manifest.family == "eagle3":
        eagle3.write(source, folder / FILE)
        return
    if source.manifest.family in BLOCKS:
        blocks.write(source, folder / FILE)
        return
    wide, spec = widened(source), source.manifest.model_spec
    architecture(wide.shape, spec.max_positions)
    name = f"specctl {source.manifest.family} draft"
    model = GgufModel(name, wide.shape, wide.tensors, spec)
    write_gguf(folder / FILE, model, vocabulary_of(source.target.tokenizer, spec))


def fits(source: ExportSource) -> None:
    """Refuse what llama.cpp's graphs of trained drafters do not compute."""
    if source.manifest.family == "eagle3":
        eagle3.refuse(source)
    elif source.manifest.family in BLOCKS:
        blocks.refuse(source)
    else:
        refuse_other_architectures(source)


def layout(source: ExportSource) -> object:
    """Of a block: tensors and tokenizer; of the others `fits` says all."""
    if source.manifest.family not in BLOCKS:
        return None
    vocabulary = vocabulary_of(source.target.tokenizer, source.manifest.model_spec)
    return blocks.tensors_of(source), vocabulary


def check(source: ExportSource, folder: Path) -> None:
    """Read the file by llama.cpp's rules: the same logits, the same drafts, the same tokenizer."""
    check_files(folder)
    if source.manifest.family == "eagle3":
        reader: GgufReader = _check_eagle3(source, folder / FILE)
    elif source.manifest.family in BLOCKS:
        reader = _check_blocks(source, folder / FILE)
    else:
        reader = GgufReader(folder / FILE)
        _check_small_lm(source, reader)
    _check_tokenizer(source, reader)
    if reader.context != source.manifest.model_spec.max_positions:
        raise gate(f"a context of {reader.context:,}", "that of the target")


def _check_eagle3(source: ExportSource, path: Path) -> GgufEagle3:
    """Behind random features and on its own states the file drafts what the drafter drafts."""
    trial = Trial.of(source, FED_BACK)
    reader = GgufEagle3(path, embedding_of(source))
    ours = drafted_logits(twin(source, without_router(source.drafter)), trial)
    compare(ENGINE, reader.drafted_logits(trial), ours)
    return reader


def _check_blocks(source: ExportSource, path: Path) -> GgufBlocks:
    """The file drafts the block that the drafter drafts, and is as sure of it."""
    trial = Trial.of(source, _length(source) - 1, without=mask_row(source))
    reader = GgufBlocks(path, embedding_of(source), head_of(source))
    ours = drafted_logits(twin(source, source.drafter), trial)
    compare(ENGINE, reader.drafted_logits(trial), ours)
    if source.manifest.family == "dspark":
        check_confidence(source, reader.confidences(trial), trial)
    return reader


def _length(source: ExportSource) -> int:
    """Drafted tokens: of a block as many as while training, since its slots see each other."""
    if source.manifest.family in BLOCKS:
        return int(source.drafter.options.num_heads)
    return draft_length(source)


def _check_small_lm(source: ExportSource, reader: GgufReader) -> None:
    ids_1S = probe_ids(source)
    theirs = reader.logits(ids_1S[0])[None]
    if theirs.shape[-1] != source.manifest.vocabulary.target_size:
        raise gate(f"{theirs.shape[-1]:,} tokens", "one for every token of the target")
    compare_logits(source, theirs, own_logits(source, ids_1S), gate)
    _check_drafts(source, reader, ids_1S)


def _check_drafts(source: ExportSource, reader: GgufReader, ids_1S: Tensor) -> None:
    """Token after token, each fed back: what the file drafts is what the drafter drafts."""
    vocab, half = source.drafter.vocab, max(1, ids_1S.shape[1] - DRAFTED)
    prefix_1S = ids_1S[:, :half]
    for _ in range(DRAFTED):
        best = own_logits(source, prefix_1S)[0, -1].argmax()
        token = best if vocab is None else vocab.ids_K.cpu()[best]
        theirs = reader.logits(prefix_1S[0])[-1].argmax()
        if int(theirs) != int(token):
            raise gate(f"token {int(theirs)} is drafted", f"token {int(token)}")
        prefix_1S = torch.cat([prefix_1S, token.view(1, 1)], dim=1)


def _check_tokenizer(source: ExportSource, reader: GgufReader) -> None:
    """Texts of ordinary tokens, special ids, and how text is split where llama.cpp can."""
    tokenizer, spec = source.target.tokenizer, source.manifest.model_spec
    added = set(tokenizer.added_tokens_decoder)
    for number, text in enumerate(reader.tokens.tokens[: len(tokenizer)]):
        if number not in added and tokenizer.convert_ids_to_tokens(number) not in (text, None):
            raise gate(
                f"token {number} is {text!a}", f"{tokenizer.convert_ids_to_tokens(number)!a}"
            )
    eos = tokenizer.eos_token_id
    eos = next(iter(spec.eos_ids), None) if eos is None else eos
    if reader.special_id("eos") != eos:
        raise gate(f"end of text {reader.special_id('eos')}", f"{eos}")
    vocabulary = vocabulary_of(tokenizer, spec)
    for text in filter(vocabulary.is_read_alike, PROBES):
        ours = tokenizer.encode(text, add_special_tokens=False)
        theirs = reader.tokens.encode(text)
        if theirs != ours:
            raise gate(f"{text!a} becomes {theirs[:12]}", f"{ours[:12]}")


def notes(source: ExportSource) -> tuple[str, ...]:
    """Said where llama.cpp splits some text otherwise than the tokenizer."""
    found = vocabulary_of(source.target.tokenizer, source.manifest.model_spec).deviation
    return () if found is None else (found,)


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """The target becomes a GGUF file first, unless it is one: by our writer, which knows more
    tokenizers, where it is of Llama's shape, else by llama.cpp's converter."""
    kind, length = SPEC_TYPES[source.manifest.family], str(_length(source))
    words = ["-md", f"{folder}/{FILE}", "--spec-type", kind, "--spec-draft-n-max", length]
    words += ["--spec-draft-p-min", "0"]
    if _is_file(source.target.name):
        return (shlex.join(["llama-server", "-m", TARGET, *words]),)
    convert = ["python", "convert_hf_to_gguf.py", TARGET, "--outfile", "target.gguf"]
    model = "target.gguf"
    if isinstance(source.target.lm, FastLlama):
        convert = ["specctl", "export", "--target", TARGET, "--to", "gguf", "--out", "target-gguf"]
        model = f"target-gguf/{TARGET_FILE}"
    return shlex.join(convert), shlex.join(["llama-server", "-m", model, *words])


def _is_file(name: str) -> bool:
    """Whether a target is a GGUF file already."""
    try:
        found = resolve(name)
    except SpecctlError:  # a model in memory
        return False
    return found.file is not None or found.gguf is not None


FORMAT = Format(
    name="gguf",
    summary="one GGUF file with the target's tokenizer, for llama.cpp",
    families=tuple(SPEC_TYPES),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
    fits=fits,
    layout=layout,
    ready=lambda engine_python: library(),
)
