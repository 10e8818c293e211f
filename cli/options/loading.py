"""From the words of a command line to drafters and policies; torch comes late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.cli.app.console import Console
from specctl.cli.options.flags import (
    AdaptiveFlag,
    Allow,
    ControllerFlag,
    Draft,
    LengthFlag,
    NodesFlag,
    ParallelFlag,
    PolicyFlag,
    RuleFlag,
    StopRuleFlag,
    TranslateFlag,
)
from specctl.core.errors import RecipeError, SpecctlError, did_you_mean, one_of

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.runtime.measure.cost_table import CostTable
    from specctl.runtime.policies import Policy
    from specctl.runtime.target.target import Target

NO_DRAFTER = "none"
COST_ROUNDS = 16  # timed rounds of each draft length


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFlags:
    """How to draft; None leaves it to the package, then to the family."""

    policy: PolicyFlag = None
    length: LengthFlag = None
    nodes: NodesFlag = None
    rule: RuleFlag = None
    stop_rule: StopRuleFlag = None
    controller: ControllerFlag = None
    parallel: ParallelFlag = None
    adaptive: AdaptiveFlag = None
    allow: Allow = None
    translate: TranslateFlag = "auto"

    def of(self, draft: str) -> DraftChoice:
        """The same settings for the drafter of that name."""
        given = {field.name: getattr(self, field.name) for field in fields(DraftingFlags)}
        return DraftChoice(draft, **given)


@dataclass(frozen=True, slots=True)
class DraftChoice(DraftingFlags):
    """What the drafting flags say, drafter included."""

    draft: Draft = NO_DRAFTER

    def load(self, target: Target) -> LoadedDraft:
        """The drafter with the policy and rule it is to be served by; drafter None for plain."""
        if self.draft == NO_DRAFTER:
            self._refuse_settings()
            return LoadedDraft("plain", None, None, "auto", False)
        from specctl.drafters import family
        from specctl.export.package.folder import load_drafter
        from specctl.runtime.cross_vocab.translate import check_method

        allow = tuple(self.allow or ())
        how = None if self.translate == "none" else self.translate
        if how is not None:
            check_method(how)  # also where nothing needs to be translated
        drafter = load_drafter(self.draft, target, allow=allow, translate=how)
        from specctl.runtime.policies import make_policy, policies_of

        policies = drafter.policies or policies_of(family(drafter.family))
        serve = self._serve({} if drafter.policies else packaged_serve(self.draft), policies)
        rule = str(serve.get("rule") or "auto")
        adaptive = True if serve.get("adaptive") else self.adaptive
        parallel = bool(serve.get("parallel"))
        return LoadedDraft(self.draft, drafter, make_policy(serve), rule, adaptive, parallel)

    def _serve(self, packaged: dict[str, Any], policies: Sequence[str]) -> dict[str, Any]:
        flags = {
            "policy": self.policy,
            "length": self.length,
            "nodes": self.nodes,
            "rule": self.rule,
            "controller": self.controller,
            "parallel": self.parallel,
            "adaptive": self.adaptive,
            **_stop_settings(self.stop_rule),
        }
        serve = dict(packaged)
        if self.policy is not None and self.policy != packaged.get("policy"):
            kept = ("length", "rule", "adaptive", "parallel")
            serve = {k: v for k, v in serve.items() if k in kept}
        serve |= {k: v for k, v in flags.items() if v is not None}
        serve.setdefault("policy", policies[0])
        if serve["policy"] not in policies:
            raise RecipeError(
                f"this drafter cannot be grown by policy {serve['policy']!r}",
                where="--policy",
                found=str(serve["policy"]),
                expected=one_of(policies, "specctl recipes schema --field serve"),
                do=did_you_mean(str(serve["policy"]), policies, f"--policy {policies[0]}"),
            )
        from specctl.recipes.serve import POLICY_FIELDS

        given = {"nodes": self.nodes, "stop": self.stop_rule, "controller": self.controller}
        for key, value in given.items():
            if value is not None and key not in POLICY_FIELDS[serve["policy"]]:
                raise _ignored(key, str(value), serve["policy"], policies)
        return serve

    def _refuse_settings(self) -> None:
        others = ("allow", "translate")
        names = [field.name for field in fields(DraftingFlags) if field.name not in others]
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if given:
            raise SpecctlError(
                f"{', '.join(given)} says how to draft, but there is no drafter",
                where="the command line",
                found="--draft none",
                expected="a package folder, prompt-lookup or token-recycling",
                do="--draft prompt-lookup",
            )


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter ready to be served."""

    name: str
    drafter: Drafter | None
    policy: Policy | None
    rule: str
    is_adaptive: bool | None  # None: where the costs are known
    parallel: bool = False

    @property
    def source(self) -> str:
        """What tells it from other drafters: the digest of a package, else its name."""
        return _source(self.name)

    def announce(self, console: Console) -> None:
        """Say what a user should know before this drafter is used."""
        if self.drafter is None:
            return
        if self.drafter.note:
            console.say(self.drafter.note)
        if not self.drafter.lossless:
            console.warn(
                f"{self.drafter.family} is approximate: it changes the target's answers by design"
            )

    def costs(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        batch: int = 1,
        *,
        sampled: bool = False,
        measure: bool = False,
    ) -> CostTable | None:
        """The costs that choose each round's draft length; None when the length is fixed.

        They are kept between commands. `measure` takes them anew, an adaptive drafter only where
        they are not known yet; for any other the length stays fixed where they are not known.
        `sampled` rounds have prices of their own.
        """
        if self.is_adaptive is False or self.drafter is None or self.policy is None:
            return None
        if self.parallel:
            return None
        from specctl.cli.options.cost_cache import describe, read_costs, write_costs

        about = describe(target, self.drafter, self.policy, self.source, batch)
        about["sampled"] = sampled
        found = None if measure else read_costs(about)
        if found is None and (measure or self.is_adaptive):
            from specctl.runtime.measure.cost import measure_costs
            from specctl.runtime.sampling.sampling import Sampling

            found = measure_costs(
                target,
                self.drafter,
                self.policy,
                prompts,
                batch=batch,
                rounds=COST_ROUNDS,
                sampling=Sampling(temperature=1.0 if sampled else 0.0),
            )
            write_costs(about, found)
        return found


