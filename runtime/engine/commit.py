"""commit: the round's one host read. Letters: B rows, N nodes, P path length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specctl.core.tree import DraftTree
from specctl.runtime.engine.request import Row
from specctl.runtime.engine.stopping import cut
from specctl.runtime.target.target import Target
from specctl.runtime.verify import Verdict


class Committed(NamedTuple):
    """By row: how many drafted tokens were accepted, and the tokens given to the user."""

    accepted: list[int]
    emitted: list[tuple[int, ...]]


def commit(rows: Sequence[Row], tree: DraftTree, verdict: Verdict, target: Target) -> Committed:
    """Append what a round emitted to its rows; EOS, stop strings and limits are cut here, in token
    order. A round that was cut rejected nothing."""
    packed = verdict.next_token_B[:, None]
    if tree.num_nodes:
        node_BP = (verdict.path_BP[:, 1:] - 1).clamp(min=0)
        path_BP = tree.token_BN.gather(1, node_BP)
        end_B1 = verdict.path_BP.gather(1, verdict.num_accepted_B[:, None])
        is_behind_B = (tree.valid_BN & (tree.parent_BN + 1 == end_B1)).any(1)
        counts = [verdict.num_accepted_B, tree.valid_BN.sum(1), is_behind_B]
        packed = torch.cat([packed, torch.stack(counts, dim=1), path_BP], dim=1)
    done = Committed([], [])
    for b, (next_token, *rest) in enumerate(packed.tolist()):
        row = rows[b]
        num_accepted, num_drafted, is_behind, *path = rest or (0, 0, 0)
        kept, row.finished = cut(row, [*path[:num_accepted], next_token], target)
        row.tokens.extend(kept)
        row.kept_len = len(row.tokens) - 1
        row.num_rounds += 1
        is_rejected = bool(is_behind) and len(kept) > num_accepted
        row.stats.count(num_drafted, min(num_accepted, len(kept)), len(kept), is_rejected)
        done.accepted.append(num_accepted)
        done.emitted.append(tuple(kept))
    return done
