"""Exports in the speculators format, loaded by the speculators package itself.

Packages given with --draft, and random drafters of every shape that the format holds, are exported
for the embedded target; speculators (in a Python or a folder of its own, 0.9.0) loads the folders
and runs its own forward pass on random states of the target. Its logits after the newest token and
after each drafted one are compared with those of the drafter. It fails (exit 1) where they differ
by more than 1e-5 of the largest, or where a parameter is missing or left over. With --vllm, the
config that vLLM's own code derives must be the one that the export's reader derives, too.

    pip install --no-deps --target OTHER speculators==0.9.0 hs-connectors==0.9.0 loguru \\
        pydantic-settings transformers==5.19.0
    pip download --no-deps vllm==0.33.0      # and unpack it
    python benchmarks/export_speculators.py --packages OTHER --draft runs/eagle3/package --vllm DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.core.errors import GateError
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.export.formats import ExportSource, export
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    twin,
    without_router,
)
from specctl.export.readers.vllm_eagle3 import draft_config
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target

READER = Path(__file__).with_name("speculators_logits.py")
KEPT = 512
SHAPES: list[tuple[str, str, bool, dict[str, Any]]] = [
    ("eagle3", "eagle3", False, {}),
    ("eagle3, trimmed", "eagle3", True, {}),
    ("eagle3, 3.1, taps out of order", "eagle3", True, {"fc_norm": True, "norm_output": True,
                                                        "taps": (6, 1, 3)}),
    ("eagle3, qwen3 layer, two taps", "eagle3", True, {"qk_norm": True, "taps": (2, 5)}),
    ("eagle3, routed head", "eagle3", True, {"head_groups": 8}),
    ("p-eagle", "p-eagle", True, {"num_heads": 4, "layers": 2}),
    ("p-eagle, four layers", "p-eagle", False, {"num_heads": 6, "layers": 4, "taps": (7, 3)}),
]  # fmt: skip


def random_drafter(family: str, target: Target, trimmed: bool, options: dict[str, Any]) -> Drafter:
    """Of that family, nothing zero and nothing the identity."""
    vocab = None
    if trimmed:
        kept = torch.randperm(target.spec.vocab_size)[:KEPT]
        kept = torch.cat([kept, torch.tensor(target.eos_ids)]).unique()
        vocab = VocabMap(kept, target.spec.vocab_size)
    found = families()[family]
    drafter = found.build(found.options(**options), target.spec, vocab)
    drafter.bind(target.borrowed())
    assert drafter.module is not None
    with torch.no_grad():
        for name, weight in drafter.module.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return drafter


def prepare(package: Path, folder: Path, target: Target) -> torch.Tensor:
    """Export into `folder` with a trial beside it; the drafter's own logits [N + 1, V]."""
    export(package, "speculators", folder, target)
    manifest = read_manifest(package)
    source = ExportSource(package, manifest, load_drafter(package, target), target)
    config = json.loads((folder / "config.json").read_text())
    length = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    trial = Trial.of(source, length - 1, without=config.get("mask_token_id"))
    body = {
        "ids": torch.tensor(trial.ids),
        "drafted": torch.tensor(trial.drafted, dtype=torch.long),
        "states": torch.stack([trial.states[k] for k in sorted(trial.states)]),
    }
    save_file(body, folder / "trial.safetensors")
    return drafted_logits(twin(source, without_router(source.drafter)), trial)


def derived(folder: Path, vllm: Path) -> list[str]:
    """Keys of the draft model's config on which vLLM's own code and our reader disagree."""
    place = vllm / "vllm/transformers_utils/configs/speculators/algos.py"
    spec = importlib.util.spec_from_file_location("vllm_algos", place)
    assert spec is not None
    assert spec.loader is not None
    algos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(algos)
    config = json.loads((folder / "config.json").read_text())
    theirs = dict(config["transformer_layer_config"])
    algos.SUPPORTED_SPECULATORS_TYPES[config["speculators_model_type"]](config, theirs)
    ours = vars(draft_config(config))
    passed = {key for key in theirs if key in ours or key in config}
    return sorted(key for key in passed if theirs[key] != ours.get(key, theirs[key]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", action="append", default=[], help="package for the target tiny")
    parser.add_argument("--python", default=sys.executable, help="has speculators 0.9.0")
    parser.add_argument("--packages", default="", help="folder with speculators, for that Python")
    parser.add_argument("--vllm", type=Path, help="folder of an unpacked vLLM 0.33.0 wheel")
    args = parser.parse_args()
    target = load_target("tiny", dtype="float32")
    torch.manual_seed(0)
    failed = False
    with tempfile.TemporaryDirectory() as temp:
        root, ours = Path(temp), dict[str, torch.Tensor]()
        cases = [(name, Path(name)) for name in args.draft]
        for index, (name, family, trimmed, options) in enumerate(SHAPES):
            drafter, package = random_drafter(family, target, trimmed, options), root / f"p{index}"
            about: dict[str, Any] = {"serve": {"length": 4}, "recipe_digest": "", "command": []}
            save_package(drafter, target, package, acceptance=None, **about)
            cases.append((name, package))
        folders = [root / f"f{index}" for index in range(len(cases))]
        for (name, package), folder in zip(cases, folders, strict=True):
            ours[name] = prepare(package, folder, target)
        env = {**os.environ, "PYTHONPATH": args.packages}
        words = [args.python, str(READER), str(resolve(target.name).path), *map(str, folders)]
        subprocess.run(words, env=env, check=True)
        for (name, _), folder in zip(cases, folders, strict=True):
            theirs_NV = load_file(folder / "logits.safetensors")["logits"]
            try:
                error = compare("speculators 0.9.0", theirs_NV, ours[name])
                print(f"{name:44} {len(theirs_NV)} tokens  largest error {error:.1e}")
            except GateError as fault:
                failed = True
                print(f"{name:44} DIFFERS: {fault.found}")
            odd = [] if args.vllm is None else derived(folder, args.vllm)
            if odd:
                failed = True
                print(f"{name:44} vLLM derives other values of {', '.join(odd)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
