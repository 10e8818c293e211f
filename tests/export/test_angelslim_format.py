"""DFly and DFlare leave as AngelSlim publishes them, and come back from its folders and AngelSpec's
as they were, byte for byte; what they score is computed here once more, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl.core.errors import GateError, IncompatibleError, SpecctlError
from specctl.export.formats import export, format_for
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import WEIGHTS
from specctl.export.readers.trial import Trial, drafted_logits
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
from specctl_testing.export.import_cases import Config, Tensors, same_tensors, taken

TO, MASK = "angelslim", {"mask_id": 9, "num_heads": 3}
FLY_KEYS = {
    "architectures": ["Qwen3DFlyModel"],
    "model_type": "qwen3",
    "model_arch": "dfly",
    "block_size": 4,
    "mask_token_id": 9,
    "target_layer_ids": [0, 1, 2],
    "num_target_layers": 3,
    "target_num_hidden_layers": 8,
    "enable_hidden_correction": True,
    "hidden_correction_intermediate_size": 24,
    "sample_from_anchor": False,
    "dspark_bonus_anchor": True,
}
FLY_TENSORS = {
    "context_proj.weight": [16, 48],
    "context_norm.weight": [16],
    "final_norm.weight": [16],
    "layer_fusion_weights": [2, 3],
    "hidden_correction.hidden_norm.weight": [16],
    "hidden_correction.embed_norm.weight": [16],
    "hidden_correction.gate_proj.weight": [24, 32],
    "hidden_correction.up_proj.weight": [24, 32],
    "hidden_correction.down_proj.weight": [16, 24],
}
FLARE_KEYS = {
    "architectures": ["QwenDFlareDraftModel"],
    "model_type": "qwen3",
    "block_size": 4,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 1, 2], "causal": False},
}
FLARE_TENSORS = {
    "layer_fusion_weights": [2, 3],
    "hidden_norm.weight": [16],
    "norm.weight": [16],
    "layers.1.self_attn.k_proj_target.weight": [8, 16],
    "layers.0.self_attn.v_proj_target.weight": [8, 16],
}


@pytest.mark.parametrize(
    ("family", "options", "keys", "tensors"),
    [("dfly", {"inner": 24}, FLY_KEYS, FLY_TENSORS), ("dflare", {}, FLARE_KEYS, FLARE_TENSORS)],
)
def test_a_folder_has_the_published_names(
    family: str,
    options: dict[str, Any],
    keys: dict[str, Any],
    tensors: dict[str, list[int]],
    target: Target,
    tmp_path: Path,
) -> None:
    drafter = shaken(family, target, **MASK, **options)
    manifest = exported(drafter, target, tmp_path / "out", TO)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config.get(key) for key in keys} == keys
    assert ("dflash_config" in config) == (family == "dflare")
    found = {name: list(t.shape) for name, t in load_file(tmp_path / "out" / WEIGHTS).items()}
    assert {name: found.get(name) for name in tensors} == tensors
    assert len(found) == len(drafter.tensors())
    assert "fc.weight" not in found
    assert manifest.served_by == ()
    assert any("no released engine" in note for note in manifest.notes)
    assert "No command" in (tmp_path / "out" / "README.md").read_text()


# -- by hand -----------------------------------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x_LHE: Tensor, first: int, theta: float) -> Tensor:
    """Rotary positions: pairs of an element of the first half and one of the second."""
    low, high = x_LHE.chunk(2, dim=-1)
    half = torch.arange(low.shape[-1], dtype=x_LHE.dtype)
    position_L = torch.arange(first, first + len(x_LHE), dtype=x_LHE.dtype)
    angle = (position_L[:, None] / theta ** (half / low.shape[-1]))[:, None]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def by_hand(
    config: Config, t: Tensors, trial: Trial, embedding_VD: Tensor, head_VD: Tensor
) -> Tensor:
    """[B, V]: what every slot says of the position that it stands at; slot 0 is the root's."""
    settings = {**config, **config.get("dflash_config", {})}
    heads, size, theta = (config[k] for k in ("num_attention_heads", "head_dim", "rope_theta"))
    taps = [trial.states[layer + 1] for layer in settings["target_layer_ids"]]
    ids = [trial.ids[-1], *[settings["mask_token_id"]] * (config["block_size"] - 1)]
    x, before = embedding_VD[ids], len(trial.ids) - 1
    names = {"context": "context_norm", "last": "final_norm"}
    if "context_proj.weight" not in t:
        names = {"context": "hidden_norm", "last": "norm"}
    for layer in range(config["num_hidden_layers"]):
        part = {
            n.split(f"layers.{layer}.")[1].removesuffix(".weight"): w
            for n, w in t.items()
            if n.startswith(f"layers.{layer}.")
        }
        share = t["layer_fusion_weights"][layer].exp()
        read = sum(s / share.sum() * tap for s, tap in zip(share, taps, strict=True))
        if "context_proj.weight" in t:
            read = read + torch.cat(taps, -1) @ t["context_proj.weight"].T
        read, y = normed(read, t[f"{names['context']}.weight"]), normed(x, part["input_layernorm"])
        query = (y @ part["self_attn.q_proj"].T).unflatten(-1, (-1, size))
        query = turned(normed(query, part["self_attn.q_norm"]), before, theta)
        pair = []
        for kind in ("k", "v"):
            own = part[f"self_attn.{kind}_proj"]
            of_text = part.get(f"self_attn.{kind}_proj_target", own)
            pair.append(torch.cat([read @ of_text.T, y @ own.T]).unflatten(-1, (-1, size)))
        key = turned(normed(pair[0], part["self_attn.k_norm"]), 0, theta)
        key, value = (z.repeat_interleave(heads // z.shape[1], dim=1) for z in (key, pair[1]))
        chance = (torch.einsum("qhe,khe->hqk", query, key) / size**0.5).softmax(-1)
        seen = torch.einsum("hqk,khe->qhe", chance, value).flatten(1)
        x = x + seen @ part["self_attn.o_proj"].T
        y = normed(x, part["post_attention_layernorm"])
        gate = y @ part["mlp.gate_proj"].T
        x = x + (gate.sigmoid() * gate * (y @ part["mlp.up_proj"].T)) @ part["mlp.down_proj"].T
    state = normed(x, t[f"{names['last']}.weight"])
    if "context_proj.weight" in t:  # slot k is corrected behind the token at k - 1
        c = {n.split(".")[1]: w for n, w in t.items() if n.startswith("hidden_correction.")}
        last = embedding_VD[[trial.ids[-1], trial.ids[-1], *trial.drafted]]
        both = torch.cat([normed(state, c["hidden_norm"]), normed(last, c["embed_norm"])], dim=-1)
        added = (F.silu(both @ c["gate_proj"].T) * (both @ c["up_proj"].T)) @ c["down_proj"].T
        state = torch.cat([state[:1], (state + added)[1:]])
    return state @ head_VD.T


@pytest.mark.parametrize("family", ["dfly", "dflare"])
@torch.no_grad()
def test_the_first_slots_and_the_last_say_what_the_equations_say(
    family: str, target: Target, tmp_path: Path
) -> None:
    """Slot 0 speaks for nobody: slot 1 is what is drafted first, slot B - 1 what is drafted
    last."""
    drafter: Any = shaken(family, target, num_heads=5, mask_id=9)
    exported(drafter, target, tmp_path / "out", TO)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-6
    tensors = {n: t.double() for n, t in load_file(tmp_path / "out" / WEIGHTS).items()}
    random = torch.Generator().manual_seed(3)
    states = torch.randn(9, 7, 16, generator=random, dtype=torch.float64)
    trial = Trial((4, 8, 15, 16, 23, 42, 3, 7), (11, 30, 2, 45), dict(enumerate(states)))
    rows = target.borrowed().embedding_VD.double(), target.borrowed().head_VD.double()
    theirs_BV = by_hand(config, tensors, trial, *rows)
    drafter.to(torch.device("cpu"), torch.float64)
    ours_NV = drafted_logits(drafter, trial)
    assert len(ours_NV) == len(theirs_BV) - 1 == 5
    for slot in (1, 2, 5):
        torch.testing.assert_close(ours_NV[slot - 1], theirs_BV[slot], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours_NV[0], theirs_BV[0], atol=0.1)


# -- back and forth ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("dfly", {"inner": None}),
        ("dfly", {"inner": 24, "layers": 1, "rope_theta": 77.0, "dtype": torch.bfloat16}),
        ("dflare", {"layers": 1, "kv_heads": 1, "heads": 2, "head_dim": 8, "intermediate": 24}),
    ],
    ids=str,
)
def test_a_published_folder_comes_back_and_goes_out_as_it_was(
    family: str, options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(TO, family=family, **MASK, **options)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.notes) == ("flat-angelslim", ())
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, found.dtype))
    kept = {key: getattr(found.options, key) for key in options if key in ("inner", "layers")}
    assert kept == {key: options[key] for key in kept}
    assert report.manifest.serve["length"] == 3
    export(tmp_path / "package", TO, tmp_path / "again", target)
    for name in ("config.json", WEIGHTS):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.parametrize("family", ["dfly", "dflare"])
