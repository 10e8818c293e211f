"""follow_policy(): a drafter beside a policy that is being trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from specctl.api.arguments.arguments import MOST_ROWS, check_count
from specctl.api.arguments.drafting import load_draft
from specctl.api.arguments.targets import tokenizer_of
from specctl.api.failures import raises_user_errors
from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.recipes.schema import TrainPart
from specctl.recipes.serve import is_relaxed
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.variants.moving import MovingTarget
from specctl.train.rollouts import RolloutDrafter, check_sampling

MOST_KEPT = 1 << 20  # rollouts


@raises_user_errors
def follow_policy(
    policy: Any,
    drafter: str | Drafter,
    *,
    sampling: Sampling | None = None,
    tokenizer: Any = None,
    learning_rate: float = 2e-3,
    optimizer: str = "muon",
    rows: int = 8,
    keep: int = 256,
    batch: int = 16,
    seed: int = 0,
    allow: Sequence[str] = (),
    **drafting: Any,
) -> RolloutDrafter:
    """Put a drafter beside a policy that somebody else trains, a model of transformers (or peft) in
    memory: `rollouts(prompts)` of the result writes with the policy of that moment, `follow(steps)`
    trains the drafter on the newest `keep` rollouts.

    The policy is only read, and its weights are not copied. Call this when its adapters are added
    and it lies on its device. `sampling` may set temperature, seed, max_new_tokens and stops.
    `learning_rate`, `optimizer` ("muon" or "adamw") and `rows` of a step are how the drafter
    learns, `seed` in which order; its weights are changed in place. `drafting`: `tree`, `length`
    and `nodes` of the drafts, as `policy`, `length` and `nodes` of `generate`; `rule`. `allow` is
    that of load_drafter.
    """
    check_count("keep", keep, MOST_KEPT)
    check_count("batch", batch, MOST_ROWS)
    sampling = sampling if sampling is not None else Sampling(temperature=1.0)
    if not isinstance(sampling, Sampling):
        raise SpecctlError(
            "this says nothing of how rollouts are drawn",
            where="sampling",
            found=type(sampling).__name__,
            expected="specctl.Sampling, or None: temperature 1",
            do="sampling=specctl.Sampling(temperature=1.0, max_new_tokens=256)",
        )
    check_sampling(sampling)
    settings = _settings(learning_rate=learning_rate, optimizer=optimizer, rows=rows, seed=seed)
    unknown = sorted({*drafting} - {"tree", "length", "nodes", "rule"})
    if unknown:
        raise RecipeError(
            f"unknown setting {unknown[0]!r}",
            where="specctl.follow_policy",
            found=", ".join(unknown),
            expected="tree, length, nodes, rule, or an argument of follow_policy",
            do="help(specctl.follow_policy)",
        )
    if not (hasattr(policy, "config") and hasattr(policy, "parameters")):
        raise SpecctlError(
            "this is no policy",
            where="policy",
            found=type(policy).__name__,
            expected="a causal language model of transformers, in memory",
            do="AutoModelForCausalLM.from_pretrained(...), or the model that you train",
        )
    moving = MovingTarget(policy, tokenizer or tokenizer_of(policy))
    how = {("policy" if name == "tree" else name): value for name, value in drafting.items()}
    draft = load_draft(drafter, moving.now(), allow=tuple(allow), **how)
    if draft.drafter is None or not draft.drafter.lossless or is_relaxed(draft.rule):
        raise IncompatibleError(
            "rollouts must follow the policy's own distribution",
            found=f"{draft.name}, rule {draft.rule}",
            expected="a lossless drafter with weights, and a lossless rule",
            do="take an eagle3 package, and leave the rule out",
            where="drafter",
        )
    return RolloutDrafter(
        moving,
        draft.drafter,
        sampling,
        settings,
        tree=draft.policy,
        rule=draft.rule,
        batch=batch,
        keep=keep,
    )


def _settings(**given: Any) -> TrainPart:
    try:
        return TrainPart(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0])
        raise RecipeError(
            f"{name} cannot be used",
            where=f"specctl.follow_policy: {name}",
            found=repr(given.get(name))[:80],
            expected=str(first["msg"]),
            do=f"give another {name}, or leave it out",
        ) from error
