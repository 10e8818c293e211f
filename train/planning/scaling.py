"""The log-linear scaling laws: tau = a + b log(tokens) + c log(parameters), and the speed of a
batch d + e log(rows).

Scylla (arXiv 2505.07858, theorems 1.1 to 1.3) finds tau linear in the logarithm of the drafter's
training tokens and of its size, and the speed of decoding in that of the batch. Here a grid of
small runs is trained, the law is fitted by least squares, and its error is that of each point
predicted from all others (PRESS: the residual divided by 1 - leverage). The third law is fitted to
tokens per second of batches of several sizes, decoded with the grid's best drafter on this device;
every law tells its R2. Parameters are those of the layers: embedding and LM head only grow with the
vocabulary.
Letters: N points.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.spec import ModelSpec
from specctl.core.storage.files import write_json
from specctl.recipes.load import build_recipe
from specctl.recipes.schema import DrafterPart, Recipe
from specctl.runtime.generate import generate
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.assemble import trainable_family
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.init.initial import checkpoint_drafter
from specctl.train.planning.plan import VocabSize, build_shape
from specctl.train.run import train_draft
from specctl.train.saving.fingerprint import check_same_run, config_fields

MARK, SPEEDS = "point.json", "batches.json"
GAIN = 0.1  # of tau, whose price is told


@dataclass(frozen=True, slots=True)
class Point:
    """One run of the grid: parameters of its layers, positions it read, tau it reached."""

    parameters: int
    tokens: int
    tau: float


@dataclass(frozen=True, slots=True)
class Law:
    """The fitted law. `error` is the root mean square of leave-one-out errors of tau, None where
    some point is needed to determine the law at all."""

    intercept: float
    per_tokens: float
    per_parameters: float
    r2: float
    error: float | None

    def tau(self, tokens: float, parameters: float) -> float:
        logs = self.per_tokens * math.log(tokens) + self.per_parameters * math.log(parameters)
        return self.intercept + logs

    def factor(self, slope: float, gain: float = GAIN) -> float | None:
        """How many times as much of a resource brings `gain` of tau; None if it brings nothing."""
        return math.exp(gain / slope) if slope > 0 and gain / slope < 700 else None


def fit(points: Sequence[Point]) -> Law:
    """Least squares over at least two sizes and two budgets."""
    if min(len({p.parameters for p in points}), len({p.tokens for p in points})) < 2:
        raise RecipeError(
            "a law of size and data needs two of each",
            where="scaling",
            found=f"{len(points)} points",
            expected="at least two sizes and two numbers of steps",
            do='--set scaling.sizes="[[1, 64], [1, 128]]" --set scaling.steps="[60, 120]"',
        )
    rows = [[1.0, math.log(p.tokens), math.log(p.parameters)] for p in points]
    design_N3, tau_N = np.array(rows), np.array([p.tau for p in points])
    found_3, *_ = np.linalg.lstsq(design_N3, tau_N, rcond=None)
    residual_N = tau_N - design_N3 @ found_3
    spread = float(((tau_N - tau_N.mean()) ** 2).sum())
    r2 = 1.0 - float((residual_N**2).sum()) / spread if spread > 0 else 0.0
    leverage_N = np.einsum("ni,in->n", design_N3, np.linalg.pinv(design_N3))
    error = None
    if float(leverage_N.max()) < 1.0 - 1e-9:
        error = float(np.sqrt(((residual_N / (1.0 - leverage_N)) ** 2).mean()))
    intercept, per_tokens, per_parameters = (float(x) for x in found_3)
    return Law(intercept, per_tokens, per_parameters, r2, error)


@dataclass(frozen=True, slots=True)
class BatchSpeed:
    """Tokens per second of a batch of so many rows, all of them together."""

    batch: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class BatchLaw:
    """speed = intercept + per_batch log(batch)."""

    intercept: float
    per_batch: float
    r2: float

    def speed(self, batch: int) -> float:
        return self.intercept + self.per_batch * math.log(batch)


def fit_batches(speeds: Sequence[BatchSpeed]) -> BatchLaw:
    """Least squares over at least three sizes of the batch: two lie on every line."""
    if len({speed.batch for speed in speeds}) < 3:
        raise RecipeError(
            "a law of the batch size needs three sizes",
            where="scaling.batches",
            found=str([speed.batch for speed in speeds]),
            expected="at least three different sizes, or none",
            do='--set scaling.batches="[1, 2, 4, 8]"',
        )
    design_N2 = np.array([[1.0, math.log(speed.batch)] for speed in speeds])
    speed_N = np.array([speed.tokens_per_second for speed in speeds])
    found_2, *_ = np.linalg.lstsq(design_N2, speed_N, rcond=None)
    off = float(((speed_N - design_N2 @ found_2) ** 2).sum())
    spread = float(((speed_N - speed_N.mean()) ** 2).sum())
    return BatchLaw(float(found_2[0]), float(found_2[1]), 1.0 - off / spread if spread > 0 else 0.0)


def measure_batches(cell: Cell, target: Target) -> list[BatchSpeed]:
    """Greedy decoding with a finished cell's drafter, in every size of batch in turn, three times;
    the median of each. What was measured is kept in the cell's folder."""
    recipe, path = cell.recipe, cell.folder / SPEEDS
    sizes = recipe.scaling.batches
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        kept = [BatchSpeed(**one) for one in found["speeds"]]
        if [speed.batch for speed in kept] == list(sizes):
            return kept
    drafter = checkpoint_drafter(cell.folder, target).to(target.device, target.dtype)
    policy = make_policy({"policy": "chain", "length": recipe.serve.length})
    prompts = [list(one.ids) for one in heldout_prompts(target, max(sizes, default=0))]
    sampling = Sampling(max_new_tokens=recipe.train.tau_tokens, ignore_eos=True)
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size, speeds in taken.items():
            how: Any = {"drafter": drafter, "policy": policy, "sampling": sampling, "batch": size}
            speeds.append(generate(target, prompts[:size], **how).stats.tokens_per_second)
    measured = [BatchSpeed(size, statistics.median(speeds)) for size, speeds in taken.items()]
    write_json(path, {"speeds": [asdict(speed) for speed in measured]})
    return measured


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid, before it has run."""

    layers: int
    width: int
    recipe: Recipe
    folder: Path

    @property
    def tokens(self) -> int:
        train = self.recipe.train
        return train.steps * train.rows * train.accumulate * train.seq_len


def grid(recipe: Recipe, out: Path) -> list[Cell]:
    """The cells of a recipe's grid, the cheapest first."""
    if recipe.drafter.family != "small-lm" or recipe.stages:
        raise RecipeError(
            "the scaling law is fitted over sizes of small-lm",
            where="drafter.family" if not recipe.stages else "stages",
            found=recipe.drafter.family + (" in stages" if recipe.stages else ""),
            expected="small-lm, without stages",
            do="specctl plan --scaling --recipe scaling",
        )
    cells = []
    for layers, width in recipe.scaling.sizes:
        for steps in recipe.scaling.steps:
            name = f"{layers}x{width}-{steps}"
            tree = recipe.to_json()
            tree["name"] = f"{recipe.name}-{name}"
            tree["drafter"]["options"] |= {"layers": layers, "width": width}
            tree["train"]["steps"] = steps
            made = build_recipe(tree, f"{recipe.name}:scaling").with_origin(recipe.origin)
            cells.append(Cell(layers, width, made, out / name))
    return sorted(cells, key=lambda c: (c.tokens * c.layers * c.width**2, c.folder.name))


