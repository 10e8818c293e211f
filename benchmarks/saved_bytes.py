"""What training keeps for the backward pass, by family, at the shape of Llama-3.1-8B.

    python benchmarks/saved_bytes.py

One row, one document, bfloat16 under autocast, a draft vocabulary of 32,000; options as in the
recipes llama3-8b-*, else the family's own. Nothing of that size is computed: weights and features
are fake (see specctl_testing/drafters/saved_bytes.py). Counted is all that autograd keeps between
loss and backward but the weights and the target's features.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from specctl.recipes.files import recipe_names
from specctl.recipes.load import load_recipe
from specctl_testing.drafters.saved_bytes import saved_bytes

FAMILIES = (
    "eagle3", "eagle", "hass", "coral", "jakiro", "gumiho", "fspad", "falcon", "p-eagle", "dflash",
    "dspark", "glide", "moa", "chimera", "hydra", "medusa",
)  # fmt: skip
LENGTHS = (2_048, 8_192, 16_384)


def options_of(family: str) -> dict[str, Any]:
    """Those of its recipe for this target, if there is one."""
    name = f"llama3-8b-{family}"
    found = dict(load_recipe(name).drafter.options) if name in recipe_names() else {}
    found.pop("head_groups", None)  # are arranged by values, which nothing has here
    return found | {"chunk": 8_192}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    found = dict[str, list[int]]()
    for family in args.families.split(","):
        options = options_of(family)
        found[family] = [saved_bytes(family, options, length) for length in LENGTHS]
        if not args.json:
            if len(found) == 1:
                print(f"| family | {' | '.join(f'{n:,} tokens' for n in LENGTHS)} |")
                print(f"|---|{'---|' * len(LENGTHS)}")
            cells = " | ".join(f"{kept / 1e9:.1f}" for kept in found[family])
            print(f"| {family} | {cells} |", flush=True)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
