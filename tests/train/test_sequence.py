"""Several processes to a row: the loss and the gradients of one, in float64, by forks that talk
through gloo."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.core.forward.row_part import RowPart
from specctl.core.vocab import VocabMap
from specctl.drafters import families, family
from specctl.drafters.attention import recompute
from specctl.drafters.attention.attention import attend_seen
from specctl.drafters.attention.seen import KeySet, Seen, SeenPart
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.sequence import row_part
from specctl.train.features.capture import capture

PACKED = [[0] * 9 + [1] * 10 + [-1] * 2, [0] * 2 + [1] * 19]  # S = 21: stretches differ in length
KEPT = [0, 1, 2, 3, 5, 8, 11, 12, 13, 20, 21]


def forked(size: int, body: Callable[[Ranks], Any], folder: Path) -> list[Any]:
    """What `body` returns in each of so many processes."""
    common = importlib.import_module("proof_common")

    def keep(ranks: Ranks) -> None:
        torch.set_num_threads(1)
        torch.save(body(ranks), folder / f"found{ranks.rank}.pt")

    codes = common.run_ranks(size, keep, folder, 60.0)
    assert codes == [0] * size, [p.read_text() for p in folder.glob("*.trace")]
    return [torch.load(folder / f"found{rank}.pt") for rank in range(size)]


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


def whole_part(count: int, ranks: Ranks) -> RowPart:
    return RowPart(ranks.rank, count, dist.group.WORLD)


@pytest.mark.parametrize("count", [2, 4])
def test_attention_over_stretches_is_that_over_whole_rows(count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    documents = torch.tensor(PACKED)
    widths = (4, 2, 2, 2, 2)  # query; keys and values of two steps
    given = [torch.randn(2, n, 21, 8, dtype=torch.float64) for n in widths]
    by = torch.randn(2, 21, 32, dtype=torch.float64)

    def one(leaves: list[Tensor], seen: Any, by_out: Tensor) -> list[Tensor]:
        query, key, value, *own = leaves
        sets = [*seen.sets(seen.gathered(key), seen.gathered(value)), KeySet(own[0], own[1], None)]
        out = attend_seen(query, sets)
        return [out.detach(), *torch.autograd.grad(out, leaves, by_out)]

    def part_of(ranks: Ranks) -> list[Tensor]:
        part = whole_part(count, ranks)
        start, stop = part.bounds(21)
        leaves = [x[:, :, start:stop].clone().requires_grad_() for x in given]
        return one(leaves, SeenPart.text(documents, part), by[:, start:stop])

    wanted = one([x.clone().requires_grad_() for x in given], Seen.text(documents), by)
    found = forked(count, part_of, tmp_path)
    joined = [torch.cat(parts, 1 if i == 0 else 2) for i, parts in enumerate(zip(*found))]  # noqa: B905
    for mine, theirs in zip(joined, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def drafter_of(target: Target, name: str = "eagle3", **options: Any) -> Drafter:
    """Fresh weights that are no identity."""
    torch.manual_seed(5)
    found = family(name)
    vocab = VocabMap(torch.tensor(KEPT), target.spec.vocab_size)
    drafter = found.build(found.options(chunk=7, **options), target.spec, vocab)
    drafter.to(torch.device("cpu"), torch.float64)
    drafter.bind(target.borrowed())
    for parameter in drafter.trainable().values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


def packed(vocab: int = 24) -> TrainBatch:
    """Two packed rows; one has its only tokens to predict in the first stretch."""
    at = torch.arange(21).expand(2, 21)
    torch.manual_seed(1)
    wanted = at < torch.tensor([[21], [4]])
    return TrainBatch(torch.randint(0, vocab, (2, 21)), wanted, torch.tensor(PACKED), at)


def learned(
    target: Target, drafter: Drafter, plain: TrainBatch, part: RowPart | None
) -> list[Tensor]:
    """Loss, count, metrics and every gradient, over whole rows or a stretch of them."""
    needs = drafter.needs()
    if part is not None:
        needs = replace(needs, teacher_rows=needs.teacher)
    batch = replace(capture(target, plain, needs), part=part)
    assert isinstance(batch.teacher_rows, HeadRows) or part is None or not needs.teacher
    out = drafter.loss(batch)
    moved = list(drafter.trainable().values())
    sums = [out.sum, out.count, *(x for pair in out.metrics.values() for x in pair)]
    grads = torch.autograd.grad(out.sum, moved, allow_unused=True)
    zero = torch.zeros(())
    return [(zero if x is None else x).detach().double() for x in (*sums, *grads)]


def assert_added_up(found: list[list[Tensor]], single: list[Tensor]) -> None:
    """What the processes found is together what one finds."""
    total = [torch.stack(parts).sum(0) for parts in zip(*found)]  # noqa: B905
    assert float(single[0]) > 1
    for mine, theirs in zip(total, single, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("again", [False, True])
def test_eagle3_over_stretches_learns_what_it_learns_over_whole_rows(
    make_target: Any, count: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes computed again or not."""
    monkeypatch.setattr(recompute, "MOST_SAVED", 0 if again else 10**12)
    target = make_target(num_layers=3, vocab=24, dtype=torch.float64)
    drafter, plain = drafter_of(target, ttt_steps=3), packed()

    def part_of(ranks: Ranks) -> list[Tensor]:
        return learned(target, drafter, plain, whole_part(count, ranks))

    assert_added_up(forked(count, part_of, tmp_path), learned(target, drafter, plain, None))


