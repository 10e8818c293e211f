"""SpecKV-PC: SpecKV behind SpecPC (arXiv 2506.08373).

The draft model writes its answer behind the whole prompt. What its last tokens and that answer
attend to is kept of the prompt, `prompt` tokens; the target reads these and the answer, and of the
keys and values keeps `keep` a head. The prefill is shorter, and the cache shorter still.
"""

from __future__ import annotations

import time
from dataclasses import replace

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.kept_prompts.attention import check_shows
from specctl.runtime.kept_prompts.base import Answering
from specctl.runtime.kept_prompts.spec_kv import SpecKV
from specctl.runtime.kept_prompts.spec_pc import kept_places, scores


class SpecKVPC(SpecKV):
    """One prompt at a time. `_ahead`: the answer drafted for the prompt at hand, if one was."""

    _ahead: tuple[int, ...] | None = None

    def open_engine(self, writing: Answering) -> Engine:
        check_shows(self.beside.lm)
        return super().open_engine(writing)

    def num_read(self, request: Request) -> int:
        return min(len(request.tokens), int(self.mixture.numbers[1]))

    def kept(self, index: int, request: Request) -> Request:
        tokens, most, self._ahead = request.tokens, int(self.mixture.numbers[1]), None
        if len(tokens) > most:
            began = time.perf_counter()
            self._ahead = super().drafted(request)
            score_L = scores(self.beside.lm, tokens, 1.0, self._ahead)
            short = tuple(tokens[at] for at in kept_places(score_L, most))
            self.counts.count(len(tokens) - len(short), 0)
            self.choosing_seconds += time.perf_counter() - began
            request = replace(request, tokens=short)
        return super().kept(index, request)

    def drafted(self, request: Request) -> tuple[int, ...]:
        return super().drafted(request) if self._ahead is None else self._ahead
