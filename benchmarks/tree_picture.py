"""A picture of what a drafter guesses in one round: the trees of several policies for the same
text, with the nodes that the target accepted.

    python benchmarks/tree_picture.py --draft runs/quickstart/package
    python benchmarks/tree_picture.py --draft runs/eagle3/package --policies chain,ddd --out t.png

The target continues the prompt by `--after` tokens; from there each policy drafts its first round,
as its defaults say. Depth goes to the right; siblings stand in the order of their draft.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter, Outcome, RoundSeconds
from specctl.core.tree import DraftTree
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.policies import make_policy
from specctl.runtime.policies.length import FixedLength
from specctl.runtime.target.target import Target

PROMPT_TEXT = "class Stack:\n    def __init__(self):\n        "
POLICIES = "chain,dynamic-tree,static-tree,rsd"
LABELLED = 40  # nodes of a tree; the tokens of a larger one cannot be read
ACCEPTED, DRAFTED = "#1a7f37", "0.55"


@dataclass(slots=True)
class Rounds(FixedLength):
    """Keeps what every round did. One writer: the engine."""

    outcomes: list[Outcome] = field(default_factory=list)

    def observe(self, outcome: Outcome, seconds: RoundSeconds) -> None:
        self.outcomes.append(outcome)


def first_round(
    target: Target, drafter: Drafter, name: str, ids: tuple[int, ...], sampling: Sampling
) -> Outcome:
    """Of that policy, behind those tokens, with as long a draft as it takes by default."""
    policy = make_policy({"policy": name})
    rounds = Rounds(CostTable({}, {}, "", "", 1), fixed=policy.depth)
    Engine(target, drafter, policy, "auto", num_slots=1, chooser=rounds).run(
        [Request(ids, sampling)]
    )
    drafted = [one for one in rounds.outcomes if one.tree.num_nodes]
    if not drafted:
        raise SystemExit(f"{name}: nothing was drafted here; try another --after")
    return drafted[0]


def heights(tree: DraftTree) -> list[float]:
    """By fed index: leaves below one another, a parent half-way between its children."""
    parents = [int(p) + 1 for p in tree.parent_BN[0]]
    valid = tree.valid_BN[0].tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents, start=1):
        if valid[node - 1]:
            children.setdefault(parent, []).append(node)
    found, leaves = [0.0] * (len(parents) + 1), 0

    def place(node: int) -> float:
        nonlocal leaves
        below = [place(child) for child in children.get(node, [])]
        if not below:
            leaves += 1
        found[node] = (below[0] + below[-1]) / 2 if below else leaves - 1.0
        return found[node]

    place(0)
    return found


def panel(axes: Any, name: str, outcome: Outcome, root: str, texts: list[str]) -> None:
    """One tree; `texts` are those of its nodes."""
    tree, y = outcome.tree, heights(outcome.tree)
    depth = tree.depth_BT()[0].tolist()
    accepted = {int(fed) for fed in outcome.path_BP[0] if fed >= 0}
    valid = [True, *tree.valid_BN[0].tolist()]
    parents = [0, *(int(p) + 1 for p in tree.parent_BN[0])]
    for node in range(1, len(valid)):
        if valid[node]:
            parent, taken = parents[node], node in accepted
            xs, ys = (depth[parent], depth[node]), (y[parent], y[node])
            colour = ACCEPTED if taken else "0.8"
            axes.plot(xs, ys, color=colour, linewidth=1.8 if taken else 0.9, zorder=1)
    is_labelled = sum(valid) <= LABELLED
    for node, text in enumerate([root, *texts]):
        if not valid[node]:
            continue
        colour = "black" if node == 0 else ACCEPTED if node in accepted else DRAFTED
        axes.scatter(depth[node], y[node], s=22, color=colour, zorder=2)
        if is_labelled:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.85}
            axes.annotate(
                text,
                (depth[node], y[node]),
                (4, 0) if node else (-4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if node else "right",
                fontsize=8,
                family="monospace",
                color="black" if colour != DRAFTED else "0.35",
                bbox=box,
                parse_math=False,
            )
    nodes = sum(valid) - 1
    axes.set_title(f"{name}: {nodes} nodes, {len(accepted - {0})} accepted", fontsize=11)
    axes.set_xlim(-0.6, max(depth) + 0.9)
    axes.set_ylim(max(y) + 0.8, min(y) - 0.8)
    axes.set_xticks(range(max(depth) + 1))
    axes.set_xlabel("depth (tokens ahead)")
    axes.set_yticks([])
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--draft", required=True, help="package of a stepwise drafter")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--policies", default=POLICIES, help="by commas; four fit well")
    parser.add_argument("--prompt", default=PROMPT_TEXT)
    parser.add_argument("--after", type=int, default=6, help="tokens written before the round")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/images/trees.svg"))
    args = parser.parse_args()
    target = load_target(args.target, dtype="float32")
    drafter = load_drafter(args.draft, target).to(target.device, target.dtype)
    sampling = Sampling(args.temperature, seed=args.seed, max_new_tokens=max(1, args.after))
    ids = tuple(target.encode(args.prompt))
    if args.after:
        ids = (*ids, *generate(target, [list(ids)], sampling=sampling).outputs[0].token_ids)
    sampling = Sampling(args.temperature, seed=args.seed, max_new_tokens=16)
    names = args.policies.split(",")
    rounds = {name: first_round(target, drafter, name, ids, sampling) for name in names}

    def shown(token: int) -> str:
        text = target.decode([token])
        return text.replace("\n", "\\n").replace(" ", "\u00b7") or "?"

    rows = -(-len(names) // 2)
    most = max(max(heights(one.tree)) for one in rounds.values())
    figure = Figure(figsize=(11, rows * max(2.4, 0.19 * most + 1.2)), layout="constrained")
    figure.suptitle(
        f"Draft trees for the same text (green: accepted by {target.name})", fontsize=13
    )
    grid = figure.subplots(rows, min(2, len(names)), squeeze=False).flatten()
    for axes, (name, outcome) in zip(grid, rounds.items(), strict=False):
        root = shown(int(outcome.view.root_B[0]))
        panel(axes, name, outcome, root, [shown(int(t)) for t in outcome.tree.token_BN[0]])
    for axes in grid[len(names) :]:
        axes.set_visible(False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=150, metadata={"Date": None} if args.out.suffix == ".svg" else {})
    for name, outcome in rounds.items():
        print(f"{name}: {outcome.num_accepted[0]} accepted of {outcome.tree.num_nodes} nodes")
    print(args.out)


if __name__ == "__main__":
    main()
