"""A GGUF export drafts in llama.cpp, by its rules, what the draft drafts here."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from specctl.cli.app.console import Console
from specctl.cli.commands.show import show
from specctl.core.errors import FileError, GateError, IncompatibleError, SpecctlError
from specctl.export.formats.gguf import FILE
from specctl.export.layouts.llama_cpp import model as model_
from specctl.export.layouts.llama_cpp import vocab as vocab_
from specctl.export.layouts.llama_cpp.reader import GgufReader
from specctl.export.package.folder import load_drafter
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import exported, shaken
from specctl_testing.export.gguf_cases import byte_tokenizer

SMALL: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "head_dim": 8,
    "heads": 2,
    "kv_heads": 1,
    "intermediate": 24,
}
KEPT = (0, 1, 2, *range(3, 300, 3))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    """A random target whose tokenizer has fewer ids than its embedding has rows."""
    made: Target = make_target(num_layers=4, hidden=16, vocab=320, rope_theta=5000.0)
    return replace(
        made,
        name="some/target",
        tokenizer=byte_tokenizer(),
        tokenizer_fingerprint="b" * 64,
        template_digest="c" * 64,
        eos_ids=(1, 2),
    )


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"tied": True}),
        ("llama", {"tied": False, "heads": 4, "kv_heads": 2}),
        ("llama", {"attention_bias": True, "output_bias": True}),
        ("llama", {"window": 256}),
        ("llama", {"attention_bias": True}),
        ("qwen3", {"qk_norm": True, "heads": 4, "kv_heads": 2}),
    ],
)
@pytest.mark.parametrize("kept", [None, KEPT])
def test_llama_cpp_computes_the_same_drafts(
    arch: str, options: dict[str, Any], kept: Any, target: Target, tmp_path: Path
) -> None:
    exported(shaken("small-lm", target, kept, **SMALL | options), target, tmp_path / "out", "gguf")
    reader = GgufReader(tmp_path / "out" / FILE)
    assert reader.arch == arch
    assert reader.logits(torch.tensor([5, 300, 7])).shape == (3, 320)
    assert reader.tokens.tokens[319] == "[PAD319]"
    assert reader.special_id("bos") == 0
    assert reader.special_id("eos") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_matrices_keep_their_dtype_and_vectors_are_float32(
    dtype: torch.dtype, target: Target, tmp_path: Path
) -> None:
    exported(shaken("small-lm", target, None, dtype, **SMALL), target, tmp_path / "out", "gguf")
    file = gguf.GGUFReader(tmp_path / "out" / FILE)
    kinds = {len(t.shape): set[str]() for t in file.tensors}
    for tensor in file.tensors:
        kinds[len(tensor.shape)].add(tensor.tensor_type.name)
    known = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F32"}
    assert kinds == {1: {"F32"}, 2: {known[dtype]}}


@pytest.mark.parametrize("scaling", [LLAMA3, {"rope_type": "linear", "factor": 4.0}])
def test_scaled_positions_are_those_of_the_draft(
    scaling: dict[str, Any], make_target: Any, target: Target, tmp_path: Path
) -> None:
    made = make_target(num_layers=4, hidden=16, vocab=320, rope_parameters=_rope(scaling))
    same = replace(target, lm=made.lm)
    exported(shaken("small-lm", same, KEPT, **SMALL), same, tmp_path / "out", "gguf")
    names = {t.name for t in gguf.GGUFReader(tmp_path / "out" / FILE).tensors}
    assert ("rope_freqs.weight" in names) == (scaling["rope_type"] == "llama3")


def _rope(scaling: dict[str, Any]) -> dict[str, Any]:
    return {**scaling, "rope_theta": 5000.0}


@pytest.mark.parametrize(
    ("options", "scaling", "found"),
    [
        ({"qk_norm": True, "attention_bias": True}, None, "qk_norm True, attention_bias True"),
        ({"window": 6}, None, "window 6"),
        ({"qk_norm": True}, LLAMA3, "rope_type llama3"),
        ({}, {"rope_type": "yarn", "factor": 4.0}, "rope_type yarn"),
    ],
)
def test_what_no_graph_computes_is_refused(
    options: dict[str, Any],
    scaling: dict[str, Any] | None,
    found: str,
    make_target: Any,
    target: Target,
    tmp_path: Path,
) -> None:
    fields = {} if scaling is None else {"rope_parameters": _rope(scaling)}
    same = replace(target, lm=make_target(num_layers=4, hidden=16, vocab=320, **fields).lm)
    drafter = shaken("small-lm", same, **SMALL | options)
    with pytest.raises(IncompatibleError, match=found):
        exported(drafter, same, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


Spoil = Callable[[pytest.MonkeyPatch], None]


def field(name: str, change: Callable[[Any], Any]) -> Spoil:
    """The writer's method of that name is given another value."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        right = getattr(gguf.GGUFWriter, name)
        patch.setattr(gguf.GGUFWriter, name, lambda writer, value: right(writer, change(value)))

    return spoil


