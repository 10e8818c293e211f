"""What `specctl show` tells of a GGUF file, from its fields and its table of tensors. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.commands.shown_ends import end_rows
from specctl.core.errors import SpecctlError
from specctl.core.storage.gguf_header import GgufHeader, read_header

SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")


def show_gguf(console: Console, path: Path) -> tuple[dict[str, Any], list[str]]:
    """The table of a file, its result, and what to do next; a warning where it is no target."""
    header = read_header(path)
    rows: list[tuple[str, object]] = [
        ("kind", "GGUF model" + ("" if len(header.parts) == 1 else f", {len(header.parts)} parts")),
        ("name", header.get("general.name", str, "") or "not named"),
        ("architecture", header.architecture or "not named"),
        ("weights", f"{header.weights:,}: {types_text(header)}; {header.bytes:,} bytes"),
    ]
    result: dict[str, Any] = {
        "kind": "gguf",
        "path": str(path),
        "architecture": header.architecture or None,
        "weights": header.weights,
        "weight_bytes": header.bytes,
        "types": header.kinds(),
        "config": None,
        "ends": None,
    }
    try:
        rows += _read(header, result)
        following = [with_text("generate", "--target", path, "--draft", "prompt-lookup")]
    except SpecctlError as error:
        console.warn(f"{path} is no target: {error.what} ({error.found}); {error.do}")
        following = []
    console.table(("field", "value"), rows)
    return result, following


def _read(header: GgufHeader, result: dict[str, Any]) -> list[tuple[str, object]]:
    """What only files that can be targets tell: sizes, tokenizer, ends of text."""
    from specctl.runtime.target.gguf.config import fields_of
    from specctl.runtime.target.gguf.tokens import ends_in_file
    from specctl.runtime.target.gguf.weights import GgufWeights

    config = fields_of(header)
    GgufWeights(header, config)
    ends = ends_in_file(header, config["vocab_size"])
    result |= {"config": config, "ends": ends.to_json()}
    split = header.get("tokenizer.ggml.pre", str, "")
    return [
        *((name.replace("_", " "), config[name]) for name in SIZES),
        ("tokenizer", f"byte-level BPE, split as {split}"),
        *end_rows(ends),
    ]


def types_text(header: GgufHeader) -> str:
    """The types of the weights with their shares, such as `Q4_1 79%, Q8_0 21%`; what is below a
    percent (norms) is left out."""
    shares = {name: count / header.weights for name, count in header.kinds().items()}
    named = [f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.01]
    return ", ".join(named) or "none"
