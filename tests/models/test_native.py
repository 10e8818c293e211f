"""The compiled step: PyTorch's numbers, one fixed order of sums, and a way without a compiler."""

from __future__ import annotations

import copy
import ctypes
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn.utils.parametrize import register_parametrization

from specctl.core.forward.sub_layers import SubLayers
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LmOut, Masks
from specctl.core.spec import ModelSpec
from specctl.core.tree import DraftTree, NodeKind
from specctl.models.llama import fast_llama, llama
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.models.native import bits as few_bits
from specctl.models.native import library as built
from specctl.models.native import step
from specctl.models.native.packed import (
    TYPES,
    PackedMatrix,
    PackedType,
    PackedWeights,
    from_gguf,
)
from specctl.models.native.step import most_rows
from specctl.models.native.threads import Kind

WIDTH, VOCAB, LAYERS = 40, 90, 3  # neither a multiple of 16: rests of a vector occur
needs_compiler = pytest.mark.skipif(
    built.library().functions is None, reason=f"no compiled step: {built.library().missing}"
)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased": {"attention_bias": True, "output_bias": True},
    "normed heads": {"qk_norm": True},
    "windowed": {"window": 5},
    "every head its own": {"num_kv_heads": 4},
    "trimmed head": {"tied": False, "out_size": 30},
}
WIDE = {"hidden_size": 278, "intermediate_size": 301}
# Inputs in whole steps, an even and an odd number of them: with AMX its tiles multiply them.
TILED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def make(dtype: torch.dtype = torch.float32, **fields: Any) -> FastLlama:
    torch.manual_seed(0)
    sizes = {"num_layers": LAYERS, "hidden_size": WIDTH, "vocab_size": VOCAB, "num_heads": 4}
    more = {"num_kv_heads": 2, "head_dim": 20, "intermediate_size": 52, "norm_eps": 1e-5}
    shape = LlamaShape(**{**sizes, **more, "rope_theta": 1e4, "tied": True, **fields})
    module = LlamaModel(shape).requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    spec = ModelSpec("llama", LAYERS, WIDTH, VOCAB, *heads, 52, 1e-5, 1e4, 256)
    return FastLlama(module.to(dtype), spec)


def forward(lm: FastLlama, kv: SlotKV, ids: Tensor, starts: list[int], **wanted: Any) -> LmOut:
    """A causal run of every row behind its kept tokens, in slots of their own in reverse order."""
    B, T = ids.shape
    slots, start_B = tuple(range(B))[::-1], torch.tensor(starts)
    span = max(starts) + T
    kv.begin(slots, torch.tensor(slots), start_B, T, span)
    position = start_B[:, None] + torch.arange(T)
    with torch.no_grad():
        return lm.run(Feed(ids, position, lm.chain_masks(start_B, T, span), **wanted), kv)


@pytest.fixture
def eagerly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """eagerly(lm, ...): the same forward in PyTorch."""

    def run(lm: FastLlama, *given: Any, **wanted: Any) -> LmOut:
        with monkeypatch.context() as patch:
            patch.setattr(FastLlama, "_native", lambda self, feed: None)
            return forward(lm, *given, **wanted)

    return run


def filled(lm: FastLlama, num_slots: int) -> SlotKV:
    torch.manual_seed(1)
    kv = lm.new_kv(num_slots, 48)
    for store in stores(kv):
        store.normal_()
    return kv


def stores(kv: SlotKV) -> list[Tensor]:
    return [*kv.key_ZJLE, *kv.value_ZJLE]


def copied(lm: FastLlama, kv: SlotKV) -> SlotKV:
    twin = lm.new_kv(kv.num_slots, kv.max_len)
    for mine, theirs in zip(stores(twin), stores(kv), strict=True):
        mine.copy_(theirs)
    return twin


def test_the_step_is_built_where_there_is_a_compiler() -> None:
    """Tests of it are skipped where it is missing, which must not hide a source that fails."""
    is_meant = os.environ.get(built.SWITCH, "1") != "0" and any(map(shutil.which, built.COMPILERS))
    assert (built.library().functions is not None) == is_meant, built.library().missing


