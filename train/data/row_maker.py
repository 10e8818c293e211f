"""Documents become the rows of a run: cut, packed, written, behind those that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.messages.printable import counted
from specctl.runtime.measure.reporter import Reporter
from specctl.train.data.preparation import Preparation
from specctl.train.data.prompts.answers import WrittenAnswer
from specctl.train.data.prompts.heldout import num_held
from specctl.train.data.rows.growth import ids_key, joined_rows, opening_key, part_digest
from specctl.train.data.rows.pack import Document, PackedRows, better_seq_len, cut_documents, pack
from specctl.train.data.rows.rows import TokenData, write_rows
from specctl.train.data.sources.defects import Defects

POOR_FILL = 0.8  # below this, another row length is looked for


@dataclass(frozen=True, slots=True)
class WrittenTexts:
    """What rows are made of: answers that the target wrote in the run, those of it that were
    `there` in the data, and the source's own words."""

    answers: Sequence[WrittenAnswer]
    there: Sequence[Document]
    own: Sequence[Document]


def write_documents(
    made: Preparation,
    texts: WrittenTexts,
    place: tuple[Path, str, dict[str, Any]],
    before: TokenData | None,
    defects: Defects,
    console: Reporter,
) -> None:
    """The rows of the texts in the folder, by digest and settings, together with those that are
    there `before`."""
    folder, digest, settings = place
    answers, own = texts.answers, texts.own
    documents = [each for a in answers for each in a.documents(made.data.train_on_prompt)]
    documents += texts.there
    writer = "both" if documents and own else "target" if documents else "source"
    prompts = {ids_key(a.prompt.ids) for a in answers}
    prompts |= {opening_key(document) for document in (*texts.there, *own)}
    answered = len(answers) + len(texts.there)
    if before is None:
        rows = _rows([*documents, *own], made, defects, console)
        held = num_held(made.data, len(rows.ids_RS), made.target.can_run)
        parts = [(digest, len(rows.ids_RS))]
    else:
        there, rows = before.manifest, before.packed()
        parts, held, answered = list(there.parts), there.held or 0, there.answered + answered
        if documents or own:
            new = _rows([*documents, *own], made, defects, console)
            parts.append((part_digest(parts, digest), len(new.ids_RS)))
            rows = joined_rows(before, new)
            writer = writer if writer == there.writer else "both"
        else:
            console.warn("data: nothing new; --set data.prompts with more of them takes more")
            writer = there.writer
        prompts |= before.prompts() or set()
    manifest = write_rows(
        folder, rows, digest, settings, writer, defects,
        held=held, answered=answered, parts=parts, prompts=prompts,
    )  # fmt: skip
    defects.tell(console)
    console.say(
        f"data: {counted(manifest.rows, 'row')} of {manifest.seq_len}, "
        f"{counted(manifest.tokens, 'token')}, "
        f"{manifest.loss_tokens:,} to predict, {manifest.fill:.1%} full ({digest[:12]})"
    )


def _rows(
    documents: Sequence[Document],
    made: Preparation,
    defects: Defects,
    console: Reporter,
) -> PackedRows:
    seq_len, spec = made.seq_len, made.target.spec
    cut = cut_documents(documents, seq_len)
    if cut.dropped:
        reason = f"sample has nothing to predict in its first {seq_len} tokens"
        defects.note(reason, "train.seq_len", cut.dropped)
    if not cut.documents:
        raise SpecctlError(
            "cutting to the row length removed every answer",
            where="train.seq_len",
            found=f"{seq_len}, longest sample {cut.longest:,} tokens",
            expected="rows long enough for a prompt and some of its answer",
            do=f"raise train.seq_len (at most {cut.longest} is needed)",
        )
    if cut.shortened:
        console.warn(
            f"data: {cut.shortened:,} samples cut to {seq_len} tokens (longest {cut.longest:,}); "
            "raise train.seq_len to keep them whole"
        )
    pad_id = spec.pad_id if spec.pad_id is not None else 0
    rows = pack(cut.documents, seq_len, pad_id, made.data.seed)
    if rows.fill < POOR_FILL and len(cut.documents) > 1:
        better, fill = better_seq_len([len(d.ids) for d in cut.documents], seq_len)
        if fill > rows.fill + 0.1:
            console.say(
                f"data: rows of {seq_len} are {rows.fill:.0%} full; "
                f"--set train.seq_len={better} would fill {fill:.0%}"
            )
    return rows
