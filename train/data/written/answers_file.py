"""Answers as a file of records that people and programs can read, ours again without a loss.

A line a document: the exact ids and which of them are answers (`input_ids`, `loss_mask`), which is
what training reads, the target that wrote them, by which it takes them as they are
(`own_answers.py`), and the same as `messages` or `text` for everybody else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specctl.runtime.target.target import Target
from specctl.train.data.prompts.answers import WrittenAnswer
from specctl.train.data.written.own_answers import writer_of


def write_answers(
    path: Path, answers: Sequence[WrittenAnswer], target: Target, thinking: bool | None = None
) -> int:
    """Write the file, whole or not at all; returns its lines. `thinking`: what the chat template
    was told of it."""
    part, count = path.with_name(f".{path.name}.tmp"), 0
    with part.open("w", encoding="utf-8") as file:
        for answer in answers:
            for record in records(answer, target, thinking):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return count


def records(
    answer: WrittenAnswer, target: Target, thinking: bool | None = None
) -> Iterator[dict[str, Any]]:
    """The lines of an answer: one, or one for each piece of a conversation whose beginning the chat
    template writes otherwise later."""
    documents, by = answer.documents(), asdict(writer_of(target, thinking))
    for number, document in enumerate(documents):
        record = {
            "input_ids": document.ids.tolist(),
            "loss_mask": document.mask.astype(int).tolist(),
            "tokenizer": target.tokenizer_fingerprint,
            "finish_reason": answer.finish_reason,
            "greedy": answer.is_greedy,
            "written_by": by,
        }
        if document.domain:
            record["domain"] = document.domain
        if number == len(documents) - 1:
            record |= _said(answer, target)
        yield record


def _said(answer: WrittenAnswer, target: Target) -> dict[str, Any]:
    """The same in words."""
    words = [target.decode(turn.new_ids) for turn in answer.turns]
    if answer.prompt.dialogue is None:
        return {"text": target.decode(answer.prompt.ids) + words[0]}
    dialogue = answer.prompt.dialogue
    said = dialogue.said(words[:-1])
    tools = {"tools": list(dialogue.tools)} if dialogue.tools else {}
    return {"messages": [*said, {"role": "assistant", "content": words[-1]}], **tools}
