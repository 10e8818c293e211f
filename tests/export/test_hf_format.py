"""A transformers folder drafts in transformers what our drafter drafts here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specctl.core.errors import FileError, GateError, IncompatibleError, SpecctlError
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.vocab import VocabMap
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.export.formats import export, formats
from specctl.export.layouts.widen import MARGIN, residual_bound, widen
from specctl.export.package.check import check_package
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import check_files, read_manifest
from specctl.models.llama.fast_llama import LlamaModel, LlamaShape
from specctl.runtime.target.target import Target

KEPT = torch.tensor([0, 2, 3, 4, 5, 7, 11, 20, 21, 22, 30, 31, 40, 47])
SMALL = SmallLmOptions(layers=2, width=16, head_dim=8, heads=2, kv_heads=1, intermediate=24)


def shaken(drafter: SmallLm, seed: int = 0, size: float = 0.4) -> SmallLm:
    """Fresh layers are identities; make every weight count."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.module.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=size)
    return drafter


@pytest.fixture
def make_small(plain_target: Target) -> Callable[..., SmallLm]:
    def make(
        kept_K: torch.Tensor | None = None, dtype: Any = torch.float32, **changes: Any
    ) -> SmallLm:
        vocab = None if kept_K is None else VocabMap(kept_K, plain_target.spec.vocab_size)
        drafter = SmallLm(replace(SMALL, **changes), plain_target.spec, vocab)
        shaken(drafter).module.to(dtype)
        return drafter

    return make


def logits_of(drafter: SmallLm, ids_BS: torch.Tensor) -> torch.Tensor:
    position_BS = torch.arange(ids_BS.shape[1]).expand_as(ids_BS)
    masks = Masks(document_mask(torch.zeros_like(ids_BS)))
    with torch.no_grad():
        out = drafter.lm.dense(ids_BS, position_BS, masks)
    assert out.logits_BTV is not None
    return out.logits_BTV


OPTIONS: list[dict[str, Any]] = [
    {"tied": True},
    {"tied": False},
    {"qk_norm": True},
    {"width": 15, "heads": 2},
    {"heads": 4, "kv_heads": 2},
]


@pytest.mark.parametrize("changes", OPTIONS)
@pytest.mark.parametrize("trimmed", [False, True])
def test_transformers_computes_the_same_logits(
    changes: dict[str, Any],
    trimmed: bool,
    make_small: Any,
    save: Any,
    plain_target: Target,
    tmp_path: Path,
) -> None:
    if trimmed:
        changes = {**changes, "tied": False}
    drafter = make_small(KEPT if trimmed else None, **changes)
    out = tmp_path / "hf"
    export(save(drafter), "hf", out, plain_target)
    model = AutoModelForCausalLM.from_pretrained(out).eval().double()
    drafter.module.double()
    ids_BS = torch.randint(48, (4, 40))
    ours_BSK, theirs_BSV = logits_of(drafter, ids_BS), model(ids_BS).logits.detach()
    assert theirs_BSV.shape[-1] == plain_target.spec.vocab_size
    kept_K = KEPT if trimmed else torch.arange(48)
    assert torch.allclose(theirs_BSV[..., kept_K], ours_BSK, atol=1e-5, rtol=1e-5)
    if trimmed:
        theirs_BSV[..., kept_K] = -torch.inf
        assert theirs_BSV.max() < ours_BSK.min() - MARGIN


def test_widening_is_exact_in_real_arithmetic() -> None:
    shape = LlamaShape(2, 12, 48, 4, 2, 8, 20, 1e-2, 1e4, tied=False, out_size=len(KEPT))
    torch.manual_seed(1)
    small = LlamaModel(shape).double()
    with torch.no_grad():
        for weight in small.parameters():
            weight.normal_()
    wide = widen(shape, dict(small.state_dict()), KEPT)
    assert wide.shape.hidden_size == 16
    x_ND = torch.randn(50, 12).double() * torch.logspace(-4, 3, 50).double()[:, None]
    c = wide.tensors["model.embed_tokens.weight"][0, 12]
    assert c > 0
    wide_ND = torch.cat([x_ND, c.expand(50, 1), torch.zeros(50, 3)], dim=1)
    weight_D = small.model.norm.weight
    narrow = torch.nn.functional.rms_norm(x_ND, (12,), weight_D, shape.norm_eps)
    out = torch.nn.functional.rms_norm(
        wide_ND, (16,), wide.tensors["model.norm.weight"], wide.shape.norm_eps
    )
    assert torch.allclose(out[:, :12], narrow, atol=1e-12, rtol=1e-12)
    assert (out[:, 12] > 0).all()


