"""SpecPC: the target reads the part of a prompt that a draft model attends to (arXiv 2506.08373).

The draft reads the whole prompt. A token's score is the largest attention weight that one of the
last `WINDOW` tokens gives it, in any head of any layer from `FIRST_LAYER` on; the weights of these
tokens count from 0 for the first to 1 for the last. Scores are smoothed by a maximum over
`SMOOTHED` neighbours. The window is kept, then the tokens with the best scores, each with its
`AROUND` neighbours, until there are `keep`. The target reads them in their order, as a prompt of
its own: positions are counted anew.

`depth` is the share of the draft's layers that read the prompt. With the target as its own draft, a
part of its layers chooses what all of them read.
Letters: H query heads, L positions, T fed tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.language_model import LanguageModel
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.kept_prompts.attention import check_shows, read_and_watch
from specctl.runtime.kept_prompts.base import Answering, KeptPrompts, OnNew

WINDOW, FIRST_LAYER, SMOOTHED, AROUND = 64, 8, 64, 64  # as the paper's configurations


class SpecPC(KeptPrompts):
    """Prompts are shortened one by one, and answered as any others."""

    def open_engine(self, writing: Answering) -> Engine:
        check_shows(self.beside.lm)
        return writing.engine(writing.target, writing.num_slots)

    def run(self, requests: Sequence[Request], on_round: OnNew | None = None) -> list[Completion]:
        self.check_read(requests)
        kept = [replace(request, tokens=self.shortened(request.tokens)) for request in requests]
        done = self.engine.run(kept, on_round)
        return [replace(one, request=own) for one, own in zip(done, requests, strict=True)]

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that the target reads of a prompt."""
        began, found = time.perf_counter(), tokens
        if len(tokens) > self.keep:
            score_L = scores(self.beside.lm, tokens, self.mixture.numbers[1])
            found = tuple(tokens[at] for at in kept_places(score_L, self.keep))
        self.choosing_seconds += time.perf_counter() - began
        self.counts.count(len(tokens), len(found))
        return found


@torch.inference_mode()
def scores(
    lm: LanguageModel, tokens: Sequence[int], depth: float, drafted: Sequence[int] = ()
) -> Tensor:
    """[L] of every token of a prompt, by its last tokens and those `drafted` behind it, which count
    in full."""
    read = max(1, round(depth * lm.spec.num_layers))
    layers = range(min(FIRST_LAYER, read // 2), read)
    window, length = min(WINDOW, len(tokens)), len(tokens) + len(drafted)
    ramp_T = torch.cat([torch.linspace(0, 1, window), torch.ones(len(drafted))])
    ramp_T1, best_L = ramp_T.to(lm.device)[:, None], torch.zeros(length, device=lm.device)
    watched = read_and_watch(lm, lm.new_kv(1, length), [*tokens, *drafted], len(ramp_T), layers)
    for _, weight_HTL in watched:
        best_L = torch.maximum(best_L, (weight_HTL * ramp_T1).amax((0, 1)))
    return best_L[: len(tokens)]


def kept_places(score_L: Tensor, keep: int) -> list[int]:
    """Where the tokens stand that are kept, in their order: the window, then the best scores with
    their neighbours, nearest first; of equal scores the first."""
    length, left = len(score_L), (SMOOTHED - 1) // 2
    padded = F.pad(score_L[None], (left, SMOOTHED - 1 - left))
    smooth_L = F.max_pool1d(padded, SMOOTHED, stride=1)[0]
    order = smooth_L.argsort(descending=True, stable=True)[:keep].tolist()
    reach = range(-((AROUND - 1) // 2), AROUND // 2 + 1)
    offsets = sorted(reach, key=abs)
    chosen = dict.fromkeys(range(max(0, length - WINDOW), length))
    for at in order:
        for offset in offsets:
            if len(chosen) >= keep:
                return sorted(chosen)
            chosen[min(max(at + offset, 0), length - 1)] = None
    return sorted(chosen)
