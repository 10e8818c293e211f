"""--dtype int8 and int4: named in results, one text however it is drafted, refused if no gain."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import specctl
from specctl.api.arguments.targets import target_json
from specctl.cli.app.console import Console
from specctl.cli.options.target_choice import TargetChoice
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, SpecctlError
from specctl.drafters import families
from specctl.drafters.lm.small_lm import SmallLm
from specctl.models.native.library import no_int8
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants import few_bits, rounding
from specctl.train.joint.check import check_target

needs_int8 = pytest.mark.skipif(no_int8() is not None, reason=f"int8: {no_int8()}")


@pytest.fixture(scope="module", params=["int8", "int4"])
def target(request: pytest.FixtureRequest) -> Target:
    return specctl.load_target("tiny", dtype=request.param, device="cpu")


@needs_int8
def test_every_result_says_the_bits_and_text_is_one_however_it_is_drafted(target: Target) -> None:
    plain = specctl.generate(target, "def read(path):\n", max_new_tokens=40)
    drafted = specctl.generate(target, "def read(path):\n", "prompt-lookup", max_new_tokens=40)
    assert target.dtype_name in ("int8", "int4")
    assert plain.text == drafted.text
    report = specctl.bench(target, "prompt-lookup", num_prompts=2, max_new_tokens=8)
    assert report.to_json()["dtype"] == target.dtype_name
    with pytest.raises(IncompatibleError, match=f"{target.lm.bits} bits"):
        check_target(target)


@needs_int8
def test_whole_sequences_are_read_as_rounds_are_and_near_what_was_published(
    target: Target,
) -> None:
    ids = torch.tensor([target.encode("import os\n\n\ndef walk(top):\n    for name in os.listdir")])
    whole, position = ids.shape[1], torch.arange(ids.shape[1])[None]
    masks = target.lm.chain_masks(torch.tensor([0]), whole, whole)
    kv = target.new_kv(1, whole)
    kv.begin((0,), torch.tensor([0]), torch.tensor([0]), whole, whole, 0)
    with torch.no_grad():
        dense = target.lm.dense(ids, position, masks).logits_BTV
        assert torch.equal(dense, target.lm.forward(ids, position, masks, kv).logits_BTV)
        plain = specctl.load_target("tiny", device="cpu").lm
        published = plain.dense(ids, position, masks).logits_BTV
    before, after = published.log_softmax(-1), dense.log_softmax(-1)
    kl = (before.exp() * (before - after)).sum(-1).mean()
    least, most = {"int8": (1e-6, 2e-3), "int4": (5e-3, 5e-2)}[target.dtype_name]
    assert least < float(kl) < most


@needs_int8
@pytest.mark.parametrize("bits", [8, 4])
def test_stored_matrices_are_freed_and_the_rest_stays(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is known of its rounding
    target = specctl.load_target("tiny", device="cpu")
    module, body = target.lm.module, target.lm.module.model
    before = {name: weakref.ref(weight) for name, weight in module.named_parameters()}
    target = few_bits.measured_in_few_bits(target, bits)
    gc.collect()
    freed = {name for name, weight in before.items() if weight() is None}
    assert freed == {name for name in before if name.endswith("_proj.weight")}
    assert target.borrowed().head_VD is not None
    inner = module.shape.intermediate_size
    assert {tuple(w.shape) for w in body.layers[0].mlp.parameters()} == {(inner, 256), (256, inner)}
    assert {weight.device.type for weight in module.parameters()} == {"cpu"}


@needs_int8
@pytest.mark.parametrize("name", ["eagle3", "swift", "itself"])
def test_drafters_that_read_the_target_still_draft(target: Target, name: str) -> None:
    """Its LM head and taps; its layers; all of it."""
    if name == "itself":
        drafter: Drafter = SmallLm.from_lm(target.lm, target.spec)
    else:
        family = families()[name]
        drafter = family.build(family.options(), target.spec, None).to("cpu", target.dtype)
    settings = {"max_new_tokens": 24, "ignore_eos": True}
    plain = specctl.generate(target, "def read(path):\n", **settings)
    made = specctl.generate(target, "def read(path):\n", drafter, **settings)
    assert made.text == plain.text
    assert made.stats.rounds < 24 or name == "eagle3", "an untrained head may never be right"


@needs_int8
def test_keys_and_values_are_those_that_a_forward_leaves_in_the_cache(target: Target) -> None:
    name = target.dtype_name
    for lm in (target.lm, specctl.load_target("tiny", dtype=name, inflate="100m", device="cpu").lm):
        ids, start = torch.tensor([[5, 9, 2, 7]]), torch.tensor([0])
        position, masks, kv = torch.arange(4)[None], lm.chain_masks(start, 4, 4), lm.new_kv(1, 4)
        kv.begin((0,), start, start, 4, 4, 0)
        taps = lm.forward(ids, position, masks, kv, taps=(1, 3)).taps
        at, heads = getattr(lm, "real_layers", range(9)), lm.spec.num_kv_heads
        for layer, (key, value) in lm.key_value(taps, position).items():
            # computed from taps, which are rounded where the target is in bfloat16
            off = 0.05 if key.dtype == torch.bfloat16 else 0.0
            for mine, left in zip((key, value), kv.read(at[layer]), strict=True):
                torch.testing.assert_close(mine, left[:, :heads], atol=off, rtol=off)


@needs_int8
def test_what_needs_the_stored_matrices_is_refused(target: Target) -> None:
    ids = torch.zeros(1, 2, dtype=torch.long)
    state = {1: torch.zeros(1, 2, 256, requires_grad=True)}
    masks = target.lm.chain_masks(torch.tensor([0]), 2, 2)
    for use in (
        lambda: copy.deepcopy(target.lm),
        lambda: target.lm.module.state_dict(),
        lambda: target.lm.key_value(state, ids),  # with gradients, as the next
        lambda: target.lm.dense(ids, ids, masks),
        lambda: pickle.dumps(target.lm.module.model.layers[0]),
    ):
        with pytest.raises(IncompatibleError, match="few bits are not in memory in any other form"):
            use()


@pytest.mark.parametrize("bits", [8, 4])
def test_where_it_is_no_gain_it_is_refused(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    given: dict[str, Any]
    for given in ({"compile": True}, {"device_map": "auto"}):
        with pytest.raises(SpecctlError, match=f"weights of dtype int{bits} are read"):
            specctl.load_target("tiny", dtype=f"int{bits}", device="cpu", **given)
    monkeypatch.setattr(few_bits, "no_int8", lambda: "a CPU without AVX2")
    with pytest.raises(IncompatibleError, match=f"{bits} bits") as refused:
        specctl.load_target("tiny", dtype=f"int{bits}", device="cpu")
    assert refused.value.found == "a CPU without AVX2"


@needs_int8
def test_how_far_it_is_from_the_model_as_stored_is_measured_once_and_stands_in_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = specctl.load_target("tiny", dtype="int4", device="cpu")
    assert first.rounding is not None
    assert 5e-3 < first.rounding.kl < 5e-2
    assert 0.8 < first.rounding.agreement < 1
    assert first.rounding.tokens == 256
    assert target_json(first)["rounding"]["kl"] == first.rounding.kl
    monkeypatch.setattr(rounding, "_logits", lambda *given: pytest.fail("measured twice"))
    assert specctl.load_target("tiny", dtype="int4", device="cpu").rounding == first.rounding
    assert specctl.load_target("tiny", device="cpu").rounding is None


@needs_int8
def test_a_target_that_answers_otherwise_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(rounding, "DOUBTFUL", 0.001)
    with pytest.warns(UserWarning, match="visibly worse model; --dtype int8 or --dtype auto"):
        specctl.load_target("tiny", dtype="int4", device="cpu")
    console = Console(io.StringIO(), io.StringIO())
    TargetChoice("tiny", dtype="int4", device="cpu").load(console)
    assert "KL" in console.warnings[0]
    monkeypatch.setattr(rounding, "DOUBTFUL", 0.05)
    told = io.StringIO()
    TargetChoice("tiny", dtype="int4", device="cpu").load(Console(io.StringIO(), told))
    assert "in int4 the target is KL 0.0" in told.getvalue()
    assert "warning" not in told.getvalue()


@pytest.mark.parametrize("name", ["quantspec", "prompt-lookup+quantspec"])
def test_a_drafter_that_reads_stored_weights_is_named_before_anything_is_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*given: object, **named: object) -> None:
        pytest.fail("a target was loaded")

    monkeypatch.setattr("specctl.runtime.target.target.load_target", loads)
    with pytest.raises(IncompatibleError, match="quantspec drafts with the target") as caught:
        TargetChoice("tiny", dtype="int8").or_own(name)
    assert "--dtype auto" in caught.value.do
    assert "prompt-lookup" in caught.value.do
    TargetChoice("tiny", dtype="auto").or_own(name)
    TargetChoice("tiny", dtype="int8").or_own("prompt-lookup")


@needs_int8
def test_in_python_it_is_named_as_well(target: Target) -> None:
    with pytest.raises(IncompatibleError, match="quantspec drafts with the target"):
        specctl.generate(target, "x", "quantspec")
