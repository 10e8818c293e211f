"""What positions by axes bring a drafter on a target with M-RoPE: tau on images of shapes.

Trains a small target in Qwen2-VL's layout on rendered shapes of 24 to 36 pixels a side (16 to 36
placeholders) behind a sentence and in front of a question, then drafters on captions that it
writes, as `images_in.py` does: EAGLE-3 whose rows are rotated by the target's three axes
(`mrope`), or by their index; for each seed of the drafter. Greedy, chains of four tokens; tau with
its standard error over images (jackknife), and the mean difference over the same images. Every
drafted text must be the plain one.

    python benchmarks/images_mrope.py --out runs/images-mrope
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from images_in import Prompt, captions_of, learn, make_target, options, run, tau

from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.runtime.engine.request import Completion
from specctl.runtime.target.target import Target, load_target
from specctl.train.pretrain.shapes import EXPORT, ShapesRecipe

LEAD = "A picture of a shape follows: "


def seen(recipe: ShapesRecipe, target: Target, seeds: Sequence[int]) -> list[Prompt]:
    """Prompts with the images of these seeds, as the target was trained on them."""
    assert target.vision is not None
    ids = target.encode(recipe.prompt(f"{target.vision.spelled} "))
    return [target.vision.see(ids, [recipe.scene(seed).image]) for seed in seeds]


def fresh(target: Target, name: str, mrope: Sequence[int], seed: int) -> Drafter:
    torch.manual_seed(seed)
    more: dict[str, Any] = {"taps": (1, 2, 3)} if name == "eagle3" else {}
    found = family(name)
    options = found.options(intermediate=192, ttt_steps=3, mrope=tuple(mrope), **more)
    return found.build(options, target.spec, None)


def difference(one: Sequence[Completion], two: Sequence[Completion]) -> tuple[float, float]:
    """tau of `one` less that of `two`, and its standard error (jackknife over the images)."""
    without = []
    for at in range(len(one)):
        left = [[c for i, c in enumerate(done) if i != at] for done in (one, two)]
        without.append(tau(left[0])[0] - tau(left[1])[0])
    mean, count = sum(without) / len(without), len(without)
    spread = sum((each - mean) ** 2 for each in without) * (count - 1) / count
    return tau(one)[0] - tau(two)[0], spread**0.5


def main() -> None:
    parser = options(__doc__, target_steps=250, steps=80, train=256)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="eagle3", help="drafters, with commas")
    flags = parser.parse_args()
    folder, count = flags.out / "target", 4 * flags.train
    recipe = make_target("tiny-shapes-qwen2-vl", folder, flags.target_steps, count, LEAD)
    target = load_target(str(folder / EXPORT), dtype="float32", device="cpu", images=True)
    assert target.vision is not None
    assert target.vision.axes is not None
    captions = captions_of(target, partial(seen, recipe), flags.test, flags.train)
    prompts, plain = captions.prompts, captions.plain
    rows: list[dict[str, Any]] = []
    for name in flags.only.split(","):
        for seed in range(flags.seeds):
            done: list[list[Completion]] = []
            for mrope in (target.vision.axes.axis, ()):
                drafter = fresh(target, name, mrope, seed)
                learn(target, drafter, captions.lessons, "states", flags.steps)
                done.append(run(target, prompts, drafter))
                assert [c.tokens for c in done[-1]] == [c.tokens for c in plain], "not lossless"
            (axes, error), (index, other) = map(tau, done)
            more, doubt = difference(*done)
            print(f"{name}, seed {seed}: axes {axes:.3f} +- {error:.3f}, index {index:.3f} +- "
                  f"{other:.3f}, difference {more:+.3f} +- {doubt:.3f}", flush=True)  # fmt: skip
            rows.append({"drafter": name, "seed": seed, "axes": axes, "axes_error": error,
                         "index": index, "index_error": other, "difference": more,
                         "difference_error": doubt})  # fmt: skip
    found = {**captions.right, "rows": rows}
    (flags.out / "images_mrope.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
