"""An independent draft as one GGUF file, which llama.cpp's server takes beside its target (`-md`).

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

from specctl.export.formats import TARGET, ExportSource, Format
from specctl.export.formats.hf import compare_logits, own_logits, probe_ids, widened
from specctl.export.layouts.engines import draft_length, gate
from specctl.export.layouts.llama_cpp import library
from specctl.export.layouts.llama_cpp.model import GgufModel, architecture, write_gguf
from specctl.export.layouts.llama_cpp.pretokenizers import KNOWN
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.layouts.llama_cpp.tokens import PROBES
from specctl.export.layouts.llama_cpp.vocab import vocabulary_of
from specctl.export.package.manifest import check_files

FILE = "draft.gguf"
DRAFTED = 4  # tokens that the file drafts on its own in `check`


def write(source: ExportSource, folder: Path) -> None:
    library()
    wide, spec = widened(source), source.manifest.model_spec
    architecture(wide.shape, spec.max_positions)
    name = f"specctl {source.manifest.family} draft"
    model = GgufModel(name, wide.shape, wide.tensors, spec)
    write_gguf(folder / FILE, model, vocabulary_of(source.target.tokenizer, spec))


def check(source: ExportSource, folder: Path) -> None:
    """Read the file by llama.cpp's rules: the same logits, the same drafts, the same tokenizer."""
    check_files(folder)
    reader = GgufReader(folder / FILE)
    ids_1S = probe_ids(source)
    theirs = reader.logits(ids_1S[0])[None]
    if theirs.shape[-1] != source.manifest.vocabulary.target_size:
        raise gate(f"{theirs.shape[-1]:,} tokens", "one for every token of the target")
    compare_logits(source, theirs, own_logits(source, ids_1S), gate)
    _check_drafts(source, reader, ids_1S)
    _check_tokenizer(source, reader)
    if reader.context != source.manifest.model_spec.max_positions:
        raise gate(f"a context of {reader.context:,}", "that of the target")


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
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(spec.eos_ids))
    if reader.special_id("eos") != eos:
        raise gate(f"end of text {reader.special_id('eos')}", f"{eos}")
    if reader.tokens.kind == "gpt2" and reader.tokens.pre not in KNOWN:
        return
    is_exact = vocabulary_of(tokenizer, spec).is_exact
    for text in PROBES if is_exact else [text for text in PROBES if not text.startswith(" ")]:
        ours = tokenizer.encode(text, add_special_tokens=False)
        theirs = reader.tokens.encode(text)
        if theirs != ours:
            raise gate(f"{text!a} becomes {theirs[:12]}", f"{ours[:12]}")


def notes(source: ExportSource) -> tuple[str, ...]:
    """Said where llama.cpp splits some text otherwise than the tokenizer."""
    vocabulary = vocabulary_of(source.target.tokenizer, source.manifest.model_spec)
    if vocabulary.is_exact:
        return ()
    if vocabulary.kind == "llama":
        return ("llama.cpp reads a text that begins with a blank with one blank more.",)
    return (
        "llama.cpp has no name for the way this tokenizer splits text (tokenizer.ggml.pre is "
        "'default'). Drafts are right, but the engine would read text as other tokens, with this "
        "file and with the target's: send prompts as token ids.",
    )


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    """The target becomes a GGUF file first, by llama.cpp's own converter."""
    convert = ["python", "convert_hf_to_gguf.py", TARGET, "--outfile", "target.gguf"]
    words = ["llama-server", "-m", "target.gguf", "-md", f"{folder}/{FILE}"]
    words += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(draft_length(source))]
    return shlex.join(convert), shlex.join([*words, "--spec-draft-p-min", "0"])


FORMAT = Format(
    name="gguf",
    summary="one GGUF file with the target's tokenizer, for llama.cpp",
    families=("small-lm",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
)
