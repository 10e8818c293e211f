"""Products by oneDNN beside torch's own: the same numbers, gradients and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, train
from specctl.train.step import products
from specctl.train.step.products import faster_products, usual_products
from specctl_testing.train import toy

needs_onednn = pytest.mark.skipif(products._onednn() is None, reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def _untouched() -> Iterator[None]:
    """What was found out about this machine is found out again behind each test."""
    yield
    products.is_onednn_faster.cache_clear()
    products._answers.clear()


def forced(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The products that oneDNN makes, as if it were faster here and no product too small."""
    found, product = list[tuple[int, ...]](), products._product

    def noted(left: Tensor, right: Tensor) -> Tensor | None:
        out = product(left, right)
        if out is not None:
            found.append((*left.shape, right.shape[1]))
        return out

    fake = cache(lambda threads: True)
    patch.setattr(products, "is_onednn_faster", fake)
    patch.setattr(products, "LEAST_WORK", 0)
    patch.setattr(products, "_product", noted)
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    return forced(monkeypatch)


def layouts(matrix: Tensor) -> list[Tensor]:
    """The same matrix in memory by rows, by columns, as part of a larger one, with gaps between
    its numbers."""
    rows, columns = matrix.shape
    wider = torch.full((rows + 3, columns + 5), torch.nan)
    wider[2 : 2 + rows, 4 : 4 + columns] = matrix
    part = wider[2 : 2 + rows, 4 : 4 + columns]
    gaps = torch.full((rows, 3 * columns + 1), torch.nan)
    gaps[:, : 3 * columns : 3] = matrix
    apart = gaps[:, : 3 * columns : 3]
    return [matrix, matrix.t().contiguous().t(), part, part.t().contiguous().t(), apart]


