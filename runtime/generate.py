"""generate(): prompts in, texts and statistics out. The one call behind `specctl generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError, SpecctlError, one_of_two
from specctl.core.forward.prompt_images import PromptImages
from specctl.core.messages.printable import counted
from specctl.drafters import family
from specctl.recipes.serve import check_in_parallel
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.image_rows import check_image_rows, with_images
from specctl.runtime.engine.request import Completion, Request, Row
from specctl.runtime.kept_prompts import KeptPrompts, make_kept_prompts
from specctl.runtime.measure.stats import Stats, add_counts, repetition_rate
from specctl.runtime.outline.answer import OutlineReport
from specctl.runtime.pearl import Pearl
from specctl.runtime.policies import Policy, make_policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.policies.switch import Switch
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.text.prompt_limits import check_room
from specctl.runtime.target.text.text_stream import TokenDecoder, whole_text
from specctl.runtime.turns import Turns, make_turns
from specctl.runtime.verify.choice import verification_of

OnTokens = Callable[[int, tuple[int, ...]], None]
Writer = Engine | Pearl | Turns | KeptPrompts
OnRound = Callable[[int, tuple[int, ...], int], None]  # prompt, new ids, how many were drafted


@dataclass(frozen=True, slots=True)
class Output:
    """One continuation. `token_ids` are the emitted tokens, an ending EOS included; `text` leaves
    special tokens out and ends before a stop string or a stop token. `outline`: how it was written,
    where that was from one (runtime/outline)."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    outline: OutlineReport | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            **({} if self.outline is None else {"outline": self.outline.to_json()}),
        }


@dataclass(frozen=True, slots=True)
class Generated:
    """Outputs in the order of the prompts, and the run's statistics."""

    outputs: tuple[Output, ...]
    stats: Stats

    def to_json(self) -> dict[str, Any]:
        return {"outputs": [o.to_json() for o in self.outputs], "stats": self.stats.to_json()}


def check_greedy(rule: str, sampling: Sampling) -> None:
    """Refuses to sample where nothing but the target's best token is accepted."""
    if rule == "greedy" and sampling.temperature > 0:
        raise RecipeError(
            "rule greedy cannot verify sampled text",
            found=f"temperature {sampling.temperature:g}",
            expected="temperature 0, or a rule for sampling",
            do="leave the rule at auto, or set the temperature to 0",
        )


def default_policy(drafter: Drafter | None) -> Policy:
    """The first policy of the drafter's family."""
    if drafter is None:
        return make_policy({"policy": "direct"})
    names = drafter.policies or family(drafter.family).policies
    return make_policy({"policy": names[0]})


def generate(
    target: Target,
    prompts: Sequence[str | Sequence[int]],
    *,
    drafter: Drafter | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    policy: Policy | None = None,
    rule: str = "auto",
    batch: int = 1,
    chooser: LengthChooser | None = None,
    on_tokens: OnTokens | None = None,
    on_round: OnRound | None = None,
    parallel: bool = False,
    images: Sequence[PromptImages | None] | None = None,
    drafts: bool | str | Sequence[bool | str] = True,
) -> Generated:
    """Continue every prompt (text or token ids). Prompt i uses seed `sampling.seed + i`; settings
    that are given for each prompt differ in seeds and processors alone.

    Lossless for every drafter of a lossless family: greedy output is token-identical in float32,
    sampled output follows the target's distribution. `parallel`: the drafter goes on while the
    target verifies (PEARL), one prompt at a time, as models that write in turns do. Where a model
    beside the target chooses what is kept of prompts, this holds behind what is kept. `images`:
    those of each prompt, which then holds their placeholders (`Vision.see`); what stands for an
    image alone is not drawn behind it. `drafts`: of a team the member that drafts for all prompts
    or for each, by name; False: nothing is drafted. Raises SpecctlError for an empty or too long
    prompt, an unknown drafter and a rule that is illegal with the policy.
    """
    sampling, each = by_prompt(sampling, len(prompts))
    check_greedy(rule, sampling)
    policy = policy if policy is not None else default_policy(drafter)
    shown = [None] * len(prompts) if images is None else images
    who = drafts_by_prompt(drafts, len(prompts))
    requests = [
        with_images(target, Request(_tokens(target, prompt, i), own, drafts=name), seen)
        for i, (prompt, own, seen, name) in enumerate(zip(prompts, each, shown, who, strict=True))
    ]
    if any(seen is not None for seen in shown):
        check_image_rows(target, parallel)
    if drafts is not True and (parallel or (target.mixture is not None and target.beside)):
        raise one_of_two(
            "one drafter drafts for all where models run beside the target",
            "drafts and serve.parallel, or --mix",
            "leave drafts out",
        )
    slots = max(1, min(batch, len(requests)))
    engine: Writer
    if target.mixture is not None and target.beside:
        if parallel:
            raise one_of_two(
                f"{target.mixture.law} does not go with drafting beside the target",
                f"--mix {target.mixture} and serve.parallel",
                "leave out serve.parallel",
            )
        if target.mixture.keeps_part:
            engine = make_kept_prompts(target, drafter, policy, rule, slots, chooser)
        else:
            engine = make_turns(target, drafter, policy, rule, chooser)
    elif parallel and drafter is not None:
        check_in_parallel(parallel, rule)
        engine = Pearl(target, drafter, policy)
    else:
        engine = Engine(target, drafter, policy, rule, num_slots=slots, chooser=chooser)
    started = time.perf_counter()
    reported: dict[int, int] = {}  # prompt -> accepted tokens of the rounds before

    def report(row: Row, new: tuple[int, ...]) -> None:
        if on_tokens is not None:
            on_tokens(row.index, new)
        if on_round is not None:
            accepted = row.stats.accepted - reported.get(row.index, 0)
            reported[row.index] = row.stats.accepted
            on_round(row.index, new, min(accepted, len(new)))

    completions = engine.run(requests, report)
    seconds = time.perf_counter() - started
    texts = [p if isinstance(p, str) else _text(target, p) for p in prompts]
    plain = TokenDecoder(lambda ids: _text(target, ids))  # reads no vocabulary, which takes time
    decoder = TokenDecoder.of(target) if sampling.stop else plain
    outputs = tuple(_output(t, c, decoder) for t, c in zip(texts, completions, strict=True))
    mark = mark_of(rule, drafter, policy, target, sampling, parallel)
    return Generated(outputs, summarize(completions, engine, seconds, mark))


