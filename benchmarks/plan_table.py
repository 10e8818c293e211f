"""Plans of 8B, 32B, 70B and an MoE on 1, 4, 8 and 64 GPUs: what a step holds, and the way out.

    python benchmarks/plan_table.py [--targets 8B,MoE] [--write docs/multi-gpu.md]

Every step is traced at the rows and length that a process has; no GPU and no weights are needed.
`--many ROWS` traces a step of that many rows and compares it with what a plan reckons in a straight
line from smaller ones, as it does beyond some number of slices of logits.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specctl.core.spec import ModelSpec
from specctl.models.hf.hf_spec import spec_of
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.train.planning.capacity import fits
from specctl.train.planning.hardware import Cluster
from specctl.train.planning.live_bytes import traced
from specctl.train.planning.step_bytes import TracedStep, fake_drafter, fake_target
from specctl.train.planning.target_shape import TargetShape
from specctl.train.planning.weighing import Weighing
from specctl.train.step.optim import Gradient

BEGIN, END = "<!-- made by benchmarks/plan_table.py -->", "<!-- end -->"
GPUS = (1, 4, 8, 64)
LARGE: dict[str, Any] = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "8B": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336}),
    "32B": ("qwen3", LARGE | {
        "vocab_size": 151936, "hidden_size": 5120, "num_hidden_layers": 64,
        "intermediate_size": 25600}),
    "70B": ("llama", LARGE | {
        "vocab_size": 128256, "hidden_size": 8192, "num_hidden_layers": 80,
        "intermediate_size": 28672}),
    "MoE": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8}),
}  # fmt: skip


def shape(name: str) -> TargetShape:
    """The shape of a target, of which nothing exists."""
    kind, fields = CONFIGS[name]
    config = AutoConfig.for_model(
        kind, max_position_embeddings=32768, tie_word_embeddings=False, **fields
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    return TargetShape(spec_of(config), count, count, torch.bfloat16, kind != "qwen3_moe", config)


def recipe_for(spec: ModelSpec) -> Recipe:
    """EAGLE-3 as the recipe of the 8B has it: 16 rows of 2,048 tokens, AdamW, a vocabulary of
    32,000."""
    del spec
    return load_recipe("llama3-8b-eagle3", target="tiny")


def compared(name: str, rows: int, most: int) -> str:
    """Peaks of a step of `rows` rows, reckoned from at most `most` rows and traced."""
    target = shape(name)
    recipe = recipe_for(target.spec)
    kept = recipe.vocab.size
    assert isinstance(kept, int)
    with traced() as live:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(target.config), dtype=torch.bfloat16
        ).eval()
        model.requires_grad_(False)
        drafter = fake_drafter(recipe.drafter, recipe.train, target.spec, kept, is_gpu=True)
        read = fake_target(model, target.spec)
        drafter.bind(read.borrowed())
        gradient = Gradient(drafter.trainable())
        step = TracedStep(live, read, drafter, recipe.train.precision == "bf16", lambda: None)
        reckoned = max(step.reckoned(rows, recipe.train.seq_len, most).values())
        whole = max(step.peaks(rows, recipe.train.seq_len).values())
        del gradient
    return (
        f"{name}, {rows} rows: {reckoned / 1e9:,.2f} GB reckoned from {most}, "
        f"{whole / 1e9:,.2f} GB traced = {reckoned / whole:.3f}"
    )


def rows_of(name: str) -> list[str]:
    """The lines of the table for a target."""
    target, lines = shape(name), []
    for gpus in GPUS:
        recipe, cluster = recipe_for(target.spec), Cluster.of("h100", gpus)
        if gpus > recipe.train.rows:
            more = recipe.train.model_copy(update={"rows": gpus})
            recipe = recipe.model_copy(update={"train": more})
        weighing = Weighing(recipe, target, cluster)
        held = weighing.held()
        rows = -(-recipe.train.rows // gpus)
        step = sum(size for name, size in held.device.items() if name in PARTS)
        verdict = "fits" if fits(held, cluster) else weighing.way_out(fits) or "nothing found"
        lines.append(
            f"| {name} | {gpus} | {rows} | {step / 1e9:,.1f} | {held.device_bytes / 1e9:,.1f} | "
            f"{verdict} |"
        )
        print(lines[-1], flush=True)
    return lines


PARTS = ("target", "drafter, gradient, optimizer", "batch")


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans on GPUs that need not be here.")
    parser.add_argument("--targets", default=",".join(CONFIGS))
    parser.add_argument("--write", type=Path, help="Put the table between the marks of this file.")
    parser.add_argument("--many", type=int, help="Compare with a trace of so many rows instead.")
    options = parser.parse_args()
    if options.many is not None:
        for name in options.targets.split(","):
            print(compared(name, options.many, options.many // 2), flush=True)
        return
    began = time.perf_counter()
    lines = [
        "| Target | H100s | rows each | step, GB | all, GB | fits 80 GB, or what to change |",
        "|---|---|---|---|---|---|",
    ]
    for name in options.targets.split(","):
        lines += rows_of(name)
    print(f"{time.perf_counter() - began:.0f} s")
    if options.write is not None:
        text = options.write.read_text()
        before, rest = text.split(BEGIN, 1)
        after = rest.split(END, 1)[1]
        options.write.write_text("\n".join([before + BEGIN, *lines, END]) + after)


if __name__ == "__main__":
    main()