def tensors(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """The tensors of the file are changed before they are written."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        right = model_.tensors_of

        def wrong(*args: Any) -> dict[str, Any]:
            found = right(*args)
            change(found)
            return found

        patch.setattr(model_, "tensors_of", wrong)

    return spoil


def straight(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_, "neighbours", lambda weight, heads: weight)


def straight_biases(patch: pytest.MonkeyPatch) -> None:
    right = model_.neighbours
    patch.setattr(model_, "neighbours", lambda w, h: right(w, h) if w.dim() == 2 else w)


def one_head(patch: pytest.MonkeyPatch) -> None:
    right = model_.neighbours
    patch.setattr(model_, "neighbours", lambda weight, heads: right(weight, 1))


def named(name: str) -> Spoil:
    return lambda patch: patch.setattr(vocab_, "pre_of", lambda body: name)


BIASED = {"attention_bias": True, "output_bias": True}
FAULTS: dict[str, tuple[dict[str, Any], Spoil]] = {
    "unpermuted rows": ({}, straight),
    "unpermuted biases": (BIASED, straight_biases),
    "rows permuted over all heads": ({}, one_head),
    "rope theta": ({}, field("add_rope_freq_base", lambda v: 10000.0)),
    "norm epsilon": ({}, field("add_layer_norm_rms_eps", lambda v: 1e-3)),
    "key/value heads": ({"kv_heads": 2}, field("add_head_count_kv", lambda v: 1)),
    "context": ({}, field("add_context_length", lambda v: 2 * v)),
    "layers": ({}, field("add_block_count", lambda v: v - 1)),
    "no head": ({}, tensors(lambda t: t.pop("output.weight"))),
    "no bias": (BIASED, tensors(lambda t: t.pop("blk.1.attn_v.bias"))),
    "gate and up": (
        {},
        tensors(
            lambda t: t.update(
                {"blk.0.ffn_gate.weight": t["blk.0.ffn_up.weight"]}
                | {"blk.0.ffn_up.weight": t["blk.0.ffn_gate.weight"]}
            )
        ),
    ),
    "an unknown name": ({}, tensors(lambda t: t.update({"blk.0.extra.weight": torch.ones(4)}))),
    "shifted vocabulary": ({}, field("add_token_list", lambda v: (*v[1:], v[0]))),
    "short vocabulary": ({}, field("add_token_list", lambda v: v[:-1])),
    "reversed merges": ({}, field("add_token_merges", lambda v: v[::-1])),
    "end of text": ({}, field("add_eos_token_id", lambda v: v + 1)),
    "split of another tokenizer": ({}, named("gpt-2")),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_seeded_mistake_does_not_pass(
    fault: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, spoil = FAULTS[fault]
    spoil(monkeypatch)
    drafter = shaken("small-lm", target, KEPT, **SMALL | options)
    with pytest.raises(GateError, match="an engine would not compute"):
        exported(drafter, target, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_query_and_key_norms_of_qwen3_are_not_permuted(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = model_.tensors_of
    monkeypatch.setattr(model_, "tensors_of", lambda model, arch: right(model, "llama"))
    drafter = shaken("small-lm", target, qk_norm=True, **SMALL)
    with pytest.raises(GateError, match="logits differ"):
        exported(drafter, target, tmp_path / "out", "gguf")


def test_the_commands_convert_the_target_and_draft_with_the_file(
    target: Target, tmp_path: Path
) -> None:
    drafter = shaken("small-lm", target, **SMALL)
    manifest = exported(drafter, target, tmp_path / "out", "gguf")
    convert, serve = manifest.served_by
    assert convert == "specctl export --target some/target --to gguf --out target-gguf"
    assert f"-md THIS_FOLDER/{FILE} --spec-type draft-simple --spec-draft-n-max 3" in serve
    assert manifest.notes == ()


def test_a_target_that_is_a_file_already_is_served_as_it_is(target: Target, tmp_path: Path) -> None:
    file = tmp_path / "target.gguf"
    file.write_bytes(b"GGUF")
    drafter = shaken("small-lm", target, **SMALL)
    manifest = exported(drafter, replace(target, name=str(file)), tmp_path / "out", "gguf")
    [serve] = manifest.served_by
    assert serve.startswith(f"llama-server -m TARGET_FOLDER -md THIS_FOLDER/{FILE}")


def test_specctl_says_whose_folder_it_is(target: Target, tmp_path: Path) -> None:
    out, shown = tmp_path / "out", io.StringIO()
    exported(shaken("small-lm", target, **SMALL), target, out, "gguf")
    with pytest.raises(FileError, match=r"export for serving engines.*format gguf.*package"):
        load_drafter(out, target)
    show(Console(shown, shown), str(out))
    assert f"llama-server -m target-gguf/target.gguf -md {out}/{FILE}" in shown.getvalue()
    assert "specctl generate" not in shown.getvalue()


def test_without_the_library_the_error_names_it(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SpecctlError, match=r"pip install 'specctl-toolkit\[gguf\]'"):
        exported(shaken("small-lm", target, **SMALL), target, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()
