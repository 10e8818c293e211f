"""EAGLE-3 heads by other trainers beside ours: tau at equal tokens, and seconds a step.

Heads for the embedded target by specctl (its recipe eagle3), nvidia-modelopt (its random LM head,
and with the target's rows) and speculators, each in an environment of its own below --out, made
once: the same batches in the same order, sizes, unrolled steps, optimizer (Muon, AdamW for the
rest), learning rates and clipping; loss, initialisation, weights of the steps and norms are each
trainer's own. Every head is then read into specctl by its weights, proved to give the logits that
its trainer gives, and drafts chains of 5 for held-out prompts, greedy and at T = 0.8; the
difference to ours has a paired bootstrap over prompts (all seeds of a prompt together). --set adds
arms of ours that differ in keys of the recipe, --rate gives every trainer another learning rate.
Each trained head is kept, the same command goes on.

    python benchmarks/peers.py --out runs/peers-train --seeds 3 --threads 1 \\
        --set "EAGLE-3:drafter.options.fc_norm=false,drafter.options.norm_output=false"
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from environments import made
from peer_hosts.turns import turn
from safetensors.torch import load_file, save_file
from torch import Tensor

from specctl import Sampling, generate, load_drafter, load_target
from specctl.api.train import train_and_package
from specctl.core.batch import TrainBatch
from specctl.core.drafter import Space
from specctl.core.language_model import Borrowed
from specctl.core.storage.files import write_json
from specctl.drafters.features.eagle3 import Eagle3, Eagle3Options, Eagle3State
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.measure.reporter import SilentReporter
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target
from specctl.train import loop
from specctl.train.data.prepare import prepare
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.rows.pack import PackedRows
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.rows.supply import Order
from specctl.train.data.sources.defects import Defects
from specctl.train.features.capture import capture
from specctl.train.step.optim import learning_rate
from specctl.train.vocab.draft_vocab import draft_vocab

HOSTS = Path(__file__).parent / "peer_hosts"
TORCH = "torch==2.13.0"
MODELOPT = ("train_modelopt.py", "modelopt",
            [TORCH, "nvidia-modelopt==0.47.0", "transformers<5.15", "accelerate", "requests",
             "datasets"], [])  # fmt: skip
SPECULATORS = ("train_speculators.py", "speculators", ["speculators==0.9.0", TORCH],
               ["torchvision", "torchaudio"])  # fmt: skip
ARMS: dict[str, Any] = {
    "specctl": {},
    "modelopt": (*MODELOPT, "random"),
    "modelopt, target's rows": (*MODELOPT, "target"),
    "speculators": (*SPECULATORS, "target"),
}
OPTIONS = Eagle3Options(ttt_steps=3, intermediate=384)
SAMPLINGS = {"greedy": {}, "T = 0.8": {"temperature": 0.8}}


def recipe_of(args: argparse.Namespace, seed: int, sets: tuple[str, ...] = ()) -> Recipe:
    """The embedded target's eagle3 recipe at the sizes compared; measured here, not while it
    trains."""
    return load_recipe("eagle3", [
        "target.dtype=float32", f"train.steps={args.steps}", f"train.seed={seed}",
        f"train.tau_every={args.steps}", "train.tau_prompts=1", f"train.save_every={args.steps}",
        "data.prompts=420", "data.new_tokens=240", "data.text_tokens=368640",
        *([] if args.rate is None else [f"train.learning_rate={args.rate}"]), *sets,
    ])  # fmt: skip


def rows_of(args: argparse.Namespace, recipe: Recipe, target: Target) -> TokenData:
    """The rows of the recipe that are one document each: not every trainer masks packed ones."""
    whole = args.out / "data-all"
    data = prepare(recipe, target, whole)
    folder = args.out / "data"
    if (folder / "manifest.json").exists():
        return TokenData(folder, type(data.manifest)(**json.loads(
            (folder / "manifest.json").read_text())))  # fmt: skip
    arrays = load_file(data.folder / data.manifest.file)
    document_RS, position_RS = arrays["document_RS"], arrays["position_RS"]
    one_R = (document_RS == document_RS[:, :1]).all(1) & (position_RS[:, -1] == data.seq_len - 1)
    kept = {name: array[one_R] for name, array in arrays.items() if name.endswith("RS")}
    if len(kept["ids_RS"]) < args.steps * recipe.train.rows:
        raise SystemExit(f"{int(one_R.sum())} rows of one document are too few")
    kept["document_RS"] = torch.arange(int(one_R.sum()), dtype=torch.int32)[:, None].expand(
        -1, data.seq_len
    )
    rows = PackedRows(
        **{name: array.contiguous().numpy() for name, array in kept.items()},
        domain_N=["row"] * len(kept["ids_RS"]),
    )
    folder.mkdir(parents=True, exist_ok=True)
    settings = data.manifest.settings
    manifest = write_rows(folder, rows, data.digest, settings, data.manifest.writer, Defects())
    return TokenData(folder, manifest)


def train_ours(target: Target, recipe: Recipe, data: TokenData, folder: Path) -> None:
    """By `specctl train-draft`'s own code, on the rows that are there."""
    linked = folder / "data"
    if not linked.exists():
        folder.mkdir(parents=True, exist_ok=True)
        linked.symlink_to(data.folder.resolve(), target_is_directory=True)
    command = ("python", "benchmarks/peers.py")
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"log_every": 1})})
    take_step = loop.take_step

    def in_turn(*given: Any) -> None:
        with turn():
            take_step(*given)

    with patch.object(loop, "take_step", in_turn):
        train_and_package(SilentReporter(), recipe, folder, command=command, target=target)
    log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    until = [0.0, *(line["seconds"] for line in log if "seconds" in line)]
    seconds = [later - earlier for earlier, later in pairwise(until)]
    about = {"seconds": seconds, "version": "this tree", "torch": torch.__version__}
    write_json(folder / "about.json", about)


