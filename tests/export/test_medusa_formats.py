"""Medusa exports: what TGI and vLLM would draft is what our heads draft."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError
from specctl.core.vocab import VocabMap
from specctl.export.formats import formats
from specctl.export.formats.medusa import FILE
from specctl.export.layouts.whole_head import whole_head, without_cut
from specctl.export.package.manifest import WEIGHTS
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import (
    KEPT,
    Change,
    exported,
    faulty,
    saying,
    shaken,
    swapped,
    without,
    zeroed,
)

FILES = {"medusa": FILE, "vllm-medusa": WEIGHTS}


@pytest.mark.parametrize("to", list(FILES))
@pytest.mark.parametrize("head", ["own", "shared"])
@pytest.mark.parametrize("kept", [None, KEPT])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_engines_draft_what_the_heads_draft(
    to: str, head: str, kept: Any, num_blocks: int, plain_target: Target, tmp_path: Path
) -> None:
    drafter = shaken("medusa", plain_target, kept, head=head, num_blocks=num_blocks, num_heads=3)
    manifest = exported(drafter, plain_target, tmp_path / "out", to)
    assert f'"num_speculative_tokens": {3}' in manifest.served_by[-1]
    assert "0.32" in manifest.notes[-1]
    assert manifest.notes[-1] in (tmp_path / "out" / "README.md").read_text()


def test_the_layouts_hold_exactly_their_names(plain_target: Target, tmp_path: Path) -> None:
    own = shaken("medusa", plain_target, num_heads=2)
    exported(own, plain_target, tmp_path / "fd", "medusa")
    names = {f"{h}.{part}" for h in (0, 1) for part in ("0.linear.weight", "0.linear.bias")}
    assert set(load_file(tmp_path / "fd" / FILE)) == names | {"0.1.weight", "1.1.weight"}
    config = json.loads((tmp_path / "fd" / "config.json").read_text())
    assert "architectures" not in config
    assert config["base_model_name_or_path"] == "some/target"
    shared = shaken("medusa", plain_target, KEPT, num_heads=2, head="shared")
    exported(shared, plain_target, tmp_path / "vllm", "vllm-medusa")
    tensors = load_file(tmp_path / "vllm" / WEIGHTS)
    names = {f"blocks.{h}.layers.0.{leaf}" for h in (0, 1) for leaf in ("weight", "bias")}
    assert set(tensors) == names | {"lm_head.weight", "token_map"}
    assert tensors["token_map"].tolist() == list(KEPT)
    assert tensors["lm_head.weight"].shape == (len(KEPT), 16)


def test_copies_of_the_targets_head_are_counted(plain_target: Target, tmp_path: Path) -> None:
    shared = shaken("medusa", plain_target, num_heads=3, head="shared")
    manifest = exported(shared, plain_target, tmp_path / "out", "medusa")
    assert "written 3 times" in manifest.notes[0]
    tensors = load_file(tmp_path / "out" / FILE)
    head_VD = plain_target.borrowed().head_VD
    assert all(torch.equal(tensors[f"{i}.1.weight"], head_VD) for i in range(3))


@pytest.mark.parametrize("to", list(FILES))
def test_heads_in_bfloat16_stay_bfloat16(to: str, plain_target: Target, tmp_path: Path) -> None:
    drafter = shaken("medusa", plain_target, KEPT, torch.bfloat16, num_heads=2)
    exported(drafter, plain_target, tmp_path / "out", to)
    tensors = load_file(tmp_path / "out" / FILES[to])
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def _loud(name: str, cut: int) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        logits = tensors[name].clone()
        logits[cut] = 50 * torch.sign(torch.randn_like(logits[0]))
        logits[cut + 7] = -logits[cut]
        tensors[name] = logits

    return change


FAULTS: list[tuple[str, dict[str, Any], Change]] = [
    ("medusa", {}, swapped("0.1.weight", "1.1.weight")),
    ("medusa", {}, swapped("0.0.linear.weight", "1.0.linear.weight")),
    ("medusa", {}, zeroed("1.0.linear.bias")),
    ("medusa", {}, without("1.0.linear.bias")),
    ("medusa", {}, saying(medusa_fc_bias=False)),
    ("medusa", {}, saying(architectures=["MedusaModel"])),
    ("medusa", {}, saying(medusa_num_heads=1)),
    ("medusa", {"num_blocks": 2}, saying(medusa_num_layers=1)),
    ("medusa", {"num_blocks": 2}, swapped("0.0.linear.weight", "0.1.linear.weight")),
    ("medusa", {"kept": KEPT}, _loud("0.1.weight", 12)),
    ("vllm-medusa", {}, swapped("lm_heads.0.weight", "lm_heads.1.weight")),
    ("vllm-medusa", {}, saying(medusa_fc_bias=False)),
    ("vllm-medusa", {}, saying(logit_scale=0.5)),
    ("vllm-medusa", {}, saying(model_type="llama")),
    ("vllm-medusa", {"head": "shared"}, saying(original_lm_head=False)),
    ("vllm-medusa", {"head": "shared", "kept": KEPT}, without("token_map")),
    ("vllm-medusa", {"head": "shared", "kept": KEPT}, saying(truncated_vocab_size=48)),
    (
        "vllm-medusa",
        {"head": "shared", "kept": KEPT},
        lambda config, tensors: tensors.update(
            token_map=tensors["token_map"] - torch.arange(len(KEPT))
        ),
    ),
]


@pytest.mark.parametrize(("to", "options", "change"), FAULTS)
def test_a_seeded_mistake_does_not_pass(
    to: str,
    options: dict[str, Any],
    change: Change,
    plain_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty(monkeypatch, to, change, FILES[to])
    drafter = shaken("medusa", plain_target, num_heads=2, **options)
    with pytest.raises(GateError, match="an engine would not compute"):
        exported(drafter, plain_target, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_the_mean_of_the_kept_rows_is_never_the_first_choice() -> None:
    torch.manual_seed(3)
    vocab = VocabMap(torch.tensor(KEPT), 48)
    head_KD = torch.randn(len(KEPT), 16) + 2.0  # all rows lean the same way
    states_ND = torch.randn(500, 16) * torch.logspace(-2, 2, 500)[:, None]
    logits_NV = states_ND @ whole_head(head_KD, vocab).T
    ours_N = vocab.ids_K[(states_ND @ head_KD.T).argmax(-1)]
    assert torch.equal(logits_NV.argmax(-1), ours_N)
    spoken = without_cut(logits_NV, vocab)
    assert torch.equal(spoken[:, vocab.ids_K], logits_NV[:, vocab.ids_K])
    assert bool((spoken[:, ~vocab.t2d()] == -torch.inf).all())


def test_other_heads_are_refused_by_both_layouts(plain_target: Target, tmp_path: Path) -> None:
    for to in FILES:
        assert formats()[to].families == ("medusa",)
    with pytest.raises(IncompatibleError, match="cannot hold a drafter of family hydra"):
        exported(shaken("hydra", plain_target), plain_target, tmp_path / "out", "medusa")


def test_a_target_without_a_repository_is_left_to_the_user(
    plain_target: Target, tmp_path: Path
) -> None:
    own = replace(plain_target, name="/models/mine")
    manifest = exported(shaken("medusa", own), own, tmp_path / "out", "medusa")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["base_model_name_or_path"] == "TARGET_FOLDER"
    assert any("which is TARGET_FOLDER: put" in note for note in manifest.notes)