@needs_compiler
@pytest.mark.parametrize("kind", [*KINDS, "wide"])
def test_it_computes_what_pytorch_computes(kind: str, eagerly: Any) -> None:
    lm, atol = (
        make(**KINDS.get(kind, WIDE)),
        5e-4 if kind == "wide" else 2e-5,
    )  # its numbers are larger
    assert lm.module.native() is not None
    for num_rows, num_fed in ((1, 1), (1, 7), (2, 2), (2, 8), (3, 5), (1, 27), (3, 11)):
        ids = torch.randint(0, VOCAB, (num_rows, num_fed))
        kv = filled(lm, num_rows)
        given = ids, [11, 3, 20][:num_rows]
        wanted = {"taps": (0, 2, LAYERS)}
        theirs = eagerly(lm, other := copied(lm, kv), *given, **wanted)
        mine = forward(lm, kv, *given, **wanted)
        assert mine.logits_BTV is not None
        torch.testing.assert_close(mine.logits_BTV, theirs.logits_BTV, atol=atol, rtol=1e-4)
        torch.testing.assert_close(dict(mine.taps), dict(theirs.taps), atol=atol, rtol=1e-4)
        torch.testing.assert_close(stores(kv), stores(other), atol=atol, rtol=0)


@needs_compiler
def test_a_prompt_of_many_tokens_is_read_as_by_pytorch(eagerly: Any) -> None:
    lm, ids = make(), torch.randint(0, VOCAB, (1, 205))
    kv, other = lm.new_kv(1, 240), lm.new_kv(1, 240)
    for start in (0, 17):
        theirs = eagerly(lm, other, ids, [start], taps=(1,))
        mine = forward(lm, kv, ids, [start], taps=(1,))
        torch.testing.assert_close(mine.logits_BTV, theirs.logits_BTV, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(dict(mine.taps), dict(theirs.taps), atol=5e-5, rtol=1e-4)


@needs_compiler
def test_in_bfloat16_a_prompt_is_read_as_its_tokens_are_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "most_rows", lambda *given: 64)  # or PyTorch's, with AMX
    lm, ids = make(torch.bfloat16), torch.randint(0, VOCAB, (1, 40))
    whole = forward(lm, lm.new_kv(1, 48), ids, [0]).logits_BTV
    kv = lm.new_kv(1, 48)
    one_by_one = [forward(lm, kv, ids[:, i : i + 1], [i]).logits_BTV for i in range(40)]
    assert whole is not None
    assert torch.equal(whole, torch.cat([each for each in one_by_one if each is not None], 1))