ALL = {"anchors": 64}  # a block behind every position, so that which of them are drawn is no matter
SHARING: dict[str, dict[str, Any]] = {
    "blockwise": {},
    "chimera": ALL,
    "clover": {},
    "coral": {"ttt_steps": 3, "noise": 0.0, "head_groups": 3, "head_top": 1},
    "dflash": {**ALL, "layers": 2, "d_pace": 0.25, "window": 8, "sink": 2},
    "dflare": {**ALL, "layers": 2},
    "dflash2": {**ALL, "layers": 2, "rank": 4},
    "dfly": {**ALL, "layers": 2, "inner": 8},
    "domino": {**ALL, "layers": 2, "rank": 4, "state": 8, "base_weight": 0.5},
    "dspark": {**ALL, "layers": 2, "rank": 4, "correction": "rnn"},
    "eagle": {"noise": 0.0},
    "eagle3": {"ttt_steps": 2, "norm_output": True, "window": 5, "sink": 2},
    "fspad": {"ttt_steps": 2, "noise": 0.0},
    "gumiho": {"mlp_heads": 2, "noise": 0.0},
    "hass": {"ttt_steps": 3, "top": 3, "noise": 0.0},
    "hydra": {"prefix": 1, "feature_weight": 1.0},
    "jakiro": {"noise": 0.0},
    "lilicorr": {**ALL, "layers": 2, "width": 8, "factor": 8, "candidates": 4, "loss": "ce"},
    "medusa": {"head": "own", "d_pace": 0.5},
    "mlp-speculator": {},
    "mtp": {"ttt_steps": 2},
    "p-eagle": {**ALL, "keep": 1.0},
    "propd": {},
    "recurrent": {},
    "small-lm": {"width": 16, "heads": 2, "layers": 2, "window": 5},
    "xpress": {**ALL, "layers": 2, "rank": 4},
}


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_families_that_share_rows_learn_what_they_learn_over_whole_ones(
    make_target: Any, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All in one pair of processes."""
    monkeypatch.setattr(recompute, "MOST_SAVED", 0 if again else 10**12)
    monkeypatch.setattr("specctl.drafters.losses.step_losses.NEGATIVES", 6)
    target, plain = make_target(num_layers=3, vocab=24, dtype=torch.float64), packed()
    drafters = {name: drafter_of(target, name, **how) for name, how in SHARING.items()}

    def part_of(ranks: Ranks) -> list[list[Tensor]]:
        part = whole_part(2, ranks)
        return [learned(target, each, plain, part) for each in drafters.values()]

    found = forked(2, part_of, tmp_path)
    for at, (name, drafter) in enumerate(drafters.items()):
        try:
            assert_added_up([parts[at] for parts in found], learned(target, drafter, plain, None))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_the_families_that_share_rows_are_those_tried() -> None:
    claims = {
        name
        for name, each in families().items()
        if each.trainable and getattr(each.build, "splits_rows", False)
    }
    assert claims == set(SHARING)


def test_what_cannot_share_rows_is_refused(make_target: Any) -> None:
    spec = make_target(num_layers=3, vocab=24).spec
    recipe = load_recipe("eagle3", sets=["train.sequence_parallel=4"])
    built = {name: family(name).build(family(name).options(), spec, None) for name in FAMILIES}
    with pytest.raises(RecipeError, match="falcon computes whole rows") as caught:
        row_part(4, built["falcon"], Ranks(0, 4))
    assert ", eagle3, fspad, " in str(caught.value.expected)
    scored = family("blockwise").options(rescore="ngram")
    with pytest.raises(RecipeError, match="blockwise computes whole rows"):
        row_part(4, family("blockwise").build(scored, spec, None), Ranks(0, 4))
    with pytest.raises(RecipeError, match="do not divide"):
        row_part(4, built["eagle3"], Ranks(0, 6))
    assert row_part(1, built["falcon"], Ranks(0, 4)) is None
    assert recipe.train.groups(8) == 2
    with pytest.raises(RecipeError, match="look at whole rows"):
        load_recipe("eagle3", sets=["train.sequence_parallel=2", "train.select=random"])


FAMILIES = ("eagle3", "falcon")
