"""outcome_of: what a round tells drafter and policies, gathered along the accepted paths.

Letters: B rows, T fed tokens, P path length, D width, K top-k, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specctl.core.drafter import Needs, Outcome, RoundView
from specctl.core.language_model import LmOut
from specctl.core.tree import DraftTree, empty_tree
from specctl.runtime.engine.request import Row
from specctl.runtime.verify import Verdict


def outcome_of(
    view: RoundView,
    tree: DraftTree,
    verdict: Verdict,
    out: LmOut,
    rows: Sequence[Row],
    accepted: Sequence[int],
    emitted: Sequence[tuple[int, ...]],
) -> Outcome:
    """The outcome with taps; `with_topk` adds what the target thought of every fed token."""
    taps = {tap: _along(value, verdict.path_BP, tree) for tap, value in out.taps.items()}
    return Outcome(
        view,
        tree,
        verdict.path_BP,
        tuple(accepted),
        verdict.next_token_B,
        tuple(emitted),
        tuple(row.finished for row in rows),
        taps,
    )


def with_topk(outcome: Outcome, needs: Needs, logits_BTV: Tensor) -> Outcome:
    """The same with the target's top-k at every fed token, where the drafter wants it."""
    if not needs.topk:
        return outcome
    logits_BTK, topk_BTC = logits_BTV.topk(needs.topk, dim=-1)
    if not needs.topk_logp:
        return replace(outcome, topk_BTC=topk_BTC)
    logp_BTK = logits_BTK.float() - logits_BTV.float().logsumexp(-1, keepdim=True)
    return replace(outcome, topk_BTC=topk_BTC, topk_logp_BTC=logp_BTK)


def _along(value_BTD: Tensor, path_BP: Tensor, tree: DraftTree) -> Tensor:
    """[B, P, D]: rows of `value` at the path's fed tokens."""
    if tree.is_chain:
        return value_BTD[:, : path_BP.shape[1]]
    index_BP1 = path_BP.clamp(min=0)[:, :, None]
    return value_BTD.gather(1, index_BP1.expand(-1, -1, value_BTD.shape[-1]))


def of_rows(outcome: Outcome, at: Sequence[int], device: torch.device) -> Outcome:
    """The outcome of some rows only."""
    if len(at) == len(outcome.emitted):
        return outcome
    at_B = torch.tensor(at, device=device)
    view = view_of_rows(outcome.view, at, at_B)
    topk, logp = outcome.topk_BTC, outcome.topk_logp_BTC
    return replace(
        outcome,
        view=view,
        tree=outcome.tree.of_rows(at_B),
        path_BP=outcome.path_BP[at_B],
        num_accepted=tuple(outcome.num_accepted[b] for b in at),
        next_token_B=outcome.next_token_B[at_B],
        emitted=tuple(outcome.emitted[b] for b in at),
        finished=tuple(outcome.finished[b] for b in at),
        taps={tap: value[at_B] for tap, value in outcome.taps.items()},
        topk_BTC=None if topk is None else topk[at_B],
        topk_logp_BTC=None if logp is None else logp[at_B],
    )


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
    )


def spread(tree: DraftTree, at: Sequence[int], num_rows: int) -> DraftTree:
    """The tree of the rows `at` as one of all rows; the others have no node of it."""
    if len(at) == num_rows:
        return tree
    device = tree.token_BN.device
    if not tree.num_nodes:
        return empty_tree(num_rows, device)
    place = {b: i for i, b in enumerate(at)}
    at_B = torch.tensor([place.get(b, 0) for b in range(num_rows)], device=device)
    drafts_B1 = torch.tensor([b in place for b in range(num_rows)], device=device)[:, None]
    tree = tree.of_rows(at_B)
    return replace(tree, valid_BN=tree.valid_BN & drafts_B1)
