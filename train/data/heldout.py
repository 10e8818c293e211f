"""Held-out prompts: what tau is measured on. Never seen by the embedded target in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, SpecctlError, nearest
from specctl.runtime.target.prompt_limits import check_room
from specctl.runtime.target.target import Target
from specctl.train.data.chat import conversation_prompt
from specctl.train.data.records import check_values, parse_line, sample_of


@dataclass(frozen=True, slots=True)
class HeldoutPrompt:
    """A prompt as token ids, its text, and the domain it is reported under."""

    ids: tuple[int, ...]
    text: str
    domain: str


def embedded_prompts() -> Path:
    """The prompts that come with specctl."""
    import specctl.recipes

    return Path(specctl.recipes.__path__[0]) / "tiny" / "prompts.jsonl"


def heldout_prompts(
    target: Target, count: int, domain: str | None = None, path: str | Path | None = None
) -> list[HeldoutPrompt]:
    """`count` prompts (fewer if there are fewer), taken in turn from every domain, always the same.

    `path` is a text file (one prompt per line) or JSONL with text, prompt or messages per line.
    """
    file = embedded_prompts() if path is None else Path(path)
    by_domain: dict[str, list[tuple[str, Any]]] = {}
    for found, record in _records(file):
        by_domain.setdefault(found, []).append((found, record))
    if domain is not None and domain not in by_domain:
        raise SpecctlError(
            "no held-out prompts of that domain",
            where=str(file),
            found=domain,
            expected="one of " + ", ".join(sorted(by_domain)),
            do=f"write {nearest(domain, by_domain, 1)}",
        )
    groups = [by_domain[name] for name in sorted(by_domain) if domain in (None, name)]
    turns = [
        group[i]
        for i in range(max(map(len, groups), default=0))
        for group in groups
        if i < len(group)
    ]
    prompts = [_prompt(target, found, record, file) for found, record in turns[:count]]
    prompts = prompts if path is not None else [_short(target, prompt) for prompt in prompts]
    if not prompts:
        raise FileError(
            "the file of held-out prompts is empty",
            found=str(file),
            expected="a prompt on every line",
            do="add prompts",
        )
    return prompts


def _short(target: Target, prompt: HeldoutPrompt) -> HeldoutPrompt:
    """An embedded prompt, which nobody chose for this target, in at most half of its context."""
    most = max(1, target.spec.max_positions // 2)
    if len(prompt.ids) <= most:
        return prompt
    ids = prompt.ids[:most]
    return HeldoutPrompt(ids, target.decode(ids), prompt.domain)


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Domain and record of every line; a line that is not JSON in a JSONL file is an error."""
    is_json = file.suffix.lower() in (".jsonl", ".json")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(
            "the file of held-out prompts cannot be read",
            where=str(file),
            found=getattr(error, "strerror", None) or f"no UTF-8 text: {error}",
            expected="a text file with one prompt per line, or JSONL",
            do="correct the path, or leave it out to use the embedded prompts",
        ) from error
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if not is_json:
            yield file.stem, line
            continue
        try:
            record = parse_line(line)
        except ValueError as error:
            raise FileError(
                "a line of the held-out prompts is not JSON",
                where=f"{file}:{number}",
                found=str(error),
                expected='one object per line, e.g. {"text": "def main("}',
                do="correct or remove the line",
            ) from error
        named = record.get("domain") if isinstance(record, dict) else None
        yield (named if isinstance(named, str) and named else file.stem), record


def _prompt(target: Target, domain: str, record: Any, file: Path) -> HeldoutPrompt:
    text = record.get("text", record.get("prompt")) if isinstance(record, dict) else record
    try:
        if isinstance(text, str):
            check_values(text)
            check_room(target, text)
            return HeldoutPrompt(tuple(target.encode(text)), text, domain)
        sample = sample_of(record, str(file), domain)
        ids = tuple(conversation_prompt(target.tokenizer, sample))
    except ValueError as error:
        raise FileError(
            "a held-out prompt cannot be used",
            where=str(file),
            found=str(error),
            expected="text, prompt or messages",
            do="correct the line",
        ) from error
    return HeldoutPrompt(ids, target.decode(ids), domain)
