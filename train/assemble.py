"""The parts of a training run, each built from the recipe: drafter, prompts, decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from pydantic import ValidationError

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Drafter, Family
from specctl.core.errors import RecipeError, nearest, one_of
from specctl.core.forward.attention_only import AttentionOnly, borrowing, of_serving
from specctl.core.forward.prompt_images import PromptImages, StoredImage
from specctl.core.messages.printable import counted
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import family as family_named
from specctl.drafters.nets.options import read_options
from specctl.drafters.nets.shortlist import check_shortlist
from specctl.models.hf.hf_spec import refuse_with_states
from specctl.recipes.low_rank import JointPart
from specctl.recipes.schema import DataPart, DrafterPart, TrainPart
from specctl.recipes.serve import ServePart
from specctl.runtime.generate import generate
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.measure.stats import Stats
from specctl.runtime.policies import Policy, make_policy, policies_of
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.verify.relaxed import relaxation
from specctl.train.data.images.shown_images import ImageReader
from specctl.train.data.prompts.heldout import heldout_prompts, num_held
from specctl.train.data.prompts.suite_prompts import SuitePrompts
from specctl.train.data.rows.rows import TokenData
from specctl.train.metrics.metrics import (
    MeasuredAcceptance,
    SuiteTau,
    Totals,
    alphas,
    means,
    simulated_tau,
)

Prompts = Sequence[Sequence[int]]
BatchOf = Callable[[list[int]], TrainBatch]


def attention_only(part: DrafterPart, serve: ServePart) -> tuple[AttentionOnly, ...]:
    """What the drafter, and the way it is served, need of a target of attention alone."""
    name = part.family
    borrowed = [borrowing(name)] if family_named(name).borrows_layers else []
    return (*borrowed, *of_serving(serve.model_dump()))


def check_states(config: Any, wanted: Sequence[AttentionOnly], name: str) -> None:
    """Refuse a target whose configuration says that its recurrent states cannot go with that."""
    if config is not None:
        refuse_with_states(config, wanted, name)


def trainable_family(part: DrafterPart, joint: JointPart | None) -> Family:
    """The recipe's family; an error if it has no weights, unless the target alone learns."""
    family = family_named(part.family)
    if not family.trainable and (joint is None or joint.alone is None):
        raise RecipeError(
            f"{family.name} has nothing to train",
            found=f"drafter.family: {family.name}",
            expected="a family with weights",
            do=f"use it as it is: specctl generate --draft {family.name}",
            where="drafter.family",
        )
    return family


def served_family(part: DrafterPart, joint: JointPart | None, serve: ServePart) -> Family:
    """The same; an error as well if it cannot draft as the recipe says."""
    family = trainable_family(part, joint)
    if serve.policy not in policies_of(family):
        raise RecipeError(
            f"{family.name} cannot be grown by policy {serve.policy}",
            expected=one_of(policies_of(family), "specctl recipes schema --field serve"),
            do=f"--set serve.policy={family.policies[0]}",
            where="serve.policy",
        )
    relaxation(serve.rule)  # refuses wrong numbers now, not when the training is over
    if serve.stop_file is not None:
        raise RecipeError(
            "a trained stop rule is no part of a package",
            found=serve.stop_file,
            expected="a policy that needs no other file",
            do="leave serve.stop_file out, and give the file to generate, bench or serve with "
            "--set serve.stop",
            where="serve.stop_file",
        )
    return family


def family_options(family: Family, part: DrafterPart) -> Any:
    """The recipe's options as the family's own dataclass."""
    known = [field.name for field in fields(family.options)]
    for name in part.options:
        if name not in known:
            raise RecipeError(
                f"{family.name} has no option {name!r}",
                expected=", ".join(known),
                do=f"write one of: {nearest(name, known)}",
                where=f"drafter.options.{name}",
            )
    try:
        return read_options(family.options, part.options)
    except ValidationError as error:
        problem = error.errors()[0]
        option, *inside = problem["loc"] or ("drafter.options",)
        message = problem["msg"]
        raise RecipeError(
            f"option {option} of {family.name} is not valid",
            found=repr(problem["input"])[:120],
            expected=message[0].lower() + message[1:],
            do=f"correct {option}, or leave it out",
            where=".".join(map(str, ("drafter.options", option, *inside))),
        ) from error


