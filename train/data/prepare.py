"""Training data of a run: `prepare` turns the recipe's source into packed rows in OUT/data.

The digest covers all that decides the rows: source text, tokenizer, chat template, settings and,
when the target wrote the answers, the target. Data are reused only if it is the same.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specctl.core.errors import RecipeError, SpecctlError
from specctl.core.files import digest_of
from specctl.core.printable import counted
from specctl.recipes.schema import DataPart, Recipe
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.target import Target
from specctl.train.data.answers import AnswerPlan, WrittenAnswer
from specctl.train.data.chat import encode_sample, thinking_switch
from specctl.train.data.context import check_context, check_ids
from specctl.train.data.endpoint import EndpointSettings, EndpointWriter
from specctl.train.data.pack import Document, PackedRows, best_fit, cut_documents, pack
from specctl.train.data.prompts import cut_prompts
from specctl.train.data.records import Sample, without
from specctl.train.data.regenerate import regenerate
from specctl.train.data.rows import FORMAT, TokenData, read_manifest, write_rows
from specctl.train.data.sources import Defects, read_samples
from specctl.train.distributed.ranks import Ranks

LEAST_ANSWER = 16  # tokens of an answer for which a prompt must leave room in its row
LATER = ("top_p", "top_k", "thinking")  # count where set, so that rows made before them stay
POOR_FILL = 0.8  # below this, another row length is looked for

__all__ = ["TokenData", "encode_document", "prepare"]


def prepare(
    recipe: Recipe,
    target: Target,
    out: Path,
    console: Reporter | None = None,
    ranks: Ranks | None = None,
) -> TokenData:
    """The training rows of a recipe in OUT/data: reused if nothing that decides them has changed,
    else made anew; regeneration goes on where it was stopped. With `ranks` all of them call this:
    each has its share of the prompts answered, the first one writes the rows."""
    console = console if console is not None else SilentReporter()
    ranks = ranks if ranks is not None else Ranks()
    check_context(recipe, target.spec)
    folder, data, defects = out / "data", recipe.data, Defects()
    if data.regenerate and data.limit_tokens is not None:
        console.warn("data.limit_tokens is ignored while the target writes the answers")
    samples, source_digest = _select(data, defects)
    defects.tell_reading(console)
    settings = _settings(recipe, target, source_digest)
    digest = digest_of(settings)
    manifest = None
    with ranks.together():  # nobody writes before all have looked
        manifest = read_manifest(folder)
    if manifest is not None and manifest.digest == digest:
        console.say(f"data: reusing {counted(manifest.rows, 'row')} ({digest[:12]})")
        return TokenData(folder, manifest)
    answers: list[WrittenAnswer] = []
    if data.regenerate:
        answers = answer_prompts(recipe, target, samples, folder, defects, console, ranks)
    with ranks.together():
        if ranks.is_main:
            _write(recipe, target, samples, answers, (folder, digest, settings), defects, console)
    manifest = read_manifest(folder)
    assert manifest is not None, "the first rank has written it"
    return TokenData(folder, manifest)


def _write(
    recipe: Recipe,
    target: Target,
    samples: Sequence[Sample],
    answers: Sequence[WrittenAnswer],
    place: tuple[Path, str, dict[str, Any]],
    defects: Defects,
    console: Reporter,
) -> None:
    """The rows of answers and of the source's own words, in the folder, by digest and settings."""
    data, (folder, digest, settings) = recipe.data, place
    if data.regenerate:
        documents = [each for a in answers for each in a.documents(data.train_on_prompt)]
        if data.text_tokens:
            documents += _encoded(data, target, samples, defects, data.text_tokens)
    else:
        documents = _encoded(data, target, samples, defects, data.limit_tokens)
    rows = _rows(documents, recipe, target, defects, console)
    writer = "target" if data.regenerate else "source"
    writer = "both" if data.regenerate and data.text_tokens else writer
    manifest = write_rows(folder, rows, digest, settings, writer, defects)
    defects.tell(console)
    console.say(
        f"data: {counted(manifest.rows, 'row')} of {manifest.seq_len}, "
        f"{counted(manifest.tokens, 'token')}, "
        f"{manifest.loss_tokens:,} to predict, {manifest.fill:.1%} full ({digest[:12]})"
    )