def train_peer(
    args: argparse.Namespace, arm: str, recipe: Recipe, data: TokenData, kept_K: Tensor,
    folder: Path,
) -> None:  # fmt: skip
    """In the trainer's environment, on batches written down beside the head."""
    script, name, packages, unwanted, head = ARMS[arm]
    python = dict(pair.split("=", 1) for pair in args.python).get(name)
    python = python or made(args.out / "environments" / name, packages, unwanted)
    folder.mkdir(parents=True, exist_ok=True)
    settings, order = recipe.train, Order(data.num_rows, recipe.train.seed)
    taken = [order.take(step * settings.rows, settings.rows) for step in range(settings.steps)]
    ids_NBS = torch.stack([data.batch(rows).ids_BS for rows in taken]).int()
    save_file({"ids_NBS": ids_NBS, "kept_K": kept_K}, folder / "batches.safetensors")
    job = {
        "target": str(args.out / "target"), "batches": str(folder / "batches.safetensors"),
        "out": str(folder), "seed": settings.seed, "head": head, "clip": settings.clip,
        "weight_decay": settings.weight_decay, "momentum": settings.momentum,
        "attention_rate": settings.attention_rate,
        "rates": [learning_rate(step, settings) for step in range(settings.steps)],
        "shape": {"taps": args.taps, "ttt_steps": OPTIONS.ttt_steps, "rope_theta": 10_000.0,
                  "intermediate": OPTIONS.intermediate},
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as log:
        subprocess.run([python, str(HOSTS / script), json.dumps(job)], env=environment, check=True,
                       stdout=log, stderr=log)  # fmt: skip


class TwiceNormedState(Eagle3State):
    """Serves a `TwiceNormed`."""

    def __init__(self, drafter: TwiceNormed, space: Space) -> None:
        self.first = drafter.first
        super().__init__(drafter, space)

    def _compiled(self, *given: Any) -> None:
        """The compiled step norms the state once."""

    def _project(self, ids_BT: Tensor, state_BTD: Tensor, rope_BT2E: Tensor) -> Any:
        return super()._project(ids_BT, self.first(state_BTD), rope_BT2E)


class TwiceNormed(Eagle3):
    """modelopt 0.47 trains with the state normed twice before attention: by the norm of the
    embedding (which its decoder layer applies, too), then by its own. Engines norm it once; here
    the head is served as it was trained."""

    def first(self, state_BTD: Tensor) -> Tensor:
        norm = self.module.layer.input_layernorm
        return F.rms_norm(state_BTD, norm.weight.shape, norm.weight.detach(), norm.eps)

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        layer = self.module.layer
        mix = type(layer).mix
        layer.mix = lambda e, s: mix(layer, e, self.first(s))  # type: ignore[method-assign]

    def open(self, space: Space) -> Eagle3State:
        return TwiceNormedState(self, space)


def imported(folder: Path, arm: str, target: Target, vocab: Any, taps: tuple[int, ...]) -> Eagle3:
    """A peer's head as our drafter, with what no serving engine computes carried over: speculators
    norms the taps as one vector, and see `TwiceNormed`."""
    weights = load_file(folder / "head.safetensors")
    weights = {name: each for name, each in weights.items() if not name.startswith("proof.")}
    is_theirs = ARMS[arm][1] == "speculators"
    options = replace(OPTIONS, taps=taps, norm_before_residual=is_theirs, norm_output=is_theirs)
    drafter = (Eagle3 if is_theirs else TwiceNormed)(options, target.spec, vocab)
    scale = weights.pop("input_norm.weight", None)
    drafter.load_tensors(weights)
    drafter.bind(target.borrowed())
    net = drafter.module
    if scale is not None:

        def gathered(given: Mapping[int, Tensor]) -> Tensor:
            joined = torch.cat([given[tap] for tap in net.taps], dim=-1)
            return F.rms_norm(joined, scale.shape, scale, target.spec.norm_eps)

        net.gathered = gathered  # type: ignore[method-assign]
    net.eval()
    return drafter


def proved(drafter: Eagle3, folder: Path, target: Target) -> float:
    """Largest difference between the logits of our net and its trainer's, over the largest."""
    proof = load_file(folder / "head.safetensors")
    ids_BS, theirs_BSK = proof["proof.ids"], proof["proof.logits"]
    whole = torch.ones_like(ids_BS)
    batch = TrainBatch(ids_BS, whole.bool(), whole * 0, torch.arange(ids_BS.shape[1])[None])
    with torch.no_grad():
        normed_BSD = drafter.unroll(capture(target, batch, drafter.needs()), 1)[0]
        ours_BSK = drafter.module.lm_head(normed_BSD)
    S = ids_BS.shape[1] - 1  # the last row has no next token
    return float((ours_BSK[:, :S] - theirs_BSK[:, :S]).abs().max() / theirs_BSK[:, :S].abs().max())


def measured(
    target: Target, drafter: Any, prompts: list[tuple[int, ...]], tokens: int
) -> dict[str, list[list[int]]]:
    """Per setting and prompt: tokens emitted and rounds."""
    found = {}
    for name, settings in SAMPLINGS.items():
        counts = [[0, 0] for _ in prompts]

        def count(index: int, new: tuple[int, ...], accepted: int, counts: Any = counts) -> None:
            del accepted
            counts[index][0] += len(new)
            counts[index][1] += 1

        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True, seed=0, **settings)
        generate(target, [list(p) for p in prompts], drafter=drafter, sampling=sampling,
                 policy="chain", length=5, batch=24, on_round=count)  # fmt: skip
        found[name] = counts
    return found


