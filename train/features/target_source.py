"""TargetSource: who says what the target thinks of a batch.

    inprocess   the target itself, one forward (`capture.py`)
    endpoint    servers that write the hidden states of posted token ids to files
    files       such files, written before

With the last two only embedding, final norm and LM head of the target are here (`served.py`).
Engines hand out the last state before the final norm; the tap `num_layers` is behind it, so the
norm is applied here. Letters: B rows, S sequence, N tokens of a text, K taps, D hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Needs
from specctl.core.errors import IncompatibleError, NumbersError
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.served import ServedLM
from specctl.runtime.target.target import Target
from specctl.train.data.images.shown_images import ImageReader
from specctl.train.features.capture import capture, first_not_finite, to_device

Text = tuple[int, ...]


class TargetSource(Protocol):
    """Gives a batch the taps and the teacher that a drafter needs."""

    def read(self, batch: TrainBatch, needs: Needs) -> TrainBatch: ...


class InProcess:
    """The target of this process."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.reader = None if target.vision is None else ImageReader(target)

    def read(self, batch: TrainBatch, needs: Needs) -> TrainBatch:
        return capture(self.target, batch, needs, self.reader)


class StateSource(Protocol):
    """Hidden states from outside: of each text [N, K, D], in the order of the asked layers; the
    last layer's before the final norm."""

    def states(self, texts: Sequence[Text], layers: tuple[int, ...]) -> list[Tensor]: ...


class FromStates:
    """A batch made of states from outside, as `capture` would have made it. Every document is a
    text of its own, since documents do not see each other."""

    def __init__(self, target: Target, reader: StateSource) -> None:
        lm = target.lm
        assert isinstance(lm, ServedLM), "a loaded target is asked itself"
        if not lm.has_plain_head:
            raise IncompatibleError(
                f"the logits of {target.name} are more than a product with its head",
                found="a soft cap behind the LM head",
                expected="logits that its last state and its head give",
                do="--set data.target_source=inprocess",
            )
        self.target, self.lm, self.reader = target, lm, reader

    def read(self, batch: TrainBatch, needs: Needs) -> TrainBatch:
        made = self.made(batch, needs)
        if (at := first_not_finite(made)) is not None:
            raise NumbersError(
                f"the states that were read of target {self.target.name} are not numbers",
                found=f"NaN or infinities at token {at[1]:,} of a row",
                expected="finite hidden states",
                do="have the server compute in bfloat16 or float32, or write the states again",
            )
        return made

    @torch.no_grad()
    def made(self, batch: TrainBatch, needs: Needs) -> TrainBatch:
        """What `read` gives, not looked at."""
        batch, last = to_device(batch, self.target.device), self.target.spec.num_layers
        layers = layers_for(self.target, needs)
        if not layers:
            return batch
        spans = list(documents(batch))
        texts = [tuple(batch.ids_BS[row, start:end].tolist()) for row, start, end in spans]
        shape = (*batch.ids_BS.shape, self.target.spec.hidden_size)
        laid = {layer: self._empty(shape) for layer in layers}
        found = self.reader.states(texts, layers)
        for (row, start, end), states_NKD in zip(spans, found, strict=True):
            for k, layer in enumerate(layers):
                laid[layer][row, start:end] = states_NKD[:, k].to(laid[layer])
        if last in laid:
            laid[last] = self.lm.normed(laid[last])
        made = replace(batch, taps={tap: laid[tap] for tap in needs.taps})
        if not needs.teacher:
            return made
        head = self.target.borrowed()
        if needs.teacher_rows:
            rows = HeadRows(laid[last].flatten(0, 1), head.head_VD, head.head_bias_V)
            return replace(made, teacher_rows=rows)
        return replace(made, teacher_BSV=F.linear(laid[last], head.head_VD, head.head_bias_V))

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)


def layers_for(target: Target, needs: Needs) -> tuple[int, ...]:
    """Indices of hidden states that must be handed out, ascending: the taps, and for a teacher the
    last one."""
    last = {target.spec.num_layers} if needs.teacher else set()
    return tuple(sorted({*needs.taps} | last))


def documents(batch: TrainBatch) -> list[tuple[int, int, int]]:
    """Row, first and last+1 place of every document."""
    found = []
    for row, document_S in enumerate(batch.document_BS):
        numbers, counts = document_S.unique_consecutive(return_counts=True)
        start = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number >= 0:
                found.append((row, start, start + count))
            start += count
    return found


def target_source(part: DataPart, target: Target, reporter: Reporter) -> TargetSource:
    """The source that the recipe names."""
    if part.target_source == "inprocess":
        return InProcess(target)
    assert part.states is not None, "the schema asks for it"
    if part.target_source == "endpoint":
        from specctl.train.features.state_server import StateServers

        return FromStates(target, StateServers(target, part, reporter))
    from specctl.train.features.state_files import StateFiles

    return FromStates(target, StateFiles(part.states))
