"""Import: what another toolkit published becomes a package that drafts what its engine drafts, or
nothing is written and the reason is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.api.measured.measurement import Measurement
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import GateError, IncompatibleError
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import export
from specctl.export.imports import Imported, Measured, import_published
from specctl.export.package.check import check_package
from specctl.export.package.folder import load_drafter
from specctl.export.package.manifest import CARD, MANIFEST, WEIGHTS, read_manifest
from specctl.export.readers import mtp, sglang_blocks, sglang_eagle, vllm_blocks, vllm_eagle3
from specctl.export.readers.medusa import TgiMedusa
from specctl.export.readers.mlp_speculator import VllmMlp
from specctl.runtime.target.target import Target
from specctl_testing.export.engine_cases import KEPT, Change, exported, shaken
from specctl_testing.export.import_cases import LAYERS, Config, Tensors, same_tensors, taken

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("speculators", {}),
        ("speculators", {"kept": KEPT, "norm_before_residual": True, "rope_theta": 500.0}),
        ("speculators", {"qk_norm": True, "heads": 2, "kv_heads": 1, "intermediate": 24}),
        ("speculators", {"fc_norm": True, "norm_output": True, "taps": (1, 3, 6, 7)}),
        ("speculators", {"taps": (5,)}),
        ("speculators", {"window": 5}),
        ("speculators", {"kept": KEPT, "dtype": torch.bfloat16}),
        ("sglang", {}),
        ("sglang", {"kept": KEPT, "taps": (1, 3, 7), "rope_theta": 500.0}),
        ("sglang", {"fc_norm": True, "norm_output": True, "taps": (4, 6), "head_dim": 8}),
        ("sglang", {"kept": KEPT, "dtype": torch.bfloat16}),
        ("sglang", {"head_dim": 8, "mrope": (0, 1, 1, 2)}),
        ("speculators", {"head_dim": 8, "mrope": (0, 1, 2, 0)}),
    ],
    ids=str,
)
def test_an_export_comes_back_with_the_same_weights_and_drafts(
    to: str, options: dict[str, Any], target: Target, publish: Any, tmp_path: Path
) -> None:
    drafter, folder = publish(to, **options)
    report = taken(folder, target, tmp_path / "package")
    manifest = report.manifest
    assert manifest.acceptance is None
    assert manifest.dtype == str(options.get("dtype", torch.float32)).removeprefix("torch.")
    assert report.notes == ()
    assert report.engine.startswith("vLLM" if to == "speculators" else "SGLang")
    found = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter.to(target.device, target.dtype))
    assert found.needs() == drafter.needs()
    assert getattr(found.options, "window", None) == options.get("window")
    assert found.options.mrope == options.get("mrope")
    prompts = [[1, 5, 9, 5, 9, 5], [7, 7, 3]]
    checked = check_package(
        tmp_path / "package", target, reference=drafter, prompts=prompts, new_tokens=12
    )
    assert checked.loaded == checked.before


def trained(target: Target, steps: int) -> Drafter:
    """A head that knows one text by heart."""
    family = families()["eagle3"]
    vocab = VocabMap(torch.tensor(KEPT), target.spec.vocab_size)
    drafter = family.build(family.options(ttt_steps=2), target.spec, vocab)
    drafter.bind(target.borrowed())
    ids_1S = torch.tensor([[*KEPT, *KEPT]])
    document_1S, position_1S = torch.zeros_like(ids_1S), torch.arange(ids_1S.shape[1])[None]
    masks, taps = Masks(document_mask(document_1S)), drafter.needs().taps
    with torch.no_grad():
        seen = target.lm.dense(ids_1S, position_1S, masks, taps, logits=True)
    batch = TrainBatch(
        ids_1S, ids_1S >= 0, document_1S, position_1S, dict(seen.taps), seen.logits_BTV
    )
    optimizer, losses = torch.optim.Adam(drafter.trainable().values(), lr=3e-3), []
    for _ in range(steps):
        out = drafter.loss(batch)
        optimizer.zero_grad()
        (out.sum / out.count).backward()
        optimizer.step()
        losses.append(float((out.sum / out.count).detach()))
    assert losses[-1] < losses[0]
    return drafter


@pytest.mark.parametrize("to", ["speculators", "sglang"])
def test_a_trained_head_comes_back(to: str, target: Target, tmp_path: Path) -> None:
    drafter = trained(target, 10)
    exported(drafter, target, tmp_path / to, to)
    taken(tmp_path / to, target, tmp_path / "package")
    assert same_tensors(load_drafter(tmp_path / "package", target), drafter)
    again = export(tmp_path / "package", to, tmp_path / "again", target)
    assert again.files[WEIGHTS] == read_manifest(tmp_path / to).files[WEIGHTS]


def safe_ai_lab(config: Config, tensors: Tensors) -> None:
    """The names of the first EAGLE-3 heads, and the few keys they have."""
    config["architectures"] = ["LlamaForCausalLM"]
    for key in ("eagle_config", LAYERS, "norm_before_residual", "norm_output", "fc_norm"):
        del config[key]
    for key in ("norm_before_fc", "num_aux_hidden_states", "rope_parameters", "rope_scaling"):
        del config[key]
    for name in list(tensors):
        tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)


def modelopt(config: Config, tensors: Tensors) -> None:
    """Only the list inside eagle_config, no mask of the vocabulary, code beside it."""
    del config[LAYERS], tensors["t2d"]
    config["auto_map"] = {"AutoModel": "modeling.Evil"}


def modelopt_yarn(config: Config, tensors: Tensors) -> None:
    """As ModelOpt 0.47 exports by default: YaRN that was not there in training."""
    modelopt(config, tensors)
    del config["rope_parameters"]
    config["rope_scaling"] = {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048,
    }  # fmt: skip


def top_list_alone(config: Config, tensors: Tensors) -> None:
    del config["eagle_config"]


def old_norms(config: Config, tensors: Tensors) -> None:
    """The norms of the features under the names that SGLang knows as well."""
    del config["fc_norm"]
    config["use_aux_norm"] = True
    for at, name in enumerate(("low", "mid", "high")):
        tensors[f"aux_norm_{name}.weight"] = tensors.pop(f"fc_norm.{at}.weight")


def no_theta(config: Config, tensors: Tensors) -> None:
    for key in ("rope_theta", "rope_parameters", "rope_scaling"):
        del config[key]


def specforge_vl(config: Config, tensors: Tensors) -> None:
    """As SpecForge's heads of Qwen2.5-VL name the axes of M-RoPE."""
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [1, 2, 1]}
    del config["rope_parameters"]


