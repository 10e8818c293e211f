"""LlamaModel on its own: fresh weights, its heads, fused copies, packed rows, linear kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.spec import ModelSpec
from specctl.models.kernels import can_pack, linear, pack
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.models.llama.llama import in_one
from specctl_testing.drafters.lm_cases import difference, random_ids, whole


def small_shape(**fields: Any) -> LlamaShape:
    sizes = {"num_layers": 2, "hidden_size": 16, "vocab_size": 96, "num_heads": 2}
    more = {"num_kv_heads": 1, "head_dim": 8, "intermediate_size": 32, "norm_eps": 1e-5}
    return LlamaShape(**{**sizes, **more, "rope_theta": 1e4, "tied": False, **fields})


def small_lm(**fields: Any) -> FastLlama:
    torch.manual_seed(0)
    shape = small_shape(**fields)
    spec = ModelSpec("llama", 2, 16, 96, 2, 1, 8, 32, 1e-5, 1e4, 256)
    return FastLlama(LlamaModel(shape), spec)


def test_a_fresh_model_starts_with_identity_layers() -> None:
    with torch.no_grad():
        taps = whole(small_lm(), random_ids(1, 5), taps=(0, 1)).taps
    assert torch.equal(taps[0], taps[1])


def test_a_trimmed_head_has_its_own_rows() -> None:
    with torch.no_grad():
        logits = whole(small_lm(out_size=24), random_ids(1, 5)).logits_BTV
    assert logits is not None
    assert logits.shape == (1, 5, 24)


def test_training_moves_what_serving_reads() -> None:
    lm, ids = small_lm(), random_ids(2, 12)
    optimizer = torch.optim.AdamW(lm.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        with torch.no_grad():
            whole(lm, ids)  # fills the fused copies, which the step must invalidate
        logits = whole(lm, ids).logits_BTV
        assert logits is not None
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    served, trained = copy.deepcopy(lm), whole(lm, ids)
    with torch.no_grad():
        assert difference(whole(served, ids), trained) < 1e-5
        assert difference(whole(lm, ids), trained) < 1e-5


@pytest.mark.parametrize("change", ["in-place", "load"])
def test_fused_copies_follow_every_change_of_the_weights(change: str) -> None:
    lm, other, ids = small_lm(), small_lm(), random_ids(1, 6)
    with torch.no_grad():
        other.module.model.layers[1].mlp.down_proj.weight.normal_()
        whole(lm, ids)
        if change == "in-place":
            pairs = zip(lm.module.parameters(), other.module.parameters(), strict=True)
            for mine, theirs in pairs:
                mine.copy_(theirs)
        else:
            lm.module.load_state_dict(other.module.state_dict(), assign=True)
        assert difference(whole(lm, ids), whole(other, ids)) < 1e-6


def test_weights_made_in_inference_mode_are_read() -> None:
    """They do not say whether they have changed; casting them makes new ones."""
    ids = random_ids(1, 6)
    with torch.inference_mode():
        lm = small_lm()
        assert difference(whole(lm, ids), whole(lm, ids)) == 0
        assert (
            difference(whole(FastLlama(lm.module.double(), lm.spec), ids), whole(small_lm(), ids))
            < 1e-5
        )


def test_fused_copies_follow_a_cast() -> None:
    lm, ids = small_lm(), random_ids(1, 6)
    with torch.no_grad():
        before = whole(lm, ids).logits_BTV
        lm.module.double()
        after = whole(lm, ids).logits_BTV
    assert before is not None
    assert after is not None
    assert after.dtype == torch.float64
    torch.testing.assert_close(after.float(), before, atol=1e-5, rtol=1e-5)


def test_dense_under_autocast_gives_finite_gradients() -> None:
    lm, ids = small_lm(), random_ids(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        logits = whole(lm, ids).logits_BTV
        assert logits is not None
        loss = logits.float().logsumexp(-1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    grads = [p.grad for p in lm.module.parameters()]
    assert all(g is not None and g.isfinite().all() for g in grads)


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    lm = small_lm()
    with torch.no_grad():
        for name, p in lm.module.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                p.normal_(std=0.3)
    ids = random_ids(1, 9)
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        packed = lm.dense(ids, position, Masks(document_mask(document))).logits_BTV
        alone = whole(lm, ids[:, 4:]).logits_BTV
    assert packed is not None
    torch.testing.assert_close(packed[:, 4:], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 17])
def test_every_linear_kernel_gives_the_product(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    for out, width in ((48, 32), (700, 300)):
        weight = torch.randn(out, width, generator=generator).to(dtype)
        x = torch.randn(1, rows, width, generator=generator).to(dtype)
        bias = torch.randn(out, generator=generator).to(dtype)
        oracle = x.double() @ weight.double().T + bias.double()
        scale = 0.3 if dtype == torch.bfloat16 else 1e-3
        with torch.no_grad():
            found = [linear(x, weight, bias)]
            found += [linear(x, pack(weight), bias)] if can_pack(weight) else []
        for product in found:
            assert product.shape == (1, rows, out)
            assert product.dtype == dtype
            torch.testing.assert_close(product.double(), oracle, atol=scale, rtol=0.02)


def test_parameters_become_rows_of_one_matrix_without_a_copy() -> None:
    """As on a GPU: what is learned in them is read from it, and they are saved as before."""
    parts = tuple(torch.nn.Parameter(torch.randn(rows, 8)) for rows in (6, 2, 4))
    was = [part.detach().clone() for part in parts]
    whole = in_one(parts)
    assert whole.equal(torch.cat(was))
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    with torch.no_grad():
        parts[1].mul_(2.0)
    assert whole[6:8].equal(2 * was[1])
    again = in_one(parts)
    assert again.data_ptr() == whole.data_ptr()
    assert again.equal(whole)
    names = {str(i): part.detach() for i, part in enumerate(parts)}
    saved = safetensors.torch.load(safetensors.torch.save(names))
    assert all(saved[name].equal(part) for name, part in names.items())
    (parts[0].sum() + parts[2].square().sum()).backward()
    assert parts[2].grad is not None