def tau(counts: np.ndarray[Any, Any]) -> float:
    """[seeds, prompts, (tokens, rounds)] -> tokens a round."""
    return float(counts[..., 0].sum() / counts[..., 1].sum())


def interval(ours: Any, theirs: Any) -> tuple[float, float, float]:
    """The difference of tau and its 95 % interval: prompts drawn anew, both arms on the same."""
    random, a, b = np.random.default_rng(0), np.array(ours), np.array(theirs)
    found = []
    for _ in range(4000):
        drawn = random.integers(0, a.shape[1], a.shape[1])
        found.append(tau(a[:, drawn]) - tau(b[:, drawn]))
    low, high = np.quantile(found, [0.025, 0.975])
    return tau(a) - tau(b), float(low), float(high)


def trained(
    args: argparse.Namespace, arm: str, seed: int, target: Target, data: TokenData, vocab: Any
) -> dict[str, Any]:
    """An arm of one seed: trained, read in, measured; the counts are kept beside it."""
    plain = arm.replace(",", "").replace("'", "").replace(" ", "-")
    rate = "" if args.rate is None else f"-{args.rate:g}"
    folder = args.out / f"{plain}{rate}-{seed}"
    result = folder / f"result-{args.skip}-{args.prompts}.json"
    recipe = recipe_of(args, seed, ARMS[arm].get("set", ()) if isinstance(ARMS[arm], dict) else ())
    asked, kept = recipe.train.model_dump(mode="json"), folder / "train.json"
    is_trained = (folder / "about.json").exists()
    if is_trained and not (kept.exists() and json.loads(kept.read_text()) == asked):
        raise SystemExit(f"{folder} was trained with other settings; give another --out")
    if result.exists():
        return dict(json.loads(result.read_text()))
    if not is_trained:
        print(f"{arm}, seed {seed}: training", file=sys.stderr, flush=True)
        if isinstance(ARMS[arm], dict):
            train_ours(target, recipe, data, folder)
        else:
            train_peer(args, arm, recipe, data, vocab.ids_K, folder)
        write_json(kept, asked)
    about = json.loads((folder / "about.json").read_text())
    if isinstance(ARMS[arm], dict):
        drafter, proof = load_drafter(folder / "package", target), 0.0
    else:
        drafter = imported(folder, arm, target, vocab, tuple(args.taps))
        proof = proved(drafter, folder, target)
    prompts = [p.ids for p in heldout_prompts(target, args.skip + args.prompts)[args.skip :]]
    counts = measured(target, drafter, prompts, args.tokens)
    found = {"arm": arm, "seed": seed, "version": about["version"], "torch": about["torch"],
             "seconds_per_step": median(about["seconds"]), "logits_differ": proof,
             "counts": counts}  # fmt: skip
    write_json(result, found)
    print(f"{arm}, seed {seed}: " + ", ".join(f"{k} {tau(np.array(v)):.3f}" for k, v in
          counts.items()) + f", {found['seconds_per_step']:.2f} s a step", file=sys.stderr,
          flush=True)  # fmt: skip
    return found