def whole_tables(config: Config, tensors: Tensors) -> None:
    """Tables of a vocabulary that is not trimmed."""
    tensors["d2t"] = torch.zeros(48, dtype=torch.long)
    tensors["t2d"] = torch.ones(48, dtype=torch.bool)


@pytest.mark.parametrize(
    ("change", "options", "engine"),
    [
        (safe_ai_lab, {"kept": KEPT}, "SGLang"),
        (modelopt, {"kept": KEPT, "taps": (1, 3, 7)}, "SGLang"),
        (modelopt_yarn, {"kept": KEPT, "taps": (1, 3, 7)}, "SGLang"),
        (top_list_alone, {"taps": (1, 3, 7)}, "vLLM"),
        (old_norms, {"fc_norm": True}, "SGLang"),
        (no_theta, {"rope_theta": 10000.0}, "SGLang"),
        (whole_tables, {}, "SGLang"),
        (specforge_vl, {"head_dim": 8, "rope_theta": 500.0, "mrope": (0, 1, 1, 2)}, "SGLang"),
    ],
)
def test_flat_folders_of_other_toolkits_are_read_as_their_engines_do(
    change: Change,
    options: dict[str, Any],
    engine: str,
    target: Target,
    publish: Any,
    tmp_path: Path,
) -> None:
    drafter, folder = publish("sglang", change, **options)
    (folder / "modeling.py").write_text("raise SystemExit\n")
    report = taken(folder, target, tmp_path / "package")
    assert (report.format, report.engine.split()[0]) == ("flat-eagle3", engine)
    found: Any = load_drafter(tmp_path / "package", target)
    assert same_tensors(found, drafter)
    assert found.options.taps == options.get("taps", (2, 4, 5))
    assert any("plain positions" in note for note in report.notes) == (change is modelopt_yarn)
    assert found.module.shape.rope_theta == options.get("rope_theta", target.spec.rope_theta)
    assert found.options.mrope == options.get("mrope")


