"""What a vocabulary selector is: a name, and the tokens whose counts rank the ids.

The ids most often counted are kept first. How many are kept is another question, answered by
`specctl.train.vocab.trim` from predicted and measured speed-up, whatever the selector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from specctl.core.drafter import Drafter
from specctl.runtime.policies import Policy
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import HeldoutPrompt
from specctl.train.data.records.records import Sample
from specctl.train.data.rows.rows import TokenData
from specctl.train.vocab.coverage import Counted


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a selector may look at. `prompts` may be answered and counted, tau is measured on
    others; `data` is what a run's drafter learnt to predict; `samples` opens raw text; a drafter
    that is yet to be trained is None."""

    target: Target
    prompts: Sequence[HeldoutPrompt] = ()
    data: TokenData | None = None
    samples: Callable[[], Iterable[Sample]] | None = None
    drafter: Drafter | None = None
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector file's entry. `count` yields documents of token ids with their domains;
    `needs_drafter` says that there must be a trained one."""

    name: str
    summary: str
    paper: str
    count: Callable[[Evidence], Iterator[Counted]]
    needs_drafter: bool = False
