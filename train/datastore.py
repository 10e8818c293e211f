"""Fill a drafter's store with texts: the source's own, or what the target writes to its prompts.

The rows are those a training would use (`data` of the recipe), so that regeneration, chat templates
and resumption are the same. States are captured only where the drafter keeps them (DReSD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, Needs
from specctl.core.errors import RecipeError
from specctl.core.messages.printable import counted
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.rows import TokenData
from specctl.train.features.capture import capture


@runtime_checkable
class TextStore(Protocol):
    """A drafter that retrieves from texts. `taps`: for each text what `needs().taps` asks for,
    [n, D] each; nothing where it asks for none."""

    def learn(
        self, texts: Iterable[Sequence[int]], taps: Iterable[Mapping[int, Tensor]] = ()
    ) -> None: ...


def fill(
    drafter: Drafter,
    target: Target,
    rows: Callable[[], TokenData],
    console: Reporter | None = None,
) -> int:
    """Store the texts of the rows in the drafter, which forgets what it held; returns their tokens.
    `rows` makes them, for a drafter that has a store."""
    console = console if console is not None else SilentReporter()
    if not isinstance(drafter, TextStore):
        raise RecipeError(
            f"family {drafter.family} retrieves from no texts",
            where="drafter.family",
            found=drafter.family,
            expected="a family with a store, such as rest, suffix-automaton or token-recycling",
            do="specctl datastore --recipe rest",
        )
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    found = list(_documents(drafter, rows(), target))
    drafter.learn([ids for ids, _ in found], [taps for _, taps in found])
    num_tokens = sum(len(ids) for ids, _ in found)
    console.say(f"store: {counted(len(found), 'text')}, {counted(num_tokens, 'token')}")
    return num_tokens


def teach(drafter: Drafter, target: Target, texts: Sequence[Sequence[int]]) -> None:
    """Store these token sequences in a drafter that retrieves from texts, with the target's states
    where it keeps them; any other drafter stays as it is."""
    if isinstance(drafter, TextStore):
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
        needs = _wanted(drafter)
        drafter.learn(texts, [_states(target, ids, needs) for ids in texts])


def _wanted(drafter: Drafter) -> Needs:
    """What is kept of a text beside its tokens."""
    return drafter.needs() if drafter.learns_states else Needs()


def _states(target: Target, ids: Sequence[int], needs: Needs) -> dict[int, Tensor]:
    """What a text's taps are: [n, D] each."""
    if not needs.taps:
        return {}
    ids_BS = torch.tensor([list(ids)])
    flat_BS, position_BS = torch.zeros_like(ids_BS), torch.arange(len(ids))[None]
    batch = TrainBatch(ids_BS, torch.ones_like(ids_BS, dtype=torch.bool), flat_BS, position_BS)
    return {tap: value[0] for tap, value in capture(target, batch, needs).taps.items()}


def _documents(
    drafter: Drafter, data: TokenData, target: Target
) -> Iterator[tuple[list[int], dict[int, Tensor]]]:
    """Token ids and taps of each document of the rows."""
    needs = _wanted(drafter)
    for row in range(data.num_rows):
        batch = data.batch([row])
        taps = capture(target, batch, needs).taps if needs.taps else {}
        document_S = batch.document_BS[0]
        for number in sorted(set(document_S.tolist())):
            if number >= 0:
                here_S = document_S == number
                states = {tap: value[0, here_S.to(value.device)] for tap, value in taps.items()}
                yield batch.ids_BS[0, here_S].tolist(), states
