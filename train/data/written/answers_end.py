"""Where an answer that an engine wrote ends, and with which token.

An answer is learned with the token that ended it, once. vLLM and SGLang list that token with the
others, and name it beside them (`stop_reason`, `matched_stop`) where it is none of their own ends;
other engines leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.chat_tokens import control_ids
from specctl.train.data.prompts.answers import OVER


def as_written(
    ids: Sequence[int], choice: Mapping[str, Any], prompt_ids: Sequence[int], target: Target
) -> tuple[list[int], str]:
    """Ids and finish reason of an answer from the `choice` of a completion that stopped or became
    too long. What the engine wrote is kept up to the first end of a text; one that it stopped at
    and left out comes behind."""
    ends = [at for at, token in enumerate(ids) if token in target.eos_ids]
    if ends:
        return list(ids[: ends[0] + 1]), OVER
    if choice.get("finish_reason") != "stop":
        return list(ids), "length"
    stopped = _stopped_at(choice)
    if isinstance(stopped, str):
        number = {end.token: end.token_id for end in target.ends.each}.get(stopped)
        if number is None:
            return list(ids), "stop"  # a stop string of the server's own is no end
        stopped = number
    elif stopped is None and not (ids and ids[-1] in control_ids(target.tokenizer)):
        stopped = _usual_end(prompt_ids, target)
    if stopped is None or [*ids[-1:]] == [stopped]:
        return list(ids), OVER
    return [*ids, stopped], OVER


def _usual_end(prompt_ids: Sequence[int], target: Target) -> int | None:
    """What a text behind this prompt ends with: a turn, if the prompt is a chat template's."""
    controls = control_ids(target.tokenizer) - {target.spec.bos_id}
    is_chat = not controls.isdisjoint(prompt_ids)
    return target.end_of_turn if is_chat else target.end_of_document


def _stopped_at(choice: Mapping[str, Any]) -> int | str | None:
    """The token, or the string, that the engine says it stopped at."""
    for name in ("stop_reason", "matched_stop"):
        found = choice.get(name)
        if isinstance(found, (int, str)) and not isinstance(found, bool):
            return found
    return None