def test_the_yarn_of_an_exporter_is_a_second_reading(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    """Its scores are those of transformers' YaRN, whose cos and sin are multiplied as well."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    seen: list[Imported] = []

    def measure(found: Imported, serve: Any) -> Measured:
        seen.append(found)
        record = Measurement(1.25, (0.25,), 8, 48).record(target)
        return Measured(1.25, record, dict.fromkeys(found.readings, 1.0))

    _, folder = publish("sglang", modelopt_yarn, kept=KEPT, rope_theta=100.0)
    out = tmp_path / "package"
    report = import_published(folder, target, out, command=["specctl"], measure=measure)
    assert report.measured is not None
    assert list(report.measured.readings) == ["with the positions of config.json (YaRN)"]
    (other,) = seen[0].readings.values()
    plain, scaled = (one.module.layer.self_attn for one in (seen[0].drafter, other))
    head_dim = plain.shape.head_dim
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=target.spec.max_positions,
        rope_parameters={"rope_type": "yarn", "factor": 32.0, "rope_theta": 100.0,
                         "original_max_position_embeddings": 2048},
    )  # fmt: skip
    x_1TI, at_1T = torch.randn(1, 20, plain.q_proj.in_features), torch.arange(20)[None]
    cos, sin = LlamaRotaryEmbedding(config)(x_1TI, at_1T)
    query, key = (plain._heads(p(x_1TI)) for p in (plain.q_proj, plain.k_proj))
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    rope = other.module.rope(at_1T)
    ours = scaled.query(x_1TI, rope)[:, :2], scaled.key_value(x_1TI, rope)[0][:, :2]
    torch.testing.assert_close(ours, (query[:, :2], key[:, :2]))


@pytest.mark.parametrize(("to", "meant"), [("speculators", True), ("sglang", False)])
def test_a_missing_norm_before_residual_is_what_the_engine_of_the_format_takes_it_for(
    to: str, meant: bool, target: Target, publish: Any, tmp_path: Path
) -> None:
    def silent(config: Config, tensors: Tensors) -> None:
        del config["norm_before_residual"]

    _, folder = publish(to, silent)
    taken(folder, target, tmp_path / "package")
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.options.norm_before_residual is meant


def test_missing_layers_and_a_missing_base_are_what_vllm_takes_them_for(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    def silent(config: Config, tensors: Tensors) -> None:
        del config[LAYERS], config["transformer_layer_config"]["rope_parameters"]
        config["transformer_layer_config"].pop("rope_theta", None)

    _, folder = publish("speculators", silent, rope_theta=10_000.0)
    assert taken(folder, target, tmp_path / "package").engine.startswith("vLLM")
    found: Any = load_drafter(tmp_path / "package", target)
    assert found.options.taps == (2, 4, 5)
    assert found.module.shape.rope_theta == 10_000.0


def test_the_docs_name_the_engines_by_whose_rules_folders_are_read() -> None:
    told = (ROOT / "docs" / "export.md").read_text().partition("## Import")[2]
    of_eagle = {vllm_eagle3.ENGINE, sglang_eagle.ENGINE}
    of_others = {mtp.ENGINE, TgiMedusa.name, VllmMlp.name}
    assert [name for name in of_eagle | of_others if f" {name}" not in told] == []
    assert {vllm_blocks.ENGINE, sglang_blocks.ENGINE} == of_eagle


def test_a_flat_head_with_a_normed_residual_is_proved_by_vllm(
    target: Target, publish: Any, tmp_path: Path
) -> None:
    def normed(config: Config, tensors: Tensors) -> None:
        config["norm_before_residual"] = True

    _, folder = publish("sglang", normed)
    assert taken(folder, target, tmp_path / "package").engine.startswith("vLLM")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 100.0,
}


def old_rope(config: Config, tensors: Tensors) -> None:
    part = config.get("transformer_layer_config", config)
    del part["rope_parameters"]
    part["rope_scaling"] = {key: LLAMA3[key] for key in LLAMA3 if key != "rope_theta"}


def other_factor(config: Config, tensors: Tensors) -> None:
    part = config.get("transformer_layer_config", config)
    part["rope_parameters"] = {**LLAMA3, "factor": 4.0}
    part.pop("rope_scaling", None)


@pytest.mark.parametrize("to", ["speculators", "sglang"])
def test_positions_scaled_as_the_targets_are_taken_over_and_others_refused(
    to: str, make_target: Any, tmp_path: Path
) -> None:
    made: Target = make_target(num_layers=8, hidden=16, vocab=48, rope_parameters=LLAMA3)
    made = replace(made, name="some/target")
    drafter = shaken("eagle3", made, scaled_rope=True)
    for at, change in enumerate((None, old_rope, other_factor)):
        out, package = tmp_path / f"head{at}", tmp_path / f"package{at}"
        exported(drafter, made, out, to)
        if change is not None:
            config = json.loads((out / "config.json").read_text())
            change(config, {})
            (out / "config.json").write_text(json.dumps(config))
        (out / MANIFEST).unlink()
        if change is other_factor:
            with pytest.raises(IncompatibleError, match=r"factor 4.0.*just as the target's"):
                taken(out, made, package)
            continue
        taken(out, made, package)
        found: Any = load_drafter(package, made)
        assert found.options.scaled_rope
        assert found.module.shape == drafter.module.shape  # type: ignore[union-attr]


def test_a_drafter_that_forgot_the_scaling_is_caught(
    make_target: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    from specctl.export.imports import eagle3

    made: Target = make_target(num_layers=8, hidden=16, vocab=48, rope_parameters=LLAMA3)
    made, right = replace(made, name="some/target"), eagle3._options
    exported(shaken("eagle3", made, scaled_rope=True), made, tmp_path / "head", "sglang")
    monkeypatch.setattr(eagle3, "_options", lambda *w: replace(right(*w), scaled_rope=False))
    with pytest.raises(GateError, match="differ by"):
        taken(tmp_path / "head", made, tmp_path / "package")


def test_the_command_imports_and_says_what_is_next(
    tiny_target: Target, tmp_path: Path, capfd: Any
) -> None:
    from specctl.cli.main import main

    folder, out = tmp_path / "head", tmp_path / "package"
    exported(shaken("eagle3", tiny_target), tiny_target, folder, "speculators")
    (folder / MANIFEST).unlink()
    (folder / CARD).write_text("# A head\n\nAcceptance length: 3.14\x1b[31m on my prompts\n")
    few = ["--num-prompts", "2", "--max-new-tokens", "8"]
    words = ["import", str(folder), "--target", "tiny", "--out", str(out), "--json", *few]
    assert main(words) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["result"]["format"] == "speculators"
    assert answer["result"]["claims"] == ["Acceptance length: 3.14\\x1b[31m on my prompts"]
    acceptance = read_manifest(out).acceptance
    assert acceptance is not None
    assert (acceptance.tau, acceptance.prompts) == (answer["result"]["tau"], 2)
    assert answer["next"] == [
        f"specctl bench --target tiny {out}",
        f"specctl verify {out} --target tiny --level lossless",
    ]
    assert main(["verify", str(out), "--target", "tiny", "--level", "files", "--json"]) == 0


def test_a_hub_id_is_answered_with_how_to_download_it(tmp_path: Path, capfd: Any) -> None:
    from specctl.cli.main import main

    words = ["import", "some/head", "--target", "tiny", "--out", str(tmp_path / "o"), "--json"]
    assert main(words) == 4
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["do"] == "hf download some/head --local-dir head"
