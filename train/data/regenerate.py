"""The target writes the answers: a drafter must match the target's own words, not a data set's.

Prompts are cut from the data and answered in batches by the engine, partly greedily, partly by
sampling, each with its own seed. Answers are kept as the exact token ids that the target drew (text
would not always encode back to them). Shards of 64 prompts are written whole, so a killed job goes
on where it stopped, and what a shard holds depends on the plan alone. N prompts.
"""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from specctl.core.errors import IntegrityError, SpecctlError
from specctl.core.files import digest_of
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request, Row
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.chat import conversation_prompt
from specctl.train.data.context import LEAST_PROMPT, check_ids
from specctl.train.data.corpus import PROSE, regions
from specctl.train.data.pack import Document
from specctl.train.data.records import Sample
from specctl.train.data.sources import Defects
from specctl.train.saving.tensorfile import write_arrays

SHARD = 64
EXTRA_PASSES = 2  # over the samples, where some gave nothing or the same again
CHARS_PER_TOKEN = 16  # text read for a prompt; more than any usual token is long


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How prompts are cut and answered."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    temperature: float
    greedy_share: float
    seed: int


@dataclass(frozen=True, slots=True)
class PromptCut:
    """A prompt made from a sample of the data."""

    ids: tuple[int, ...]
    domain: str


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """A prompt with what the target wrote after it, an ending EOS included."""

    prompt: PromptCut
    new_ids: tuple[int, ...]
    is_greedy: bool
    finish_reason: str

    def document(self, train_on_prompt: bool = False) -> Document:
        """As training text: only the answer is predicted, unless the prompt is wanted too."""
        ids = np.array([*self.prompt.ids, *self.new_ids], dtype=np.int32)
        mask = np.full(len(ids), True)
        if not train_on_prompt:
            mask[: len(self.prompt.ids)] = False
        return Document(ids, mask, self.prompt.domain)


