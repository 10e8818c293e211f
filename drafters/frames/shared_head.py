"""SharedHeadDrafter: the target's layers, a small trained module, and the target's own LM head.

Letters: D hidden width, K draft vocabulary.
"""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from specctl.core.language_model import Borrowed
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters.frames.self_drafter import SelfDrafter
from specctl.drafters.nets.heads import cut_rows, head_rows


class SharedHeadDrafter(SelfDrafter):
    """Binding and trimming: over fewer ids the module stays as it is, the head loses rows."""

    module: nn.Module

    def __init__(self, options: Any, spec: ModelSpec, vocab: VocabMap | None = None) -> None:
        super().__init__(options, spec, vocab)
        self._head_KD: Tensor | None = None

    def bind(self, borrowed: Borrowed) -> None:
        super().bind(borrowed)
        self._head_KD = head_rows(borrowed, self.vocab)

    @property
    def head_width(self) -> int | None:
        return self.spec.hidden_size

    def head_weight(self) -> Tensor:
        """[K, D]: the target's LM head over the draft vocabulary."""
        assert self._head_KD is not None, "bind() the target's LM head first"
        return self._head_KD

    def trimmed(self, vocab: VocabMap) -> Self:
        small = type(self)(self.options, self.spec, vocab)
        small.module.to(next(self.module.parameters()))
        small.module.load_state_dict(self.module.state_dict())
        small._lm = self._lm
        if self._head_KD is not None:
            small._head_KD = cut_rows(self._head_KD, self.vocab, vocab)
        return small
