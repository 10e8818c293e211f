"""The module of a checkpoint: taken out, proved, and written back bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import GateError, IncompatibleError, SpecctlError
from specctl.drafters.features.mtp import Mtp, MtpNet, MtpOptions
from specctl.export.formats import export
from specctl.export.imports import import_published
from specctl.export.imports.published import read_published
from specctl.export.package.folder import load_drafter, save_package
from specctl.models.weights.mtp_layout import layout_of, ours
from specctl.runtime.target.mtp_checkpoint import first_module, own_module, stored_module
from specctl.runtime.target.target import Target
from specctl_testing.export.import_cases import same_tensors, taken
from specctl_testing.export.mtp_cases import DENSE, MODELS, checkpoint, opened

KEY = "num_nextn_predict_layers"
SERVE = {"policy": "chain", "length": 2}


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def every_tensor(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert all(index[name] == path.name for name in tensors), path.name
        found |= tensors
    assert found.keys() == index.keys()
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [  # every layout, in one of two types by turns; the others are proofs
        pytest.param(kind, dtype, marks=[pytest.mark.proof] if (i + j) % 2 else [])
        for i, kind in enumerate(MODELS | DENSE)
        for j, dtype in enumerate((torch.float32, torch.bfloat16))
    ],
)
def test_a_module_comes_out_and_goes_back_bit_for_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, tensors = checkpoint(kind, folder, dtype)
    before = digests(folder)
    report = taken(folder, target, package)
    assert (report.format, report.manifest.family) == ("mtp", "mtp")
    drafter = load_drafter(package, target)
    assert same_tensors(drafter, load_drafter("mtp", target))
    export(package, "mtp", back, target)
    assert digests(folder) == before
    there, here = every_tensor(back), every_tensor(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in here)
    assert tensors.keys() <= here.keys()
    again = opened(back, target.lm.module)
    assert same_tensors(own_module(again), own_module(target))


def test_of_a_checkpoint_the_module_alone_is_read(tmp_path: Path) -> None:
    _, tensors = checkpoint("glm4_moe", tmp_path / "checkpoint")
    assert read_published(tmp_path / "checkpoint").tensors.keys() == tensors.keys()


def test_experts_that_are_stored_together_stay_together(tmp_path: Path) -> None:
    """As Qwen3.5 stores its mixtures."""
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, _ = checkpoint("glm4_moe", folder)
    block = own_module(target).tensors()
    own = {n.removeprefix(ours(0)): t for n, t in block.items() if n.startswith(ours(0))}

    def joined(found: Any) -> None:
        for name in [name for name in found if ".mlp.experts." in name]:
            del found[name]
        found |= {OWN + name: t.clone() for name, t in own.items() if ".experts." in name}

    changed(folder, joined)
    taken(folder, target, package)
    assert same_tensors(load_drafter(package, target), load_drafter("mtp", target))
    export(package, "mtp", back, target)
    there, here = every_tensor(back), every_tensor(folder)
    assert f"{OWN}mlp.experts.gate_up_proj" in there
    assert there.keys() == here.keys()
    assert all(torch.equal(there[name], here[name]) for name in here)


def test_a_tuned_module_goes_back_changed_and_nothing_else(tmp_path: Path) -> None:
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, tensors = checkpoint("glm4_moe", folder)
    drafter = own_module(target)
    with torch.no_grad():
        drafter.module.fc.weight.add_(1.0)
    save_package(
        drafter, target, package, serve=SERVE, recipe_digest="", acceptance=None, command=[]
    )
    manifest = export(package, "mtp", back, target)
    there, here = every_tensor(back), every_tensor(folder)
    assert [n for n in here if not torch.equal(here[n], there[n])] == [
        "model.layers.2.eh_proj.weight"
    ]
    torch.testing.assert_close(
        there["model.layers.2.eh_proj.weight"], tensors["model.layers.2.eh_proj.weight"] + 1.0
    )
    assert json.loads((back / "config.json").read_text())[KEY] == 1
    assert any('"method": "mtp"' in line for line in manifest.served_by)


def test_a_target_without_a_module_gets_one(tmp_path: Path) -> None:
    """One file of weights without an index, and no word of a module in config.json."""
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, tensors = checkpoint("qwen3_next", folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    (folder / "model-00001-of-00002.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(SpecctlError, match="carries no module"):
        own_module(target)
    drafter = first_module(target)
    save_package(
        drafter, target, package, serve=SERVE, recipe_digest="", acceptance=None, command=[]
    )
    export(package, "mtp", back, target)
    config = json.loads((back / "config.json").read_text())
    assert config[KEY] == 1
    assert stored_module(back, layout_of(target.lm.module.config)).keys() == tensors.keys()
    every_tensor(back)
    two = first_module(target, 2).options
    assert (two.modules, two.shared) == (2, True)
    path = folder / "config.json"
    for count in (1000, -1):  # the message is about the file, not about an option
        path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: count}))
        with pytest.raises(IncompatibleError, match=f"{KEY}: {count}, tensors of 0"):
            first_module(target)


def test_as_many_modules_as_the_target_carries_may_be_wanted(tmp_path: Path) -> None:
    target, _ = checkpoint("glm4_moe", tmp_path, modules=2)
    assert first_module(target, 2).options.modules == first_module(target).options.modules == 2
    with pytest.raises(IncompatibleError, match=r"found: modules: 3, the checkpoint holds 2"):
        first_module(target, 3)


def changed(folder: Path, change: Any) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    body["weight_map"] = {n: p for n, p in body["weight_map"].items() if p != path.name}
    body["weight_map"] |= dict.fromkeys(tensors, path.name)
    index.write_text(json.dumps(body))


OWN = "model.layers.2."


def renamed(tensors: Any) -> None:
    tensors[f"{OWN}hidden_norm.weight"] = tensors.pop(f"{OWN}hnorm.weight")


def other_head(tensors: Any) -> None:
    tensors[f"{OWN}shared_head.head.weight"] += 1.0


def narrow(tensors: Any) -> None:
    tensors[f"{OWN}mlp.experts.0.up_proj.weight"] = torch.zeros(8, 32)


def quantised(tensors: Any) -> None:
    name = f"{OWN}eh_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (renamed, "hidden_norm.weight"),
        (lambda tensors: tensors.pop(f"{OWN}shared_head.norm.weight"), "norm.weight"),
        (other_head, "head of its own"),
        (narrow, r"experts.0.up_proj.weight \(8, 32\)"),
        (quantised, "quantised"),
    ],
)
def test_a_module_that_is_another_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    target, _ = checkpoint("glm4_moe", tmp_path / "checkpoint")
    changed(tmp_path / "checkpoint", change)
    with pytest.raises(SpecctlError, match=told):
        taken(tmp_path / "checkpoint", target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


def test_a_number_of_modules_that_is_not_there_is_refused(tmp_path: Path) -> None:
    target, _ = checkpoint("glm4_moe", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: 3}))
    with pytest.raises(SpecctlError, match="another number of modules than it says"):
        own_module(target)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_5_text", "mimo_v2_flash"])
def test_several_modules_come_out_and_go_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, _ = checkpoint(kind, folder, modules=3)
    report = taken(folder, target, package)
    drafter = load_drafter(package, target)
    assert isinstance(drafter, Mtp)
    assert (drafter.options.modules, drafter.options.shared) == (3, kind == "qwen3_5_text")
    assert report.manifest.serve["length"] == 3
    # every module's own layer: none is the first one over again
    queries = [t for n, t in drafter.tensors().items() if n.endswith("self_attn.q_proj.weight")]
    assert len({float(tensor.sum()) for tensor in queries}) == 3
    export(package, "mtp", back, target)
    there, here = every_tensor(back), every_tensor(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in here)
    single = Mtp(MtpOptions(layer=drafter.options.layer), target.spec)
    single.bind(target.borrowed())
    save_package(
        single, target, tmp_path / "1", serve=SERVE, recipe_digest="", acceptance=None, command=[]
    )
    with pytest.raises(SpecctlError, match="another number of modules than the drafter"):
        export(tmp_path / "1", "mtp", tmp_path / "out", target)


def says(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("order", ["plain", "interleaved"])
def test_fused_projections_come_apart_and_go_back_bit_for_bit(order: str, tmp_path: Path) -> None:
    """MiMo-V2.5-Pro's, in pieces as many as its full layers have heads of keys; a checkpoint that
    does not say which of the two orders it has is refused, since neither shows."""
    folder, package, back = (tmp_path / name for name in ("checkpoint", "package", "back"))
    target, _ = checkpoint("mimo_v2_flash", folder, modules=2)
    apart, pieces = own_module(target), 2 if order == "interleaved" else 1

    def in_one(tensors: dict[str, torch.Tensor]) -> None:
        for before in ("model.mtp.layers.0.self_attn.", "model.mtp.layers.1.self_attn."):
            parts = [tensors.pop(f"{before}{name}_proj.weight").chunk(pieces) for name in "qkv"]
            assert len(parts[0][0]) != len(parts[2][0]), "values are narrower than keys"
            rows = [part[piece] for piece in range(pieces) for part in parts]
            tensors[f"{before}qkv_proj.weight"] = torch.cat(rows)

    changed(folder, in_one)
    says(folder, attention_projection_layout="fused_qkv")
    with pytest.raises(IncompatibleError, match="does not say in which order the rows"):
        own_module(target)
    says(folder, fused_qkv_weight_order=order)
    assert same_tensors(own_module(target), apart)
    taken(folder, target, package)
    export(package, "mtp", back, target)
    there, here = every_tensor(back), every_tensor(folder)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[n], here[n]) and there[n].dtype == here[n].dtype for n in here)
    other = {"plain": "interleaved", "interleaved": "plain"}[order]
    says(folder, fused_qkv_weight_order=other)
    assert not same_tensors(own_module(target), apart)


def test_modules_in_another_order_are_caught(tmp_path: Path, monkeypatch: Any) -> None:
    target, _ = checkpoint("glm4_moe", tmp_path / "checkpoint", modules=3)
    entry = MtpNet.entry
    monkeypatch.setattr(MtpNet, "entry", lambda self, module: entry(self, 0))
    with pytest.raises(GateError, match=r"drafted token 2: .*differ by"):
        import_published(tmp_path / "checkpoint", target, tmp_path / "package", command=[])


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next"])
def test_a_drafter_that_reads_otherwise_is_caught(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    target, _ = checkpoint(kind, tmp_path / "checkpoint")
    mix = MtpNet.mix
    monkeypatch.setattr(MtpNet, "mix", lambda self, token, state: mix(self, state, token))
    with pytest.raises(GateError, match="differ by"):
        import_published(tmp_path / "checkpoint", target, tmp_path / "package", command=[])


def test_a_module_with_a_llama_layer_has_no_place(make_target: Any, tmp_path: Path) -> None:
    target = make_target()
    drafter = Mtp(MtpOptions(), target.spec)
    save_package(
        drafter, target, tmp_path / "p", serve=SERVE, recipe_digest="", acceptance=None, command=[]
    )
    with pytest.raises(SpecctlError, match="no place for a module"):
        export(tmp_path / "p", "mtp", tmp_path / "out", target)


def test_the_name_of_the_family_is_the_module_that_the_target_carries(make_target: Any) -> None:
    target: Target = make_target()
    with pytest.raises(SpecctlError):
        load_drafter("mtp", target)
