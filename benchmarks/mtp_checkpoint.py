"""A small GLM-4.5 checkpoint with a module for multi-token prediction, to serve in an engine.

    python benchmarks/mtp_checkpoint.py --out runs/glm
    specctl import runs/glm --target runs/glm --out runs/glm-mtp
    specctl export --draft runs/glm-mtp --target runs/glm --to mtp --out runs/glm-back \
        --prove --engine-python ENV/bin/python

Nobody has trained it: two layers add little to the embedding of a random model, and the module is
the last of them behind the embedding of the token and .3 of the state before it. So a drafted token
is right now and then, and never because both are alike.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig

from specctl.recipes.targets import resolve

WIDTH, LAYERS, ADDED, STATE = 256, 2, 0.02, 0.3
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def checkpoint(out: Path) -> int:
    """Writes it into `out`; how many parameters its module has."""
    folder = resolve("tiny").path
    assert folder is not None
    tokens = [path for path in folder.iterdir() if path.name.startswith("tokenizer")]
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]

    torch.manual_seed(0)
    config = Glm4MoeConfig(
        vocab_size=vocab, hidden_size=WIDTH, intermediate_size=512, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, n_routed_experts=4,
        num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=128,
        first_k_dense_replace=1, use_qk_norm=True, attention_bias=True, n_shared_experts=1,
        partial_rotary_factor=0.5, max_position_embeddings=2048, initializer_range=0.08,
        tie_word_embeddings=False, num_nextn_predict_layers=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(ADDED)
    model.save_pretrained(out)
    for path in tokens:
        shutil.copy(path, out)

    (out / "model.safetensors").rename(out / FIRST)
    stored = load_file(out / FIRST)
    last, own = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    module = {own + k.removeprefix(last): x for k, x in stored.items() if k.startswith(last)}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        module[f"{own}{norm}.weight"] = torch.ones(WIDTH)
    eye = torch.eye(WIDTH)
    module[own + "eh_proj.weight"] = torch.cat([eye, STATE * eye], 1)
    module[own + "embed_tokens.weight"] = stored["model.embed_tokens.weight"]
    module[own + "shared_head.head.weight"] = stored["lm_head.weight"]
    save_file(module, out / SECOND, metadata={"format": "pt"})
    places = dict.fromkeys(stored, FIRST) | dict.fromkeys(module, SECOND)
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return sum(x.numel() for x in module.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    print(f"{out}: {checkpoint(out):,} parameters in the module")


if __name__ == "__main__":
    main()
