"""Inflation: a large model with the small one's distribution, taps and borrowed pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.core.forward.masks import chain_mask
from specctl.core.language_model import LmOut, Masks
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants import inflate as module
from specctl.runtime.target.variants.inflate import (
    SIZES,
    Size,
    count_parameters,
    inflate,
    inflated_shape,
)

TAPS = (0, 1, 2, 3)
IDS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nominal size that takes no time: 600,000 parameters, four times the width."""
    monkeypatch.setitem(module.SIZES, "600k", Size(600_000, 128, 7))


def run(target: Target, ids_BS: Tensor) -> LmOut:
    B, S = ids_BS.shape
    kept_B = torch.zeros(B, dtype=torch.long)
    kv = target.new_kv(B, S)
    kv.begin(tuple(range(B)), torch.arange(B), kept_B, S, S, 0)
    mask = chain_mask(kept_B, S, S)
    masks = Masks(mask, {w: chain_mask(kept_B, S, S, w) for w in target.lm.windows})
    return target.lm.forward(ids_BS, torch.arange(S).expand(B, S), masks, kv, TAPS)


def errors(found: LmOut, oracle: LmOut) -> dict[str, float]:
    assert found.logits_BTV is not None
    assert oracle.logits_BTV is not None
    logits = (found.logits_BTV - oracle.logits_BTV).abs().max().item()
    taps = max((found.taps[k] - oracle.taps[k]).abs().max().item() for k in TAPS)
    return {"logits": logits, "taps": taps}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {}),
    ],
)
def test_inflation_keeps_logits_and_taps_in_float64(
    make_target: Callable[..., Target], model_type: str, fields: dict[str, Any]
) -> None:
    base = make_target(model_type, num_layers=3, dtype=torch.float64, **fields)
    found = errors(run(inflate(base, "600k"), IDS), run(base, IDS))
    assert found["logits"] < 1e-9
    assert found["taps"] < 1e-9


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.6)], ids=["float32", "bfloat16"]
)
def test_inflation_keeps_logits_within_rounding(
    make_target: Callable[..., Target], dtype: torch.dtype, limit: float
) -> None:
    base = make_target(num_layers=3)
    assert errors(run(inflate(base, "600k", dtype), IDS), run(base, IDS))["logits"] < limit


def test_taps_and_borrowed_pieces_have_the_width_of_the_base(
    make_target: Callable[..., Target],
) -> None:
    base = make_target(num_layers=3)
    big = inflate(base, "600k")
    assert big.spec == base.spec
    assert all(tap.shape == (2, 12, 32) for tap in run(big, IDS).taps.values())
    assert torch.equal(big.borrowed().embedding_VD, base.borrowed().embedding_VD)
    assert torch.equal(big.borrowed().head_VD, base.borrowed().head_VD)


def test_last_tap_on_the_borrowed_head_gives_the_logits(
    make_target: Callable[..., Target],
) -> None:
    big = inflate(make_target(num_layers=3), "600k")
    out = run(big, IDS)
    assert out.logits_BTV is not None
    product = out.taps[3] @ big.borrowed().head_VD.T
    torch.testing.assert_close(out.logits_BTV, product, atol=1e-4, rtol=1e-4)


def test_identity_and_size_are_reported(make_target: Callable[..., Target]) -> None:
    base = make_target(num_layers=3)
    big = inflate(base, "600k")
    assert big.fingerprint == base.fingerprint
    assert big.inflated == "600k"
    assert base.inflated is None
    count = sum(p.numel() for p in big.lm.module.parameters())
    assert abs(count - 600_000) < 0.15 * 600_000


@pytest.mark.parametrize("name", ["100m", "300m", "1b", "8b"])
def test_sizes_of_the_embedded_target_are_within_fifteen_percent(
    tiny_target: Target, name: str
) -> None:
    base: Any = tiny_target.lm.module
    count = count_parameters(inflated_shape(base.shape, SIZES[name], name))
    assert abs(count / SIZES[name].parameters - 1) < 0.15


def test_added_weights_are_random_and_seeded(make_target: Callable[..., Target]) -> None:
    base = make_target(num_layers=3)
    first, again, other = (inflate(base, "600k", seed=s).lm.module for s in (0, 0, 1))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(name), again.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))
    assert (first.get_parameter(name) == 0).float().mean() < 0.01


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_transformers_runs_the_inflated_weights(
    make_target: Callable[..., Target], model_type: str
) -> None:
    big = inflate(make_target(model_type, num_layers=3), "600k")
    model = as_transformers(big.lm)
    with torch.no_grad():
        logits = model(IDS).logits
    torch.testing.assert_close(logits, run(big, IDS).logits_BTV, atol=1e-3, rtol=1e-3)
    assert model.model.embed_tokens.weight is big.lm.module.get_parameter(
        "model.embed_tokens.weight"
    )


def test_unknown_size_names_the_nearest(make_target: Callable[..., Target]) -> None:
    with pytest.raises(SpecctlError, match="300m"):
        inflate(make_target(), "310m")


def test_a_target_that_does_not_fit_is_refused(make_target: Callable[..., Target]) -> None:
    with pytest.raises(IncompatibleError, match="does not fit into 600k"):
        inflate(make_target(hidden=160), "600k")


def test_inflating_twice_is_refused(make_target: Callable[..., Target]) -> None:
    with pytest.raises(IncompatibleError, match="already 600k"):
        inflate(inflate(make_target(), "600k"), "600k")


def test_an_architecture_without_lean_forward_is_refused(
    make_target: Callable[..., Target],
) -> None:
    with pytest.raises(IncompatibleError, match="gpt_neox"):
        inflate(make_target("gpt_neox"), "600k")