def test_depths_out_of_order_are_written_in_the_order_of_the_layers(
    family: str, target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(TO, family=family, taps=(3, 1, 2), **MASK)
    taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.own_taps == (1, 2, 3)
    ours, theirs = drafter.module.fusion, found.module.fusion
    assert torch.equal(ours[:, [1, 2, 0]], theirs)


def renamed(tensors: Tensors, pairs: dict[str, str]) -> None:
    for name in list(tensors):
        for old, new in pairs.items():
            if name.startswith(old):
                tensors[new + name.removeprefix(old)] = tensors.pop(name)


def at_first(config: Config, tensors: Tensors) -> None:
    """AngelSpec's first spelling of DFly, beside a DSpark without its heads."""
    for key in ("sample_from_anchor", "dspark_bonus_anchor", "rope_parameters"):
        del config[key]
    config |= {"architectures": ["DSparkDraftModel"], "model_type": "dspark", "markov_rank": 0}
    config |= {"enable_confidence_head": False, "confidence_head_with_markov": False}


def vllm_names(config: Config, tensors: Tensors) -> None:
    """And what AngelSpec's class of configurations says by default."""
    del config["num_target_layers"]
    config["model_arch"] = "dflash"
    pairs = {"context_proj": "fc", "context_norm": "hidden_norm", "final_norm": "norm"}
    renamed(tensors, pairs)


def of_angelspec(config: Config, tensors: Tensors) -> None:
    """DFlare as AngelSpec writes it."""
    nested = config.pop("dflash_config")
    del nested["causal"], config["sample_from_anchor"]
    config |= {**nested, "architectures": ["DFlashDraftModel"], "model_type": "dflash"}
    config["num_target_layers"] = 3
    renamed(tensors, {"hidden_norm.": "context_norm.", "norm.": "final_norm."})


def of_angelslim(config: Config, tensors: Tensors) -> None:
    del config["model_arch"], config["dflash_config"]["causal"]


@pytest.mark.parametrize(
    ("family", "change", "is_noted"),
    [
        ("dfly", at_first, True),
        ("dfly", vllm_names, False),
        ("dflare", of_angelspec, True),
        ("dflare", of_angelslim, False),
    ],
)
def test_every_spelling_of_theirs_is_the_same_drafter(
    family: str, change: Change, is_noted: bool, target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(TO, change, family=family, rope_theta=77.0, **MASK)
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.manifest.family) == ("flat-angelslim", family)
    assert any("which token a slot predicts" in note for note in report.notes) == is_noted
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.net.shape == drafter.net.shape
    assert (found.own_taps, found.options.num_heads) == ((1, 2, 3), 3)


# -- mistakes ----------------------------------------------------------------------------------


def lost(key: str) -> Change:
    return lambda config, tensors: config.update({key: None})


def named(architecture: str, *dropped: str) -> Change:
    """Another architecture, without the keys that say more."""

    def change(config: Config, tensors: Tensors) -> None:
        config["architectures"] = [architecture]
        for key in ("model_arch", *dropped):
            config.pop(key, None)

    return change


SPOKEN = ("sample_from_anchor", "dspark_bonus_anchor")
OTHER_NAME = r"layer_fusion_weights in a .*model_arch: dfly or dflare"
REFUSED: list[tuple[str, Change, str]] = [
    ("dfly", lost("enable_hidden_correction"), r"correction: None.*correction: true"),
    ("dfly", saying(enable_hidden_correction=False), r"enable_hidden_correction: False"),
    ("dfly", lost("block_size"), r"block_size: None"),
    ("dfly", lost("mask_token_id"), r"mask_token_id: None"),
    ("dfly", lost("target_layer_ids"), r"target_layer_ids: None"),
    ("dfly", saying(num_target_layers=8), r"num_target_layers: 8"),
    ("dfly", saying(target_num_hidden_layers=80), r"another target.*layers: 80"),
    ("dfly", saying(rope_theta=5.0), r"rope_theta: .*one"),
    ("dfly", saying(sample_from_anchor=True), r"sample_from_anchor: True"),
    ("dfly", saying(shift_label=True), r"shift_label: True"),
    ("dfly", saying(dspark_bonus_anchor=False), r"dspark_bonus_anchor: False"),
    ("dfly", saying(is_causal=True), r"is_causal: True"),
    ("dfly", saying(markov_rank=8), r"markov_rank: 8"),
    ("dfly", saying(hidden_correction_pos_adaptive=True), r"pos_adaptive: True"),
    ("dfly", saying(hidden_correction_intermediate_size=7), r"down_proj.*\(16, 7\)"),
    ("dfly", without("layer_fusion_weights"), r"no fusion"),
    ("dfly", without("context_norm.weight"), r"no fc_norm"),
    ("dfly", named("DFlashDraftModel", *SPOKEN), OTHER_NAME),
    ("dfly", named("Qwen3DSparkModel", *SPOKEN), OTHER_NAME),
    ("dfly", named("QwenDFlareDraftModel", *SPOKEN), r"enable_hidden_correction: True"),
    ("dflare", named("DFlashDraftModel"), OTHER_NAME),
    ("dflare", named("Qwen3DFlyModel"), r"enable_hidden_correction: None"),
    ("dflare", saying(num_target_layers=5), r"num_target_layers: 5"),
    ("dflare", without("layers.1.self_attn.k_proj_target.weight"), r"no .*k_proj_target"),
]


@pytest.fixture(scope="module")
def folders(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each family, as it is published."""
    found = {}
    for family in ("dfly", "dflare"):
        found[family] = tmp_path_factory.mktemp(family) / "out"
        exported(shaken(family, target, **MASK), target, found[family], TO)
    return found


@pytest.mark.parametrize(("family", "change", "said"), REFUSED)
def test_a_folder_of_theirs_that_says_too_little_is_refused(
    family: str,
    change: Change,
    said: str,
    target: Target,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = json.loads((folders[family] / "config.json").read_text())
    tensors = load_file(folders[family] / WEIGHTS)
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(SpecctlError, match=said):
        taken(tmp_path, target, tmp_path / "package")
    assert not (tmp_path / "package").exists()


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("dfly", zeroed("layer_fusion_weights"), "logits by AngelSpec differ"),
        ("dfly", saying(enable_hidden_correction=False), "no enable_hidden_correction"),
        (
            "dflare",
            swapped("layers.0.self_attn.k_proj_target.weight", "layers.0.self_attn.k_proj.weight"),
            "logits by AngelSlim differ",
        ),
    ],
)
def test_a_faulty_export_is_noticed(
    family: str,
    change: Change,
    said: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faulty(monkeypatch, TO, change)
    with pytest.raises(GateError, match=said):
        exported(shaken(family, target, **MASK), target, tmp_path / "out", TO)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "options", "said"),
    [
        ("dfly", {**MASK, "fusion": False}, "fusion: false"),
        ("dfly", {**MASK, "causal": True}, "causal: true"),
        ("dflare", {**MASK, "window": 6}, "window: 6"),
        ("dflare", {**MASK, "kept": KEPT}, "a vocabulary of 14 ids"),
        ("dflare", {}, "mask_id: null"),
    ],
)
def test_what_their_modules_do_not_compute_is_refused(
    family: str, options: dict[str, Any], said: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(IncompatibleError, match=said):
        exported(shaken(family, target, **options), target, tmp_path / "out", TO)
    for engine in ("vllm", "sglang", "llama.cpp"):
        with pytest.raises(IncompatibleError, match=f"no format lets {engine} read.*angelslim"):
            format_for(engine, family)