def build_drafter(
    part: DrafterPart, train: TrainPart, spec: ModelSpec, vocab: VocabMap | None
) -> Drafter:
    """A fresh drafter on the CPU in float32; its weights follow from train.seed."""
    family = trainable_family(part, train.joint)
    options = family_options(family, part)
    torch.manual_seed(train.seed)
    drafter = family.build(options, spec, vocab)
    check_shortlist(drafter)
    return drafter


def what_trains(drafter: Drafter) -> list[str]:
    """Lines that say which tensors move, which are frozen, and what is shared."""
    trainable = drafter.trainable()
    if drafter.module is None:
        return [f"{drafter.family} has no weights: the target alone learns"]
    frozen = {n: p for n, p in drafter.module.named_parameters() if n not in trainable}
    count = sum(p.numel() for p in trainable.values())
    lines = [f"trains {count:,} parameters: {_names(trainable)}"]
    if frozen:
        count = sum(p.numel() for p in frozen.values())
        lines.append(f"frozen {count:,} parameters: {_names(frozen)}")
    if drafter.needs().borrow:
        head = "" if "lm_head.weight" in trainable else ", LM head"
        lines.append(f"frozen, shared with the target: embedding{head}")
    return lines


def _names(named: dict[str, torch.nn.Parameter], most: int = 6) -> str:
    names = [name.removesuffix(".weight") for name in named]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_answers(data: DataPart, target: Target) -> None:
    """A target that is only read writes no answers, and drafts nothing."""
    writes = data.on_policy or (data.regenerate and not data.endpoint)
    if target.can_run or not writes:
        return
    raise RecipeError(
        f"target {target.name} can be read here, but not run, so it writes no answers",
        where="data.regenerate" if data.regenerate else "data.on_policy",
        found=getattr(target.lm, "reason", ""),
        expected="data with the target's own answers in them, written by a serving engine",
        do="--set data.regenerate=false --set data.on_policy=0 --data ANSWERS.jsonl",
    )


def measuring_rows(part: DataPart, data: TokenData, can_run: bool = True) -> range:
    """The rows that are held out: as many as when the data were first made, the last ones."""
    held = data.manifest.held
    if held is None:
        held = num_held(part, data.num_rows, can_run)
    return range(data.num_rows - held, data.num_rows)


def measuring_images(
    part: DataPart, count: int, target: Target, data: TokenData
) -> Sequence[PromptImages | None] | None:
    """The images of each of `measuring_prompts`, as the target sees them; None where no prompt has
    any."""
    held = measuring_rows(part, data)
    if not data.images or not held or not target.can_run:
        return None
    reader = ImageReader(target)
    return [
        reader.seen(prompt.ids, prompt.images) if prompt.images else None
        for prompt in islice(cut_documents(data, held, part.prompt_tokens), count)
    ]


def measuring_prompts(part: DataPart, count: int, target: Target, data: TokenData) -> Prompts:
    """What tau is measured on: `count` held-out prompts, or beginnings of kept-back documents."""
    if not target.can_run:
        return []
    held = measuring_rows(part, data)
    if not held:
        return [prompt.ids for prompt in heldout_prompts(target, count)]
    return document_prompts(data, held, count, part.prompt_tokens)


def document_prompts(data: TokenData, rows: Sequence[int], count: int, most: int) -> Prompts:
    """Of each document in the rows, what stands before its first predicted token; of text in which
    everything is predicted, up to half of it and at most `most` tokens."""
    return [prompt.ids for prompt in islice(cut_documents(data, rows, most), count)]


@dataclass(frozen=True, slots=True)
class DocumentPrompt:
    """What stands before the first predicted token of a document, and the images in it."""

    ids: list[int]
    images: tuple[StoredImage, ...]


