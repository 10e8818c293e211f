"""Proof T8: a run is not continued as something else; what differs is named, and so is --allow.

    PYTHONPATH=src python benchmarks/proof_changed.py

Every field of the recipe that decides what is learned is changed, one at a time, and the run
continued: it must be refused with exit code 5 and that very field before anything is written. So
with another target, other data, another vocabulary, another number of processes. Fields that decide
nothing must not be refused, and each refused part must be accepted under its --allow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from proof_common import (
    Check,
    checked,
    load_toy,
    parser,
    report,
    run_ranks,
    small_recipe,
    small_target,
    write_text,
)

from specctl.core.errors import Exit, IncompatibleError, SpecctlError
from specctl.recipes.load import build_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, restore, train
from specctl.train.run import train_draft
from specctl.train.saving.fingerprint import FREE, check_same_run, config_fields
from specctl.train.saving.integrity import read_manifest

STEPS = 4
# Fields whose next value is not got by adding to them.
OTHER: dict[str, Any] = {
    "target.dtype": "float32", "target.inflate": "100m", "target.revision": "abc",
    "data.format": "jsonl", "data.greedy_share": 0.25, "data.limit_tokens": 900,
    "drafter.family": "eagle3", "drafter.options": {"heads": 2}, "drafter.init": "target",
    "train.schedule": "cosine", "train.optimizer": "adamw", "train.precision": "bf16",
    "train.warmup": 0.1, "train.decay": 0.1, "train.weight_decay": 0.1, "train.learning_rate": 2e-3,
    "train.vocab_rate": 0.5, "train.momentum": 0.5,
    "vocab.size": 16, "vocab.min_coverage": 0.5, "vocab.selector": "fr-spec",
}  # fmt: skip


def changed(recipe: Recipe, field: str) -> Recipe | None:
    """The recipe with another value of that field; None if the field alone cannot be changed."""
    section, _, name = field.partition(".")
    tree = recipe.to_json()
    old = tree[section][name]
    if field in OTHER:
        new = OTHER[field]
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, (int, float)):
        new = old + 1
    else:
        new = "other" if isinstance(old, str) or old is None else None
    if new is None or new == old:
        return None
    tree[section][name] = new
    try:
        return build_recipe(tree, field)
    except SpecctlError:
        return None


def refusal(
    recipe: Recipe, out: Path, target: Target, allow: Sequence[str] = ()
) -> SpecctlError | None:
    """The error with which the run in `out` is not continued; None if it is."""
    try:
        train_draft(recipe, out, target=target, allow=allow)
    except SpecctlError as error:
        return error
    return None


def refused(error: SpecctlError | None, field: str, part: str) -> str | None:
    """What is wrong with a refusal, None if it names the field and the way on."""
    if not isinstance(error, IncompatibleError) or error.exit != Exit.INCOMPATIBLE:
        return f"{field}: {error}"
    if field not in error.found or f"--allow {part}" not in error.do:
        return f"{field}: found {error.found!r}, do {error.do!r}"
    return None


def every_field(recipe: Recipe, out: Path, target: Target) -> list[str | None]:
    """Each deciding field of the recipe, changed."""
    record = (out / "run.yaml").read_bytes()
    found: list[str | None] = []
    for field in config_fields(recipe):
        other = changed(recipe, ".".join(field.split(".")[:2]))
        if other is None:
            continue
        wrong = refused(refusal(other, out, target), field.split(".")[1], "config")
        if wrong is None and (out / "run.yaml").read_bytes() != record:
            wrong = f"{field}: a refused run changed run.yaml"
        found.append(wrong)
    return found


def free_fields(recipe: Recipe, out: Path, target: Target) -> list[str | None]:
    """Fields that decide nothing: accepted. A target over several processes needs them."""
    found: list[str | None] = []
    for field in sorted(FREE - {"target.tensor_parallel"}):
        other = changed(recipe, field) if field.count(".") == 1 else None
        if other is not None:
            error = refusal(other, out, target)
            found.append(None if error is None else f"{field}: {error}")
    return found


def other_parts(recipe: Recipe, out: Path, target: Target, folder: Path) -> list[str | None]:
    """Another target, other data: refused by name, allowed on purpose."""
    moved = write_text(folder / "other.txt", seed=9)
    tree = recipe.to_json()
    tree["data"]["source"] = str(moved)
    data = build_recipe(tree, "data")
    found = [
        refused(refusal(recipe, out, small_target(seed=5)), "target", "target"),
        refused(refusal(data, out, target, ["config"]), "data", "data"),
    ]
    for error in (
        refusal(recipe, out, small_target(seed=5), ["target"]),
        refusal(data, out, target, ["config", "data"]),
    ):
        found.append(None if error is None else f"not allowed: {error}")
    return found


def unit(part: str, before: Any, after: Any) -> str | None:
    """A part of the fingerprint that differs, checked as such."""
    base = {"config": {}, "target": {}, "data": "d", "vocab": None, "world-size": 1}
    try:
        check_same_run({**base, part: before}, {**base, part: after})
    except IncompatibleError as error:
        return refused(error, part, part)
    return f"{part}: not refused"


def go_on(ranks: Ranks, out: Path, is_allowed: bool) -> None:
    """Continue a toy run with the number of processes there are."""
    toy = load_toy()
    job = toy.make_job(out, ranks=ranks, steps=STEPS if ranks.size == 1 else 2 * STEPS)
    saved = job.checkpoints.newest()
    if saved is not None:
        folder = job.checkpoints.path(saved.step)
        was, now = read_manifest(folder)["world_size"], ranks.size
        check_same_run({"world-size": was}, {"world-size": now}, ["world-size"] * is_allowed)
    train(job, restore(job, saved) if saved else TrainProgress())


def processes(folder: Path) -> list[str | None]:
    """One process, then two: refused; two with --allow: goes on."""
    out = folder / "ranks"
    codes = [
        run_ranks(size, partial(go_on, out=out, is_allowed=ok), folder / "meet", 60)
        for size, ok in ((1, False), (2, False), (2, True))
    ]
    wanted = [[0], [int(Exit.INCOMPATIBLE)] * 2, [0, 0]]
    return [
        None if a == b else f"exit codes {a}, not {b}" for a, b in zip(codes, wanted, strict=True)
    ]


def prove(*, pairs: bool = True) -> list[Check]:
    """All of it."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, target = write_text(folder / "text.txt"), small_target()
        recipe = small_recipe("small-lm", text, train__steps=STEPS)
        out = folder / "run"
        train_draft(recipe, out, target=target)
        units = [unit("vocab", None, "v"), unit("world-size", 1, 2), unit("data", "d", "e")]
        checks = [
            checked(
                "field of the recipe changed: refused by name", every_field(recipe, out, target), 25
            ),
            checked("field that decides nothing: accepted", free_fields(recipe, out, target), 4),
            checked(
                "target, data: refused, then allowed", other_parts(recipe, out, target, folder)
            ),
            checked("vocabulary, processes, data: refused", units, 3),
        ]
        if pairs:
            checks.append(checked("one process, then two", processes(folder), 3))
        return checks


def main() -> None:
    given = parser(__doc__).parse_args()
    report(prove(), given.json)


if __name__ == "__main__":
    main()
