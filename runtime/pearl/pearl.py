"""PEARL (arXiv 2408.11850): the drafter goes on drafting while the target verifies.

Each round two things happen at once: the target reads the newest committed token and the drafts
behind it that wait for a verdict, and the drafter draws `gamma` more. Then the waiting drafts and
the first new one are verified (the target has just given their distributions). With nothing waiting
this is the paper's pre-verification, which tests the first token of a draft before the rest exists
for the target; with drafts waiting it is post-verification. While everything is accepted the
drafter never stops, so runs of accepted tokens are not bounded by gamma; a rejection drops what is
waiting and rolls both caches back. Verification is token-level speculative sampling, or greedy:
lossless.

Drafting costs nothing where target and drafter have devices (or cores) of their own; where they
share them, both slow down. Two threads: torch releases the interpreter while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.runtime.engine.request import Completion, Request, Row
from specctl.runtime.pearl.pearl_row import PearlRow
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.chain import Chain
from specctl.runtime.target.target import Target


class Pearl:
    """Generates one row at a time, drafting and verifying in two threads. `policy` is a chain whose
    length is gamma. Counts as an engine does; `waited_seconds` is what the target spent waiting for
    the drafter, `run_lengths` the accepted tokens of every run that ended in a rejection."""

    def __init__(self, target: Target, drafter: Drafter, policy: Policy) -> None:
        if not isinstance(policy, Chain) or policy.stopper is not None:
            raise RecipeError(
                "drafting in parallel needs a chain of fixed length",
                where="serve.parallel",
                found=type(policy).__name__,
                expected="policy chain without a stop rule",
                do="--policy chain --length 4, or leave parallel out",
            )
        if drafter.needs().topk:
            raise RecipeError(
                "this drafter cannot draft while the target verifies",
                where="serve.parallel",
                found=f"{drafter.family}, which learns from every token that is verified",
                expected="a drafter that reads the text or the target's features",
                do="leave parallel out",
            )
        self.target, self.drafter, self.policy = target, drafter, policy
        self.gamma, self.needs = policy.length, drafter.needs()
        self.prefill_seconds = self.draft_seconds = self.verify_seconds = self.waited_seconds = 0.0
        self.run_lengths: list[int] = []
        if self.needs.borrow:
            drafter.bind(target.borrowed())

    def run(
        self,
        requests: Sequence[Request],
        on_round: Callable[[Row, tuple[int, ...]], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the requests; `on_round(row, new)` after each round."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter") as pool:
            done = []
            for index, request in enumerate(requests):
                session = PearlRow(self, Row.of(index, 0, request), pool)
                for new in session.rounds():
                    if on_round is not None:
                        on_round(session.row, new)
                done.append(session.row.completion())
        return done