def body_parameters(part: DrafterPart, size: VocabSize, spec: ModelSpec) -> int:
    """Parameters of the drafter's layers, without embedding and LM head."""
    drafter = build_shape(trainable_family(part, None), part, size, spec)
    assert drafter.module is not None
    sizes = {drafter.spec.vocab_size} | ({drafter.vocab.size} if drafter.vocab else set())
    named = drafter.module.parameters()
    return sum(p.numel() for p in named if not sizes.intersection(p.shape))


def run_grid(
    cells: Sequence[Cell],
    target: Target,
    reporter: Reporter | None = None,
    command: Sequence[str] = (),
) -> list[Point]:
    """Train every cell that has not been trained yet; all share the rows that the first prepares.
    The same call continues a stopped grid, in the cell that was running."""
    talker = reporter or SilentReporter()
    points: list[Point] = []
    for number, cell in enumerate(cells, start=1):
        tau = _measured(cell)
        if tau is None:
            talker.say(f"run {number} of {len(cells)}: {cell.folder.name}")
            done = [c.folder for c in cells if (c.folder / MARK).exists()]
            share_data(done, cell.folder)
            result = train_draft(
                cell.recipe, cell.folder, reporter=reporter, command=command, target=target
            )
            assert result.tau is not None, "the last step of a run is always measured"
            tau = result.tau
            write_json(cell.folder / MARK, {"config": config_fields(cell.recipe), "tau": tau})
        part, size = cell.recipe.drafter, cell.recipe.vocab.size
        points.append(Point(body_parameters(part, size, target.spec), cell.tokens, tau))
    return points