@needs_compiler
@pytest.mark.parametrize("shape", [{}, TILED])
def test_in_bfloat16_it_is_near_the_same_weights_in_float32(shape: dict[str, int]) -> None:
    narrow = make(torch.bfloat16, **shape)
    wide = FastLlama(make(**shape).module.to(torch.bfloat16).float(), narrow.spec)
    for width in (1, 5, 16, 17, 31):
        ids = torch.randint(0, VOCAB, (1, width))
        own, other = (forward(lm, lm.new_kv(1, 48), ids, [0]).logits_BTV for lm in (narrow, wide))
        assert distance(own, other) < 0.02


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """PyTorch's forward with matrices rounded group by group, the head to 8 bits, and their inputs
    to 8 bits."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        of = 8 if len(weight) in (VOCAB, 30) else bits
        inputs = few_bits.rounded(x.flatten(0, -2), 8).view(x.shape)
        return torch.nn.functional.linear(inputs, few_bits.rounded(weight, of).to(x), bias)

    monkeypatch.setattr(fast_llama, "linear", product)
    monkeypatch.setattr(llama, "can_pack", lambda weight: False)


def distance(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    return float((found - expected).abs().mean() / expected.abs().mean())


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_in_few_bits_it_is_the_model_whose_numbers_are_rounded(
    kind: str, bits: int, eagerly: Any, rounding: None
) -> None:
    """But for a number here and there that is rounded to the other side."""
    sizes = {"hidden_size": 100, "intermediate_size": 152}  # groups of which the last is in part
    plain = make(**sizes, **KINDS[kind])
    lm = plain.in_bits(bits)
    for num_rows, num_fed in ((1, 1), (1, 7), (2, 2), (3, 5)):
        ids, kv = torch.randint(0, VOCAB, (num_rows, num_fed)), filled(lm, num_rows)
        given = ids, [11, 3, 20][:num_rows]
        theirs = eagerly(lm, copied(lm, kv), *given)
        unrounded = forward(plain, copied(lm, kv), *given)
        mine = forward(lm, kv, *given)
        off = distance(mine.logits_BTV, unrounded.logits_BTV)
        assert distance(mine.logits_BTV, theirs.logits_BTV) < 0.2 * off


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
def test_matrices_of_few_bits_are_near_the_stored_ones(bits: int) -> None:
    """Of normal numbers, with the search of a scale (without: 0.0874); zeros and equals stay."""
    torch.manual_seed(0)
    weight = torch.randn(40, 128)
    weight[3] = 0
    weight[4] = -0.7
    off = few_bits.rounded(weight, bits) - weight
    assert float(off.square().mean().sqrt()) < {8: 0.007, 4: 0.0855}[bits]
    assert few_bits.rounded(weight, bits)[3:5].allclose(weight[3:5])


@needs_compiler
def test_copies_of_8_bits_follow_the_weights(eagerly: Any) -> None:
    lm, ids = make().in_bits(8), torch.randint(0, VOCAB, (1, 3))
    before = forward(lm, filled(lm, 1), ids, [5]).logits_BTV
    lm.module.model.layers[1].mlp.down_proj.weight.mul_(3)
    expected = eagerly(lm, filled(lm, 1), ids, [5]).logits_BTV
    found = forward(lm, filled(lm, 1), ids, [5]).logits_BTV
    assert 1e-4 < distance(found, expected) < 0.05 < distance(before, expected)
    with torch.inference_mode():  # as where tau is measured while a drafter learns
        cut = replace(lm.module.stack(), head=lm.module.head_weight[:30].clone())
    own = step.native_step(cut, bits=8)
    assert own is not None
    assert own.is_current


@needs_compiler
def test_what_drafts_is_read_in_8_bits_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = make(hidden_size=256, intermediate_size=1024)
    for why in (None, "a CPU without AVX2"):
        monkeypatch.setattr(step, "no_int8", lambda why=why: why)
        assert large.for_drafting().bits == (8 if why is None else None)
        assert make().for_drafting().bits is None, "too small to matter"
        assert large.bits is None
    monkeypatch.setattr(step, "no_int8", lambda: None)
    monkeypatch.setenv(built.INT8_SWITCH, "0")
    assert large.for_drafting().bits is None


@needs_compiler
def test_parts_of_it_are_borrowed(eagerly: Any) -> None:
    lm, ids = make(), torch.randint(0, VOCAB, (2, 3))
    for wanted in (
        {"parts": SubLayers((0, 2), (1,))},
        {"residual_BTD": torch.randn(2, 3, WIDTH), "parts": SubLayers.span(1, 3), "taps": (1,)},
        {"only": (2, 0)},
        {"logits": False, "taps": (1, LAYERS)},
    ):
        kv = filled(lm, 2)
        theirs = eagerly(lm, copied(lm, kv), ids, [9, 4], **wanted)
        mine = forward(lm, kv, ids, [9, 4], **wanted)
        torch.testing.assert_close(mine.logits_BTV, theirs.logits_BTV, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(dict(mine.taps), dict(theirs.taps), atol=2e-5, rtol=1e-4)


@needs_compiler
def test_of_a_run_no_mask_is_made_and_of_other_tokens_the_mask_counts() -> None:
    lm, ids, start_B = make(), torch.randint(0, VOCAB, (2, 3)), torch.tensor([9, 4])
    kv = filled(lm, 2)
    own, fewer = lm.chain_masks(start_B, 3, 12), lm.chain_masks(start_B - 2, 3, 12)

    def logits(masks: Masks) -> Tensor:
        kv.begin((0, 1), torch.tensor([0, 1]), start_B, 3, 12)
        with torch.no_grad():
            found = lm.run(Feed(ids, start_B[:, None] + torch.arange(3), masks), kv).logits_BTV
        assert found is not None
        return found

    whole = logits(own)
    assert "full" not in vars(own)
    torch.testing.assert_close(whole, logits(Masks(own.full)), atol=0, rtol=0)
    torch.testing.assert_close(logits(fewer), logits(Masks(fewer.full)), atol=0, rtol=0)
    assert (logits(fewer) - whole).abs().max() > 1e-3


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tiled", "int8", "int4", "packed"])
@pytest.mark.parametrize("amx", [False, True])
def test_rounds_of_any_width_are_their_tokens_one_by_one(
    kind: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, up to 32 rows (in float32 24: those of prompts are summed in another order),
    whether or not the processor could multiply matrices in bfloat16 by itself."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if kind == "packed":
        lm = packed_models()[-1]
    else:
        dtype = torch.bfloat16 if kind in ("bfloat16", "tiled") else torch.float32
        lm = make(dtype, **(TILED if kind == "tiled" else {}))
        lm = lm.in_bits(int(kind[3:])) if kind.startswith("int") else lm
    ids, kv = torch.randint(0, VOCAB, (1, 32)), lm.new_kv(1, 48)
    each = [forward(lm, kv, ids[:, i : i + 1], [i]).logits_BTV for i in range(32)]
    alone = torch.cat([one for one in each if one is not None], 1)
    for width in (2, 3, 4, 5, 6, 8, 16, 24 if kind == "float32" else 32):
        with torch.no_grad():
            assert lm.is_native(ids[:, :width])
        together = forward(lm, lm.new_kv(1, 48), ids[:, :width], [0]).logits_BTV
        assert together is not None
        assert torch.equal(together, alone[:, :width])


@needs_compiler
def test_a_token_has_the_same_logits_alone_in_a_batch_and_in_a_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, in both dtypes, 8 and 4 bits: greedy text is the same however it is drafted."""
    monkeypatch.setattr(step, "most_rows", lambda *given: 64)  # or some rounds are PyTorch's
    wide, narrow = make(), make(torch.bfloat16)
    few = [lm.in_bits(bits) for lm in (wide, narrow) for bits in (8, 4)]
    for lm in (wide, narrow, *few):
        prompt, text = torch.randint(0, VOCAB, (1, 4)), torch.randint(0, VOCAB, (1, 3))
        alone = lm.new_kv(1, 48)
        forward(lm, alone, prompt, [0])
        one_by_one = [forward(lm, alone, text[:, i : i + 1], [4 + i]).logits_BTV for i in range(3)]
        together = lm.new_kv(3, 48)
        forward(lm, together, prompt.expand(3, -1), [0, 0, 0])
        found = forward(lm, together, text.expand(3, -1), [4, 4, 4]).logits_BTV
        assert found is not None
        expected = torch.cat([each for each in one_by_one if each is not None], 1)
        assert torch.equal(found, expected.expand(3, -1, -1))
        # the text as one path of a tree whose other nodes stand between its tokens
        other = (text + 1) % VOCAB
        nodes = torch.stack([other[0, 1], text[0, 1], other[0, 2], text[0, 2]])[None]
        parents, real = torch.tensor([[-1, -1, 0, 1]]), torch.ones(1, 4, dtype=torch.bool)
        tree = DraftTree(nodes, parents, torch.zeros_like(nodes), real, NodeKind.POINT, depth=2)
        kv, start = lm.new_kv(1, 48), torch.tensor([4])
        forward(lm, kv, prompt, [0])
        kv.begin((0,), torch.tensor([0]), start, 5, 9)
        ids, position = torch.cat([text[:, :1], nodes], 1), 4 + tree.depth_BT()
        grown = lm.forward(ids, position, lm.tree_masks(tree, start, 9), kv).logits_BTV
        assert grown is not None
        assert torch.equal(grown[:, [0, 2, 4]], expected)


