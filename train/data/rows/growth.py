"""More data for a run that goes on: its rows stay, and rows of what is new come behind them.

A prompt that is in the rows is never taken a second time, and which rows are held out was decided
with the first of them. So no held-out prompt is ever trained on, none that was trained on becomes
held out, and tau is measured on the same prompts as before. Answers that were written are not
written again, and neither are features that lie on disk: every part of the rows has its own.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.messages.printable import counted
from specctl.core.storage.files import digest_of
from specctl.runtime.measure.reporter import Reporter
from specctl.train.data.rows.pack import Document, PackedRows
from specctl.train.data.rows.rows import DataManifest, TokenData

# Settings of the rows that may be others in a later part: where prompts come from, how many there
# are, how they are answered. The others say what a row and a prompt are.
MAY_DIFFER = frozenset(
    {
        "source", "prompts", "limit_tokens", "text_tokens", "new_tokens", "temperature",
        "greedy_share", "top_p", "top_k", "writer",
    }
)  # fmt: skip
ELSEWHERE = "choose another --out; --init with this run's folder starts from its weights"


@dataclass(frozen=True, slots=True)
class LearnedRows:
    """What a run has made of the rows in its folder: their digest, the steps that it has made and
    will have made, and whether more data are allowed. `begins` is called when nothing stands
    against going on, before anything is written."""

    digest: str | None
    step: int
    steps: int
    allows_more: bool
    begins: Callable[[], None]

    def check(self, digest: str, settings: Mapping[str, Any], there: DataManifest | None) -> None:
        """Raise unless the run may go on with rows of that digest and these settings. `there`: the
        rows in its folder."""
        is_same = there is None or there.digest == digest
        identity = digest if there is None else there.identity
        if self.digest is None or (is_same and identity == self.digest):
            return
        if there is None:
            raise IncompatibleError(
                "the rows that the run has learned are gone, and the data are others now",
                found=f"rows {digest[:12]}",
                expected=f"rows {str(self.digest)[:12]}, with which the run began",
                do=f"set the data as they were, or {ELSEWHERE}",
                where="data",
            )
        if not self.allows_more:
            raise IncompatibleError(
                "this folder holds a run that was started with other data",
                found="; ".join(_changed(there.settings, settings, {*there.settings, *settings}))
                or f"rows {there.identity[:12]}",
                expected=f"rows {str(self.digest)[:12]}, with which the run began",
                do="choose another --out, or go on with more data: --allow data, which keeps the "
                "rows that are there and adds what is new",
                where="data",
            )
        if there.digest != digest:
            _check_fixed(there, settings)
        if self.step >= self.steps:
            raise RecipeError(
                "the run has made all its steps, so it would learn nothing of more data",
                where="train.steps",
                found=f"{self.steps:,}, all of them made",
                expected="steps for the new rows",
                do=f"--steps {2 * self.steps} with --allow data makes as many again",
            )

    def say(self, before: TokenData, wanted: int | None, console: Reporter) -> None:
        """What will be kept and done. `wanted`: prompts to be answered in all."""
        kept = before.manifest
        answered = "" if not kept.answered else f"{counted(kept.answered, 'answer')} in "
        more = "" if wanted is None else f"; {max(0, wanted - kept.answered):,} more to write"
        console.say(
            f"more data: {answered}{counted(kept.rows, 'row')} are kept, {kept.held:,} of them "
            f"held out{more}"
        )
        console.say(
            f"more data: {self.step:,} steps are made, {self.steps - self.step:,} to come, from "
            f"the weights of step {self.step:,}: the rows are shuffled anew, the learning rate "
            "begins anew over these steps, the draft vocabulary and the held-out prompts stay"
        )


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _changed(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Collection[str]
) -> list[str]:
    """`name: before -> now` of each that differs."""
    return [
        f"{name}: {_short(before.get(name))} -> {_short(now.get(name))}"
        for name in sorted(names)
        if before.get(name) != now.get(name)
    ]


def _check_fixed(there: DataManifest, settings: Mapping[str, Any]) -> None:
    """Refuse to add rows that would be of another kind than those that are there."""
    before = there.settings
    changed = _changed(before, settings, {*before, *settings} - MAY_DIFFER)
    wrote, writes = before.get("writer"), settings.get("writer")
    if wrote and writes and wrote[:2] != writes[:2]:
        changed.append(f"written by target {_short(wrote[0])} -> {_short(writes[0])}")
    if changed:
        raise IncompatibleError(
            "more data must be made as the run's own were",
            found="; ".join(changed),
            expected="the same target, chat template, row length, seed and way to cut prompts",
            do=f"set them as they were, or {ELSEWHERE}",
            where="data",
        )
    if there.held is None:
        raise IncompatibleError(
            "it is not known which prompts these rows hold",
            found="rows of an earlier version of specctl",
            expected="rows that say which prompts they hold and which are held out",
            do=ELSEWHERE,
            where="data",
        )


def ids_key(ids: Sequence[int]) -> int:
    """A number of 64 bits that names token ids."""
    digest = hashlib.sha256(array("i", ids).tobytes()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def opening_key(document: Document) -> int:
    """The key of what stands before the first token to be predicted; of a text in which all are,
    that of the text."""
    first = int(document.mask.argmax())
    return ids_key((document.ids[:first] if first else document.ids).tolist())


def unknown_documents(documents: Iterable[Document], known: frozenset[int]) -> list[Document]:
    """Those whose prompts are not among the known ones."""
    if not known:
        return list(documents)
    return [document for document in documents if opening_key(document) not in known]


def part_digest(parts: Sequence[tuple[str, int]], digest: str) -> str:
    """Names a part by what it is made of and by the parts before it, whose prompts it lacks."""
    return digest_of({"behind": [part for part, _ in parts], "settings": digest})


def joined_rows(before: TokenData, new: PackedRows) -> PackedRows:
    """The new rows before those that are held out (see `rows.py`)."""
    old = before.packed()
    at = len(old.ids_RS) - (before.manifest.held or 0)
    later = np.where(new.document_RS >= 0, new.document_RS + len(old.domain_N), new.document_RS)
    return PackedRows(
        np.concatenate([old.ids_RS[:at], new.ids_RS, old.ids_RS[at:]]),
        np.concatenate([old.mask_RS[:at], new.mask_RS, old.mask_RS[at:]]),
        np.concatenate([old.document_RS[:at], later.astype(np.int32), old.document_RS[at:]]),
        np.concatenate([old.position_RS[:at], new.position_RS, old.position_RS[at:]]),
        [*old.domain_N, *new.domain_N],
    )