def _measured(cell: Cell) -> float | None:
    """The tau of a finished cell; one finished under another recipe is refused."""
    try:
        mark = json.loads((cell.folder / MARK).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    try:
        check_same_run(mark, {"config": config_fields(cell.recipe)})
    except IncompatibleError as error:
        error.do = "choose another --out"
        raise
    return float(mark["tau"])


def share_data(done: Sequence[Path], folder: Path) -> None:
    """Give a run folder without data the rows of another one; the run makes its own where these
    are not the rows of its recipe."""
    if not done or (folder / "data").exists():
        return
    part = folder / ".tmp-data"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(done[0] / "data", part)
    part.rename(folder / "data")


def report(points: Sequence[Point], law: Law, speeds: Sequence[BatchSpeed] = ()) -> dict[str, Any]:
    """The law, its error, what the next tenth of tau costs from the best point on, and the law of
    the batch where speeds were measured."""
    best = max(points, key=lambda p: p.tau)
    batches = None
    if speeds:
        by_batch = fit_batches(speeds)
        batches = {
            "points": [asdict(s) | {"fitted": by_batch.speed(s.batch)} for s in speeds],
            "law": asdict(by_batch),
        }
    more = {"tokens": law.factor(law.per_tokens), "parameters": law.factor(law.per_parameters)}
    return {
        "points": [asdict(point) | {"fitted": law.tau(point.tokens, point.parameters)}
                   for point in points],
        "law": asdict(law),
        "best": asdict(best),
        "batches": batches,
        "next_tenth": {
            name: None if factor is None else {"factor": factor, "total": factor * amount}
            for (name, factor), amount in zip(
                more.items(), (best.tokens, best.parameters), strict=True
            )
        },
    }  # fmt: skip


def save_picture(points: Sequence[Point], law: Law, path: Path) -> Path | None:
    """Tau over tokens, a line of the fitted law per size; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="training tokens", ylabel="tau", xscale="log")
    for size in sorted({point.parameters for point in points}):
        mine = sorted((p.tokens, p.tau) for p in points if p.parameters == size)
        ends = [mine[0][0], mine[-1][0]]
        (line,) = axes.plot(ends, [law.tau(tokens, size) for tokens in ends], "--")
        axes.plot(*zip(*mine, strict=True), "o", color=line.get_color(), label=f"{size:,}")
    axes.legend(title="parameters in layers")
    error = "" if law.error is None else f", leave-one-out error {law.error:.3f}"
    axes.set_title(f"R2 {law.r2:.3f}{error}")
    figure.savefig(path, dpi=120)
    return path
