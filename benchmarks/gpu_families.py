"""Every family on a GPU, by its full recipe on the embedded target, and some of them ablated.

    python benchmarks/gpu_families.py --out runs/gpu
    python benchmarks/gpu_families.py --out runs/gpu --dry-run

Case by case: train (OUT/families/NAME is an ordinary run, which the next call continues), then
measure on 64 held-out prompts x 128 tokens, greedy, as a chain and as the family's tree; on the
embedded target and inflated to the cost of 1B and 8B parameters, where the text and tau are the
same and the speeds those of such a target.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from gpu_common import Cases, parser

from specctl.cli.app.console import Console
from specctl.cli.commands.bench_families import Heat, chosen, measure, recipes_of, train_family
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.recipes.stages import stages_of
from specctl.runtime.target.target import Target, load_target

SIZES = (None, "1b", "8b")
DRY_SETS = (
    "data.prompts=8", "data.new_tokens=8", "data.text_tokens=2000", "train.steps=2",
    "train.seq_len=64", "train.rows=2", "train.tau_prompts=1", "train.tau_tokens=4",
)  # fmt: skip
# Name -> recipe, and what is changed of it.
ABLATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle3, one step": ("eagle3", ("drafter.options.ttt_steps=1",)),
    "eagle3, three steps": ("eagle3", ("drafter.options.ttt_steps=3",)),
    "eagle3, whole vocabulary": ("eagle3", ("vocab.size=null",)),
    "eagle3, on the text": ("eagle3", ("drafter.options.loss=ce",)),
    "eagle3, total variation": ("eagle3", ("drafter.options.loss=tv",)),
    "distill, on the text": ("distill", ("drafter.options.loss=ce",)),
    "distill, reverse KL": ("distill", ("drafter.options.loss=rkl",)),
}


def planned(is_dry: bool) -> dict[str, Recipe]:
    """Case -> recipe."""
    more = DRY_SETS if is_dry else ()
    names = ["medusa"] if is_dry else chosen("all")
    found = {name: load_recipe(recipes_of(name)[0], sets=[*more]) for name in names}
    for name, (recipe, sets) in [*ABLATIONS.items()][: 1 if is_dry else None]:
        found[name] = load_recipe(recipe, sets=[*more, *sets])
    return {name: recipe for name, recipe in found.items() if not stages_of(recipe)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--tokens", type=int, default=128)
    args = options.parse_args()
    cases = Cases("families", args)
    console = Console()
    console.configure(quiet=args.json)
    prompts, tokens = (1, 8) if cases.dry else (args.prompts, args.tokens)
    heat = Heat(None, prompts, None, tokens, (0.0,), 1, 1, 0, False, False)
    done: list[Path] = []

    @cache
    def target(size: str | None) -> Target:
        where = str(cases.device)
        return load_target("tiny", dtype="bfloat16", device=where, inflate=size)

    def case(name: str, recipe: Recipe) -> dict[str, Any]:
        folder = args.out / f"families{'-dry' * cases.dry}" / name.replace(", ", "-")
        folder.parent.mkdir(parents=True, exist_ok=True)
        trained = train_family(console, recipe.drafter.family, recipe, folder, done)
        done.append(folder)
        rows: list[dict[str, Any]] = []
        for size in SIZES[:1] if cases.dry else SIZES:
            rows += measure(console, target(size), [trained], heat)
            if size == SIZES[-1]:
                target.cache_clear()  # 16 GB, in the way of the next training
                if cases.device.type == "cuda":
                    torch.cuda.empty_cache()
        wrong = [row["error"] for row in rows if row["error"] is not None]
        if wrong:
            raise RuntimeError(wrong[0])
        return {"steps": recipe.train.steps, "rows": rows}

    for name, recipe in planned(cases.dry).items():
        cases.case(name, partial(case, name, recipe))
    cases.finish()


if __name__ == "__main__":
    main()
