"""Some rows of a round only: of what drafters see before it, and of what became of it.

Letters: B rows, C candidates, P path, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import Outcome, RoundView


def view_of_rows(view: RoundView, at: Sequence[int], at_B: Tensor) -> RoundView:
    """The view of some rows only."""
    return RoundView(
        tuple(view.slots[b] for b in at),
        view.slot_B[at_B],
        view.root_B[at_B],
        view.kept_len_B[at_B],
        tuple(view.tokens[b] for b in at),
        tuple(view.prompt_lens[b] for b in at) if view.prompt_lens else (),
        view.watch,
        chosen=tuple(view.chosen[b] for b in at) if view.chosen else (),
    )


def outcome_of_rows(outcome: Outcome, at: Sequence[int]) -> Outcome:
    """The outcome of some rows only."""
    if len(at) == len(outcome.emitted):
        return outcome
    at_B = torch.tensor(at, device=outcome.path_BP.device)
    topk, logp = outcome.topk_BTC, outcome.topk_logp_BTC
    return replace(
        outcome,
        view=view_of_rows(outcome.view, at, at_B),
        tree=outcome.tree.of_rows(at_B),
        path_BP=outcome.path_BP[at_B],
        num_accepted=tuple(outcome.num_accepted[b] for b in at),
        next_token_B=outcome.next_token_B[at_B],
        emitted=tuple(outcome.emitted[b] for b in at),
        finished=tuple(outcome.finished[b] for b in at),
        taps={tap: value[at_B] for tap, value in outcome.taps.items()},
        probe_taps={tap: value[at_B] for tap, value in outcome.probe_taps.items()},
        topk_BTC=None if topk is None else topk[at_B],
        topk_logp_BTC=None if logp is None else logp[at_B],
    )