@needs_compiler
def test_bfloat16_is_read_where_it_lies_and_wide_rounds_are_pytorchs(eagerly: Any) -> None:
    lm, ids = make(torch.bfloat16), torch.randint(0, VOCAB, (2, 2))
    kv = filled(lm, 2)
    theirs = eagerly(lm, copied(lm, kv), ids, [9, 4]).logits_BTV
    mine = forward(lm, kv, ids, [9, 4]).logits_BTV
    assert mine is not None
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs, atol=0.15, rtol=0.05)
    plain = make()
    wide = torch.zeros(1, most_rows(torch.float32, WIDTH) + 1, dtype=torch.long)
    with torch.no_grad():
        assert plain._native(wide) is None
        assert plain._native(wide[:, :-1]) is not None
    assert plain._native(wide[:, :1]) is None, "gradients are PyTorch's"


@needs_compiler
def test_weights_that_change_or_move_are_seen(eagerly: Any) -> None:
    lm, ids = make(), torch.randint(0, VOCAB, (1, 3))
    forward(lm, filled(lm, 1), ids, [5])
    down = lm.module.model.layers[1].mlp.down_proj.weight
    for change in ("in place", "elsewhere", "another"):
        if change == "in place":
            down.mul_(2)
        elif change == "elsewhere":
            down.data = down.data.clone().neg_()
        else:
            lm.module.load_state_dict(make(qk_norm=False).module.state_dict(), assign=True)
        fresh = copy.deepcopy(lm)
        expected = eagerly(fresh, filled(fresh, 1), ids, [5]).logits_BTV
        found = forward(lm, filled(lm, 1), ids, [5]).logits_BTV
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


