"""SpecKV: of a prompt's keys and values the target keeps those that a drafted answer looks at
(arXiv 2506.08373).

The draft model writes `lookahead` tokens greedily. The target reads the prompt and them. In each
layer, the score of a key is the largest attention weight that one of the last `WINDOW` tokens of
the prompt or a drafted one gives it, over the query heads that read its head, smoothed by a maximum
over `SMOOTHED` neighbours. Of each key/value head the `keep - WINDOW` best stay, and the window
itself; the drafted tokens' are dropped, and decoding goes on from the prompt's last token. Kept
keys stay rotated to where they stood, so new tokens have the positions that they would have behind
the whole prompt. Without a lookahead it is SnapKV (arXiv 2404.14469). The prefill reads everything:
the paper's sparse attention there is not built.
Letters: B rows, C candidates, E head width, H query heads, J key/value heads, L positions, T fed
tokens, Z slots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request, Row, check_fits
from specctl.runtime.engine.scheduler import CachedPrefix
from specctl.runtime.kept_prompts.attention import check_shows, read_and_watch
from specctl.runtime.kept_prompts.base import Answering, KeptPrompts, OnNew
from specctl.runtime.sampling.sampling import Sampling

WINDOW, SMOOTHED = 32, 7  # as the paper's configurations


class ShiftedLM(LanguageModel):
    """A model whose fed tokens stand `shift` positions behind where its cache ends: so many keys
    were dropped from it. One writer of `shift`: `SpecKV`."""

    def __init__(self, lm: LanguageModel) -> None:
        self.lm, self.module, self.spec, self.shift = lm, lm.module, lm.spec, 0

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        position_BT = (feed.position_BT + self.shift).clamp(max=self.spec.max_positions - 1)
        return self.lm.run(replace(feed, position_BT=position_BT), kv)

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        return self.lm.new_kv(num_slots, max_len)

    @property
    def kv_layers(self) -> tuple[KVShape, ...]:
        return self.lm.kv_layers

    def run_width(self, num_rows: int, width: int) -> int:
        return self.lm.run_width(num_rows, width)

    def check_unchanged(self) -> None:
        self.lm.check_unchanged()

    def borrowed(self) -> Borrowed:
        return self.lm.borrowed()

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm.dtype


class SpecKV(KeptPrompts):
    """Answers one prompt at a time, in the only slot of the engine."""

    lm: ShiftedLM

    def open_engine(self, writing: Answering) -> Engine:
        target, drafter = writing.target, writing.drafter
        check_shows(target.lm)
        if drafter is not None and (drafter.needs().taps or drafter.needs().borrow):
            raise IncompatibleError(
                f"{self.mixture.law} drops keys and states of the prompt that this drafter reads",
                where="--mix",
                found=f"family {drafter.family}",
                expected="a drafter that reads tokens alone, e.g. prompt-lookup or small-lm",
                do="choose another drafter, or leave it out",
            )
        self.lm = ShiftedLM(target.lm)
        self.draft = Engine(self.beside)
        return writing.engine(replace(target, lm=self.lm), 1)

    def run(self, requests: Sequence[Request], on_round: OnNew | None = None) -> list[Completion]:
        wanted = [self.lookahead(request) for request in requests]
        self.check_read(requests, max(wanted, default=0))
        reads = [self.num_read(request) for request in requests]
        for request, num_read in zip(requests, reads, strict=True):
            check_fits(
                replace(request, tokens=request.tokens[:num_read]), self.lm.spec.max_positions
            )
        sizes = [
            num_read + max(n, r.sampling.max_new_tokens)
            for r, num_read, n in zip(requests, reads, wanted, strict=True)
        ]
        self.engine.open(min(max(sizes, default=1), self.lm.spec.max_positions))
        return [self._answer(index, one, on_round) for index, one in enumerate(requests)]

    def num_read(self, request: Request) -> int:
        """How many tokens of a prompt the target reads."""
        return len(request.tokens)

    def lookahead(self, request: Request) -> int:
        """How many tokens are drafted behind a prompt, to see what they look at."""
        left = self.lm.spec.max_positions - self.num_read(request)
        return min(int(self.mixture.numbers[-1]), request.sampling.max_new_tokens, max(0, left - 1))

    def _answer(self, index: int, request: Request, on_round: OnNew | None) -> Completion:
        given = self.kept(index, request)
        self.engine.submit(index, given)
        row: Row | None = None
        while self.engine.is_busy:
            for emission in self.engine.step():
                row = emission.row
                if on_round is not None:
                    on_round(row, emission.tokens)
        assert row is not None, "a request has a round"
        done = row.completion()
        reason = done.finish_reason
        is_cut = given.sampling.max_new_tokens < request.sampling.max_new_tokens
        reason = "context" if is_cut and reason == "length" else reason
        return replace(done, request=request, finish_reason=reason)

    @torch.inference_mode()
    def kept(self, index: int, request: Request) -> Request:
        """The request whose prompt is in the cache up to its last token, as far as it is kept; its
        tokens are the newest of the prompt, as many as there are entries and one."""
        tokens, self.lm.shift = request.tokens, 0
        self.engine.scheduler.forget_prefixes()
        kept = len(tokens) - 1
        if kept > self.keep:
            began, kept = time.perf_counter(), self.keep
            self._compress(request)
            self.choosing_seconds += time.perf_counter() - began
            self.lm.shift = len(tokens) - 1 - kept
            room = self.lm.spec.max_positions - len(tokens)
            sampling = request.sampling
            if sampling.max_new_tokens > room:
                sampling = replace(sampling, max_new_tokens=max(1, room))
            name, tokens = f"kept {index}", tokens[-kept - 1 :]
            self.engine.scheduler.prefixes[0] = CachedPrefix(name, tokens[:-1], {})
            request = replace(request, tokens=tokens, conversation=name, sampling=sampling)
        self.counts.count(len(request.tokens) + self.lm.shift, kept + 1)
        return request

    def _compress(self, request: Request) -> None:
        """Read the prompt and what is drafted behind it, and leave the kept entries in the slot."""
        kv, lm = self.engine.reader.kv, self.lm.lm
        tokens, num_prompt = [*request.tokens, *self.drafted(request)], len(request.tokens)
        first = num_prompt - 1 - WINDOW
        for layer, weight_HTL in read_and_watch(
            lm, kv, tokens, len(tokens) - first, range(lm.spec.num_layers)
        ):
            heads = kv.key_ZJLE[layer].shape[1]
            at_JC = kept_entries(weight_HTL, heads, first, self.keep)
            for store_JLE in (kv.key_ZJLE[layer][0], kv.value_ZJLE[layer][0]):
                at_JCE = at_JC[:, :, None].expand(-1, -1, store_JLE.shape[-1])
                store_JLE[:, : self.keep] = store_JLE.gather(1, at_JCE)

    def drafted(self, request: Request) -> tuple[int, ...]:
        """What the draft model writes behind the prompt."""
        if (length := self.lookahead(request)) == 0:
            return ()
        sampling = Sampling(max_new_tokens=length)
        return self.draft.run([Request(request.tokens, sampling)])[0].tokens


def kept_entries(weight_HTL: Tensor, heads: int, first: int, keep: int) -> Tensor:
    """[J, C] ascending: the positions whose entries each of the key/value `heads` keeps, of those
    below `first` by the attention that they get (of equal ones the first), and the window."""
    score_JL = weight_HTL[:, :, :first].amax(1).view(heads, -1, first).amax(1)
    smooth_JL = F.max_pool1d(score_JL, SMOOTHED, stride=1, padding=SMOOTHED // 2)
    order_JL = smooth_JL.argsort(dim=-1, descending=True, stable=True)
    best_JC = order_JL[:, : keep - WINDOW].sort(-1).values
    window_C = torch.arange(first, first + WINDOW, device=best_JC.device)
    return torch.cat([best_JC, window_C.expand(heads, -1)], dim=-1)
