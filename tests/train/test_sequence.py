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
from specctl.core.row_part import RowPart
from specctl.core.vocab import VocabMap
from specctl.drafters import family
from specctl.drafters.nets import recompute
from specctl.drafters.nets.attention import KeySet, Seen, SeenPart, attend_seen
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


def drafter_of(target: Target) -> Drafter:
    """Fresh weights that are no identity."""
    torch.manual_seed(5)
    found = family("eagle3")
    vocab = VocabMap(torch.tensor(KEPT), target.spec.vocab_size)
    drafter = found.build(found.options(ttt_steps=3, chunk=7), target.spec, vocab)
    drafter.to(torch.device("cpu"), torch.float64)
    drafter.bind(target.borrowed())
    for parameter in drafter.trainable().values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("again", [False, True])
def test_eagle3_over_stretches_learns_what_it_learns_over_whole_rows(
    make_target: Any, count: int, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row has its only tokens to predict in the first stretch; passes computed again or not."""
    monkeypatch.setattr(recompute, "MOST_SAVED", 0 if again else 10**12)
    target = make_target(num_layers=3, vocab=24, dtype=torch.float64)
    documents = torch.tensor(PACKED)
    at = torch.arange(21).expand(2, 21)
    torch.manual_seed(1)
    wanted = at < torch.tensor([[21], [4]])
    plain = TrainBatch(torch.randint(0, 24, (2, 21)), wanted, documents, at)
    drafter = drafter_of(target)

    def learned(part: RowPart | None) -> list[Tensor]:
        needs = replace(drafter.needs(), teacher_rows=part is not None)
        batch = replace(capture(target, plain, needs), part=part)
        assert isinstance(batch.teacher_rows, HeadRows) == (part is not None)
        out = drafter.loss(batch)
        moved = list(drafter.trainable().values())
        sums = [out.sum, out.count, *(x for pair in out.metrics.values() for x in pair)]
        return [x.detach().double() for x in (*sums, *torch.autograd.grad(out.sum, moved))]

    found = forked(count, lambda ranks: learned(whole_part(count, ranks)), tmp_path)
    total = [torch.stack(parts).sum(0) for parts in zip(*found)]  # noqa: B905
    single = learned(None)
    assert float(single[0]) > 1
    for mine, theirs in zip(total, single, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_what_cannot_share_rows_is_refused(make_target: Any) -> None:
    spec = make_target(num_layers=3, vocab=24).spec
    recipe = load_recipe("eagle3", sets=["train.sequence_parallel=4"])
    built = {name: family(name).build(family(name).options(), spec, None) for name in FAMILIES}
    with pytest.raises(RecipeError, match="medusa computes whole rows"):
        row_part(recipe, built["medusa"], Ranks(0, 4))
    with pytest.raises(RecipeError, match="do not divide"):
        row_part(recipe, built["eagle3"], Ranks(0, 6))
    assert row_part(load_recipe("eagle3"), built["medusa"], Ranks(0, 4)) is None
    assert recipe.train.groups(8) == 2
    with pytest.raises(RecipeError, match="look at whole rows"):
        load_recipe("eagle3", sets=["train.sequence_parallel=2", "train.select=random"])


FAMILIES = ("eagle3", "medusa")
