"""Folders of diffusion models: names as published, and how the commands take such a target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import specctl
from specctl.core.errors import IncompatibleError, IntegrityError, SpecctlError
from specctl.diffusion.folder import load_diffusion, read_model, read_tokenizer
from specctl.diffusion.shape import shape_from
from specctl_testing.diffusion import tiny_folder

# Of LLaDA-8B and Dream-7B.
LLADA_NAMES = {
    "model.transformer.wte.weight", "model.transformer.ln_f.weight",
    "model.transformer.ff_out.weight",
    *(
        f"model.transformer.blocks.{layer}.{part}.weight"
        for layer in (0, 1)
        for part in ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj",
                     "up_proj", "ff_out")
    ),
}  # fmt: skip
LLADA_CONFIG = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 4096, "n_layers": 32,
    "n_heads": 32, "n_kv_heads": 32, "mlp_hidden_size": 12288, "vocab_size": 126464,
    "embedding_size": 126464, "mask_token_id": 126336, "eos_token_id": 126081,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "weight_tying": False,
    "max_sequence_length": 4096, "block_type": "llama", "activation_type": "silu",
    "layer_norm_type": "rms", "rope": True, "include_bias": False, "include_qkv_bias": False,
    "auto_map": {"AutoModel": "modeling_llada.LLaDAModelLM"},
}  # fmt: skip
DREAM_CONFIG = {
    "model_type": "Dream", "architectures": ["DreamModel"], "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "intermediate_size": 18944, "vocab_size": 152064, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "mask_token_id": 151666,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rope_scaling": None,
}  # fmt: skip


@pytest.fixture(scope="module", params=["llada", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp(request.param), request.param)


def test_the_published_configurations_are_read() -> None:
    llada = shape_from(LLADA_CONFIG, "config.json")
    assert (llada.num_layers, llada.mask_id, llada.shifted) == (32, 126336, False)
    assert not llada.attention_bias
    dream = shape_from(DREAM_CONFIG, "config.json")
    assert (dream.num_kv_heads, dream.mask_id, dream.shifted) == (4, 151666, True)
    assert dream.attention_bias


def test_tensors_are_named_as_published(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    if folder.name.startswith("llada"):
        assert names == LLADA_NAMES
    else:
        assert "model.layers.1.self_attn.k_proj.bias" in names
        assert "lm_head.weight" in names


def test_what_is_written_is_read_back(folder: Path) -> None:
    model = read_model(folder)
    assert shape_from(json.loads((folder / "config.json").read_text()), "x") == model.diffusion
    stored = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[model.diffusion.stored_name(name)].float())


def test_each_tensor_goes_into_its_dtype_on_its_own(
    folder: Path,
) -> None:
    """Read in the stored dtype, a model is never held in float32, nor twice."""
    made: list[torch.dtype] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            is_held = isinstance(out, torch.Tensor) and not out.is_meta and out.numel() > 999
            made.extend([out.dtype] if is_held else [])
            return out

    with Noted():
        model = load_diffusion(folder, dtype=torch.bfloat16).model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.bfloat16 in made
    assert torch.float32 not in made


def test_a_llama_without_causal_mask_says_the_same(folder: Path) -> None:
    """transformers' own layers, with everything visible."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model, shape = read_model(folder), read_model(folder).diffusion
    other = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        )
    ).eval()
    biases = {k: torch.zeros_like(v) for k, v in other.state_dict().items() if k.endswith("bias")}
    other.load_state_dict(biases | dict(model.state_dict()))
    ids = torch.arange(4, 20)[None]
    seen = torch.zeros(1, 1, 16, 16)
    with torch.no_grad():
        expected = other(ids, attention_mask=seen).logits[0]
        found = model.logits(model(ids)[0])
    known = torch.arange(shape.vocab_size) != shape.mask_id
    assert torch.allclose(found[:, known], expected[:, known], atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 10**6}, "mask_token_id"),
        ({"num_attention_heads": 5}, "heads"),
        ({"rope_theta": None}, "rope_theta"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn"}}, "rope_parameters"),
        ({"num_hidden_layers": "28"}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"mask_token_id": "<|mask|>"}, "mask_token_id"),
        ({"model_type": "qwen2"}, "model_type"),
    ],
)
def test_what_is_not_computed_here_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(IncompatibleError, match=message):
        shape_from({**DREAM_CONFIG, **change}, "config.json")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    made = tiny_folder(tmp_path / "made")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(IntegrityError, match="not those that"):
        read_model(made)
    (made / "tokenizer.json").unlink()
    with pytest.raises(SpecctlError, match="no tokenizer"):
        read_tokenizer(made)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ("llada", "model.transformer.blocks.0.attn_norm.bias"),
        ("llada", "model.transformer.blocks.0.q_proj.bias"),
        ("dream", "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_weights_that_would_be_left_out_are_refused(tmp_path: Path, layout: str, name: str) -> None:
    made = tiny_folder(tmp_path, layout)
    stored = load_file(made / "model.safetensors")
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(stored | rotary, made / "model.safetensors")
    read_model(made)
    save_file(stored | {name: torch.ones(32)}, made / "model.safetensors")
    with pytest.raises(IncompatibleError, match="not computed here") as found:
        read_model(made)
    assert found.value.found == name


def test_no_loader_of_causal_targets_takes_it(folder: Path) -> None:
    with pytest.raises(IncompatibleError, match="masked diffusion model"):
        specctl.load_target(folder)


def test_a_text_is_denoised_by_name(folder: Path) -> None:
    made = specctl.denoise(folder, ["def main(", "import"], max_new_tokens=8, block=4, steps=2)
    assert (made.verification, made.tokens, made.passes) == ("plain", 16, 8)
    assert made.outputs[0].prompt == "def main("
    target = load_diffusion(folder)
    again = specctl.denoise(target, "import", max_new_tokens=8, block=4, steps=2)
    assert again.texts == made.texts[1:]
    chat = specctl.denoise(target, [[{"role": "user", "content": "a"}]], max_new_tokens=4)
    assert len(chat.outputs[0].token_ids) <= 4
    with pytest.raises(SpecctlError, match="block"):
        specctl.denoise(target, "import", blocks=4)


def test_generate_dispatches_by_the_config(folder: Path, capsys: Any) -> None:
    from specctl.cli.main import main

    words = ["--target", str(folder), "--max-new-tokens", "8", "import os"]
    assert main(["generate", *words, "--json", "--set", "diffusion.unmask=threshold:0.1"]) == 0
    answer = json.loads(capsys.readouterr().out)["result"]
    assert answer["stats"]["verification"] == "approximate:threshold"
    refusals = {
        ("generate", *words, "--draft", "prompt-lookup"): "without drafter",
        ("generate", *words, "--length", "4"): "--length 4",
        ("generate", *words, "--rule", "typical"): "--rule typical",
        ("generate", *words, "--set", "serve.nodes=8"): "serve.nodes=8",
        ("generate", *words, "--set", "sample.top_k=4"): "sample.top_k",
        ("generate", *words, "--set", "sample.generation_config=model"): "generation_config",
        ("generate", "--set", "diffusion.steps=4", "import os"): "mean nothing for this target",
        ("bench", "--target", str(folder), "prompt-lookup"): "masked diffusion model",
    }
    for call, message in refusals.items():
        assert main([*call]) != 0
        assert message in capsys.readouterr().err
    out = folder / "families"
    assert main(["bench-families", "--target", str(folder), "--out", str(out)]) != 0
    assert capsys.readouterr().err.count("masked diffusion model") == 1
    assert not out.exists()


def test_a_drawn_seed_is_said_and_show_leads_to_what_runs(folder: Path, capsys: Any) -> None:
    from specctl.cli.main import main

    words = ["--target", str(folder), "--max-new-tokens", "8", "--temperature", "1", "import os"]
    words += ["--set", "sample.generation_config=none"]
    assert main(["generate", *words, "--seed", "-1"]) == 0
    first = capsys.readouterr()
    seed = first.err.split("the seed is ")[1].split()[0]
    assert main(["generate", *words, "--seed", seed]) == 0
    assert capsys.readouterr().out == first.out
    assert main(["show", str(folder), "--json"]) == 0
    assert "--draft" not in json.loads(capsys.readouterr().out)["next"][0]
