"""Held-out prompts: what tau is measured on. Never seen by the embedded target in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from specctl.core.errors import FileError, SpecctlError, nearest
from specctl.core.storage.bounded_read import open_regular
from specctl.recipes.schema import DataPart
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.prompt_limits import check_room
from specctl.train.data.prompts.prompt_files import FilePrompt, file_prompts
from specctl.train.data.records.chat import answerable
from specctl.train.data.records.records import Sample, check_values
from specctl.train.data.rows.context import check_ids
from specctl.train.data.rows.pack import share_held
from specctl.train.data.sources.sources import is_corpus

TEXTS = ("text", "prompt")  # keys of a prompt that is read as it is


def num_held(part: DataPart, num_rows: int, can_run: bool = True) -> int:
    """How many rows are kept out of training so that tau is measured on the user's own kind of
    text; the built-in corpus has held-out prompts of its own, so nothing is kept back there, unless
    the target cannot be run with them."""
    decodes = can_run and part.target_source == "inprocess"
    if (is_corpus(part.source) and decodes) or num_rows < 2:
        return 0
    return share_held(num_rows)


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
    target: Target,
    count: int,
    domain: str | None = None,
    path: str | Path | None = None,
    chat: bool | None = None,
) -> list[HeldoutPrompt]:
    """`count` prompts (fewer if there are fewer), taken in turn from every domain, always the same.

    `path` is a text file (one prompt per line), or a file of records as for training. A
    conversation is read as the target's template writes it. So is a text, or a prompt alone, with
    `chat`; else it goes on as it is; None: as the target is spoken to.
    """
    is_chat = target.is_chat if chat is None else chat
    file = embedded_prompts() if path is None else Path(path)
    by_domain: dict[str, list[FilePrompt]] = {}
    for found in _prompts(file):
        by_domain.setdefault(found.sample.domain, []).append(found)
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
    if path is None:
        turns = [_short(target, found) for found in turns[:count]]
    prompts = [_encoded(target, found, is_chat) for found in turns[:count]]
    if not prompts:
        raise FileError(
            "the file of held-out prompts is empty",
            where=str(file),
            found="no line with text",
            expected="a prompt on every line",
            do=f"write at least one line of text into {file}, or leave the flag out to use the "
            "prompts that come with specctl",
        )
    return prompts


def _short(target: Target, prompt: FilePrompt) -> FilePrompt:
    """An embedded prompt, which nobody chose for this target, in at most half of its context."""
    most, ids = max(1, target.spec.max_positions // 2), target.encode(prompt.sample.text)
    if len(ids) <= most:
        return prompt
    return replace(prompt, sample=replace(prompt.sample, text=target.decode(ids[:most])))


def _prompts(file: Path) -> Iterator[FilePrompt]:
    """Every prompt of the file; one that cannot be read is an error."""
    try:
        open_regular(file).close()
        yield from file_prompts(file, TEXTS, turns_first=False)
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, error) from error


def check_prompts(file: Path) -> None:
    """Refuse a file of prompts that cannot be opened; nothing is read."""
    try:
        open_regular(file).close()
    except OSError as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> FileError:
    return FileError(
        "the file of held-out prompts cannot be read",
        where=str(file),
        found=getattr(error, "strerror", None) or f"no UTF-8 text: {error}",
        expected="a text file with one prompt per line, or records as for training",
        do="correct the path, or leave it out to use the embedded prompts",
    )


def _by_ids(target: Target, sample: Sample) -> HeldoutPrompt:
    """Of a record that was tokenized, what stands before the first token that is to be learned."""
    ours = target.tokenizer_fingerprint or ""
    if sample.tokenizer and not ours.startswith(sample.tokenizer):
        raise ValueError("the token ids are of another tokenizer")
    ids = sample.ids[: sample.mask.index(True)] if any(sample.mask) else sample.ids
    if not ids:
        raise ValueError("nothing stands before the first token to be learned")
    check_ids(ids, target)
    return HeldoutPrompt(ids, target.decode(ids), sample.domain)


def _encoded(target: Target, prompt: FilePrompt, is_chat: bool) -> HeldoutPrompt:
    sample = prompt.sample
    try:
        if sample.text:
            check_values(sample.text)
            check_room(target, sample.text)
            if is_chat:
                turn = {"role": "user", "content": sample.text}
                return HeldoutPrompt(tuple(target.encode_chat([turn])), sample.text, sample.domain)
            return HeldoutPrompt(tuple(target.encode(sample.text)), sample.text, sample.domain)
        if sample.ids and not sample.messages:
            return _by_ids(target, sample)
        ids = tuple(answerable(target.tokenizer, sample.messages, sample.tools))
    except ValueError as error:
        raise FileError(
            "a held-out prompt cannot be used",
            where=prompt.where,
            found=str(error),
            expected="text, prompt or messages",
            do="correct the line",
        ) from error
    return HeldoutPrompt(ids, target.decode(ids), sample.domain)
