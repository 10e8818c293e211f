"""Products by oneDNN beside torch's own: the same numbers, gradients and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from specctl.core.batch import TrainBatch
from specctl.train import products
from specctl.train.loop import TrainProgress, take_step
from specctl.train.products import faster_products
from specctl_testing.train import toy

needs_onednn = pytest.mark.skipif(products._onednn() is None, reason="torch has no oneDNN")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The products that oneDNN makes, as if it were faster here and no product too small."""
    found, product = list[tuple[int, ...]](), products._product

    def noted(left: Tensor, right: Tensor) -> Tensor | None:
        out = product(left, right)
        if out is not None:
            found.append((*left.shape, right.shape[1]))
        return out

    monkeypatch.setattr(products, "is_onednn_faster", lambda threads: True)
    monkeypatch.setattr(products, "LEAST_WORK", 0)
    monkeypatch.setattr(products, "_product", noted)
    return found


def layouts(matrix: Tensor) -> list[Tensor]:
    """The same matrix in memory by rows, by columns, and as part of a larger one."""
    rows, columns = matrix.shape
    wider = torch.full((rows + 3, columns + 5), torch.nan)
    wider[2 : 2 + rows, 4 : 4 + columns] = matrix
    part = wider[2 : 2 + rows, 4 : 4 + columns]
    return [matrix, matrix.t().contiguous().t(), part, part.t().contiguous().t()]


@needs_onednn
@settings(max_examples=25, deadline=None)
@given(*[st.integers(16, 70)] * 3, st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_every_layout_gives_the_product(
    rows: int, inner: int, columns: int, left_kind: int, right_kind: int, seed: int
) -> None:
    torch.manual_seed(seed)
    left = layouts(torch.randn(rows, inner))[left_kind]
    right = layouts(torch.randn(inner, columns))[right_kind]
    added = torch.randn(rows, columns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "is_onednn_faster", lambda threads: True)
        patch.setattr(products, "LEAST_WORK", 0)
        with faster_products():
            product, sum_ = left @ right, torch.addmm(added, left, right, beta=0.5, alpha=-2)
            in_place = added.clone().addmm_(left, right, alpha=3)
    exact = left.double() @ right.double()
    torch.testing.assert_close(product, exact.float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(sum_, (0.5 * added - 2 * exact).float(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(in_place, (added + 3 * exact).float(), rtol=1e-5, atol=1e-4)


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
    assert len(made) == 6  # behind it the default makes them again


@needs_onednn
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_other_numbers_are_the_defaults(dtype: torch.dtype, made: list[tuple[int, ...]]) -> None:
    left, right = torch.randn(2, 32, 32).mul(9).to(dtype)
    with faster_products():
        assert torch.equal(left @ right, torch.mm(left, right, out=torch.empty_like(left)))
    assert not made


@needs_onednn
def test_what_it_cannot_take_is_the_defaults(made: list[tuple[int, ...]]) -> None:
    one_row = torch.randn(1, 40).expand(40, 40)
    square, unset = torch.randn(40, 40), torch.full((40, 40), torch.nan)
    with faster_products():
        torch.testing.assert_close(one_row @ square, one_row.clone() @ square)
        assert len(made) == 1  # the copy
        assert not torch.addmm(unset, square, square, beta=0).isnan().any()
        assert (torch.randn(4, 40) @ square).shape == (4, 40)
        assert (torch.randn(0, 40) @ square).shape == (0, 40)
        for wrong in (torch.randn(41, 40), torch.randn(2, 40, 40)):
            with pytest.raises(RuntimeError):
                torch.mm(square, wrong)
            with pytest.raises(RuntimeError):
                torch.addmm(square, square, wrong)
            with pytest.raises(RuntimeError):
                square.addmm_(square, wrong)
        with pytest.raises(RuntimeError):
            torch.randn(3, 40).addmm_(square, square)
    assert len(made) == 1


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


def test_the_slower_library_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = list[bool]()
    monkeypatch.setattr(products, "_register", lambda: registered.append(True))
    for ratio, wanted in ((1.1, False), (2.0, True)):
        seconds = iter((ratio, 1.0))

        def timed(work: Callable[[], Tensor], seconds: object = seconds) -> float:
            return float(next(seconds))  # type: ignore[call-overload]

        monkeypatch.setattr(products, "_least_seconds", timed)
        monkeypatch.setattr(products, "_onednn", lambda: torch.mm)
        products.is_onednn_faster.cache_clear()
        with faster_products():
            assert products._here.inside is wanted
        assert bool(registered) is wanted
    products.is_onednn_faster.cache_clear()


@needs_onednn
def test_a_step_of_training_is_made_by_it(
    tmp_path: Path, made: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, inside = toy.make_job(tmp_path), list[bool]()
    loss = job.drafter.loss

    def noted(batch: TrainBatch) -> object:
        inside.append(products._here.inside)
        return loss(batch)

    monkeypatch.setattr(job.drafter, "loss", noted)
    take_step(job, TrainProgress(), lambda amount, note="": None)
    assert {*inside} == {True}
    assert not products._here.inside
