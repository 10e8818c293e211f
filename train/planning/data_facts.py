"""What is known of a run's data before the run: how many prompts there are, how long they and the
target's answers are, how many token ids they need.

A few prompts are answered and their answers thrown away. How long the answers of a target are
decides how many it can write in a given time, and only answering shows it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy

from specctl.core.errors import RecipeError, SpecctlError
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.preparation import Preparation
from specctl.train.data.prepare import encode_documents, with_questions
from specctl.train.data.prompts.answers import OVER, AnswerJob, PromptCut, sampling_of
from specctl.train.data.prompts.prompts import cut_prompts
from specctl.train.data.records.layouts import field_choices
from specctl.train.data.records.records import Sample, without_images
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.self_source import check_self, others_of, uses_self
from specctl.train.data.sources.sources import (
    HUB,
    SELF,
    find_source,
    names_of,
    read_samples,
)
from specctl.train.data.written.regenerate import EngineWriter
from specctl.train.distributed.ranks import Ranks
from specctl.train.planning.work import QUESTION_TOKENS
from specctl.train.vocab.coverage import (
    always_kept,
    count_tokens,
    fewest,
    ranking,
    seen_ranking,
)

LOOKED_AT = 1024  # prompts that are encoded
TRIED = 16  # of them that are answered
LEAST_ANSWER = 4  # tokens on average; a target that says less says nothing
# Prompts whose probability is looked at, and tokens of each: at most and at least.
PREDICTED_TEXTS, PREDICTED, LEAST_PREDICTED = 8, 64, 4
# Bits for a byte of a prompt. SmolLM2-135M: English 0.8 to 1.0, code 0.9; of languages that it was
# hardly trained on Chinese 2.4, French 2.5, German 2.8, Amharic 3.2, Finnish 3.6.
UNKNOWN_BITS = 2.0
# Answers of a usual run; and the power of the number of tokens by which ids grow: 1,060 in 8,000
# tokens of SmolLM2's answers, 1,820 in 16,000, 6,150 in 127,000, 8,880 in 253,000.
USUAL_TEXTS, HEAPS = 1000, 0.6
GUESSED = 0.75  # of the longest answer, where no answer could be tried

Tried = Callable[[], None]


@dataclass(frozen=True, slots=True)
class DataFacts:
    """`prompts`: records that can be answered, those that the target writes not counted; None where
    only a download would tell. Tokens:
    `prompt_tokens` of a prompt on average, `long_prompt` of the longest but one in twenty,
    `answer_tokens` of an answer on average. `tried`: answers that say so, of which a share `ended`
    by itself; 0: none, the length is a guess. `ids`: token ids that cover the share `coverage` of
    what was read and written."""

    prompts: int | None
    prompt_tokens: float
    long_prompt: int
    answer_tokens: float
    tried: int
    ended: float
    ids: int
    coverage: float

    @property
    def document_tokens(self) -> float:
        """Of a prompt with its answer."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True, slots=True)
class SomePrompts:
    """How many samples the sources of data hold, None where only a download would tell; and some of
    them, drawn evenly. What the target writes for the source `self` is not among them."""

    count: int | None
    samples: tuple[Sample, ...]


def look_at_data(
    data: DataPart,
    made: Preparation | None,
    some: SomePrompts,
    coverage: float,
    reporter: Reporter,
    tried: Tried = lambda: None,
) -> DataFacts:
    """The facts of a recipe's data, with answers of the target by which rows are `made` of them;
    without one (it is too large to be read for a plan, or not here) lengths are those that the
    recipe allows. `tried` is called with every answer, and may end this by an error."""
    if made is None or made.target.tokenizer is None:
        ids = data.prompt_tokens if some.samples else QUESTION_TOKENS
        guessed = GUESSED * data.new_tokens
        return DataFacts(some.count, ids, ids, guessed, 0, 0.0, 0, coverage)
    target = made.target
    if not data.regenerate:
        return _of_documents(data, target, some.count, some.samples, coverage)
    samples: Sequence[Sample] = some.samples
    _warn_of_misfit(target, samples[:PREDICTED_TEXTS], reporter)
    if uses_self(data.source):
        check_self(data, target)
        samples = _with_questions(made, samples, reporter)
    cuts = _prompts(made, samples)
    lengths = sorted(len(cut.ids) for cut in cuts)
    answers = _tried(made, cuts[:TRIED], reporter, tried)
    seen = [*(cut.ids for cut in cuts), *(ids for ids, _ in answers)]
    written = sum(len(ids) for ids, _ in answers)
    mean = written / len(answers) if answers else GUESSED * data.new_tokens
    size, always = target.spec.vocab_size, always_kept(target)
    return DataFacts(
        prompts=some.count,
        prompt_tokens=sum(lengths) / len(lengths),
        long_prompt=lengths[int(0.95 * (len(lengths) - 1))],
        answer_tokens=mean,
        tried=len(answers),
        ended=sum(reason == OVER for _, reason in answers) / max(1, len(answers)),
        ids=expected_ids(seen, size, always, coverage, USUAL_TEXTS * mean),
        coverage=coverage,
    )