def test_the_bound_holds_for_the_worst_states_that_can_be_found(make_small: Any) -> None:
    drafter = make_small(KEPT)
    tensors = {n: t.double() for n, t in drafter.tensors().items()}
    bound = residual_bound(drafter.module.shape, tensors, drafter.module.shape.hidden_size)
    wide = widen(drafter.module.shape, tensors, KEPT)
    cut = [i for i in range(48) if i not in set(KEPT.tolist())]
    head_VD, norm_D = wide.tensors["lm_head.weight"], wide.tensors["model.norm.weight"]
    constant = float(wide.tensors["model.embed_tokens.weight"][0, wide.channel])
    torch.manual_seed(0)
    for length in (1e-6, 1e-2, 1.0, 1e2, 0.5 * bound, bound):
        x_ND = torch.randn(300, 16).double()
        pushed_KD = -(tensors["lm_head.weight"] * tensors["model.norm.weight"])
        x_ND = torch.cat([x_ND, pushed_KD])  # as low as the kept rows can be pushed
        x_ND = length * x_ND / x_ND.norm(dim=1, keepdim=True)
        fill = torch.zeros(len(x_ND), wide.shape.hidden_size - 16).double()
        fill[:, 0] = constant
        state = torch.nn.functional.rms_norm(
            torch.cat([x_ND, fill], 1), (wide.shape.hidden_size,), norm_D, wide.shape.norm_eps
        )
        logits = state @ head_VD.T
        assert logits[:, cut].max() < logits[:, KEPT].min() - MARGIN
    ids_BS = torch.randint(48, (8, 60))
    masks = Masks(document_mask(torch.zeros_like(ids_BS)))
    with torch.no_grad():
        states = drafter.lm.dense(ids_BS, torch.arange(60).expand_as(ids_BS), masks, taps=(0, 1))
    assert all(float(t.norm(dim=-1).max()) < bound for t in states.taps.values())
    assert math.isfinite(bound)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("sample", [False, True])