def summary(found: dict[str, list[dict[str, Any]]], ours: str) -> list[dict[str, Any]]:
    rows = []
    for arm, runs in found.items():
        row: dict[str, Any] = {"arm": arm, "version": runs[0]["version"], "seeds": len(runs),
                               "seconds_per_step": mean(r["seconds_per_step"] for r in runs),
                               "logits_differ": max(r["logits_differ"] for r in runs)}  # fmt: skip
        for name in SAMPLINGS:
            counts = [r["counts"][name] for r in runs]
            row[name] = {"tau": tau(np.array(counts)),
                         "by_seed": [tau(np.array(c)) for c in counts]}  # fmt: skip
            base = found.get(ours, [])
            if arm != ours and [r["seed"] for r in base] == [r["seed"] for r in runs]:
                row[name]["ours_ahead"] = interval([r["counts"][name] for r in base], counts)
        rows.append(row)
    return rows


def shown(row: dict[str, Any]) -> str:
    """tau of an arm, and how far ours is ahead of it."""
    text = ""
    for name in SAMPLINGS:
        text += f"   {name} {row[name]['tau']:.3f}"
        if "ours_ahead" in row[name]:
            text += " (ours {:+.3f} [{:+.3f}, {:+.3f}])".format(*row[name]["ours_ahead"])
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/peers-train"))
    parser.add_argument("--arms", default=";".join(ARMS), help="names, separated by ;")
    parser.add_argument("--set", action="append", default=[], metavar="NAME:KEY=VALUE,...",
                        help="one more arm of ours, with these keys of the recipe")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rate", type=float, default=None, help="of every trainer; the recipe's")
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--skip", type=int, default=0, help="held-out prompts left out before them")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="TRAINER=ENV/bin/python")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    torch.set_num_threads(args.threads)
    for text in args.set:
        name, _, sets = text.partition(":")
        ARMS[f"specctl, {name}"] = {"set": tuple(sets.split(","))}
        args.arms += f";specctl, {name}"
    target = load_target("tiny", dtype="float32")
    if not (args.out / "target" / "config.json").exists():
        (args.out / "target").mkdir(parents=True, exist_ok=True)
        write_target(target, args.out / "target")
    recipe = recipe_of(args, 0)
    data = rows_of(args, recipe, target)
    vocab = draft_vocab(recipe.vocab, recipe.data, target, data)
    args.taps = list(Eagle3(OPTIONS, target.spec, vocab).options.taps or ())
    arms = [arm for arm in args.arms.split(";") if arm]
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise SystemExit(f"no such arm: {unknown}; there are {list(ARMS)}")
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for seed in range(args.seeds):
        for arm in arms:
            found[arm].append(trained(args, arm, seed, target, data, vocab))
    rows = summary(found, "specctl")
    about = {"cpu": platform.processor(), "steps": args.steps, "rate": recipe.train.learning_rate}
    write_json(args.out / "peers.json", {"rows": rows, **about})
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        text = f"{row['arm']:28s} {row['seconds_per_step']:5.2f} s a step"
        print(text + shown(row))


if __name__ == "__main__":
    main()
