"""QuantSpec: what is rounded, how far, and that only known tokens ever are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.kv_cache import KVShape
from specctl.drafters.self_speculation.quantspec import QuantSpec, QuantSpecOptions, QuantSpecState
from specctl.drafters.states.plane_kv import PlaneKV, rounded
from specctl.models.llama.fast_llama import FastLlama
from specctl.models.native.library import no_int8
from specctl.models.weights import int4
from specctl.models.weights.int4 import in_int4, linear_int4
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import decode

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
PROMPTS = (TEXT, [7, 2, 7], [20, 2, 20, 2, 20, 2])


def quantspec(target: Target, **options: Any) -> QuantSpec:
    """As the paper has it, the cache in 4 bits."""
    drafter = QuantSpec(QuantSpecOptions(**{"kv_bits": 4, **options}), target.spec, None)
    drafter.bind(target.borrowed())
    return drafter


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [-1, -2])
def test_planes_are_half_a_step_off_at_most(dim: int) -> None:
    """One plane half a step of 16, both half a step of 256 (one step where the lower one would
    need an eighth code)."""
    x = noise(2, 3, 32, 16) * torch.tensor([0.1, 1.0, 9.0])[:, None, None]
    both = rounded(x, dim, has_lower=True)
    one, step = rounded(x, dim, has_lower=False), both.scale.float()
    assert bool(((one.read(torch.float32) - x).abs() <= 0.51 * step).all())
    off = (both.read(torch.float32) - x).abs() / (step / 16)
    assert float(off.max()) <= 1.1
    assert float((off <= 0.51).float().mean()) > 0.95
    assert torch.equal(one.upper, both.upper)


@pytest.mark.parametrize("recent", [1, 2])
def test_the_newest_known_and_all_drafted_tokens_are_in_full(recent: int) -> None:
    """Two rows of different length, groups of 4, each followed by three drafted tokens."""
    shape, lengths = KVShape(2, 8, 2, 8), (21, 6)
    kv = PlaneKV([shape], 3, 64, torch.float32, torch.device("cpu"), 4, recent, False, 8)
    x = noise(2, 2, 24, 8)
    for row, length in enumerate(lengths):
        for at in range(0, length, 4):
            count = min(4, length - at)
            slot_1 = torch.tensor([row + 1])
            kv.begin((row + 1,), slot_1, slot_1 * 0 + at, count, at + count, at)
            part = x[row : row + 1, :, at : at + count]
            kv.update(0, part, 2 * part)
            kv.settle(row + 1, at + count)
    slot_B, start_B = torch.tensor([1, 2]), torch.tensor(lengths)
    kv.begin((1, 2), slot_B, start_B, 3, 24)
    new = torch.stack([x[0, :, 21:24], x[1, :, 6:9]])
    key, value = kv.update(0, new, 2 * new)
    for row, length in enumerate(lengths):
        done = max(0, length - recent * 4 + 4) // 4 * 4
        assert kv.num_rounded[row + 1] == done
        whole, end = x[row], length + 3
        torch.testing.assert_close(key[row, :, done:end], whole[:, done:end])
        torch.testing.assert_close(value[row, :, done:end], 2 * whole[:, done:end])
        old = whole[:, :done]
        wanted = rounded(old.unflatten(1, (-1, 4)), -2, False).read(torch.float32).flatten(1, 2)
        torch.testing.assert_close(key[row, :, :done], wanted)
        assert done == 0 or not torch.equal(wanted, old)
        by_token = rounded(2 * old, -1, False).read(torch.float32)
        torch.testing.assert_close(value[row, :, :done], by_token)


@pytest.mark.parametrize("recent", [0, 2])
def test_rounds_leave_in_the_planes_what_a_fresh_start_does(
    make_target: Any, drive: Any, recent: int
) -> None:
    """Rejected tokens never were in them; rows that leave take theirs along."""
    target = make_target()
    drafter = quantspec(target, kv_group=4, recent=recent)
    ran = decode(target, drafter, PROMPTS, policy="chain", length=3, slots=2, tokens=18)
    assert ran.answers == decode(target, None, PROMPTS, tokens=18).answers
    assert ran.drafted > sum(sum(o.num_accepted) for o in ran.outcomes) > 0
    assert isinstance(ran.state, QuantSpecState)
    assert isinstance(ran.state.kv, PlaneKV)
    last = ran.outcomes[-1].view.slots[0]
    text = [*PROMPTS[2], *ran.answers[2]]
    fresh = drive(target, drafter).open()
    drive(target, drafter).start(fresh, 0, text)
    known = min(ran.state.kv.num_rounded[last], fresh.kv.num_rounded[0])
    assert known >= 12
    for ours, theirs in zip(ran.state.kv.keys, fresh.kv.keys, strict=True):
        off = ours.read(torch.tensor([last]), known, torch.float32)
        off = (off - theirs.read(torch.tensor([0]), known, torch.float32)).abs()
        assert float((off > 1e-3).float().mean()) < 0.01


@pytest.mark.parametrize("recent", [0, 1])
def test_a_row_drafts_the_same_beside_others(make_target: Any, recent: int) -> None:
    """As far as it drafts: beside longer rows the last drafts of a row may be longer."""
    target, found = make_target(), []
    for slots in (1, 3):
        drafter = quantspec(target, kv_group=4, recent=recent)
        ran = decode(target, drafter, PROMPTS, policy="chain", length=3, slots=slots, tokens=12)
        drafts: dict[tuple[int, int], list[int]] = {}
        for outcome in ran.outcomes:
            view = outcome.view
            rows = zip(view.tokens, view.kept_len_B.tolist(), outcome.tree.token_BN, strict=True)
            drafts |= {(text[0], kept): token_N.tolist() for text, kept, token_N in rows}
        found.append(drafts)
    assert found[0].keys() == found[1].keys()
    for at, drafted in found[0].items():
        beside = found[1][at]
        count = min(len(drafted), len(beside))
        assert drafted[:count] == beside[:count]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_in_full_it_is_the_target_and_in_8_bits_nearly(make_target: Any, kind: str) -> None:
    target, taus = make_target(kind), []
    for bits in (16, 8):
        drafter = quantspec(target, weight_bits=16, kv_bits=bits, kv_group=4, recent=0)
        taus.append(decode(target, drafter, policy="chain", length=4, tokens=30).tau)
    assert taus[0] == 5
    assert taus[1] > 4


def test_the_draft_reads_rounded_weights_and_the_target_its_own(make_target: Any) -> None:
    target = make_target()
    own, drafted = target.lm, quantspec(target).rounded()
    ids_1S = torch.tensor([TEXT])
    fed = (ids_1S, torch.arange(len(TEXT))[None], own.document_masks(ids_1S * 0))
    with torch.no_grad():
        said, rounded_said = own.dense(*fed).logits_BTV, drafted.dense(*fed).logits_BTV
        assert not torch.allclose(said, rounded_said, atol=0.05)
        for layer, kept in zip(own.module.model.layers, drafted.int4.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            parts = (attention.q_proj, attention.k_proj, attention.v_proj)
            rows = kept.qkv[0].written_out().split([part.out_features for part in parts])
            parts += (mlp.gate_proj, mlp.up_proj, mlp.down_proj, attention.o_proj)
            rows += kept.gate_up[0].written_out().chunk(2)
            rows += (kept.down.written_out(), kept.output.written_out())
            for part, weight in zip(parts, rows, strict=True):
                part.weight.copy_(weight)
        torch.testing.assert_close(own.dense(*fed).logits_BTV, rounded_said, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(no_int8() is not None, reason=f"no compiled step: {no_int8()}")
def test_beside_a_whole_cache_the_compiled_step_reads_the_4_bits(make_target: Any) -> None:
    target = make_target("llama", hidden=64)
    drafter, plain = quantspec(target, kv_bits=16), decode(target, None, PROMPTS, tokens=20)
    ran = decode(target, drafter, PROMPTS, policy="chain", length=3, slots=3, tokens=20)
    assert ran.answers == plain.answers
    assert ran.tau > 1.5
    runner = drafter.rounded()
    assert isinstance(runner, FastLlama)
    assert (runner.bits, runner.int4) == (4, None)


def test_in_other_groups_or_without_that_step_pytorch_reads_them(
    make_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole cache is the target's own either way."""
    target = make_target("llama", hidden=64)
    other = quantspec(target, kv_bits=16, weight_group=32)
    assert other.rounded().int4 is not None  # type: ignore[attr-defined]
    assert (other.needs().copied, quantspec(target).needs().copied) == (other.attention, ())
    monkeypatch.setattr("specctl.models.llama.fast_llama.no_int8", lambda: "no AVX2")
    without = quantspec(target, kv_bits=16)
    assert without.rounded().int4 is not None  # type: ignore[attr-defined]
    ran = decode(target, without, PROMPTS, policy="chain", length=3, slots=3, tokens=20)
    assert ran.answers == decode(target, None, PROMPTS, tokens=20).answers