def test_it_assists_transformers_without_changing_greedy_output(
    trimmed: bool,
    sample: bool,
    make_small: Any,
    save: Any,
    plain_target: Target,
    make_model: Any,
    tmp_path: Path,
) -> None:
    out = tmp_path / "hf"
    export(save(make_small(KEPT if trimmed else None, tied=not trimmed)), "hf", out, plain_target)
    big = make_model(num_layers=4, hidden=16, vocab=48).double()
    draft = AutoModelForCausalLM.from_pretrained(out).double().eval()
    assert draft.generation_config.num_assistant_tokens == 3
    seen: list[int] = []
    forward = draft.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        seen.append(int(result.logits[0, -1].argmax()))
        return result

    draft.forward = spy
    draft.generation_config.eos_token_id = None
    for seed in range(3):
        torch.manual_seed(seed)
        ids_1S = torch.randint(48, (1, 9))
        how = {"do_sample": sample, "max_new_tokens": 24, "pad_token_id": 0}
        assisted = big.generate(ids_1S, assistant_model=draft, **how)
        if not sample:
            assert torch.equal(assisted, big.generate(ids_1S, **how))
    assert len(seen) > 20
    if trimmed:
        assert set(seen) <= set(KEPT.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_trimmed_drafts_in_other_dtypes(
    dtype: torch.dtype, make_small: Any, save: Any, plain_target: Target, tmp_path: Path
) -> None:
    package, out = save(make_small(KEPT, dtype)), tmp_path / "hf"
    if dtype == torch.float16:
        with pytest.raises(IncompatibleError, match=r"cannot be made unreachable.*--to specctl"):
            export(package, "hf", out, plain_target)
        assert not out.exists()
        return
    export(package, "hf", out, plain_target)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto").eval()
    assert model.dtype == dtype
    prob = model(torch.randint(48, (2, 30))).logits.detach().float().softmax(-1)
    cut = [i for i in range(48) if i not in set(KEPT.tolist())]
    assert float(prob[..., cut].max()) == 0.0
    assert bool(torch.isfinite(prob).all())


def test_the_folder_comes_back_as_the_same_drafter(
    make_small: Any, save: Any, plain_target: Target, tmp_path: Path
) -> None:
    target = replace(plain_target, tokenizer_fingerprint=None, template_digest=None)
    drafter = make_small()
    package = save(drafter)
    out = tmp_path / "hf"
    allow = ("tokenizer", "template")
    export(package, "hf", out, target, allow=allow)
    back = load_drafter(out, target, allow=allow)
    assert isinstance(back, SmallLm)
    assert back.options == replace(SMALL, tied=True)
    ids = torch.randint(48, (2, 20))
    assert torch.allclose(logits_of(back, ids), logits_of(drafter, ids), atol=1e-5)
    (out / "config.json").write_text((out / "config.json").read_text().replace("24", "25"))
    with pytest.raises(SpecctlError, match=r"config\.json"):
        load_drafter(out, target, allow=allow)


def test_the_folder_holds_the_targets_tokenizer_and_no_machine_path(
    make_small: Any, save: Any, plain_target: Target, tmp_path: Path, word_tokenizer: Any
) -> None:
    word_tokenizer.save_pretrained(tmp_path / "tok")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tok")
    target = replace(plain_target, tokenizer=tokenizer)
    out = tmp_path / "hf"
    export(save(make_small()), "hf", out, target)
    assert (out / "tokenizer.json").exists()
    for path in out.iterdir():
        assert str(tmp_path).encode() not in path.read_bytes(), path
    again = PreTrainedTokenizerFast.from_pretrained(out)
    assert again.get_vocab() == tokenizer.get_vocab()
    manifest = check_files(out)
    assert manifest.format == "hf"
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= set(manifest.files)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == 48
    assert config["eos_token_id"] == 2
    assert "assistant_model=draft" in (out / "README.md").read_text()


def test_a_folder_that_computes_something_else_does_not_pass(
    make_small: Any, save: Any, plain_target: Target, tmp_path: Path, monkeypatch: Any
) -> None:
    out = tmp_path / "hf"
    form = formats()["hf"]

    def wrong(source: Any, folder: Path) -> None:
        form.write(source, folder)
        body = json.loads((folder / "config.json").read_text())
        body["rope_parameters"]["rope_theta"] = 17.0
        (folder / "config.json").write_text(json.dumps(body))

    monkeypatch.setitem(formats(), "hf", replace(form, write=wrong))
    with pytest.raises(GateError, match="does not compute"):
        export(save(make_small()), "hf", out, plain_target)
    assert not out.exists()


def test_other_families_are_refused_with_the_formats_that_fit(
    package: Path, plain_target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=r"cannot hold .*toy.*formats that fit: specctl"):
        export(package, "hf", tmp_path / "out", plain_target)
    with pytest.raises(SpecctlError, match=r"unknown export format 'gguff'.*--to gguf"):
        export(package, "gguff", tmp_path / "out", plain_target)
    assert not (tmp_path / "out").exists()


def test_export_never_writes_over_its_source(package: Path, plain_target: Target) -> None:
    for out in (package, package / "inside", package.parent):
        with pytest.raises(FileError, match="over its own source"):
            export(package, "specctl", out, plain_target)


def test_a_copy_has_fresh_hashes_and_the_same_weights(
    package: Path, plain_target: Target, tmp_path: Path
) -> None:
    manifest = export(package, "specctl", tmp_path / "copy", plain_target)
    old = read_manifest(package)
    assert manifest == check_files(tmp_path / "copy")
    assert manifest.files["model.safetensors"] == old.files["model.safetensors"]
    assert manifest.created == old.created


def test_a_damaged_package_is_not_exported(
    package: Path, plain_target: Target, tmp_path: Path
) -> None:
    path = package / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(SpecctlError, match="changed after"):
        export(package, "specctl", tmp_path / "copy", plain_target)


def test_acceptance_agrees_before_and_after_loading(
    make_small: Any, save: Any, plain_target: Target
) -> None:
    drafter = make_small()
    serve = {"policy": "chain", "length": 3}
    folder = save(drafter, serve=serve)
    prompts = [[1, 5, 9, 4], [7, 7, 3], [20, 30]]
    report = check_package(folder, plain_target, reference=drafter, prompts=prompts)
    assert report.loaded is not None
    assert report.before is not None
    assert report.loaded == report.before
    assert report.loaded.tau >= 1.0
    measured = {"tau": report.loaded.tau, "alpha": [], "command": "x", "data": "y"}
    save(drafter, serve=serve, acceptance=measured)
    again = check_package(folder, plain_target, prompts=prompts, against_recorded=True)
    assert again.recorded_tau == report.loaded.tau
    save(drafter, serve=serve, acceptance={**measured, "tau": report.loaded.tau + 1})
    with pytest.raises(GateError, match="acceptance after loading differs"):
        check_package(folder, plain_target, prompts=prompts, against_recorded=True)


def test_rounding_to_the_target_is_no_difference_in_acceptance(
    make_small: Any, save: Any, make_target: Any, plain_target: Target
) -> None:
    drafter = make_small()
    folder = save(drafter, serve={"policy": "chain", "length": 3})
    rounded = make_target(num_layers=4, hidden=16, vocab=48, dtype=torch.bfloat16)
    target = replace(plain_target, lm=rounded.lm)
    prompts = [[1 + i, 5, 9, 4 + i] for i in range(12)]
    report = check_package(folder, target, reference=drafter, prompts=prompts, tolerance=0.0)
    assert report.before == report.loaded
    assert next(drafter.module.parameters()).dtype is torch.float32


def test_a_drafter_that_lost_something_on_disk_does_not_pass(
    make_small: Any, save: Any, plain_target: Target
) -> None:
    drafter = make_small()
    folder = save(drafter, serve={"policy": "chain", "length": 3})
    with torch.no_grad():
        drafter.module.model.norm.weight[3] += 1e-6
    with pytest.raises(GateError, match=r"model\.norm\.weight"):
        check_package(folder, plain_target, reference=drafter)
