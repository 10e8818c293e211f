r"""Pictures of a target of image tokens: what each way of decoding takes, and what it writes.

    python benchmarks/images_out.py runs/tiny-digits/export
    python benchmarks/images_out.py runs/tiny-digits/export --sheet docs/images/digits.png
    python benchmarks/images_out.py runs/tiny-digits/export \
        --grids runs/tiny-neighbours/export runs/tiny-any-order/export
    python benchmarks/images_out.py --continuous

Every way writes the same digits at temperature 1. `passes` are those of the target over a picture,
`tau` the tokens a pass, both without a pass over the prompt where the first pass reads it. `nats`
is what the target itself gives a token of the picture, plainly: a way that keeps its distribution
agrees with plain decoding within errors. `right` is the share of pictures whose nearest of
REFERENCES rendered digits (by pixels) is the digit that was wanted. Errors are standard errors over
pictures. `--grids`: models of the same codebook that write in an order of their own; the nats are
those of the target, here too. `--ways WORDS`: only ways with one of them in their name.

`--continuous`: the acceptance of continuous drafts, measured and integrated, for mixtures of
Gaussians and for paths of a diffusion head.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl import load_target
from specctl.core.messages.table import Table
from specctl.core.storage.grid_kinds import ANY_ORDER
from specctl.drafters import family
from specctl.images.codebook import Codebook
from specctl.images.continuous import (
    DenoisingPath,
    Density,
    GaussianMixture,
    accept_or_redraw,
    integrated_acceptance,
)
from specctl.images.digits import CLASSES, Pixels, digits
from specctl.images.grid_folder import GridTarget, load_grid
from specctl.images.png import sheet, write_png
from specctl.images.zipar import RowWindow, zip_grids
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

REFERENCES, REFERENCE_SEED = 3000, 77
JACOBI = "speculative-jacobi"
FILLS = ("uniform", "repeat", "last-token", "above", "above-token")
GROUPS = ("grouped:1:0.15", "grouped:3:0.15", "grouped:7:0.15")
DRAFTED = (
    ("plain", None, {}, 0, "auto"),
    ("prompt-lookup", "prompt-lookup", {}, 8, "auto"),
    *((f"{JACOBI}, {fill}", JACOBI, {"fill": fill}, 16, "auto") for fill in FILLS),
    *((f"{JACOBI}, above, {rule}", JACOBI, {"fill": "above"}, 16, rule) for rule in GROUPS),
)
WINDOWS = (
    "11",
    "8",
    "6",
    "5",
    "4",
    "3",
    "2",
    "1",
    "auto:5",
    "auto:4",
    "auto:3",
    "auto:2",
    "auto:1",
)
PASSES = (121, 61, 41, 31, 26, 21, 16, 11, 8)  # of models of any order


@dataclass(frozen=True, slots=True)
class Pictures:
    """Ids of the grids, and the passes over each."""

    ids: list[list[int]]
    passes: list[int]
    verification: str


def drafted(
    target: Target, codebook: Codebook, prompts: Sequence[list[int]], way: Any, given: Any
) -> Pictures:
    """Pictures of the engine with a drafter."""
    _, name, options, length, rule = way
    drafter, rounds = None, [0] * len(prompts)
    if name is not None:
        found = family(name)
        more = {"columns": codebook.grid} if name == JACOBI else {}
        drafter = found.build(found.options(**options, **more), target.spec, None)

    def count(index: int, new: tuple[int, ...], accepted: int) -> None:
        del new, accepted
        rounds[index] += 1

    policy = "chain" if name == JACOBI else "direct"
    sampling = Sampling(1.0, seed=given.seed, max_new_tokens=codebook.num_tokens, ignore_eos=True)
    made = generate(
        target,
        prompts,
        drafter=drafter,
        sampling=sampling,
        policy=make_policy({"policy": policy, "length": length}) if length else None,
        rule=rule,
        batch=given.batch,
        on_round=count,
    )
    return Pictures([list(o.token_ids) for o in made.outputs], rounds, made.stats.verification)


def zipped(
    target: Target, codebook: Codebook, prompts: Sequence[list[int]], window: str, given: Any
) -> Pictures:
    """Pictures whose rows are decoded at once."""
    ids, passes, rows = list[list[int]](), list[int](), RowWindow.read(window)
    size = 1 if rows.is_adaptive else given.batch
    for first in range(0, len(prompts), size):
        part = prompts[first : first + size]
        seeds = [given.seed + first + index for index in range(len(part))]
        made = zip_grids(target.lm, part, codebook.grid, rows, temperature=1.0, seeds=seeds)
        ids += made.ids_BL.tolist()
        passes += [made.passes] * len(part)
    return Pictures(ids, passes, rows.verification(codebook.grid))


def ordered(
    model: GridTarget, prompts: Sequence[list[int]], passes: int | None, given: Any
) -> Pictures:
    """Pictures of a model that writes in an order of its own."""
    seeds = [given.seed + index for index in range(len(prompts))]
    ids_B = torch.tensor([prompt[0] for prompt in prompts])
    made = model.model.draw(ids_B, seeds, 1.0, passes)
    taken = [made.passes] * len(prompts)
    return Pictures(made.ids_BL.tolist(), taken, model.model.verification(passes))


def orders(codebook: Codebook, given: Any, numbers: Sequence[int]) -> Iterator[Any]:
    """The models of `--grids` by name, those of any order with each of these numbers of passes."""
    for model in map(load_grid, given.grids):
        if not np.array_equal(model.codebook.patch_KX, codebook.patch_KX):
            raise SystemExit(f"{model.name} has another codebook than {given.target}")
        kind = model.model.shape.model_type
        for count in numbers if kind == ANY_ORDER else (None,):
            yield kind if count is None else f"{kind}, {count} passes", model, count


@torch.inference_mode()
def nats(target: Target, prompts: Sequence[list[int]], ids: Sequence[list[int]]) -> list[float]:
    """Of each picture, a token, by whole forwards."""
    rows_BS = torch.tensor([[*p, *row] for p, row in zip(prompts, ids, strict=True)])
    document_BS, at_S = torch.zeros_like(rows_BS), torch.arange(rows_BS.shape[1])
    masks = target.lm.document_masks(document_BS)
    out = target.lm.dense(rows_BS, at_S.expand_as(rows_BS), masks).logits_BTV
    assert out is not None
    start = len(prompts[0])
    loss_BL = F.cross_entropy(
        out[:, start - 1 : -1].flatten(0, 1).float(), rows_BS[:, start:].flatten(), reduction="none"
    )
    return loss_BL.view(len(rows_BS), -1).mean(1).tolist()  # type: ignore[no-any-return]


def judge(pictures: Sequence[Pixels], references: tuple[Pixels, Any]) -> list[int]:
    """The digit of the nearest reference of each picture."""
    known = torch.from_numpy(references[0].reshape(len(references[0]), -1)).float()
    shown = torch.from_numpy(np.stack(pictures).reshape(len(pictures), -1)).float()
    return references[1][torch.cdist(shown, known).argmin(1).numpy()].tolist()  # type: ignore[no-any-return]


def with_error(values: Sequence[float], digits: int = 3) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.fmean(values):.{digits}f} ± {error:.{digits}f}"


def measure(target: Target, codebook: Codebook, given: Any) -> None:
    wanted = [index % CLASSES for index in range(given.pictures)]
    prompts = [target.encode(str(digit)) for digit in wanted]
    size = codebook.grid * codebook.side
    rendered = digits(REFERENCES, size, REFERENCE_SEED)
    known = np.stack([codebook.decode(row)[0] for row in codebook.encode(rendered[0]).tolist()])
    references = known, rendered[1]
    fresh, shown = digits(given.pictures, size, REFERENCE_SEED + 1)
    rows = codebook.encode(fresh).tolist()
    decoded = [codebook.decode(row)[0] for row in rows]
    fresh_right = [float(a == b) for a, b in zip(judge(decoded, references), shown, strict=True)]
    fresh_nats = nats(target, [target.encode(str(digit)) for digit in shown], rows)
    print(f"rendered digits: nats {with_error(fresh_nats)}, right {with_error(fresh_right)}")
    ways = [(way[0], partial(drafted, target, codebook, prompts, way, given)) for way in DRAFTED]
    ways += [
        (f"ZipAR, window {w}", partial(zipped, target, codebook, prompts, w, given))
        for w in WINDOWS
    ]
    ways += [
        (name, partial(ordered, model, prompts, passes, given))
        for name, model, passes in orders(codebook, given, PASSES)
    ]
    kept = [
        (name, make)
        for name, make in ways
        if not given.ways or any(word in name for word in given.ways)
    ]
    table = list[list[Any]]()
    for name, make in kept:
        made = make()
        pictures = [codebook.decode(row)[0] for row in made.ids]
        right = [float(a == b) for a, b in zip(judge(pictures, references), wanted, strict=True)]
        tau = [codebook.num_tokens / passes for passes in made.passes]
        table.append([
            name, made.verification, with_error([float(n) for n in made.passes], 1),
            with_error(tau, 2), with_error(nats(target, prompts, made.ids)), with_error(right),
        ])  # fmt: skip
        print(*table[-1], sep=" | ", flush=True)
    print(Table(("way", "pictures are", "passes", "tau", "nats", "right"), table).markdown())


def show(target: Target, codebook: Codebook, given: Any) -> None:
    """One sheet: a row of every digit for plain, speculative Jacobi, and ZipAR of three windows; or
    for each of `--grids`, those of any order in 121, 21 and 8 passes."""
    prompts = [target.encode(str(digit)) for digit in range(CLASSES)] * 2
    if given.grids:
        made = [
            ordered(model, prompts, passes, given)
            for _, model, passes in orders(codebook, given, (121, 21, 8))
        ]
        write_sheet(codebook, made, given.sheet, len(prompts))
        return
    made = [drafted(target, codebook, prompts, way, given) for way in (DRAFTED[0], DRAFTED[5])] + [
        zipped(target, codebook, prompts, window, given) for window in ("6", "3", "1")
    ]
    write_sheet(codebook, made, given.sheet, len(prompts))


def write_sheet(codebook: Codebook, made: Sequence[Pictures], file: Path, columns: int) -> None:
    rows = [codebook.decode(ids)[0] for way in made for ids in way.ids]
    write_png(file, sheet(rows, columns, 2))
    print(f"{file}: {file.stat().st_size:,} bytes")


def head(shift: float) -> DenoisingPath:
    """A diffusion head of four steps over two axes; `shift` moves what it aims at."""

    def mean(state: Tensor, step: int) -> Tensor:
        return state * (0.55 + 0.1 * step) + torch.tanh(3 * state) * 0.3 + shift

    return DenoisingPath(mean, (0.15, 0.25, 0.35, 0.45), 2)


def mixture(*parts: tuple[float, float, float]) -> GaussianMixture:
    weight, mean, width = torch.tensor(parts, dtype=torch.float64).T
    return GaussianMixture(weight, mean[:, None], width)


def continuous(count: int) -> None:
    target = mixture((0.5, -1.0, 0.4), (0.3, 0.8, 0.25), (0.2, 2.5, 0.6))
    drafts: list[tuple[str, Density, Density]] = [
        ("mixture, the same", target, target),
        ("mixture, wider", target, mixture((0.5, -1.0, 0.6), (0.3, 0.8, 0.4), (0.2, 2.5, 0.8))),
        ("mixture, moved", target, mixture((0.5, -0.7, 0.4), (0.3, 1.0, 0.25), (0.2, 2.1, 0.6))),
        ("mixture, one Gaussian", target, mixture((1.0, 0.3, 1.5))),
        ("paths, moved by .02", head(0.0), head(0.02)),
        ("paths, moved by .1", head(0.0), head(0.1)),
    ]
    rows = []
    for name, wanted, draft in drafts:
        random = torch.Generator().manual_seed(0)
        made = accept_or_redraw(wanted, draft, draft.draw(count, random), random)
        share = [float(value) for value in made.accepted]
        exact = "-"
        if isinstance(wanted, GaussianMixture):
            exact = f"{integrated_acceptance(wanted, draft, -12, 12, 200_000):.4f}"
        rows.append([name, with_error(share, 4), exact, f"{made.draws / count:.3f}"])
    columns = ("draft", "accepted", "integrated", "draws of the target a point")
    print(Table(columns, rows).markdown())


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("target", type=Path, nargs="?")
    words.add_argument("--pictures", type=int, default=100)
    words.add_argument("--batch", type=int, default=25)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--ways", nargs="*", default=[])
    words.add_argument("--sheet", type=Path)
    words.add_argument("--grids", type=Path, nargs="*", default=[])
    words.add_argument("--continuous", action="store_true")
    given = words.parse_args()
    if given.continuous:
        continuous(100_000)
        return
    if given.target is None:
        words.error("name the folder of a target of image tokens, or --continuous")
    target, codebook = load_target(str(given.target), dtype="float32"), Codebook.load(given.target)
    (measure if given.sheet is None else show)(target, codebook, given)


if __name__ == "__main__":
    main()
