"""MLP speculator exports: every step as TGI and vLLM 0.9 compute it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl.core.errors import GateError, IncompatibleError
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.mlp_speculator import TgiMlp, VllmMlp
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

TO = "mlp-speculator"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"tie": True},
    {"inner": 24},
    {"inner": 24, "tie": True, "num_heads": 2},
    {"num_heads": 1, "tie": True},
    {"scale_input": True, "num_heads": 4},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kept", [None, KEPT])
def test_engines_compute_the_same_steps(
    options: dict[str, Any], kept: Any, plain_target: Target, tmp_path: Path
) -> None:
    drafter = shaken(TO, plain_target, kept, **options)
    manifest = exported(drafter, plain_target, tmp_path / "out", TO)
    commands = " ".join(manifest.served_by)
    assert ("text-generation-launcher" in commands) == (not options.get("scale_input"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["inner_dim"] == options.get("inner", 16)
    assert config["n_predict"] == len(config["top_k_tokens_per_head"])


def test_tgi_stops_on_what_it_would_compute_otherwise(plain_target: Target, tmp_path: Path) -> None:
    exported(shaken(TO, plain_target, scale_input=True), plain_target, tmp_path / "out", TO)
    state = torch.randn(16, dtype=torch.float64)
    assert VllmMlp(tmp_path / "out").logits(state, (3, 4, 5)).shape == (3, 48)
    with pytest.raises(GateError, match=r"no tensor speculator\.proj\.0"):
        TgiMlp(tmp_path / "out").logits(state, (3, 4, 5))


def test_the_names_are_the_published_ones(plain_target: Target, tmp_path: Path) -> None:
    exported(shaken(TO, plain_target, tie=True), plain_target, tmp_path / "out", TO)
    parts = ("emb.0.weight", "proj.0.weight", "proj.1.weight", "head.0.weight")
    names = {f"speculator.{n}" for n in (*parts, "ln.0.weight", "ln.0.bias")}
    assert set(load_file(tmp_path / "out" / WEIGHTS)) == names


def test_heads_that_read_no_tokens_are_refused(plain_target: Target, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="read_tokens false"):
        exported(shaken(TO, plain_target, read_tokens=False), plain_target, tmp_path / "out", TO)
    assert not (tmp_path / "out").exists()


def _unprefix(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.removeprefix("speculator.")] = tensors.pop(name)


FAULTS: list[tuple[dict[str, Any], Change]] = [
    ({}, swapped("speculator.head.1.weight", "speculator.head.2.weight")),
    ({}, swapped("speculator.emb.1.weight", "speculator.emb.2.weight")),
    ({}, swapped("speculator.proj.1.weight", "speculator.proj.2.weight")),
    ({}, zeroed("speculator.ln.1.bias")),
    ({}, without("speculator.ln.1.bias")),
    ({}, saying(scale_input=True)),
    ({"scale_input": True}, saying(scale_input=False)),
    ({}, saying(inner_dim=0)),
    ({}, saying(n_predict=2, top_k_tokens_per_head=[1, 1])),
    ({}, saying(top_k_tokens_per_head=[1])),
    ({}, saying(tie_weights=True)),
    ({}, saying(architectures=["MLPSpeculator"])),
    ({}, saying(model_type="mlp-speculator")),
    ({}, _unprefix),
    ({"tie": True}, saying(tie_weights=False)),
]


@pytest.mark.parametrize(("options", "change"), FAULTS)
def test_a_seeded_mistake_does_not_pass(
    options: dict[str, Any],
    change: Change,
    plain_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty(monkeypatch, TO, change)
    with pytest.raises(GateError, match="an engine would not compute"):
        exported(shaken(TO, plain_target, **options), plain_target, tmp_path / "out", TO)
    assert not (tmp_path / "out").exists()
