"""Targets whose weights are spread answer as they do on one device: tiny random checkpoints, tried.

    python benchmarks/spread_targets.py                # a table
    python benchmarks/spread_targets.py llama gpt_oss  # of some architectures

`device map`: every second layer is left on disk, and brought to the CPU for its forward. `tensor
parallel`: two processes of torchrun, gloo. `same`: the fingerprint and the greedy answers of two
rows in one batch, with drafts by prompt lookup and by heads that read hidden states, are those of
the target on one device, all in float32; of a target that is only read, its logits. Else the words
of the refusal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from architectures import _config
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.recipes.targets import resolve
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import check_config
from specctl.runtime.target.folders.folder_tokenizer import load_tokenizer
from specctl.runtime.target.target import Target, load_target

KINDS = (
    "llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss",
    "glm4_moe", "deepseek_v3", "olmo2", "qwen3_next", "nemotron_h", "mamba2",
)  # fmt: skip
WORDS = ("def add(a, b):", "class Tree:\n    def insert(self, value")
NEW_TOKENS = 12


def main() -> int:
    """Print the table; 1 if any answer differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--folder", type=Path, help="of the checkpoints (within torchrun)")
    given = parser.parse_args()
    if given.folder is not None:
        return in_step(given.folder, given.kinds)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for kind in given.kinds:
            write(kind, folder / kind)
        mapped = {kind: found_by_map(folder / kind) for kind in given.kinds}
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node=2", __file__, *given.kinds, "--folder", str(folder)]
        ran = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
        parallel = json.loads((folder / "found.json").read_text()) if ran.returncode == 0 else {}
    print("| Architecture | device map | tensor parallel |\n|---|---|---|")
    for kind in given.kinds:
        print(f"| {kind} | {mapped[kind]} | {parallel.get(kind, 'the processes died')} |")
    return int("DIFFERS" in str(mapped) + str(parallel) or not parallel)


def write(kind: str, folder: Path) -> None:
    """A tiny random checkpoint in several files, with the embedded target's tokenizer."""
    tiny = resolve("tiny").path
    assert tiny is not None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(kind, {"vocab_size": 6144}))
    model.save_pretrained(folder, max_shard_size="200KB")
    load_tokenizer(tiny, check_config(tiny)).save_pretrained(folder)


def found_by_map(folder: Path) -> str:
    """What comes of every second layer on disk."""
    try:
        plain = load_target(str(folder), dtype="float32", device="cpu", is_read_only=True)
        path = layers_of(plain)
        places = {"": "cpu"} | {f"{path}.{i}": "disk" for i in range(1, plain.spec.num_layers, 2)}
        spread = load_target(
            str(folder), dtype="float32", device="cpu", is_read_only=True,
            device_map=json.dumps(places),
        )  # fmt: skip
        assert spread.spread is not None
        return compared(plain, spread)
    except SpecctlError as error:
        return f"refused: {error.found or error.what}"


def layers_of(target: Target) -> str:
    """Where its layers are in transformers' module."""
    from specctl.models.hf.spread import layer_path
    from specctl.runtime.target.checkpoint import as_transformers

    return layer_path(as_transformers(target.lm), target.spec.num_layers)


def in_step(folder: Path, kinds: list[str]) -> int:
    """What comes of tensor parallelism; the first process writes it down."""
    found = {}
    for kind in kinds:
        name = str(folder / kind)
        plain = load_target(name, dtype="float32", device="cpu", is_read_only=True)
        try:
            spread = load_target(
                name, dtype="float32", device="cpu", is_read_only=True, tensor_parallel=True
            )
        except SpecctlError as error:
            found[kind] = f"refused: {error.found or error.what}"
            continue
        found[kind] = compared(plain, spread)
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def compared(plain: Target, spread: Target) -> str:
    if plain.fingerprint != spread.fingerprint:
        return "DIFFERS: fingerprint"
    if plain.can_run != spread.can_run:
        return "DIFFERS: one of them can be run"
    if not plain.can_run:
        away = float((logits(plain) - logits(spread)).abs().max())
        return "same (read)" if away < 1e-4 else f"DIFFERS: logits by {away:.2g}"
    for family in ("prompt-lookup", "medusa"):
        if answers(plain, family) != answers(spread, family):
            return f"DIFFERS: answers with {family}"
    return "same"


def answers(target: Target, family: str) -> list[tuple[int, ...]]:
    made = families()[family]
    torch.manual_seed(0)
    drafter = made.build(made.options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    sampling = Sampling(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [target.encode(text)[:24] for text in WORDS]
    done = generate(target, prompts, drafter=drafter, sampling=sampling, batch=len(prompts))
    return [tuple(output.token_ids) for output in done.outputs]


@torch.no_grad()
def logits(target: Target) -> Any:
    ids = torch.tensor([target.encode(WORDS[1])[:24]])
    at = torch.arange(ids.shape[1])[None]
    return target.lm.dense(ids, at, target.lm.document_masks(ids * 0)).logits_BTV


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    sys.exit(main())
