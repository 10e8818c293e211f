"""ReadingLM: a causal language model that is only read: whole documents, no cache, no rounds.

Training rolls nothing back, so architectures whose state cannot be rolled back (linear attention,
state spaces, convolutions, attention in chunks or to picked keys) can have drafters trained for
them. What such a layer remembers would run from one document of a packed row into the next, and no
mask stops it, so every document becomes a row of its own, padded on the right, where a causal model
does not look. transformers' module does the arithmetic, by its own masks and positions.
A picked row is a document. Letters: B rows, Q picked rows, S sequence, T fed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specctl.core.errors import IncompatibleError
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.core.language_model import Feed, LmOut, Masks
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_spec import refuse_stateful

NO_KV = (KVShape(0, 0, 0, 0),)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A document in a packed row: where it begins and how many tokens of it are there."""

    row: int
    start: int
    length: int

    @property
    def slice(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + self.length)


class ReadingLM(HfLM):
    """`reason`: why it cannot be run."""

    can_run = False

    def __init__(self, model: Any, eos_ids: tuple[int, ...], reason: str) -> None:
        refuse_stateful(type(model), model.config, is_read_only=True)
        implementation = model.config._attn_implementation
        super().__init__(model, eos_ids, NO_KV)
        model.set_attn_implementation(implementation)
        self.windows, self.reason = (), reason

    def document_masks(self, document_BS: Tensor) -> Masks:
        """The numbers of the documents, which are read one by one."""
        return Masks(document_BS)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        if kv is not None:
            raise self._refusal()
        ids_BS, taps, logits = feed.ids_BT, dict[int, Tensor](), None
        for part in _groups(_stretches(feed.masks.full), ids_BS.numel()):
            out = self._read(ids_BS, part, feed)
            states = self._states(out, feed.taps)
            for place, stretch in enumerate(part):
                row, where = stretch.slice
                for tap, state in states.items():
                    if tap not in taps:
                        taps[tap] = state.new_zeros(*ids_BS.shape, state.shape[-1])
                    taps[tap][row, where] = state[place, : stretch.length]
                if feed.logits:
                    if logits is None:
                        logits = out.logits.new_zeros(*ids_BS.shape, out.logits.shape[-1])
                    logits[row, where] = out.logits[place, : stretch.length]
        return LmOut(logits, taps)

    def _read(self, ids_BS: Tensor, part: list[Stretch], feed: Feed) -> Any:
        ids_QS = ids_BS.new_zeros(len(part), part[0].length)
        for place, stretch in enumerate(part):
            ids_QS[place, : stretch.length] = ids_BS[stretch.slice]
        model = self.module if feed.logits else self.module.base_model
        return model(input_ids=ids_QS, use_cache=False, output_hidden_states=bool(feed.taps))

    def _states(self, out: Any, taps: tuple[int, ...]) -> dict[int, Tensor]:
        if not taps:
            return {}
        states, wanted = out.hidden_states, self.spec.num_layers + 1
        if states is None or len(states) != wanted:
            found = f"{0 if states is None else len(states):,} hidden states"
            raise self._unreadable(found, f"{wanted:,}")
        for tap in taps:
            shape = states[tap].shape
            if len(shape) != 3 or shape[-1] != self.spec.hidden_size:
                found = f"hidden state {tap} of shape {list(shape)}"
                raise self._unreadable(found, f"three axes, the last of {self.spec.hidden_size:,}")
        return {tap: states[tap] for tap in taps}

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        raise self._refusal()

    def _refusal(self) -> IncompatibleError:
        return IncompatibleError(
            f"{type(self.module).__name__} can be trained for, but not run here",
            found=self.reason,
            expected="a decoder of full or sliding attention, whose cache can be rolled back",
            do="export the drafter and serve it with vLLM or SGLang: specctl export --help",
        )


def _stretches(document_BS: Tensor) -> list[Stretch]:
    """The documents of packed rows, the longest first; padding (-1) is none."""
    found = []
    for row, numbers in enumerate(document_BS.tolist()):
        start = 0
        for at in range(1, len(numbers) + 1):
            if at == len(numbers) or numbers[at] != numbers[start]:
                if numbers[start] >= 0:
                    found.append(Stretch(row, start, at - start))
                start = at
    return sorted(found, key=lambda stretch: -stretch.length)


def _groups(stretches: list[Stretch], most: int) -> Iterator[list[Stretch]]:
    """Documents of similar length that are read together: as many tokens as the packed rows, with
    their padding."""
    part: list[Stretch] = []
    for stretch in stretches:
        if part and (len(part) + 1) * part[0].length > most:
            yield part
            part = []
        part.append(stretch)
    if part:
        yield part
