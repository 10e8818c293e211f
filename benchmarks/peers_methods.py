"""DFlash heads and distilled draft models by other trainers beside ours: tau at equal tokens.

dflash: recipe dflash beside speculators' trainer, both with Muon, the same schedule, taps, layers,
anchors and draft vocabulary; initialisation, loss, mask and the draw of the anchors are each
trainer's own (speculators' default is D-PACE with cross-entropy). distill: recipe distill with the
whole vocabulary beside TRL's GKDTrainer (forward KL, the target's text) and SFTTrainer, all from
the same layers of the target; optimizer and schedule are each trainer's own. All read the same
batches in the same order. Each arm has a search of its own over learning rates, one seed, on
prompts used for nothing else; the best of them is then trained with every seed and drafts chains of
5 for the held-out prompts, greedy and at T = 0.8. Differences to ours have a paired bootstrap over
prompts. --set adds arms of ours that differ in keys of the recipe. Each trained drafter is kept,
the same command goes on.

    python benchmarks/peers_methods.py --method dflash --out runs/peers-dflash --steps 80
    python benchmarks/peers_methods.py --method distill --out runs/peers-distill --steps 80
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from environments import made
from peers import (
    HOSTS,
    SPECULATORS,
    TORCH,
    measured,
    rows_of,
    shown,
    summary,
    tau,
    train_ours,
)
from safetensors.torch import load_file, save_file

from specctl import load_drafter, load_target
from specctl.core.batch import TrainBatch
from specctl.core.storage.files import write_json
from specctl.drafters.blocks.dflash import DFlash, DFlashOptions
from specctl.drafters.nets.taps import even_taps
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.rows.supply import Order
from specctl.train.features.capture import capture
from specctl.train.step.optim import learning_rate
from specctl.train.vocab.draft_vocab import draft_vocab

TRL = ("train_trl.py", "trl", [TORCH, "trl==1.16.0 transformers==5.23.0"], [])
OURS = "specctl"
SPECULATORS_DFLASH = ("train_speculators_dflash.py", *SPECULATORS[1:])
# method -> arm -> rates searched, keys of our recipe (ours) or the trainer and what it is told
ARMS: dict[str, dict[str, Any]] = {
    "dflash": {
        OURS: {"rates": (2e-3, 4e-3, 8e-3)},
        "speculators": {"rates": (2e-3, 4e-3, 8e-3), "job": SPECULATORS_DFLASH, "mask_id": 2,
                        "d_pace": 0.5},
        "speculators, fixed decay": {"rates": (2e-3, 4e-3, 8e-3), "job": SPECULATORS_DFLASH,
                                     "mask_id": 2},
    },
    "distill": {
        OURS: {"rates": (1.5e-3, 3e-3, 6e-3), "set": ("vocab.size=null",)},
        "TRL GKD": {"rates": (3e-4, 1e-3, 3e-3), "job": TRL, "method": "gkd"},
        "TRL SFT": {"rates": (3e-4, 1e-3, 3e-3), "job": TRL, "method": "sft"},
    },
}  # fmt: skip
LAYERS = (0, 7)  # of the embedded target, in the draft models


def recipe_of(args: argparse.Namespace, arm: str, rate: float, seed: int) -> Recipe:
    sets = [
        "target.dtype=float32", f"train.steps={args.steps}", f"train.seed={seed}",
        f"train.learning_rate={rate}", f"train.tau_every={args.steps}", "train.tau_prompts=1",
        f"train.save_every={args.steps}", f"train.rows={args.rows}", "data.prompts=420",
        "data.new_tokens=240",
        "data.text_tokens=368640", "data.temperature=0.8", "data.greedy_share=0.5",
        "data.prompt_tokens=48",
    ]  # fmt: skip
    if args.method == "distill":
        sets.append(f"drafter.options.from_layers={list(LAYERS)}")
        sets.append("drafter.options.layers=null")
    return load_recipe(args.method, [*sets, *ARMS[args.method][arm].get("set", ())])


def train_peer(
    args: argparse.Namespace, arm: str, recipe: Recipe, data: TokenData, target: Target,
    folder: Path,
) -> None:  # fmt: skip
    """In the trainer's environment, on batches written down beside what it trains."""
    about = ARMS[args.method][arm]
    script, name, packages, unwanted = about["job"]
    python = dict(pair.split("=", 1) for pair in args.python).get(name)
    python = python or made(args.out / "environments" / name, packages, unwanted)
    folder.mkdir(parents=True, exist_ok=True)
    settings, order = recipe.train, Order(data.num_rows, recipe.train.seed)
    taken = [order.take(step * settings.rows, settings.rows) for step in range(settings.steps)]
    ids_NBS = torch.stack([data.batch(rows).ids_BS for rows in taken]).int()
    vocab = draft_vocab(recipe.vocab, recipe.data, target, data)
    kept_K = torch.arange(target.spec.vocab_size) if vocab is None else vocab.ids_K
    save_file({"ids_NBS": ids_NBS, "kept_K": kept_K}, folder / "batches.safetensors")
    options = recipe.drafter.options
    shape = {"taps": list(even_taps(target.spec.num_layers)), "rope_theta": 10_000.0,
             "layers": options.get("layers"), "num_heads": options.get("num_heads"),
             "anchors": options.get("anchors"), "mask_id": about.get("mask_id"),
             "from_layers": list(LAYERS)}  # fmt: skip
    job = {
        "target": str(args.out / "target"), "batches": str(folder / "batches.safetensors"),
        "out": str(folder), "seed": settings.seed, "clip": settings.clip, "shape": shape,
        "weight_decay": settings.weight_decay, "momentum": settings.momentum,
        "attention_rate": settings.attention_rate, "method": about.get("method"),
        "d_pace": about.get("d_pace"),
        "rates": [learning_rate(step, settings) for step in range(settings.steps)],
        "learning_rate": settings.learning_rate,
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": str(args.threads), "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("w") as log:
        subprocess.run([python, str(HOSTS / script), json.dumps(job)], env=environment, check=True,
                       stdout=log, stderr=log)  # fmt: skip


def block_head(folder: Path, recipe: Recipe, target: Target, data: TokenData, mask: int) -> DFlash:
    """speculators' head as our drafter, with the mask's row as the learned vector."""
    options = recipe.drafter.options
    chosen = DFlashOptions(num_heads=options["num_heads"], layers=options["layers"])
    vocab = draft_vocab(recipe.vocab, recipe.data, target, data)
    drafter = DFlash(chosen, target.spec, vocab)
    names = {"hidden_norm.": "fc_norm.", "layers.": "net.layers."}
    weights = {}
    for name, tensor in load_file(folder / "head.safetensors").items():
        if name.startswith("proof."):
            continue
        for theirs, ours in names.items():
            name = ours + name[len(theirs) :] if name.startswith(theirs) else name
        weights[name] = tensor
    borrowed = target.borrowed()
    weights["mask"] = borrowed.embedding_VD[mask].detach().float() * borrowed.embed_scale
    drafter.load_tensors(weights)
    drafter.bind(borrowed)
    drafter.module.eval()
    return drafter


def blocks_differ(drafter: DFlash, folder: Path, target: Target) -> float:
    """Largest difference between the logits of our net and its trainer's, over the largest."""
    proof, H = load_file(folder / "head.safetensors"), drafter.options.num_heads
    ids_BS, anchor_BA = proof["proof.ids"], proof["proof.anchors"] - 1  # ours: newest token read
    anchor_BA = anchor_BA[:, anchor_BA[0] >= 0]
    theirs = proof["proof.logits"].unflatten(1, (-1, H + 1))[:, -anchor_BA.shape[1] :]
    whole = torch.ones_like(ids_BS)
    batch = TrainBatch(ids_BS, whole.bool(), whole * 0, torch.arange(ids_BS.shape[1])[None])
    worst = 0.0
    with torch.no_grad():
        found = drafter.unroll(capture(target, batch, drafter.needs()), anchor_BA)
        for head, state_BSD in enumerate(found):
            ours_BAK = F.linear(state_BSD[0, anchor_BA[0]][None], drafter.head_weights()[0])
            gap = (ours_BAK - theirs[:, :, head + 1]).abs().max()
            worst = max(worst, float(gap / theirs.abs().max()))
    return worst


def read_in(
    args: argparse.Namespace, arm: str, recipe: Recipe, target: Target, data: TokenData,
    folder: Path,
) -> tuple[Any, float]:  # fmt: skip
    """What was trained as our drafter, and how far its logits are from its trainer's."""
    about = ARMS[args.method][arm]
    if "job" not in about:
        return load_drafter(folder / "package", target), 0.0
    if args.method == "dflash":
        head = block_head(folder, recipe, target, data, about["mask_id"])
        return head, blocks_differ(head, folder, target)
    drafter = load_drafter(folder / "model", target, allow=("template",))
    proof = torch.load(folder / "proof.pt")
    ids_BS, whole = proof["ids"], torch.ones_like(proof["ids"])
    with torch.no_grad():
        lm = drafter.language_model()  # type: ignore[attr-defined]
        position_BS = torch.arange(ids_BS.shape[1])[None]
        ours = lm.dense(ids_BS, position_BS, lm.document_masks(whole * 0)).logits_BTV
    gap = (ours - proof["logits"]).abs().max() / proof["logits"].abs().max()
    return drafter, float(gap)


def trained(
    args: argparse.Namespace, arm: str, rate: float, seed: int, search: bool, target: Target,
    data: TokenData,
) -> dict[str, Any]:  # fmt: skip
    """An arm with a rate and a seed: trained, and measured on prompts of the search or held out."""
    plain = arm.replace(",", "").replace(" ", "-").replace("=", "-").replace("/", "-")
    folder = args.out / f"{plain}-{rate:g}-{seed}"
    result = folder / ("search.json" if search else "result.json")
    recipe = recipe_of(args, arm, rate, seed)
    settings = recipe.model_dump(mode="json", include={"drafter", "train", "vocab"})
    if result.exists():
        before = dict(json.loads(result.read_text()))
        if "job" not in ARMS[args.method][arm] and before.get("recipe") != settings:
            raise SystemExit(f"{result} is of another recipe: take another --out")
        return before
    if not (folder / "about.json").exists():
        print(f"{arm}, rate {rate:g}, seed {seed}: training", file=sys.stderr, flush=True)
        if "job" not in ARMS[args.method][arm]:
            train_ours(target, recipe, data, folder)
        else:
            train_peer(args, arm, recipe, data, target, folder)
    about = json.loads((folder / "about.json").read_text())
    drafter, proof = read_in(args, arm, recipe, target, data, folder)
    prompts = [p.ids for p in heldout_prompts(target, args.prompts + args.search)]
    prompts = prompts[args.prompts :] if search else prompts[: args.prompts]
    counts = measured(target, drafter, prompts, args.tokens)
    found = {"arm": arm, "seed": seed, "rate": rate, "version": about["version"],
             "torch": about["torch"], "seconds_per_step": median(about["seconds"]),
             "logits_differ": proof, "counts": counts, "recipe": settings}  # fmt: skip
    write_json(result, found)
    text = ", ".join(f"{k} {tau(np.array(v)):.3f}" for k, v in counts.items())
    print(f"{arm}, rate {rate:g}, seed {seed}, {'search' if search else 'held out'}: {text}, "
          f"{found['seconds_per_step']:.2f} s a step, logits differ {proof:.1e}",
          file=sys.stderr, flush=True)  # fmt: skip
    return found


def best_rate(args: argparse.Namespace, arm: str, target: Target, data: TokenData) -> float:
    """The rate with the highest tau on the prompts of the search, both settings averaged."""
    rates = ARMS[args.method][arm]["rates"]
    if len(rates) == 1:
        return float(rates[0])
    scores = {}
    for rate in rates:
        counts = trained(args, arm, rate, 0, True, target, data)["counts"]
        scores[rate] = mean(tau(np.array(each)) for each in counts.values())
    return float(max(scores, key=scores.__getitem__))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=sorted(ARMS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", help="names, separated by ; (all)")
    parser.add_argument("--rates", help="searched by every arm, in place of its own: 8e-3,1.6e-2")
    parser.add_argument("--set", action="append", default=[], metavar="NAME:RATE:KEY=VALUE;...",
                        help="one more arm of ours at one rate, with these keys")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rows", type=int, default=8, help="rows of 288 tokens a step")
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--search", type=int, default=36, help="prompts of the search for rates")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="TRAINER=ENV/bin/python")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    torch.set_num_threads(args.threads)
    arms = args.arms.split(";") if args.arms else list(ARMS[args.method])
    if args.rates:
        for about in ARMS[args.method].values():
            about["rates"] = tuple(float(rate) for rate in args.rates.split(","))
    for text in args.set:
        name, rate, sets = text.split(":", 2)
        base = ARMS[args.method][OURS].get("set", ())
        added = {"rates": (float(rate),), "set": (*base, *sets.split(";"))}
        ARMS[args.method][f"{OURS}, {name}"] = added
        arms.append(f"{OURS}, {name}")
    if unknown := [arm for arm in arms if arm not in ARMS[args.method]]:
        raise SystemExit(f"no such arm: {unknown}; there are {list(ARMS[args.method])}")
    target = load_target("tiny", dtype="float32")
    if not (args.out / "target" / "config.json").exists():
        (args.out / "target").mkdir(parents=True, exist_ok=True)
        write_target(target, args.out / "target")
    data = rows_of(args, recipe_of(args, OURS, 1e-3, 0), target)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    rates = {arm: best_rate(args, arm, target, data) for arm in arms}
    for seed in range(args.seeds):
        for arm in arms:
            found[arm].append(trained(args, arm, rates[arm], seed, False, target, data))
    rows = summary(found, OURS)
    write_json(args.out / "peers.json", {"rows": rows, "rates": rates, "steps": args.steps})
    if args.json:
        print(json.dumps({"rows": rows, "rates": rates}, indent=1))
        return
    for row in rows:
        rate, seconds = rates[row["arm"]], row["seconds_per_step"]
        text = f"{row['arm']:24s} rate {rate:g} {seconds:5.2f} s a step"
        print(text + shown(row))


if __name__ == "__main__":
    main()
