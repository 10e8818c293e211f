"""Benchmark prompts cut from the held-out files: half code, half docstring prose."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from specctl.train.data.corpus import CorpusFile
from specctl.train.data.heldout import heldout_prompts as heldout_prompts

CODE, PROSE = "code", "docstring"
MIN_TOKENS, MAX_TOKENS = 48, 96
MIN_FOLLOWING = 32  # tokens of the same document after the prompt: there is something to continue


@dataclass(frozen=True, slots=True)
class PromptCandidate:
    """A piece of a held-out file that starts at a line start and ends at a token boundary."""

    id: str
    file: str
    domain: str
    text: str


@dataclass(frozen=True, slots=True)
class Region:
    """Characters begin..end of a file that belong to one domain."""

    domain: str
    begin: int
    end: int


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _docstrings(text: str) -> list[tuple[int, int]]:
    """First and last line (0-based, last excluded) of every docstring of three lines or more."""
    found = []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            value = node.body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found.append((value.lineno - 1, value.end_lineno or value.lineno))
    return sorted((first, last) for first, last in found if last - first >= 3)


def regions(text: str) -> list[Region]:
    """The docstrings of a file (examples with >>> left out) and the code between them."""
    starts = _line_starts(text)
    lines = text.splitlines()
    result, line = [], 0
    for first, last in _docstrings(text):
        result.append(Region(CODE, starts[line], starts[first]))
        body = lines[first:last]
        examples = [i for i, words in enumerate(body) if words.lstrip().startswith(">>>")]
        stop = first + examples[0] if examples else last
        result.append(Region(PROSE, starts[first], starts[stop]))
        line = last
    result.append(Region(CODE, starts[line], len(text)))
    return result


def _cuts(source: CorpusFile, tokenizer: Any, rng: Random) -> list[PromptCandidate]:
    """Prompts of one file in random order, without overlap, each inside one region."""
    encoding = tokenizer.backend_tokenizer.encode(source.text)
    begins = [begin for begin, _ in encoding.offsets]
    first_token = {begin: index for index, begin in reversed(list(enumerate(begins)))}
    found = []
    for region in regions(source.text):
        starts = [s for s in _line_starts(source.text) if region.begin <= s < region.end]
        place = region.begin
        for start in starts:
            if start < place or start not in first_token or source.text[start] == "\n":
                continue
            first = first_token[start]
            last = first + rng.randint(MIN_TOKENS, MAX_TOKENS)
            if last + MIN_FOLLOWING >= len(begins) or begins[last] > region.end:
                continue
            text = source.text[start : begins[last]]
            found.append(
                PromptCandidate(f"{source.name}:{start}", source.name, region.domain, text)
            )
            place = begins[last] + 4 * (begins[last] - start)
    rng.shuffle(found)
    return found


def cut_prompts(
    sources: Iterable[CorpusFile], tokenizer: Any, per_domain: int, seed: int = 0
) -> list[PromptCandidate]:
    """`per_domain` prompts of each domain, taken from the files in turn; domains alternate."""
    files = sorted(sources, key=lambda s: s.name)
    Random(seed).shuffle(files)
    cuts = [_cuts(source, tokenizer, Random(f"{seed} {source.name}")) for source in files]
    picked: dict[str, list[PromptCandidate]] = {CODE: [], PROSE: []}
    for domain, chosen in picked.items():
        queues = [[p for p in cut if p.domain == domain] for cut in cuts]
        depth = max(map(len, queues), default=0)
        chosen += [queue[i] for i in range(depth) for queue in queues if i < len(queue)]
        del chosen[per_domain:]
    pairs = zip(picked[CODE], picked[PROSE], strict=False)
    return [prompt for pair in pairs for prompt in pair]


def write_prompts(path: Path, prompts: Iterable[PromptCandidate]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts))