def _stop_settings(word: str | None) -> dict[str, Any]:
    """What --stop-rule stands for: a rule, or a file with the weights of one."""
    if word is None or not Path(word).is_file():
        return {"stop": word}
    from specctl.runtime.stops.learned import read_stop

    return {"stop": read_stop(Path(word))[0], "stop_file": word}


def _ignored(key: str, value: str, policy: str, policies: Sequence[str]) -> RecipeError:
    from specctl.recipes.serve import POLICY_FIELDS

    flag = "--stop-rule" if key == "stop" else f"--{key}"
    other = next(name for name in (*policies, *POLICY_FIELDS) if key in POLICY_FIELDS[name])
    return RecipeError(
        f"{flag} is ignored by policy {policy}",
        where=flag,
        found=value,
        expected="a policy that has it, such as " + other,
        do=f"--policy {other}, or leave {flag} out",
    )


def _source(name: str) -> str:
    """What tells two drafters apart: the digest of a package, else the name."""
    from specctl.export.package.manifest import MANIFEST, read_manifest

    folder = Path(name)
    return read_manifest(folder).digest if (folder / MANIFEST).is_file() else name


def packaged_serve(draft: str) -> dict[str, Any]:
    """The serving settings stored in a package folder or a recipe; empty for anything else."""
    from specctl.drafters import families
    from specctl.export.package.find import free_recipe
    from specctl.export.package.manifest import MANIFEST, read_manifest

    folder = Path(draft)
    if not (folder / MANIFEST).is_file():
        recipe = None if draft in families() else free_recipe(draft)
        serve = {} if recipe is None else recipe.serve.model_dump(mode="json")
        return {k: v for k, v in serve.items() if v is not None}
    return {k: v for k, v in read_manifest(folder).serve.items() if v is not None}
