"""Drafts of another tokenizer, for benchmarks/ablations.py: a small Llama pre-trained on Python
text with a vocabulary of its own, which drafts for the embedded target by each translation. It has
never seen what the target writes, as drafts have not that the paper takes as they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from ablation_lines import Crossed
from quality import write

from specctl import load_drafter, load_target
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.train.data.prompts.heldout import heldout_prompts

LENGTH = 5
HEATS = {"greedy": 0.0, "T = 1": 1.0}
CHANGED = {
    "model": {"vocab_size": 2048, "num_hidden_layers": 2},
    "data": {"tokenizer_bytes": 4_000_000, "limit_bytes": 8_000_000},
    "train": {"decay_seq_len": 256, "micro_batch": 16, "total_tokens": 600_000,
              "decay_tokens": 200_000, "warmup_tokens": 20_000, "compile": False,
              "num_threads": 1},
    "report": {"log_tokens": 100_000, "eval_every_tokens": 10_000_000, "eval_tokens": 16_384,
               "final_eval_tokens": 65_536},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CrossedArm:
    """A translation at a temperature, with the draft of that seed."""

    method: str
    heat: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.heat.replace(' ', '')}-{self.seed}"

    def file(self, out: Path) -> Path:
        return out / "crossed" / f"{self.name}.json"


def crossed_arms(line: Crossed, seed: int) -> tuple[CrossedArm, CrossedArm | None]:
    """The translation, and what it is compared with; None: plain decoding."""
    without = None if line.without is None else CrossedArm(line.without, line.heat, seed)
    return CrossedArm(line.method, line.heat, seed), without


def draft_of(seed: int, out: Path) -> Path:
    """The pre-trained draft, made if it is not there: by one process at a time."""
    folder = out / "crossed" / f"draft-{seed}"
    if not (folder / "whole").exists():
        base = Path(__file__).parents[1] / "recipes" / "tiny-target.yaml"
        recipe = yaml.safe_load(base.read_text())
        for part, fields in CHANGED.items():
            recipe[part] |= fields
        recipe["data"]["seed"] = seed
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        words = ["pretrain", "--recipe", str(folder / "recipe.yaml"), "--out", str(folder / "run")]
        subprocess.run([sys.executable, "-m", "specctl", *words], check=True, stdout=sys.stderr)
        (folder / "whole").touch()
    return folder / "run" / "export"


def serve_crossed(arm: CrossedArm, args: argparse.Namespace) -> None:
    """Tau of chains, prompt by prompt, into the arm's file."""
    torch.set_num_threads(1)
    if arm.file(args.out).exists():
        return
    target = load_target("tiny", dtype="float32")
    drafter = load_drafter(str(draft_of(arm.seed, args.out)), target, translate=arm.method)
    kind = "chain" if arm.method == "tli" else "direct"  # strings come as a whole
    policy = make_policy({"policy": kind, "length": LENGTH})
    requests = [
        Request(tuple(p.ids), Sampling(HEATS[arm.heat], max_new_tokens=args.tokens, ignore_eos=True,
                                       seed=1000 * arm.seed + i))
        for i, p in enumerate(heldout_prompts(target, args.prompts))
    ]  # fmt: skip
    done = Engine(target, drafter, policy, num_slots=8).run(requests)
    write(arm.file(args.out), [row.stats.tokens / row.stats.rounds for row in done])
