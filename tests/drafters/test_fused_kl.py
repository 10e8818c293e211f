"""The compiled KL beside the formulas that it stands for. V target, K draft ids, Q rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.batch import HeadRows
from specctl.core.vocab import VocabMap
from specctl.drafters.losses import fused_kl, head_losses
from specctl.drafters.losses.align import AlignedRows
from specctl.drafters.losses.head_losses import LinearHead, LossOptions, TeacherLogits, head_loss
from specctl.models.native import kl
from specctl.models.native.library import library

pytestmark = pytest.mark.skipif(
    library().functions is None, reason=f"no compiled step: {library().missing}"
)
WIDTH, ROWS = 7, 21
# V, K: whole vocabularies and cut ones; full steps of 16 and rests
SIZES = ((48, 48), (50, 50), (9, 9), (90, 35), (2100, 1057))


class Case:
    """Rows of a head against a teacher over a vocabulary."""

    def __init__(self, V: int, K: int, temperature: float = 1.0) -> None:
        torch.manual_seed(V + K)
        self.options = LossOptions("kl", temperature, chunk=8)
        self.state_RD = torch.randn(ROWS, WIDTH)
        self.weight_KD = torch.randn(K, WIDTH)
        self.teacher_RV = torch.randn(ROWS, V) * 3
        self.vocab = None if K == V else VocabMap(torch.randperm(V)[:K].sort().values, V)
        row_Q = torch.randperm(ROWS)[:17]
        self.aim = AlignedRows(row_Q, torch.zeros_like(row_Q), (row_Q + 1) % ROWS, None)

    def found(self, dtype: torch.dtype, knows: str = "nothing") -> dict[str, Tensor]:
        """Loss, metrics and gradients in a dtype, the teacher knowing so much beforehand."""
        teacher_RV, temperature = self.teacher_RV.to(dtype), self.options.temperature
        teacher = TeacherLogits(teacher_RV, temperature)
        if knows != "nothing":
            teacher = TeacherLogits.of(teacher_RV, torch.arange(ROWS), temperature, 8)
        if knows == "its columns" and self.vocab is not None:
            teacher = teacher.over(self.vocab.ids_K)
        return self.against(teacher, dtype)

    def against(self, teacher: TeacherLogits, dtype: torch.dtype) -> dict[str, Tensor]:
        state, weight = (x.to(dtype).requires_grad_() for x in (self.state_RD, self.weight_KD))
        out = head_loss(state, LinearHead(weight), self.aim, self.vocab, self.options, teacher)
        found = {"sum": out.sum, "count": out.count}
        found |= {name: metric[0] for name, metric in out.metrics.items()}
        found["states"], found["weights"] = torch.autograd.grad(out.sum, (state, weight))
        return {name: value.detach().double() for name, value in found.items()}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each slice was compared by the compiled call."""
    seen: list[bool] = []

    def watched(*given: Any) -> Any:
        found = kl.compared(*given)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(fused_kl, "compared", watched)
    return seen


def close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=2e-6, atol=2e-5, msg=name)