@pytest.mark.parametrize(("outputs", "inputs"), [(48, 96), (20, 40)])
def test_weights_are_half_a_step_off_and_the_kernel_multiplies_them(
    outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = noise(outputs, inputs), noise(3, 2, inputs, seed=1)
    found = in_int4(weight, 32)
    scale_OG = found.steps.transpose(0, 1)[..., 0]
    off = (found.written_out() - weight).abs().unflatten(1, (-1, found.group))
    assert bool((off <= 0.501 * scale_OG[..., None]).all())
    bias = noise(outputs)
    torch.testing.assert_close(
        linear_int4(x, found, bias), F.linear(x, found.written_out(), bias), rtol=1e-5, atol=1e-5
    )
    narrow = in_int4(weight.bfloat16(), 32)
    assert narrow.is_packed == (outputs % 16 == 0 and inputs % 32 == 0)
    monkeypatch.setattr(int4, "_has_kernel", False)
    weight_OI = in_int4(weight.bfloat16(), 32).written_out().float()
    product, wanted = linear_int4(x.bfloat16(), narrow).float(), F.linear(x, weight_OI)
    torch.testing.assert_close(product, wanted, rtol=0.03, atol=0.15)
    assert found.num_bytes == weight.numel() // 2 + 8 * weight.numel() // found.group


def test_what_cannot_be_read_in_4_bits_says_what_to_do(make_target: Any) -> None:
    drafter = quantspec(make_target("gemma2"))
    with pytest.raises(IncompatibleError, match="weight_bits=16"):
        drafter.rounded()
    with pytest.raises(RecipeError, match="out of range"):
        QuantSpecOptions(kv_bits=3)