def rows_digest(recipe: Recipe, target: Target) -> str:
    """The digest of the rows that `prepare` would return; nothing is written."""
    _, source_digest = _select(recipe.data, Defects())
    return digest_of(_settings(recipe, target, source_digest))


def _select(data: DataPart, defects: Defects) -> tuple[list[Sample], str]:
    """The samples to use and a digest of them. For regeneration: `prompts` of them, chosen by a
    seeded hash of their number, so that the choice needs no second reading; else all of them."""
    whole = hashlib.sha256()
    chosen: list[tuple[int, int, Sample]] = []
    for number, sample in enumerate(
        read_samples(data.source, data.format, data.split, data.seed, defects)
    ):
        sample = without(sample, data.drop)
        whole.update(sample.digest())
        key = hashlib.sha256(f"{data.seed}:{number}".encode()).digest()
        entry = (-int.from_bytes(key[:8], "big"), number, sample)
        if not data.regenerate or len(chosen) < data.prompts:
            heapq.heappush(chosen, entry) if data.regenerate else chosen.append(entry)
        else:
            heapq.heappushpop(chosen, entry)
    if not chosen:
        raise RecipeError(
            "the data source holds nothing usable",
            where="data.source",
            found="; ".join(defects.lines()) or str(data.source),
            expected='text, or one JSON object a line (or a list of them) with "messages", '
            '"prompt" and "response", or "text"',
            do="correct the file or data.source",
        )
    if data.regenerate:
        defects.chose(number for _, number, _ in chosen)
    samples = [s for _, _, s in sorted(chosen, key=lambda entry: entry[1])]
    return samples, whole.hexdigest()


def _settings(recipe: Recipe, target: Target, source_digest: str) -> dict[str, Any]:
    """All that decides the content of the rows."""
    data = recipe.data
    used = {"seed", "limit_tokens"}
    writer = None
    if data.regenerate:
        used = {"seed", "prompts", "prompt_tokens", "new_tokens", "temperature", "greedy_share"}
        used |= {name for name in LATER if getattr(data, name) != getattr(DataPart(), name)}
        used |= {"text_tokens"} if data.text_tokens else set()
        here = str(target.dtype) if data.endpoint is None else EndpointWriter.name
        writer = [target.fingerprint, target.inflated, here]
    return {
        "format": FORMAT,
        "source": source_digest,
        "tokenizer": target.tokenizer_fingerprint,
        "template": target.template_digest,
        "writer": writer,
        "seq_len": recipe.train.seq_len,
        "train_on_prompt": data.train_on_prompt,
        **data.model_dump(mode="json", include=used),
    }


def write_answers_alone(
    recipe: Recipe, target: Target, out: Path, console: Reporter
) -> list[WrittenAnswer]:
    """The answers that `prepare` would make rows of, kept in OUT/data, without the rows."""
    check_context(recipe, target.spec)
    defects = Defects()
    samples, _ = _select(recipe.data, defects)
    defects.tell_reading(console)
    answers = answer_prompts(recipe, target, samples, out / "data", defects, console)
    defects.tell(console)
    return answers


