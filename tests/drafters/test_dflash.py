"""DFlash: one pass a draft, injected features, blocks that do not see each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.batch import TrainBatch
from specctl.core.errors import RecipeError
from specctl.drafters.blocks.dflash import DFlashOptions
from specctl.drafters.nets.taps import even_taps
from specctl_testing.drafters.block_cases import passes
from specctl_testing.drafters.head_cases import fit, make_heads, train


@pytest.mark.parametrize("length", [2, 7])
def test_a_draft_of_any_length_is_one_pass(
    make_target: Any, drive: Any, round_view: Any, length: int
) -> None:
    assert passes(make_target(num_layers=2, vocab=24), "dflash", length, drive, round_view) == 1


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_slot_sees_the_slots_behind_it_unless_causal_and_no_other_block(
    make_target: Any, make_batch: Any, causal: bool
) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=3, causal=causal)
    with torch.enable_grad():
        train(target, drafter, make_batch, 2)
    batch = make_batch(target, drafter)
    every = torch.arange(batch.ids_BS.shape[1]).expand_as(batch.ids_BS)
    one = [x[:, 5] for x in drafter.unroll(batch, every[:, 5:6])]
    for alone, among in zip(one, drafter.unroll(batch, every), strict=True):
        torch.testing.assert_close(alone, among[:, 5])
    fewer = make_heads(target, "dflash", num_heads=2, causal=causal)
    fewer.load_tensors(drafter.tensors())  # the last slot of three is gone
    shorter = next(iter(fewer.unroll(batch, every)))
    assert torch.allclose(shorter[:, 5], one[0], atol=1e-6) == causal


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_drafts_what_it_was_trained_to(
    make_target: Any, make_batch: Any, drive: Any, causal: bool
) -> None:
    """The states behind an anchor of a text, and those of a round behind the same text."""
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=3, causal=causal)
    with torch.enable_grad():
        train(target, drafter, make_batch, 2)
    batch, at = make_batch(target, drafter), 6
    anchor_BA = torch.full((len(batch.ids_BS), 1), at)
    trained = [state_BSD[0, at] for state_BSD in drafter.unroll(batch, anchor_BA)]
    text = batch.ids_BS[0, : at + 2].tolist()
    served_TK = drive(target, drafter).chain_logits([*text, 0, 0], len(text))
    head_KD = drafter.head_weights()[0]
    for state_D, served_K in zip(trained, served_TK, strict=True):
        torch.testing.assert_close(head_KD @ state_D, served_K, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_features_behind_the_anchor_are_invisible(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=3)
    batch = make_batch(target, drafter)
    later = {tap: x.clone() for tap, x in batch.taps.items()}
    for x in later.values():
        x[:, 5:] += 1.0  # row 4 is the anchor's
    for old, new in zip(
        drafter.unroll(batch), drafter.unroll(replace(batch, taps=later)), strict=True
    ):
        torch.testing.assert_close(old[:, :5], new[:, :5])
        assert not torch.allclose(old[:, 5], new[:, 5])


def repeating(rows: int, seed: int) -> TrainBatch:
    """Rows of four random tokens, four times over: what comes next was said four tokens ago."""
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randperm(24, generator=generator)[:4] for _ in range(rows)]
    ids_BS = torch.stack(words).repeat(1, 4)
    at_BS = torch.arange(16).expand_as(ids_BS)
    return TrainBatch(ids_BS, at_BS >= 7, torch.zeros_like(ids_BS), at_BS)


@pytest.mark.proof
def test_without_the_targets_features_a_block_knows_its_root_only(
    make_target: Any, capture_batch: Any
) -> None:
    """Injected features are all that a block sees of the text; the root alone says nothing here."""
    target, found = make_target(num_layers=2, vocab=24), {}
    for share in (1.0, 0.0):
        drafter = make_heads(target, "dflash", num_heads=2, layers=2, loss="ce", anchors=8)
        seen, unseen = (
            replace(batch, taps={tap: share * x for tap, x in batch.taps.items()})
            for batch in (
                capture_batch(target, drafter, repeating(rows, seed))
                for rows, seed in ((96, 0), (48, 1))
            )
        )
        fit(drafter, seen, 40)
        with torch.no_grad():
            metrics = drafter.loss(unseen).metrics
        found[share] = [float(a / b) for a, b in (metrics["top1"], metrics["top1/1"])]
    assert min(found[1.0]) > max(found[0.0]) + 0.06, found


def test_only_anchors_are_trained(make_target: Any, make_batch: Any) -> None:
    target = make_target(num_layers=2, vocab=24)
    drafter = make_heads(target, "dflash", num_heads=2, anchors=3, decay=1.0)
    out = drafter.loss(make_batch(target, drafter, rows=4, seq_len=24))
    assert 4 * 3 < float(out.count) <= 2 * 4 * 3


def test_sizes_out_of_range_are_refused() -> None:
    for name in ("num_heads", "layers", "anchors"):
        with pytest.raises(RecipeError, match="too small"):
            DFlashOptions(**{name: 0})


def test_five_depths_and_five_layers_are_the_default(make_target: Any) -> None:
    """DFlash's: hidden states evenly from layer 2 to the last but two, [2, 10, 18, 26, 34] of
    36."""
    assert even_taps(36) == (2, 10, 18, 26, 34)
    assert even_taps(32) == (2, 9, 16, 23, 30)
    assert even_taps(8) == (2, 3, 4, 5, 6)
    assert [even_taps(n) for n in (2, 4, 6)] == [(0, 1, 2), (0, 1, 2, 3, 4), (0, 2, 3, 4, 6)]
    target = make_target(num_layers=8, vocab=24)
    for name in ("dflash", "dspark"):
        drafter = make_heads(target, name)
        assert drafter.options.taps == (2, 3, 4, 5, 6)
        assert drafter.module.fc.in_features == 5 * 32
        assert len(drafter.module.net.layers) == 5
    assert make_heads(target, "p-eagle").options.taps == (2, 4, 5)  # EAGLE-3's


# -- DFlare ---------------------------------------------------------------------------------------


@torch.no_grad()
def test_dflare_with_one_mixture_and_one_projection_is_dflash(
    make_target: Any, make_batch: Any, drive: Any
) -> None:
    """The mixture is a matrix that joins the depths, each by its share."""
    target = make_target(num_layers=3, vocab=24)
    options: dict[str, Any] = {"num_heads": 3, "taps": (0, 1, 3), "mask_id": 5}
    plain = make_heads(target, "dflash", **options)
    layered = make_heads(target, "dflare", **options)
    shares = torch.tensor([0.3, -1.2, 0.8])
    tensors = dict(plain.tensors())
    eye = torch.eye(target.spec.hidden_size)
    tensors["fc.weight"] = torch.cat([share * eye for share in shares.softmax(-1)], dim=1)
    plain.load_tensors(tensors)
    del tensors["fc.weight"]
    tensors["fusion"] = shares.expand_as(layered.module.fusion).clone()
    for name in list(tensors):
        for part in ("k_proj", "v_proj"):
            if f".{part}." in name:
                tensors[name.replace(part, f"{part}_target")] = tensors[name].clone()
    layered.load_tensors(tensors)
    batch = make_batch(target, plain)
    for ours, theirs in zip(layered.unroll(batch), plain.unroll(batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    text = batch.ids_BS[0, :8].tolist()
    served = [drive(target, one).chain_logits(text, len(text)) for one in (layered, plain)]
    torch.testing.assert_close(*served, rtol=1e-4, atol=1e-4)


def test_every_layer_of_dflare_begins_at_its_own_depth_and_learns_apart(
    make_target: Any, make_batch: Any
) -> None:
    target = make_target(num_layers=5, vocab=24)
    drafter = make_heads(target, "dflare", num_heads=2, layers=3, taps=(1, 2, 3, 4, 5))
    net = drafter.module
    assert net.fusion.argmax(1).tolist() == [0, 2, 4]
    assert torch.equal(net.fusion[1], torch.tensor([-4.0, -2.0, 0.0, -2.0, -4.0]))
    attention = net.net.layers[0].self_attn
    out = drafter.loss(make_batch(target, drafter))
    grads = torch.autograd.grad(
        out.sum, [net.fusion, attention.k_proj_target.weight, attention.v_proj_target.weight]
    )
    assert (grads[0].abs().amax(1) > 0).all()
    assert all(grad.abs().max() > 0 for grad in grads[1:])
    assert not any(name.startswith("fc.") for name in drafter.tensors())