def by_prompt(
    sampling: Sampling | Sequence[Sampling] | None, count: int
) -> tuple[Sampling, Sequence[Sampling]]:
    """What holds for all of so many prompts, and the settings of each."""
    if sampling is None or isinstance(sampling, Sampling):
        sampling = sampling or Sampling()
        return sampling, [replace(sampling, seed=sampling.seed + i) for i in range(count)]
    first = sampling[0] if sampling else Sampling()
    is_alike = all(replace(first, seed=o.seed, processors=o.processors) == o for o in sampling)
    if len(sampling) != count or not is_alike:
        raise SpecctlError(
            "settings of each prompt may differ in seeds and processors alone",
            where="sampling",
            found=f"{len(sampling):,} for {counted(count, 'prompt')}",
            expected="as many as prompts, otherwise the same",
            do="give one Sampling, or generate prompt by prompt",
        )
    return first, sampling


def drafts_by_prompt(drafts: bool | str | Sequence[bool | str], count: int) -> list[bool | str]:
    """Who drafts for each of so many prompts."""
    found = [drafts] * count if isinstance(drafts, bool | str) else list(drafts)
    if len(found) != count:
        raise SpecctlError(
            "who drafts is said for all prompts, or for each of them",
            where="drafts",
            found=f"{len(found):,} for {counted(count, 'prompt')}",
            expected="one name, True or False, or as many as prompts",
            do="give one, or as many as prompts",
        )
    return found


def mark_of(
    rule: str,
    drafter: Drafter | None,
    policy: Policy,
    target: Target,
    sampling: Sampling,
    parallel: bool,
) -> str:
    """Class and rule of what is emitted, as results show them."""
    sampled = sampling.temperature > 0
    rule = "chain" if parallel and sampled else rule
    found = verification_of(rule, drafter, policy, sampled, target)
    return f"{found['class']}:{found['rule']}"


def summarize(
    completions: Sequence[Completion],
    engine: Writer,
    seconds: float,
    verification: str,
) -> Stats:
    """Statistics of a finished run."""
    rows = [c.stats for c in completions]
    return Stats(
        rounds=sum(r.rounds for r in rows),
        drafted=sum(r.drafted for r in rows),
        accepted=sum(r.accepted for r in rows),
        tokens=sum(r.tokens for r in rows),
        accepted_at=add_counts(r.accepted_at for r in rows),
        tested_at=add_counts(r.tested_at for r in rows),
        seconds=seconds,
        prefill_seconds=engine.prefill_seconds,
        draft_seconds=engine.draft_seconds,
        verify_seconds=engine.verify_seconds,
        verification=verification,
        repetition_rate=repetition_rate([c.tokens for c in completions]),
        controller=engine.policy.to_json() if isinstance(engine.policy, Switch) else None,
        turns=engine.counts if isinstance(engine, Turns) else None,
        kept=engine.counts if isinstance(engine, KeptPrompts) else None,
    )


def _tokens(target: Target, prompt: str | Sequence[int], index: int) -> tuple[int, ...]:
    if isinstance(prompt, str):
        check_room(target, prompt)
    tokens = tuple(target.encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise SpecctlError(
            f"prompt {index} is empty", expected="at least one token", do="give it some text"
        )
    bad = [t for t in tokens if not 0 <= t < target.spec.vocab_size]
    if bad:
        raise SpecctlError(
            f"prompt {index} has a token outside the target's vocabulary",
            found=str(bad[0]),
            expected=f"0 to {target.spec.vocab_size - 1}",
            do="encode the prompt with the target's own tokenizer",
        )
    return tokens


def _text(target: Target, tokens: Sequence[int]) -> str:
    """Decoded text; empty for a target without a tokenizer."""
    return "" if target.tokenizer is None else target.decode(tokens)


def _output(prompt: str, completion: Completion, decoder: TokenDecoder) -> Output:
    """A stop token belongs to the ids and not to the text, as a stop string does not."""
    tokens, sampling = completion.tokens, completion.request.sampling
    is_token = completion.finish_reason == "stop" and tokens[-1] in sampling.stop_token_ids
    text = whole_text(decoder, tokens[:-1] if is_token else tokens, sampling.stop)
    return Output(prompt, text, tokens, completion.finish_reason)