def _with_questions(
    made: Preparation, samples: Sequence[Sample], reporter: Reporter
) -> Sequence[Sample]:
    """The samples, and where they are few some questions of the target, which are written now and
    thrown away."""
    if len(samples) >= TRIED:
        return samples
    few = made.data.model_copy(update={"source": SELF, "prompts": TRIED - len(samples)})
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        data = with_questions(replace(made, data=few), Path(folder), reporter, Ranks())
        return [*samples, *_samples(data, Defects())]


def _of_documents(
    data: DataPart, target: Target, count: int | None, samples: Sequence[Sample], coverage: float
) -> DataFacts:
    """The facts of data whose own words are learned."""
    texts, said = list[Sequence[int]](), 0
    for sample in samples:
        try:
            documents = encode_documents(target, sample, data.train_on_prompt)
        except ValueError:
            continue
        texts += [document.ids.tolist() for document in documents]
        said += sum(int(document.mask.sum()) for document in documents)
    if not texts:
        raise _nothing(data, "no sample of the data can be learned", Defects())
    lengths = sorted(map(len, texts))
    mean, answer = sum(lengths) / len(texts), said / len(texts)
    size, always = target.spec.vocab_size, always_kept(target)
    ids = expected_ids(texts, size, always, coverage, USUAL_TEXTS * mean)
    long = lengths[int(0.95 * (len(texts) - 1))]
    return DataFacts(count, mean - answer, long, answer, len(texts), 1.0, ids, coverage)


def some_prompts(data: DataPart) -> SomePrompts:
    """How many samples the sources hold, and some of them; RecipeError where they hold none. A data
    set of the hub is not read to its end."""
    others = others_of(data)
    if others is None:
        return SomePrompts(0, ())
    names = names_of(others.source)
    is_far = any(find_source(n, data.format, data.split).kind == HUB for n in names)
    random, kept, count = Random(data.seed), list[Sample](), 0
    defects = Defects()
    for sample in _samples(others, defects):
        count += 1
        if len(kept) < LOOKED_AT:
            kept.append(sample)
        elif is_far:
            return SomePrompts(None, tuple(kept))
        elif (place := random.randrange(count)) < LOOKED_AT:
            kept[place] = sample
    if not count:
        raise _nothing(others, "the data hold nothing to learn from", defects)
    return SomePrompts(count, tuple(kept))


def held_prompts(data: DataPart) -> int:
    """`data.prompts`, or as many as there are in sources that hold fewer conversations: each is one
    prompt, while a text gives any number. Nothing is read of the hub, nor more than is wanted.
    RecipeError where files are there and nothing in them can be read."""
    names = names_of(data.source)
    if uses_self(data.source):
        return data.prompts
    count, defects = 0, Defects()
    try:
        if any(find_source(name, data.format, data.split).kind == HUB for name in names):
            return data.prompts
        for sample in _samples(data, defects):
            if not (data.regenerate and sample.messages):
                return data.prompts
            count += 1
            if count >= data.prompts:
                break
    except (SpecctlError, OSError):  # not here yet: training says what is wrong
        return data.prompts
    if not count:
        raise _nothing(data, "the data hold nothing to learn from", defects)
    return min(count, data.prompts)


def _samples(data: DataPart, defects: Defects) -> Iterator[Sample]:
    choices = field_choices(data)
    found = read_samples(data.source, data.format, data.split, data.seed, defects, choices)
    return map(without_images, found)


def _prompts(made: Preparation, samples: Sequence[Sample]) -> list[PromptCut]:
    defects = Defects()
    cuts = cut_prompts(made.target, samples, made.plan(len(samples)), defects)
    if cuts:
        return cuts
    raise _nothing(made.data, "no prompt of the data can be answered", defects)


def _nothing(data: DataPart, what: str, defects: Defects) -> RecipeError:
    return RecipeError(
        what,
        where="data.source",
        found="; ".join(defects.lines()) or f"nothing in {', '.join(names_of(data.source))}",
        expected="conversations that end before an assistant's turn, prompts, or text",
        do="correct the file, or choose a target that can answer it",
    )