class Doubled(torch.nn.Module):
    """A weight that is computed whenever it is read."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@needs_compiler
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj", "model.norm", "lm_head"])
def test_weights_that_are_computed_as_they_are_read_are_pytorchs(name: str, eagerly: Any) -> None:
    lm, ids = make(tied=False), torch.randint(0, VOCAB, (1, 3))
    before = forward(lm, filled(lm, 1), ids, [5]).logits_BTV
    register_parametrization(lm.module.get_submodule(name), "weight", Doubled())
    lm.module.packs.clear()  # as a forward with gradients does
    assert lm.module.native() is None
    fresh = copy.deepcopy(lm)
    expected = eagerly(fresh, filled(fresh, 1), ids, [5]).logits_BTV
    found = forward(lm, filled(lm, 1), ids, [5]).logits_BTV
    assert torch.equal(found, expected)
    assert not torch.allclose(found, before)


def packed_models() -> list[FastLlama]:
    """Of each type one, its numbers random and small."""
    found = []
    for name, about in TYPES.items():
        lm = make(hidden_size=256, intermediate_size=256, head_dim=64)
        stack = lm.module.stack()
        assert stack is not None

        def matrix(weight: Tensor, name: str = name, about: PackedType = about) -> PackedMatrix:
            rows, columns = weight.shape
            blocks = torch.randint(0, 256, (rows, columns // about.weights, about.bytes)).byte()
            for at in (208,) if name == "Q6_K" else (0, 2)[: 1 + about.has_least]:
                blocks[..., at : at + 2] = torch.tensor([3e-4]).half().view(torch.uint8)
            return from_gguf(blocks.flatten(1), name, rows, columns)

        layers = [
            dict(zip(built.LayerAddresses.NAMES, each, strict=True)) for each in stack.weights()
        ]
        own = tuple({each: matrix(layer[each]) for each in step.MATRICES} for layer in layers)
        assert lm.module.keep_packed(PackedWeights(own, matrix(stack.head)))
        found.append(lm.in_bits("packed"))
    return found


needs_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="names of x86-64's instruction sets"
)


@needs_compiler
@needs_x86
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4", "sapphirerapids"])
def test_it_compiles_for_registers_of_every_width(processor: str) -> None:
    """Without code: what this processor has is built here, others are not. The last has tiles."""
    compiler = built._compiler()
    assert compiler is not None
    words = [compiler, *built.FLAGS, "-fsyntax-only", f"-march={processor}", str(built.SOURCE)]
    made = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr[:2000]


@needs_compiler
@needs_x86
@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "x86-64-v4"])
@pytest.mark.proof  # each is compiled anew; those of this processor run in every test above
def test_registers_of_every_width_compute_the_same(
    processor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 128, 256 and 512 bits; what this processor cannot run is compiled only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(built, "_tuned", lambda: (f"-march={processor}", "-O0"))
    other = built.library.__wrapped__()
    assert other.functions is not None, other.missing
    wide = {"AVX512": 4, "AVX2": 3}.get(torch.backends.cpu.get_cpu_capability(), 1)
    if processor[-1] in "34" and int(processor[-1]) > wide:
        return
    plain = make()
    # of whole inputs some may be rounded to their other neighbour, most without fused products: all
    # else agrees to 1e-6
    few = [(each, 5e-3) for each in (plain.in_bits(8), plain.in_bits(4), *packed_models())]
    for lm, error in ((plain, 1e-6), *few):
        own = lm.module.native(lm.bits)
        assert own is not None
        name = "step_float32" + step.KINDS[lm.bits]
        for width in (7, 16):
            ids, wanted = torch.randint(0, VOCAB, (2, width)), {"taps": (1, LAYERS)}
            expected = forward(lm, filled(lm, 2), ids, [9, 30], **wanted)
            with monkeypatch.context() as patch:
                patch.setattr(own, "function", getattr(other.functions, name))
                found = forward(lm, filled(lm, 2), ids, [9, 30], **wanted)
            assert distance(found.logits_BTV, expected.logits_BTV) < error
            for tap, states in expected.taps.items():
                assert distance(found.taps[tap], states) < error


class Fixed:
    """So many threads."""

    def __init__(self, count: int) -> None:
        self.count, self.kinds = count, []

    def begin(self, now: float) -> int:
        return self.count

    def end(self, kind: Kind, seconds: float, now: float, fastest: dict[Kind, float]) -> None:
        assert 0 < seconds < now
        self.kinds.append(kind)


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tokens", [6, 16])
def test_the_number_of_threads_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: str, tokens: int
) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    sizes = {"hidden_size": 160, "intermediate_size": 512, "head_dim": 32}
    lm, ids = make(dtype=dtype, **sizes), torch.randint(0, VOCAB, (2, tokens))
    if kind.startswith("int"):
        lm = lm.in_bits(int(kind[3:]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    found = []
    for count in (1, 2, 3, 5):
        ways = Fixed(count)
        monkeypatch.setattr(step, "threads_of", lambda most, ways=ways: ways)
        found.append(forward(lm, filled(lm, 2), ids, [9, 20]).logits_BTV)
        rows = 2 * tokens
        assert ways.kinds == [(5, rows, rows, (20 + tokens).bit_length(), LAYERS)]
    assert all(torch.equal(one, found[0]) for one in found)


@needs_compiler
def test_uneven_heads_and_calls_that_fail_leave_the_threads_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = Fixed(1)
    monkeypatch.setattr(step, "threads_of", lambda most: ways)
    ids = torch.randint(0, VOCAB, (1, 3))
    uneven, even = make(), make(head_dim=32)
    forward(uneven, filled(uneven, 1), ids, [9])
    with pytest.raises(IndexError):
        forward(even, filled(even, 1), torch.full_like(ids, VOCAB), [9])
    assert ways.kinds == []
    forward(even, filled(even, 1), ids, [9])
    assert len(ways.kinds) == 1


@needs_compiler
def test_several_threads_may_run_one_model() -> None:
    lm, ids = make(hidden_size=160, intermediate_size=512), torch.randint(0, VOCAB, (2, 6))
    expected = forward(lm, filled(lm, 2), ids, [9, 30]).logits_BTV
    stores = [filled(lm, 2) for _ in range(4)]

    def run(kv: SlotKV) -> bool:
        every = [forward(lm, kv, ids, [9, 30]).logits_BTV for _ in range(200)]
        return all(torch.equal(one, expected) for one in every)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, stores))


@needs_compiler
@pytest.mark.parametrize("name", ["token id", "position", "slot"])
def test_nothing_is_read_from_outside_of_a_table(name: str) -> None:
    lm, kv = make(), filled(make(), 1)
    for far in (-1, {"token id": VOCAB, "position": 256, "slot": 1}[name]):
        ids = torch.tensor([[3, far if name == "token id" else 4]])
        position = torch.tensor([[9, far if name == "position" else 10]])
        slots = torch.tensor([far if name == "slot" else 0])
        kv.begin((0,), slots, torch.tensor([9]), 2, 11)
        feed = Feed(ids, position, lm.chain_masks(torch.tensor([9]), 2, 11))
        before = kv.key_ZJLE[0].clone()
        with torch.no_grad(), pytest.raises(IndexError, match=f"{name}s from"):
            lm.run(feed, kv)
        assert torch.equal(kv.key_ZJLE[0], before)


@needs_compiler
def test_a_structure_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(built.DrawCall):
        _fields_: ClassVar[Any] = [("more", ctypes.c_int64)]

    structures = [Longer if each is built.DrawCall else each for each in built.STRUCTURES]
    monkeypatch.setattr(built, "STRUCTURES", structures)
    functions = built.library().functions
    assert functions is not None
    size = ctypes.sizeof(built.DrawCall)
    with pytest.raises(OSError, match=f"Longer has {size + 8} bytes here and {size} in step.cpp"):
        built._loaded(Path(functions._name))


def test_without_it_the_reason_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make_new = built.library.__wrapped__
    with monkeypatch.context() as patch:
        patch.setenv(built.SWITCH, "0")
        switched_off = built.Library(None, "SPECCTL_NATIVE=0", do="unset SPECCTL_NATIVE")
        assert make_new() == switched_off
    with monkeypatch.context() as patch:
        patch.setattr(built, "COMPILERS", ("no-such-compiler",))
        assert "no C++ compiler" in make_new().missing
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'cannot compile' >&2; exit 1\n")
    broken.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(built, "COMPILERS", (str(broken),))
        assert "cannot compile" in make_new().missing
        left = [path.suffix for path in built.folder().rglob("*")]
        assert left == [], "nothing half made is left"
        built.folder().chmod(0o777)
        assert "others may write" in make_new().missing