@needs_onednn
@settings(max_examples=30, deadline=None)
@given(*[st.integers(16, 70)] * 3, st.integers(0, 4), st.integers(0, 4), st.integers(0, 99))
def test_every_layout_gives_the_product(
    rows: int, inner: int, columns: int, left_kind: int, right_kind: int, seed: int
) -> None:
    torch.manual_seed(seed)
    left = layouts(torch.randn(rows, inner))[left_kind]
    right = layouts(torch.randn(inner, columns))[right_kind]
    added = torch.randn(rows, columns)
    with pytest.MonkeyPatch.context() as patch:
        made = forced(patch)
        with faster_products():
            product, sum_ = left @ right, torch.addmm(added, left, right, beta=0.5, alpha=-2)
            in_place = added.clone().addmm_(left, right, alpha=3)
    assert made == [(rows, inner, columns)] * 3
    exact = left.double() @ right.double()
    torch.testing.assert_close(product, exact.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sum_, (0.5 * added - 2 * exact).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(in_place, (added + 3 * exact).float(), rtol=1e-5, atol=1e-4)


@needs_onednn
def test_numbers_seen_more_than_once(made: list[tuple[int, ...]]) -> None:
    square, numbers = torch.randn(40, 40), torch.randn(300)
    for seen in (numbers.unfold(0, 40, 1)[:40], numbers[:40].expand(40, 40), square[:, :1] * 1):
        repeated = seen.expand(40, 40)
        for right in (repeated, repeated.t()):
            with faster_products():
                found, other = square @ right, right @ square
            exact = square.double() @ right.double(), right.double() @ square.double()
            torch.testing.assert_close(found, exact[0].float(), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(other, exact[1].float(), rtol=1e-5, atol=1e-4)
    assert made


@needs_onednn
def test_layers_learn_the_same_by_it(made: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 20, bias=False))
    x = torch.randn(3, 30, 32, requires_grad=True)

    def gradients() -> list[Tensor]:
        x.grad = None
        net.zero_grad()
        net(x).square().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]

    plain = gradients()
    assert not made
    with faster_products():
        faster = gradients()
    assert len(made) == 6
    assert {(90, 32, 48), (48, 90, 32)} <= {*made}
    for theirs, ours in zip(plain, faster, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    gradients()
    assert len(made) == 6  # after it the default makes them again


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_numbers_are_the_defaults(dtype: torch.dtype, made: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(2, 32, 32).mul(9).to(dtype)
    expected = (left[:, :, None].double() * right[None].double()).sum(1)
    with faster_products():
        found = left @ right
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1.0)
    assert not made


@needs_onednn
def test_what_it_cannot_take_is_the_defaults(made: list[tuple[int, ...]]) -> None:
    square, unset = torch.randn(40, 40), torch.full((40, 40), torch.nan)
    with faster_products():
        assert not torch.addmm(unset, square, square, beta=0).isnan().any()
        assert not torch.addmm(square, unset, square, alpha=0).isnan().any()
        assert not square.clone().addmm_(unset, square, alpha=0).isnan().any()
        assert (torch.randn(4, 40) @ square).shape == (4, 40)
        assert (torch.randn(0, 40) @ square).shape == (0, 40)
        for wrong in (torch.randn(41, 40), torch.randn(2, 40, 40), torch.tensor(1.0)):
            with pytest.raises(RuntimeError):
                torch.mm(square, wrong)
            with pytest.raises(RuntimeError):
                torch.mm(wrong, square.expand(3, 40, 40))
            with pytest.raises(RuntimeError):
                torch.addmm(square, square, wrong)
            with pytest.raises(RuntimeError):
                square.addmm_(square, wrong)
        few = torch.randn(3, 40)
        with pytest.raises(RuntimeError):
            few.addmm_(square, square)
        assert few.shape == (3, 40)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", False)
            with faster_products():
                square @ square
        with usual_products():
            square @ square
    assert not made


@needs_onednn
def test_other_threads_keep_the_default(made: list[tuple[int, ...]]) -> None:
    square, done = torch.randn(40, 40), list[Tensor]()
    with faster_products():
        other = threading.Thread(target=lambda: done.append(square @ square))
        other.start()
        other.join()
        assert done
        assert not made
        with faster_products():
            pass
        square @ square
    assert made == [(40, 40, 40)]


@pytest.mark.parametrize(("ratio", "wanted"), [(1.3, False), (2.0, True)])
def test_only_a_library_far_ahead_is_taken(
    ratio: float, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, seconds = list[bool](), iter((1.0, ratio))  # oneDNN is timed first
    monkeypatch.setattr(products, "_register", lambda: registered.append(True))
    monkeypatch.setattr(products, "_least_seconds", lambda work: next(seconds))
    monkeypatch.setattr(products, "_onednn", lambda: torch.mm)
    with faster_products():
        assert products._here.inside is wanted
    assert bool(registered) is wanted


def test_a_torch_with_other_words_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn", lambda: torch.relu)
    with faster_products():
        assert not products._here.inside


class Others(Ranks):
    """Of two ranks this one, where the other one would rather multiply as usual."""

    def any(self, flag: bool) -> bool:
        return True


def test_ranks_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "is_onednn_faster", cache(lambda threads: True))
    monkeypatch.setattr(products, "_register", lambda: None)
    with faster_products(Others(0, 2)):
        assert not products._here.inside
    with faster_products(Ranks(0, 1)):
        assert products._here.inside
    with faster_products(Ranks(0, 1, torch.device("cuda"))):
        assert not products._here.inside


@needs_onednn
def test_a_step_of_training_is_made_by_it(
    tmp_path: Path, made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, inside = toy.make_job(tmp_path, steps=1), list[tuple[str, bool]]()
    loss, read = job.drafter.loss, job.batch

    def compared(batch: TrainBatch) -> object:
        inside.append(("loss", products._here.inside))
        return loss(batch)

    def batch(rows: list[int]) -> TrainBatch:
        inside.append(("read", products._here.inside))
        return read(rows)

    monkeypatch.setattr(job.drafter, "loss", compared)
    job = replace(job, batch=batch)
    train(job, TrainProgress())
    assert {*inside} == {("loss", True), ("read", False)}
    assert not products._here.inside
