"""ProPD's early pruning: what a trained early head keeps of the accepted paths, beside the target's
own LM head at the same layer.

The recipe propd is trained with --steps and each seed, and its trees are verified whole for
held-out prompts, greedily. Every node then has a rank by either head: the worst place that it and
its ancestors have among the drafter's tokens at their parents. A threshold on it says how many
nodes the upper layers would read, and which of the accepted tokens would have stayed. Recall is
given where the kept nodes are the same number (interpolated), with a bootstrap over prompts.

    python benchmarks/early_heads.py --out runs/early-heads --seeds 2 --steps 60
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import rows_of, train_ours
from torch import Tensor

from specctl import load_drafter, load_target
from specctl.core.storage.files import write_json
from specctl.core.tree import DraftTree
from specctl.drafters.heads.propd import ProPD
from specctl.recipes.load import load_recipe
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.propd import Progressive
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

SHARES = (0.75, 0.5, 0.35, 0.25)  # of the drafted nodes that stay
HEADS = ("trained", "shared")


def worst_ranks(logits_BTK: Tensor, column_BN: Tensor, tree: DraftTree) -> Tensor:
    """[B, N]: the worst rank on the way to each node (1 = best), huge where there is no node."""
    B, N = column_BN.shape
    own_BN = torch.zeros(B, N)
    for node in range(N):
        parent_B = tree.parent_BN[:, node] + 1
        row_BK = logits_BTK[torch.arange(B), parent_B]
        said_B = row_BK.gather(1, column_BN[:, node, None])
        own_BN[:, node] = (row_BK > said_B).sum(1) + 1
    own_BN[~tree.valid_BN] = 1e9
    above_BTT = tree.ancestor_BTT()[:, 1:, 1:]
    return torch.where(above_BTT, own_BN[:, None], 0.0).amax(-1)


def watched(target: Target, drafter: ProPD, prompts: list[Any], tokens: int) -> dict[str, Any]:
    """Per head and prompt: ranks of all drafted nodes, and of the accepted ones."""
    policy = Progressive(drafter.options.num_heads, 24, refresh=10**6)
    engine = Engine(target, drafter, policy, num_slots=8)
    column_V = drafter.vocab.to_draft().clamp(min=0) if drafter.vocab is not None else None
    found = {h: [([], []) for _ in prompts] for h in HEADS}  # type: ignore[var-annotated]
    last: list[Any] = []
    read, learn = engine.reader.read, engine._learn

    def reading(round: Any, tree: DraftTree) -> Any:
        out = read(round, tree)
        last[:] = [tree, out[1].taps[drafter.early_layer], [row.index for row in engine.rows]]
        return out

    def learning(outcome: Any, spent: Any) -> None:
        tree, early_BTD, indices = last
        if tree.num_nodes:
            ids_BN = tree.token_BN.clamp(min=0)
            column_BN = ids_BN if column_V is None else column_V[ids_BN]
            shared = target.lm.lm_head(early_BTD)  # type: ignore[attr-defined]
            if drafter.vocab is not None:
                shared = shared[..., drafter.vocab.ids_K]
            both = {"trained": drafter.early_logits(early_BTD), "shared": shared}
            for head, logits_BTK in both.items():
                ranks_BN = worst_ranks(logits_BTK.float(), column_BN, tree)
                for b, index in enumerate(indices):
                    drafted, accepted = found[head][index]
                    drafted.extend(ranks_BN[b][tree.valid_BN[b]].tolist())
                    path = [fed - 1 for fed in outcome.path_BP[b].tolist() if fed > 0]
                    accepted.extend(ranks_BN[b][path].tolist())
        learn(outcome, spent)

    engine.reader.read = reading  # type: ignore[method-assign]
    engine._learn = learning  # type: ignore[method-assign]
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    engine.run([Request(tuple(prompt), sampling) for prompt in prompts])
    return found


def recall(rows: list[Any], picked: Any, share: float) -> float:
    """Share of the accepted tokens that stay where `share` of the drafted nodes does."""
    drafted = np.concatenate([rows[i][0] for i in picked])
    accepted = np.concatenate([rows[i][1] for i in picked])
    steps = np.unique(drafted[drafted < 1e9])
    kept = np.searchsorted(np.sort(drafted), steps, side="right") / len(drafted)
    stays = np.searchsorted(np.sort(accepted), steps, side="right") / len(accepted)
    return float(np.interp(share, np.r_[0.0, kept], np.r_[0.0, stays]))


def compared(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per share of kept nodes, all seeds together; prompts are drawn anew with all seeds."""
    rows = {h: [run[h] for run in found] for h in HEADS}
    random, lines, number = np.random.default_rng(0), [], len(found[0]["trained"])
    draws = [random.integers(0, number, number) for _ in range(400)]
    for share in SHARES:

        def mean(head: str, picked: Any, share: float = share) -> float:
            return float(np.mean([recall(each, picked, share) for each in rows[head]]))

        gaps = [mean("trained", d) - mean("shared", d) for d in draws]
        line = {head: mean(head, range(number)) for head in HEADS}
        low, high = np.quantile(gaps, [0.025, 0.975])
        lines.append({"kept": share, **line, "ahead": [line["trained"] - line["shared"],
                      float(low), float(high)]})  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/early-heads"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    torch.set_num_threads(args.threads)
    target = load_target("tiny", dtype="float32")
    prompts = [p.ids for p in heldout_prompts(target, args.prompts)]
    rows = []
    for layer in args.layers:
        found = []
        for seed in range(args.seeds):
            recipe = load_recipe("propd", [
                "target.dtype=float32", f"train.steps={args.steps}", f"train.seed={seed}",
                f"train.tau_every={args.steps}", "train.tau_prompts=1",
                f"train.save_every={args.steps}", "data.prompts=420", "data.new_tokens=240",
                "data.text_tokens=368640", f"drafter.options.early_layer={layer}",
            ])  # fmt: skip
            folder = args.out / f"layer-{layer}-{seed}"
            if not (folder / "about.json").exists():
                train_ours(target, recipe, rows_of(args, recipe, target), folder)
            drafter = load_drafter(folder / "package", target)
            assert isinstance(drafter, ProPD)
            with torch.inference_mode():
                found.append(watched(target, drafter, prompts, args.tokens))
        rows += [{"layer": layer, **line} for line in compared(found)]
        print(f"layer {layer}: done", file=sys.stderr, flush=True)
    write_json(args.out / "early-heads.json", {"rows": rows, "steps": args.steps})
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    for row in rows:
        ahead = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["ahead"])
        print(f"behind {row['layer']} layers, {row['kept']:.0%} of the nodes kept: recall "
              f"{row['trained']:.3f} trained, {row['shared']:.3f} shared, {ahead}")  # fmt: skip


if __name__ == "__main__":
    main()