@pytest.mark.parametrize("knows", ["nothing", "its rows", "its columns"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_it_is_kl_in_double_precision(
    V: int, K: int, temperature: float, knows: str, calls: list[bool]
) -> None:
    case = Case(V, K, temperature)
    fused = case.found(torch.float32, knows)
    assert calls == [True] * 3  # 17 rows in slices of 8
    exact = case.found(torch.float64, knows)
    assert len(calls) == 3
    close(fused, exact)
    assert (fused["count"] < 17) == (V != K)  # rows whose best id was cut teach nothing


def test_a_teacher_in_bfloat16_and_one_computed_when_asked(calls: list[bool]) -> None:
    case = Case(90, 35)
    head_VD = torch.randn(90, WIDTH).bfloat16()
    rows = HeadRows(case.state_RD.bfloat16(), head_VD)
    computed = case.against(TeacherLogits(rows), torch.float32)
    stored = case.against(TeacherLogits(rows[torch.arange(ROWS)]), torch.float32)
    assert calls == [True] * 6
    for name, value in computed.items():
        assert torch.equal(value, stored[name]), name
    case.teacher_RV = rows[torch.arange(ROWS)].double()
    close(computed, case.found(torch.float64))


def test_it_is_left_out_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(90, 35)
    fused = case.found(torch.float32)
    monkeypatch.setattr(kl, "_functions", lambda *logits: None)
    close(fused, case.found(torch.float32))


def test_its_numbers_do_not_depend_on_threads() -> None:
    case, threads = Case(2100, 1057), torch.get_num_threads()
    found = []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(
                kl.compared(torch.randn(64, 2100, generator=torch.Generator().manual_seed(0)),
                            kl.TargetRows(case.teacher_RV, torch.arange(64) % ROWS, 1.0), None)
            )  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    one, three = found
    assert one is not None
    assert three is not None
    assert torch.equal(one[0], three[0])
    assert torch.equal(one[1], three[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["draft", "target"])
def test_what_is_no_number_is_not_hidden(value: float, side: str) -> None:
    draft_QK, score_RV = torch.randn(3, 40), torch.randn(3, 40)
    (draft_QK if side == "draft" else score_RV)[1, 37] = value
    found = kl.compared(draft_QK, kl.TargetRows(score_RV, torch.arange(3), 1.0), None)
    assert found is not None
    assert not found[0][1, 0].isfinite()
    assert found[0][[0, 2]].isfinite().all()
    assert not found[1][1].isfinite().all()
    assert found[1][[0, 2]].isfinite().all()


def test_far_logits_underflow_to_nothing() -> None:
    draft_QK, score_RV = torch.zeros(1, 20), torch.zeros(1, 20)
    draft_QK[0, 3], score_RV[0, 4] = 500.0, 400.0
    found = kl.compared(draft_QK, kl.TargetRows(score_RV, torch.tensor([0]), 1.0), None)
    assert found is not None
    torch.testing.assert_close(found[0][0].float(), torch.tensor([500.0, 1.0, 0.0, 0.0]))
    wanted = torch.zeros(1, 20)
    wanted[0, 3], wanted[0, 4] = 1.0, -1.0
    torch.testing.assert_close(found[1], wanted)


def test_columns_are_not_copied_for_it() -> None:
    case = Case(90, 35)
    assert case.vocab is not None
    teacher = TeacherLogits.of(case.teacher_RV, torch.arange(ROWS), 1.0, 8)
    assert head_losses._picked(teacher, LossOptions("kl"), case.vocab).logits_RK is None
    assert head_losses._picked(teacher, LossOptions("tv"), case.vocab).logits_RK is not None


@pytest.mark.parametrize(
    ("rows", "of", "draft_rows", "said"),
    [
        ([0, 3], {}, None, "row 0 to 3: there are 3"),
        ([-1, 0], {}, None, "row -1 to 0"),
        ([0, 1], {"ids_K": [2, 40]}, None, "id 2 to 40: there are 40"),
        ([0, 1], {"ids_K": [2, 3, 4]}, None, "2 logits of a draft"),
        ([0, 1], {"ids_K": [2, 3]}, [-1, 2], "draft row -1 to 2: there are 2"),
        ([0, 1], {"ids_K": [2, 3]}, [0, 1], "best id 39 to 39: there are 2"),
        ([0, 1], {"ids_K": [2, 3], "best_Q": [1, 2]}, [0, 1], "best id 1 to 2: there are 2"),
    ],
)
def test_nothing_is_read_beside_the_numbers(
    rows: list[int], of: dict[str, list[int]], draft_rows: list[int] | None, said: str
) -> None:
    width = 2 if of else 40
    target = kl.TargetRows(torch.randn(3, 40), torch.tensor(rows), 1.0)
    target = target._replace(**{name: torch.tensor(value) for name, value in of.items()})
    row_V = None if draft_rows is None else torch.tensor(draft_rows)
    with pytest.raises(IndexError, match=said):
        kl.compared(torch.randn(2, width), target, row_V)
