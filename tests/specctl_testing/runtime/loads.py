"""A simulated server whose costs and acceptance are known, for tests of batch policies."""

from dataclasses import dataclass

import numpy as np
import torch

from specctl.core.drafter import Outcome, RoundSeconds, RoundView
from specctl.core.tree import empty_tree
from specctl.runtime.batching import RowView
from specctl.runtime.measure.cost_table import BatchCosts, CostTable

LONGEST = 8
SIZES = (1, 2, 4, 8, 16, 32, 64)
NONE_B = torch.zeros(0, dtype=torch.long)
VIEW = RoundView((), NONE_B, NONE_B, NONE_B, ())
TREE = empty_tree(0, torch.device("cpu"))


def outcome_of(accepted, finished=None):
    finished = finished or (None,) * len(accepted)
    emitted = tuple((0,) * (n + 1) for n in accepted)
    return Outcome(VIEW, TREE, NONE_B, tuple(accepted), NONE_B, emitted, tuple(finished))


def seconds_of(rows, length, step=0.4):
    """A device that reads weights for 8 or computes for 0.25 a token, and drafts for `step`."""
    return max(8.0, 0.25 * rows * (length + 1)) + 1.0 + step * length


def costs_of(batches, lengths=tuple(range(LONGEST + 1)), seconds=seconds_of):
    tables = {}
    for rows in batches:
        verify = {k: seconds(rows, k) for k in lengths}
        tables[rows] = CostTable(dict.fromkeys(lengths, 0.0), verify, "cpu", "float32", rows)
    return BatchCosts(tables)


@dataclass
class Load:
    """`users` rows of known acceptance, each replaced by a new one when it has emitted its text."""

    users: int
    alphas: tuple[float, ...]
    text: int = 80
    seed: int = 0

    def run(self, batching, rounds, told=1.0):
        """(tokens per second, lengths of every round). Rounds are said to take `told` times what
        they take."""
        rng = np.random.default_rng(self.seed)
        live, emitted, clock, named, asked = [], 0, 0.0, 0, []
        for _ in range(rounds):
            while len(live) < self.users:
                live.append([named, self.alphas[named % len(self.alphas)], self.text])
                named += 1
            lengths = batching.lengths([RowView(i, left - 1) for i, _, left in live])
            tries = rng.random((len(live), LONGEST)) < np.array([[a] for _, a, _ in live])
            runs = np.cumprod(tries, axis=1).sum(1)
            accepted = np.minimum(runs, lengths).tolist()
            spent = seconds_of(len(live), max(lengths))
            clock += spent
            emitted += sum(accepted) + len(live)
            for row, n in zip(live, accepted, strict=True):
                row[2] -= n + 1
            finished = ["length" if left <= 0 else None for _, _, left in live]
            spent *= told
            batching.observe(outcome_of(accepted, finished), RoundSeconds(0.0, spent, 0.0))
            live = [row for row in live if row[2] > 0]
            asked.append(lengths)
        return emitted / clock, asked