def cut_prompts(
    target: Target,
    samples: Sequence[Sample],
    plan: AnswerPlan,
    defects: Defects,
    longest: int | None = None,
) -> list[PromptCut]:
    """`plan.prompts` prompts, evenly from the samples: of a conversation all up to its last answer,
    of raw text a stretch of `prompt_tokens` from its beginning or from the start of a line. None is
    longer than `longest` or than the target's context leaves for it."""
    room = target.spec.max_positions - plan.new_tokens
    room = room if longest is None else min(room, longest)
    cuts: list[PromptCut] = []
    seen: set[tuple[int, ...]] = set()
    passes = -(-plan.prompts // max(len(samples), 1)) + EXTRA_PASSES
    for turn in range(passes):
        for sample in samples:
            if len(cuts) == plan.prompts:
                return cuts
            try:
                cut = _cut_prompt(target, sample, turn, plan, room)
            except ValueError as error:
                if turn == 0:
                    defects.note(str(error), sample.where)
                continue
            if cut.ids not in seen:
                seen.add(cut.ids)
                cuts.append(cut)
    return cuts


def _cut_prompt(
    target: Target, sample: Sample, turn: int, plan: AnswerPlan, room: int
) -> PromptCut:
    if sample.messages:
        ids = conversation_prompt(target.tokenizer, sample)
        if len(ids) > room:
            raise ValueError(f"conversation of more than {room:,} tokens: no room for an answer")
        check_ids(ids, target)
        return PromptCut(tuple(ids), sample.domain)
    start = _line_start(sample.text, Random(f"{plan.seed}:{sample.where}:{turn}"))
    text = sample.text[start : start + CHARS_PER_TOKEN * plan.prompt_tokens]
    ids = target.encode(text)[: min(plan.prompt_tokens, room)]
    if len(ids) < LEAST_PROMPT:
        raise ValueError("the text is shorter than two tokens")
    check_ids(ids, target)
    end = start + len(target.decode(ids))
    return PromptCut(tuple(ids), domain_at(sample, end))


def domain_at(sample: Sample, place: int) -> str:
    """The sample's domain; in Python files "docstring" or "code", as of the held-out prompts."""
    if not sample.where.endswith(".py"):
        return sample.domain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the parsed file, e.g. a doubtful escape sequence
        try:
            found = regions(sample.text)
        except (SyntaxError, ValueError, RecursionError):
            return sample.domain
    place = min(place, len(sample.text))  # examples inside docstrings belong to no region
    return next((r.domain for r in found if r.begin < place <= r.end), PROSE)


def _line_start(text: str, random: Random) -> int:
    """The beginning one time in four, else the start of a line in the first nine tenths."""
    if random.random() < 0.25:
        return 0
    return text.rfind("\n", 0, random.randrange(max(1, len(text) * 9 // 10))) + 1


def sampling_of(index: int, plan: AnswerPlan) -> Sampling:
    """How prompt `index` is answered: greedy ones are spread evenly, every prompt has its seed."""
    share = plan.greedy_share
    is_greedy = int((index + 1) * share + 1e-9) > int(index * share + 1e-9)
    return Sampling(
        temperature=0.0 if is_greedy else plan.temperature,
        seed=plan.seed * 1_000_003 + index,
        max_new_tokens=plan.new_tokens,
    )


def answers_digest(target: Target, prompts: Sequence[PromptCut], plan: AnswerPlan) -> str:
    """Names the answers: the target, its precision, the exact prompts, how they are answered."""
    return digest_of(
        {
            "format": 2,
            "target": target.fingerprint,
            "inflated": target.inflated,
            "dtype": str(target.dtype),
            "plan": asdict(plan),
            "prompts": digest_of({"ids": [[list(p.ids), p.domain] for p in prompts]}),
        }
    )


def regenerate(
    target: Target,
    prompts: Sequence[PromptCut],
    plan: AnswerPlan,
    folder: Path,
    *,
    batch: int | None = None,
    console: Reporter | None = None,
) -> list[WrittenAnswer]:
    """The target's answer to every prompt; finished shards in `folder` are read, not redone.

    `batch` rows are answered together; None takes what suits the device and its memory."""
    console = console if console is not None else SilentReporter()
    if not prompts:
        raise SpecctlError("there are no prompts to answer", do="give data.source more text")
    digest = answers_digest(target, prompts, plan)
    home = folder / f"answers-{digest[:12]}"
    starts = range(0, len(prompts), SHARD)
    missing = [s for s in starts if not (home / _name(s)).exists()]
    if len(missing) < len(starts):
        console.say(f"regenerate: {len(starts) - len(missing)} of {len(starts)} shards are done")
    longest = max(len(p.ids) for p in prompts) + plan.new_tokens
    slots = slots_for(target, longest) if batch is None else batch
    engine = Engine(target, num_slots=max(1, min(slots, SHARD, len(prompts))))
    waiting = sum(len(prompts[s : s + SHARD]) for s in missing)
    started, num_tokens = time.perf_counter(), 0
    with console.task("the target writes answers", waiting, "prompts") as advance:
        for start in missing:
            members = prompts[start : start + SHARD]
            requests = [Request(p.ids, sampling_of(start + i, plan)) for i, p in enumerate(members)]

            def report(row: Row, new: tuple[int, ...]) -> None:
                nonlocal num_tokens
                num_tokens += len(new)
                if row.finished is not None:
                    rate = num_tokens / (time.perf_counter() - started)
                    advance(1, f"{rate:,.0f} tok/s")

            _write_shard(home / _name(start), digest, engine.run(requests, report))
    answers = [a for s in starts for a in _read_shard(home / _name(s), digest, prompts, s, plan)]
    console.say(_summary(answers))
    return answers


def slots_for(target: Target, longest: int, budget: int | None = None) -> int:
    """Rows whose caches fit a quarter of the free GPU memory, or 2 GiB on the host (`budget`)."""
    spec, is_cuda = target.spec, target.device.type == "cuda"
    if budget is None:
        budget = torch.cuda.mem_get_info(target.device)[0] // 4 if is_cuda else 2 << 30
    position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * target.dtype.itemsize
    return max(1, min(64 if is_cuda else 32, budget // (position * longest)))


def _name(start: int) -> str:
    return f"shard-{start // SHARD:05d}.safetensors"


def _write_shard(path: Path, digest: str, completions: Sequence[Completion]) -> None:
    ids = [token for c in completions for token in c.tokens]
    arrays = {
        "ids": np.array(ids, dtype=np.int32),
        "lengths_N": np.array([len(c.tokens) for c in completions], dtype=np.int32),
    }
    reasons = json.dumps([c.finish_reason for c in completions])
    notes = {"digest": digest, "finish_reasons": reasons}
    write_arrays(path, arrays, notes | {"sha256": _content_digest(arrays, notes)})


def _content_digest(arrays: Mapping[str, npt.NDArray[Any]], notes: Mapping[str, str]) -> str:
    """Of all that a shard says, so that a flipped bit is not taken for an answer."""
    body = hashlib.sha256()
    for name in ("ids", "lengths_N"):
        body.update(arrays[name].astype("<i4").tobytes())
    for name in ("digest", "finish_reasons"):
        body.update(notes.get(name, "").encode() + b"\0")
    return body.hexdigest()


def _read_shard(
    path: Path, digest: str, prompts: Sequence[PromptCut], start: int, plan: AnswerPlan
) -> list[WrittenAnswer]:
    members = prompts[start : start + SHARD]
    try:
        with safe_open(path, framework="np") as file:
            notes = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in ("ids", "lengths_N")}
    except SafetensorError as error:
        raise _bad_shard(path, str(error)) from error
    if notes.get("sha256") != _content_digest(arrays, notes):
        raise _bad_shard(path, "its content does not match its hash")
    lengths, ids = arrays["lengths_N"].tolist(), arrays["ids"].tolist()
    if notes.get("digest") != digest or len(lengths) != len(members) or sum(lengths) != len(ids):
        raise _bad_shard(path, "content of another plan")
    answers, at = [], 0
    reasons = json.loads(notes["finish_reasons"])
    for i, (prompt, length) in enumerate(zip(members, lengths, strict=True)):
        is_greedy = sampling_of(start + i, plan).temperature == 0.0
        answers.append(WrittenAnswer(prompt, tuple(ids[at : at + length]), is_greedy, reasons[i]))
        at += length
    return answers


def _bad_shard(path: Path, found: str) -> IntegrityError:
    return IntegrityError(
        "a shard of regenerated answers cannot be read",
        where=str(path),
        found=found,
        expected="a shard as it was written",
        do="delete that file; the next run writes it again",
    )


def _summary(answers: Sequence[WrittenAnswer]) -> str:
    num_tokens = sum(len(a.new_ids) for a in answers)
    ended = sum(a.finish_reason == "eos" for a in answers) / len(answers)
    greedy = sum(a.is_greedy for a in answers) / len(answers)
    return (
        f"answers: {len(answers):,} with {num_tokens:,} tokens "
        f"(mean {num_tokens / len(answers):.0f}, {ended:.0%} ended by themselves, "
        f"{greedy:.0%} greedy)"
    )
