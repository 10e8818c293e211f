"""Log-probabilities of emitted tokens, for the rows that ask for them.

Read from the target's logits after bias, penalties and grammar and before temperature and
truncation, so that they say what the model thought, not how it was sampled. The token at place j of
a round was drawn after fed token path[j]. Letters: B rows, T fed tokens, P path length, E emitted
tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specctl.runtime.engine.request import Row, TokenLogprob

LEAST = -9999.0  # said of what cannot be drawn: JSON has no infinities


def logprobs_of(
    logits_BTV: Tensor, path_BP: Tensor, rows: Sequence[Row], emitted: Sequence[Sequence[int]]
) -> list[tuple[TokenLogprob, ...] | None]:
    """One entry per emitted token of each row that asks; None for the others."""
    if all(row.request.logprobs is None for row in rows):
        return [None] * len(rows)
    return [
        None if row.request.logprobs is None else _of_row(logits_TV, path_P, row, new)
        for logits_TV, path_P, row, new in zip(logits_BTV, path_BP, rows, emitted, strict=True)
    ]


def _of_row(
    logits_TV: Tensor, path_P: Tensor, row: Row, new: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    count = min(row.request.logprobs or 0, logits_TV.shape[-1])
    logp_EV = logits_TV[path_P[: len(new)]].float().log_softmax(-1).clamp_(min=LEAST)
    drawn_E1 = logp_EV.gather(1, torch.tensor(new, device=logp_EV.device)[:, None])
    best = logp_EV.topk(count, dim=-1)
    drawn, ids, values = drawn_E1[:, 0].tolist(), best.indices.tolist(), best.values.tolist()
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(top, tops, strict=True)))
        for token, logprob, top, tops in zip(new, drawn, ids, values, strict=True)
    )
