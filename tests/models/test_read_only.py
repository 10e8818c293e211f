"""Models that are only read: each document of a packed row as if it stood alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.errors import IncompatibleError
from specctl.runtime.target.target import Target
from specctl_testing.models import build_model

KINDS: dict[str, dict[str, Any]] = {
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {},
    "bloom": {},
}  # fmt: skip
DOCUMENTS = [[0] * 9 + [1] * 15, [2] * 20 + [-1] * 4]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_read_as_if_each_stood_alone(kind: str) -> None:
    model = build_model(kind, **KINDS[kind])
    with pytest.raises(IncompatibleError):
        Target.from_model(model)
    target = Target.from_model(model, is_read_only=True)
    assert not target.can_run
    ids, documents = torch.randint(0, 96, (2, 24)), torch.tensor(DOCUMENTS)
    with torch.no_grad():
        out = target.lm.dense(ids, ids, target.lm.document_masks(documents), (1, 2, 4))
        assert out.logits_BTV is not None
        for row, first, last in ((0, 0, 9), (0, 9, 24), (1, 0, 20)):
            alone = model(input_ids=ids[row : row + 1, first:last], output_hidden_states=True)
            torch.testing.assert_close(
                out.logits_BTV[row, first:last], alone.logits[0], atol=1e-3, rtol=1e-3
            )
            for tap, state in out.taps.items():
                torch.testing.assert_close(
                    state[row, first:last], alone.hidden_states[tap][0], atol=1e-3, rtol=1e-3
                )
    with pytest.raises(IncompatibleError, match="not run here"):
        target.new_kv(1, 8)


def test_a_model_that_looks_ahead_cannot_even_be_read() -> None:
    with pytest.raises(IncompatibleError):
        Target.from_model(build_model("bert"), is_read_only=True)
