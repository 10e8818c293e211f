"""Drafters that know what the target would say, so that paths of every length are accepted."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, RoundView, Space, StepState


class _ByPrefix(StepState):
    """Drafts of a row are a function of its text."""

    def __init__(self) -> None:
        self.prefix: list[list[int]] = []
        self.paths: list[list[list[int]]] = []

    @abstractmethod
    def _logits(self, tokens: list[int]) -> Tensor:
        """[V] of the token behind that text."""

    def start(self, slot: int, tokens: Sequence[int], taps: Any) -> None:
        return

    def end(self, slot: int) -> None:
        return

    def observe(self, outcome: Any) -> None:
        return

    def root(self, view: RoundView) -> Tensor:
        self.prefix = [list(text) for text in view.tokens]
        self.paths = [[] for _ in view.tokens]
        return torch.stack([self._logits(text) for text in self.prefix])

    def expand(self, token_BM: Tensor, parent_BM: Tensor) -> Tensor:
        found = []
        for b, known in enumerate(self.paths):
            nodes = zip(token_BM[b].tolist(), parent_BM[b].tolist(), strict=True)
            new = [[*(known[parent] if parent >= 0 else []), token] for token, parent in nodes]
            known += new
            found.append(torch.stack([self._logits(self.prefix[b] + path) for path in new]))
        return torch.stack(found)


class KnowingState(_ByPrefix):
    """Drafts from `texts`, with the true token first at some places, second at some, and elsewhere
    not at all; `never` tokens are not drafted."""

    def __init__(
        self, texts: Sequence[Sequence[int]], vocab_size: int, never: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.texts, self.vocab_size = [list(text) for text in texts], vocab_size
        self.never = list(never)

    def _logits(self, tokens: list[int]) -> Tensor:
        at = len(tokens)
        drawn = torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(at))
        for text in self.texts:
            if text[:at] == tokens and at < len(text) and at % 5:
                drawn[text[at]] = drawn.max() + (1.0 if at % 3 else -0.01)
        drawn[self.never] = -torch.inf
        return drawn


class Knowing(Drafter):
    """A drafter of these texts."""

    family = "small-lm"

    def __init__(
        self, texts: Sequence[Sequence[int]], spec: Any, never: Sequence[int] = ()
    ) -> None:
        super().__init__(None, spec)
        self.texts, self.never = texts, never

    def open(self, space: Space) -> KnowingState:
        return KnowingState(self.texts, self.spec.vocab_size, self.never)


class _MirrorState(_ByPrefix):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def _logits(self, tokens: list[int]) -> Tensor:
        logits: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        return logits if len(tokens) % 5 else -logits


class Mirror(Drafter):
    """Drafts what a twin of the target in transformers says, but for every fifth token."""

    family = "small-lm"

    def __init__(self, model: Any, spec: Any) -> None:
        super().__init__(None, spec)
        self.model = model

    def open(self, space: Space) -> _MirrorState:
        return _MirrorState(self.model)
