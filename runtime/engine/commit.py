"""commit: what a round emits, from its one host read; and what is reported of it.

EOS, stop strings and limits are applied here and nowhere else, in token order: a token after the
first that ends a row is never emitted, counted or fed to anything. An EOS behind a text that its
grammar does not accept is no end of a text but the only token left where the grammar could not be
followed further: the row ends with "grammar", which is a failure. Log-probabilities are read from
the target's logits after bias, penalties and grammar and before temperature and truncation, so that
they say what the model thought, not how it was sampled; the token at place j of a round was drawn
after fed token path[j].
Letters: B rows, C candidates, D hidden width, M new nodes (probes), N nodes, P path, R flat rows, T
fed tokens, V target vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specctl.core.drafter import Needs, Outcome
from specctl.core.language_model import LmOut
from specctl.core.tree import DraftTree
from specctl.runtime.engine.lazy_drafter import ranked
from specctl.runtime.engine.peaks import BadRows, Peaks
from specctl.runtime.engine.request import Emission, Row, TokenLogprob
from specctl.runtime.engine.round import Round
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.stop_strings import ends_with_stop
from specctl.runtime.verify import Verdict

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar import Grammar

LEAST = -9999.0  # said of what cannot be drawn: JSON has no infinities


def commit(
    round: Round,
    tree: DraftTree,
    verdict: Verdict,
    logits_BTV: Tensor,
    target: Target,
    peaks: Peaks,
) -> list[Emission]:
    """What every row gets, by row; `logits_BTV` are the processed ones. A round that was cut
    rejected nothing. Raises `BadRows` for those whose logits are no numbers, or leave no token."""
    packed = verdict.next_token_B[:, None]
    if tree.num_nodes and tree.is_chain:
        counts = [verdict.num_accepted_B, tree.valid_BN.sum(1)]
        packed = torch.cat([packed, torch.stack(counts, dim=1), tree.token_BN], dim=1)
    elif tree.num_nodes:
        node_BP = (verdict.path_BP[:, 1:] - 1).clamp(min=0)
        path_BP = tree.token_BN.gather(1, node_BP)
        end_B1 = verdict.path_BP.gather(1, verdict.num_accepted_B[:, None])
        is_behind_B = (tree.valid_BN & (tree.parent_BN + 1 == end_B1)).any(1)
        counts = [verdict.num_accepted_B, tree.valid_BN.sum(1), is_behind_B]
        packed = torch.cat([packed, torch.stack(counts, dim=1), path_BP], dim=1)
    done, bad = list[Emission](), BadRows()
    read = peaks.read_with(packed, verdict)
    for b, (row, (next_token, *rest)) in enumerate(zip(round.rows, read.packed, strict=True)):
        num_accepted, num_drafted, *path = rest or (0, 0)
        is_behind, num_fed = num_drafted > num_accepted, num_drafted + 1
        if not tree.is_chain:
            num_behind, *path = path
            is_behind, num_fed = num_behind > 0, tree.num_nodes + 1
        if read.is_bad(b, num_fed):
            bad.numbers.append(b)
            continue
        new, finished = cut(row, [*path[:num_accepted], next_token], target)
        if read.is_banned(b) and len(new) > num_accepted:
            bad.banned.append(b)
            continue
        is_rejected = is_behind and len(new) > num_accepted
        logprobs = None
        if row.request.logprobs is not None:
            logprobs = _logprobs(logits_BTV[b], verdict.path_BP[b], row.request.logprobs, new)
        done.append(
            Emission(row, tuple(new), num_accepted, finished, num_drafted, is_rejected, logprobs)
        )
    if bad.numbers or bad.banned:
        raise bad
    return done


# -- where a row ends ------------------------------------------------------------------------------


def cut(row: Row, new: Sequence[int], target: Target) -> tuple[list[int], str | None]:
    """The tokens of `new` that are emitted, and why the row ended (None = it goes on)."""
    sampling = row.request.sampling
    room = min(row.room, target.spec.max_positions - len(row.tokens))
    kept: list[int] = []
    for token in new:
        kept.append(token)
        if token in target.eos_ids:
            if sampling.grammar is not None and not _is_accepted(row, kept, sampling.grammar):
                return kept, "grammar"
            if not sampling.ignore_eos:
                return kept, "eos"
        if token in sampling.stop_token_ids:
            return kept, "stop"
        if sampling.stop:
            generated = [*row.tokens[row.prompt_len :], *kept]
            if ends_with_stop(target, generated, sampling.stop):
                return kept, "stop"
        if len(kept) >= room:
            return kept, "length" if len(kept) >= row.room else "context"
    return kept, None


def _is_accepted(row: Row, kept: Sequence[int], grammar: Grammar) -> bool:
    """The text in front of the EOS that it ends with is one of the grammar; an EOS behind another
    one says nothing new."""
    *text, end = [*row.tokens[row.prompt_len :], *kept]
    return not grammar.eos_ids.isdisjoint(text) or grammar.accepts(text, end)


# -- what is reported ------------------------------------------------------------------------------


def _logprobs(
    logits_TV: Tensor, path_P: Tensor, num_best: int, new: Sequence[int]
) -> tuple[TokenLogprob, ...]:
    logp_RV = logits_TV[path_P[: len(new)]].float().log_softmax(-1).clamp_(min=LEAST)
    drawn_R1 = logp_RV.gather(1, torch.tensor(new, device=logp_RV.device)[:, None])
    best = logp_RV.topk(min(num_best, logits_TV.shape[-1]), dim=-1)
    bits_R = -(logp_RV.exp() * logp_RV).sum(-1) / math.log(2)
    drawn, ids, values = drawn_R1[:, 0].tolist(), best.indices.tolist(), best.values.tolist()
    return tuple(
        TokenLogprob(token, logprob, tuple(zip(top, tops, strict=True)), bits)
        for token, logprob, top, tops, bits in zip(
            new, drawn, ids, values, bits_R.tolist(), strict=True
        )
    )


def outcome_of(
    round: Round,
    tree: DraftTree,
    verdict: Verdict,
    out: LmOut,
    done: Sequence[Emission],
    needs: Needs,
) -> Outcome:
    """What drafter and policies learn of a round, gathered along the accepted paths; with the
    target's top-k at every fed token, accepted or not, where a drafter `needs` it."""
    outcome = Outcome(
        round.view,
        tree,
        verdict.path_BP,
        tuple(each.num_accepted for each in done),
        verdict.next_token_B,
        tuple(each.tokens for each in done),
        tuple(each.finished for each in done),
        _taps_along(out.taps, verdict.path_BP, tree),
        probe_taps=_at_probes(out, tree),
    )
    if not needs.topk:
        return outcome
    assert out.logits_BTV is not None
    topk_BTC, logp_BTC = ranked(out.logits_BTV, needs)
    return replace(outcome, topk_BTC=topk_BTC, topk_logp_BTC=logp_BTC)


def _taps_along(
    taps: Mapping[int, Tensor], path_BP: Tensor, tree: DraftTree
) -> Mapping[int, Tensor]:
    """Each tap along the paths; as they are where nothing but the roots was fed."""
    if not (tree.num_nodes or tree.num_probes):
        return taps
    return {tap: _along(value, path_BP, tree) for tap, value in taps.items()}


def _at_probes(out: LmOut, tree: DraftTree) -> dict[int, Tensor]:
    """[B, M, D]: taps at the probes; none where the tree has none."""
    if not tree.num_probes:
        return {}
    return {tap: value[:, -tree.num_probes :] for tap, value in out.taps.items()}


def _along(value_BTD: Tensor, path_BP: Tensor, tree: DraftTree) -> Tensor:
    """[B, P, D]: rows of `value` at the path's fed tokens."""
    if tree.is_chain:
        return value_BTD[:, : path_BP.shape[1]]
    index_BP1 = path_BP.clamp(min=0)[:, :, None]
    return value_BTD.gather(1, index_BP1.expand(-1, -1, value_BTD.shape[-1]))