def answer_prompts(
    recipe: Recipe,
    target: Target,
    samples: Sequence[Sample],
    folder: Path,
    defects: Defects,
    console: Reporter,
    ranks: Ranks | None = None,
) -> list[WrittenAnswer]:
    """The target's answers to prompts of the samples, kept in `folder`: by the engine, or by the
    recipe's endpoint."""
    data, ranks = recipe.data, ranks if ranks is not None else Ranks()
    plan = AnswerPlan(
        data.prompts,
        data.prompt_tokens,
        data.new_tokens,
        data.temperature,
        data.greedy_share,
        data.seed,
        data.top_p,
        data.top_k,
        recipe.train.seq_len - min(LEAST_ANSWER, recipe.train.seq_len // 2),
        thinking_switch(target.tokenizer, data.thinking),
    )
    prompts = cut_prompts(target, samples, plan, defects)
    if len(prompts) < plan.prompts:
        console.warn(f"data: only {len(prompts):,} of {plan.prompts:,} prompts found in the source")
    if not prompts:
        raise _nothing_left(defects, "a prompt", "a larger train.seq_len gives long prompts room")
    writer = None
    if data.endpoint is not None:
        where = EndpointSettings.of(data.endpoint, data.endpoint_model, data.endpoint_requests)
        writer = EndpointWriter(target, where, console, ranks.size)
    answers = regenerate(target, prompts, plan, folder, console=console, writer=writer, ranks=ranks)
    if len(answers) < len(prompts):
        defects.note("prompt without an answer", "data.endpoint", len(prompts) - len(answers))
    return answers


def _encoded(
    data: DataPart, target: Target, samples: Sequence[Sample], defects: Defects, limit: int | None
) -> list[Document]:
    """Documents from the source's own words, up to `limit` tokens."""
    documents: list[Document] = []
    num_tokens = 0
    for sample in samples:
        if limit is not None and num_tokens >= limit:
            break
        try:
            documents.append(encode_document(target, sample, data.train_on_prompt))
        except ValueError as error:
            defects.note(str(error), sample.where)
            continue
        num_tokens += len(documents[-1].ids)
    if not documents:
        answers = "--set data.regenerate=true lets the target answer"
        raise _nothing_left(defects, "a sample with something to predict", answers)
    return documents


def encode_document(target: Target, sample: Sample, train_on_prompt: bool = False) -> Document:
    """Token ids and loss mask of a sample; raw text counts whole and ends in EOS."""
    if sample.ids:
        ours = target.tokenizer_fingerprint or ""
        if sample.tokenizer and not ours.startswith(sample.tokenizer):
            raise ValueError("the token ids are of another tokenizer")
        ids, mask = list(sample.ids), list(sample.mask)
    elif sample.messages:
        encoded = encode_sample(target.tokenizer, sample, target.eos_ids)
        ids, mask = encoded.ids, encoded.mask
    else:
        ids = [*target.encode(sample.text), *target.eos_ids[:1]]
        mask = [True] * len(ids)
    if len(ids) < 2:
        raise ValueError("shorter than two tokens")
    check_ids(ids, target)
    if train_on_prompt:
        mask = [True] * len(ids)
    return Document(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_), sample.domain)


def _rows(
    documents: Sequence[Document],
    recipe: Recipe,
    target: Target,
    defects: Defects,
    console: Reporter,
) -> PackedRows:
    seq_len = recipe.train.seq_len
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
    pad_id = target.spec.pad_id if target.spec.pad_id is not None else 0
    rows = pack(cut.documents, seq_len, pad_id, recipe.data.seed)
    if rows.fill < POOR_FILL and len(cut.documents) > 1:
        better, fill = better_seq_len([len(d.ids) for d in cut.documents], seq_len)
        if fill > rows.fill + 0.1:
            console.say(
                f"data: rows of {seq_len} are {rows.fill:.0%} full; "
                f"--set train.seq_len={better} would fill {fill:.0%}"
            )
    return rows


def better_seq_len(lengths: Sequence[int], seq_len: int) -> tuple[int, float]:
    """A row length between 3/4 and 3/2 of `seq_len` that wastes least, and how full it is."""
    longest, found = max(lengths), []
    for tried in range(max(longest, seq_len * 3 // 4), seq_len * 3 // 2 + 1, 8):
        num_rows = len(best_fit(lengths, tried))
        found.append((sum(lengths) / (num_rows * tried), -tried))
    if not found:
        return seq_len, 0.0
    fill, minus_tried = max(found)
    return -minus_tried, fill


def _nothing_left(defects: Defects, wanted: str, do: str) -> RecipeError:
    return RecipeError(
        f"no sample of the data gave {wanted}",
        where="data.source",
        found="; ".join(defects.lines()),
        expected="conversations with an assistant turn, prompt/response pairs, or text",
        do=f"correct the data; {do}",
    )
