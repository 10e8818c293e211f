"""MLP speculator: the published arithmetic, tensor names, tied weights, what tokens bring."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from specctl.core.errors import RecipeError
from specctl.drafters.heads.mlp_speculator import MlpOptions, MlpSpeculator
from specctl_testing.drafters.head_cases import learned, nearly_markov

TEXT = [5, 17, 3, 88, 41, 9]


def make_drafter(target: Any, **options: Any) -> MlpSpeculator:
    torch.manual_seed(1)
    drafter = MlpSpeculator(MlpOptions(**options), target.spec)
    drafter.bind(target.borrowed())
    return drafter


@pytest.mark.parametrize("tie", [False, True])
def test_a_draft_follows_the_published_arithmetic(
    make_target: Any, features: Any, drive: Any, tie: bool
) -> None:
    target = make_target()
    drafter = make_drafter(target, num_heads=3, inner=48, tie=tie, scale_input=True)
    tensors = drafter.tensors()

    def named(kind: str, i: int, leaf: str = "weight") -> torch.Tensor:
        return tensors[f"{kind}.{min(i, (1 if kind == 'proj' else 0) if tie else 2)}.{leaf}"]

    keeps = 0.5 ** (0.5 / 3)
    share = math.sqrt((1 - keeps**2) * 48 / 2)
    f_D = features(target, TEXT[:-3], drafter.needs().taps)[target.spec.num_layers][-1]
    state_D = f_D / (f_D.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
    rows = []
    for i, token in enumerate(TEXT[-3:]):
        mixed_D = named("proj", i) @ state_D + share / keeps * named("emb", i)[token]
        normed_D = mixed_D / (mixed_D.pow(2).mean() + 1e-6).sqrt()
        state_D = F.gelu(normed_D * named("ln", i) + named("ln", i, "bias"))
        rows.append(named("head", i) @ state_D)
    served = drive(target, drafter).chain_logits(TEXT, len(TEXT) - 2)
    torch.testing.assert_close(served, torch.stack(rows), rtol=1e-4, atol=1e-4)


def test_tensor_names_and_sizes_are_those_of_the_public_format(make_target: Any) -> None:
    drafter = make_drafter(make_target(), num_heads=3, inner=48)
    expected = {f"{kind}.{i}.weight" for kind in ("emb", "proj", "ln", "head") for i in range(3)}
    assert set(drafter.tensors()) == expected | {f"ln.{i}.bias" for i in range(3)}
    assert drafter.tensors()["proj.0.weight"].shape == (48, 32)
    assert drafter.tensors()["proj.1.weight"].shape == (48, 48)


def test_tied_heads_share_all_but_the_first_projection(make_target: Any) -> None:
    names = set(make_drafter(make_target(), num_heads=3, tie=True).tensors())
    assert names == {
        *("emb.0.weight", "proj.0.weight", "proj.1.weight"),
        *("ln.0.weight", "ln.0.bias", "head.0.weight"),
    }


def test_half_of_the_variance_after_all_heads_is_the_first_states(make_target: Any) -> None:
    """c balances the two: the state is weighed 0.5^(1 / 2n) n times over."""
    for num_heads in (1, 3, 5):
        drafter = make_drafter(make_target(), num_heads=num_heads)
        keeps_2 = 0.5 ** (1 / num_heads)
        token_2 = drafter.token_weight**2 * keeps_2 * 2 / drafter.spec.hidden_size
        assert keeps_2 + token_2 == pytest.approx(1.0)
        assert keeps_2**num_heads == pytest.approx(0.5)


@pytest.mark.proof
def test_heads_need_the_tokens_drafted_before_them(make_model: Any, make_batch: Any) -> None:
    """Without the embeddings every head guesses from f_t alone, and is worse for it."""
    target = nearly_markov(make_model)
    seeing, blind = (
        learned(target, "mlp-speculator", make_batch, read_tokens=reads) for reads in (True, False)
    )
    assert all(a > b + 0.04 for a, b in zip(seeing, blind, strict=True)), (seeing, blind)


def test_no_heads_at_all_are_refused() -> None:
    with pytest.raises(RecipeError, match="num_heads"):
        MlpOptions(num_heads=0)