def _tried(
    made: Preparation, cuts: Sequence[PromptCut], reporter: Reporter, tried: Tried
) -> list[tuple[Sequence[int], str]]:
    """New ids and the finish reason of an answer to each prompt; none where the target writes no
    answers here."""
    data = made.data
    if not data.regenerate or data.endpoint is not None or not made.target.can_run:
        return []
    plan, target = made.plan(len(cuts)), made.writer()
    longest = max(len(cut.ids) for cut in cuts) + plan.new_tokens
    writer = EngineWriter(target, longest, len(cuts))
    jobs = (AnswerJob(i, 0, cut.ids, sampling_of(i, plan)) for i, cut in enumerate(cuts))
    found: list[tuple[Sequence[int], str]] = []
    with reporter.task("trying the target's answers", len(cuts), "prompts") as advance:

        def done(job: AnswerJob, new_ids: Sequence[int], reason: str) -> None:
            del job
            found.append((new_ids, reason))
            advance(1)
            tried()

        writer.write(jobs, done)
    _check_answers(target, found)
    return found


def _warn_of_misfit(target: Target, samples: Sequence[Sample], reporter: Reporter) -> None:
    """Say so where a target that is no chat model reads conversations, or one predicts the prompts
    as badly as text of a language that it has not learned."""
    if target.why_text is not None and any(sample.messages for sample in samples):
        reporter.warn(
            f"data: target {target.name} is no chat model ({target.why_text}): it goes on from "
            "your prompts as from any text"
        )
    if not samples or not target.can_run:
        return
    bits = bits_per_byte(target, [_prompt_text(sample) for sample in samples])
    if bits > UNKNOWN_BITS:
        reporter.warn(
            f"data: target {target.name} needs {bits:.1f} bits for a byte of your prompts; about 1 "
            f"is usual, and above {UNKNOWN_BITS:g} a target hardly knows such text or its "
            f'language. Look at its answers first: specctl generate --target {target.name} "..."'
        )


def _prompt_text(sample: Sample) -> str:
    """The first words of a user, or the beginning of a text."""
    for message in sample.messages:
        if message["role"] == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return sample.text


@torch.no_grad()
def bits_per_byte(target: Target, texts: Sequence[str]) -> float:
    """By how many bits the target falls short of certainty for a byte of the texts' beginnings, all
    read at once; 0.0 where they have none."""
    read = [torch.tensor(target.encode(text)[:PREDICTED]) for text in texts]
    read = [ids_S for ids_S in read if len(ids_S) >= LEAST_PREDICTED]
    if not read:
        return 0.0
    ids_BS = torch.cat(read)[None].to(target.device)
    position_BS = torch.cat([torch.arange(len(one)) for one in read])[None].to(target.device)
    document_BS = (position_BS == 0).cumsum(1) - 1
    logits = target.lm.dense(ids_BS, position_BS, target.lm.document_masks(document_BS)).logits_BTV
    assert logits is not None, "asked for"
    lost_S = cross_entropy(logits[0, :-1].float(), ids_BS[0, 1:], reduction="none")
    lost = float(lost_S[position_BS[0, 1:] > 0].sum()) / math.log(2)
    return lost / sum(len(target.decode(one[1:].tolist()).encode()) for one in read)


def _check_answers(target: Target, found: Sequence[tuple[Sequence[int], str]]) -> None:
    mean = sum(len(ids) for ids, _ in found) / len(found)
    if mean >= LEAST_ANSWER:
        return
    raise RecipeError(
        f"target {target.name} ends its answers at once: there is nothing to learn",
        where="data.source",
        found=f"{len(found)} answers of {mean:.1f} tokens on average",
        expected=f"at least {LEAST_ANSWER} tokens",
        do=f'look at what it says: specctl generate --target {target.name} "..."',
    )


def expected_ids(
    texts: Sequence[Sequence[int]],
    vocab_size: int,
    always: Sequence[int],
    coverage: float,
    usual: float,
) -> int:
    """How many ids `vocab.size: auto` is expected to keep: those that cover that share of texts
    that were not ranked, and at most as many as the `usual` tokens of a run will hold. Fewer tokens
    hold only a part of these, which grows by Heaps' law."""
    documents = ((ids, "text") for ids in texts)
    counts, heldout = count_tokens(documents, vocab_size)
    growth = max(1.0, usual / sum(map(len, texts))) ** HEAPS
    seen = int(growth * len(seen_ranking(counts, always)))
    return min(seen, fewest(ranking(counts, always), heldout, always, coverage))
