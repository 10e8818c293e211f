"""What a feature-level drafter says, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from specctl.drafters.states.feature_state import FeatureState


@contextmanager
def kept_logits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The logits of every root and of every expansion while it is open; of a whole chain those of
    the tokens of every step."""
    found = list[Tensor]()

    def kept(call: Any) -> Any:
        def run(self: FeatureState, *given: Any) -> Tensor:
            out: Tensor = call(self, *given)
            found.append(out.clone())
            return out

        return run

    whole_chain = FeatureState.whole_chain

    def kept_chain(self: FeatureState, *given: Any) -> Any:
        out = whole_chain(self, *given)
        found.extend([] if out is None else out.logits.unbind(1))
        return out

    with monkeypatch.context() as patch:
        for name in ("root", "expand"):
            patch.setattr(FeatureState, name, kept(getattr(FeatureState, name)))
        patch.setattr(FeatureState, "whole_chain", kept_chain)
        yield found