def cut_documents(data: TokenData, rows: Sequence[int], most: int) -> Iterator[DocumentPrompt]:
    """The prompts of `document_prompts`, one by one."""
    batch = data.batch(list(rows))
    for ids_S, mask_S, document_S in zip(
        batch.ids_BS, batch.loss_mask_BS, batch.document_BS, strict=True
    ):
        for number in document_S[document_S >= 0].unique_consecutive().tolist():
            ids = ids_S[document_S == number].tolist()
            images = data.images.get(number, ())
            marks = mask_S[document_S == number].int()
            if images:  # prompts that are learned, too, are not cut within an image
                marks[: images[-1].end] = 0
            first = int(marks.argmax())
            cut = first if first >= 2 else min(most, len(ids) // 2)
            if cut >= 1:
                yield DocumentPrompt(ids[:cut], tuple(i for i in images if i.end <= cut))


def decoder(
    serve: ServePart,
    train: TrainPart,
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    suite: SuitePrompts | None = None,
    images: Sequence[PromptImages | None] | None = None,
) -> Callable[[], MeasuredAcceptance]:
    """A function that decodes the prompts greedily through the engine and measures acceptance, and
    after them those of a suite, apart. `images`: of each prompt."""
    policy, other = (make_policy(serve.model_dump()) for _ in range(2))
    sampling = Sampling(temperature=0.0, max_new_tokens=train.tau_tokens)

    def decoded(
        prompts: Prompts, policy: Policy, shown: Sequence[PromptImages | None] | None = None
    ) -> Stats:
        batch = min(len(prompts), train.tau_prompts)  # what the plan of the memory counts
        return generate(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            policy=policy,
            batch=batch,
            images=shown,
        ).stats

    def on_suite() -> SuiteTau | None:
        if suite is None:
            return None
        return SuiteTau(suite.name, decoded(suite.prompts, other).tau, len(suite.prompts))

    def measure() -> MeasuredAcceptance:
        stats = decoded(prompts, policy, images)
        return MeasuredAcceptance(
            tau=stats.tau,
            alpha=stats.alpha,
            accepted_per_position=stats.accepted_per_position,
            prompts=len(prompts),
            tokens=stats.tokens,
            temperature=0.0,
            suite=on_suite(),
        )

    return measure


def estimator(
    train: TrainPart, length: int, drafter: Drafter, batch: BatchOf, rows: Sequence[int]
) -> Callable[[], MeasuredAcceptance]:
    """A function that estimates acceptance without decoding: the alphas of the loss over rows that
    were kept back, each position behind the text itself, and the tau of a chain of `length` that
    passes with them. For a target that cannot be run here, or whose layers are elsewhere."""
    held = list(rows)[: train.tau_prompts]

    def measure() -> MeasuredAcceptance:
        totals = Totals()
        for first in range(0, len(held), train.rows):
            read = batch(held[first : first + train.rows])
            totals = totals.plus(drafter.loss(read), read)
        figures = means(totals.to_floats())
        alpha = alphas(figures) or (figures.get("top1", 0.0),)
        return MeasuredAcceptance(
            tau=simulated_tau(alpha, length) or 1.0,
            alpha=alpha[0],
            accepted_per_position=alpha[:length],
            prompts=len(held),
            tokens=round(float(totals.pairs["tokens"][0])),
            temperature=1.0,
            is_estimate=True,
        )

    return measure


def say_data(data: DataPart, train: TrainPart, num_rows: int, reporter: Reporter) -> None:
    """How often the run will read each row; many times over means it will learn them by heart."""
    fresh = data.on_policy
    read = train.steps * train.rows * train.accumulate * (1.0 - fresh)
    epochs = read / num_rows
    if fresh:
        every = data.on_policy_every
        reporter.say(f"the drafter writes {fresh:.0%} of every batch, anew every {every:,} steps")
    reporter.say(f"{counted(num_rows, 'row')} to train on, {epochs:.1f} epochs")
    if epochs > 40:
        reporter.warn(
            f"each row will be read {epochs:.0f} times: the drafter will learn the rows, not the "
            "target; raise data.prompts or lower train.steps"
        )
