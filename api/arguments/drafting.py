"""What a `drafter` argument stands for, and how it is served: policy, rule, costs."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.api.arguments.arguments import MOST_DRAFTED, check_count
from specctl.api.arguments.attention_only import attention_only
from specctl.api.arguments.families import check_stored
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.api.measured.cost_cache import describe, read_costs, write_costs
from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError, SpecctlError, did_you_mean
from specctl.drafters import family
from specctl.drafters.nets.options import served_anew
from specctl.drafters.nets.shortlist import check_shortlist, how_head_is_read
from specctl.export.package import folder as packages
from specctl.export.package.manifest import MANIFEST, package_in, read_manifest
from specctl.recipes.built_in import as_path_word, is_built_in
from specctl.recipes.drafter_names import drafter_names, drafter_words
from specctl.recipes.published import path_named
from specctl.recipes.serve import POLICY_FIELDS, is_relaxed
from specctl.runtime.cross_vocab.translate import check_method
from specctl.runtime.measure.cost import measure_costs
from specctl.runtime.measure.cost_table import CostTable
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.policies import Policy, make_policy, policies_of
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.stops import STOPS
from specctl.runtime.stops.learned import read_stop
from specctl.runtime.target.target import Target

OPTION = "--set drafter.options."
COST_ROUNDS = 16  # timed rounds of each draft length
NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A drafter ready to be served; drafter None decodes plainly. `source` tells it from other
    drafters: the digest of a package, else its name; empty where nothing does."""

    name: str
    drafter: Drafter | None
    policy: Policy | None
    rule: str
    is_adaptive: bool | None  # None: where the costs are known
    parallel: bool = False
    source: str = ""

    def announce(self, reporter: Reporter) -> None:
        """Say what a user should know before this drafter is used."""
        if self.drafter is None:
            return
        if self.drafter.note:
            reporter.say(self.drafter.note)
        most, whole = self.drafter.positions, self.drafter.spec.max_positions
        if most is not None and most < whole:
            reporter.say(
                f"the draft model was made for {most:,} positions, the target for {whole:,}: "
                f"behind {most:,} tokens drafts are seldom accepted; the answers are the same"
            )
        if (how := how_head_is_read(self.drafter)) is not None:
            reporter.say(how)
        for name, is_approximate in (
            (self.drafter.family, not self.drafter.lossless),
            (f"rule {self.rule}", is_relaxed(self.rule)),
        ):
            if is_approximate:
                reporter.warn(f"{name} is approximate: it changes the target's answers by design")

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
        if self.parallel or target.beside:
            return None
        about = self._about(target, batch, sampled)
        found = None if measure or about is None else read_costs(about)
        if found is None and (measure or self.is_adaptive):
            found = measure_costs(
                target,
                self.drafter,
                self.policy,
                prompts,
                batch=batch,
                rounds=COST_ROUNDS,
                sampling=Sampling(temperature=1.0 if sampled else 0.0),
            )
            if about is not None:
                write_costs(about, found)
        return found

    def _about(self, target: Target, batch: int, sampled: bool) -> dict[str, Any] | None:
        """All that its costs depend on; None where they could be those of another drafter."""
        if not self.source or self.drafter is None or self.policy is None:
            return None
        about = describe(target, self.drafter, self.policy, self.source, batch)
        return {**about, "sampled": sampled}


PLAIN = LoadedDraft("plain", None, None, "auto", False)
DrafterLike = str | Path | Drafter | LoadedDraft | None


@raises_user_errors
def load_drafter(
    drafter: str | Path | Drafter,
    target: TargetLike = None,
    *,
    allow: Sequence[str] = (),
    translate: str | None = None,
) -> Drafter:
    """A drafter from a package folder, a transformers folder or hub id, or a family's name; names
    joined by `+` make a team of them, one of which drafts in each round. Without a target, for the
    one its package was made for.

    Every file is verified and every mismatch with the target refused; `allow` lets named soft
    mismatches pass ("target", "tokenizer", "template", "eos", ...). A language model of another
    tokenizer is refused, too, unless `translate` says how its tokens become the target's: "tli",
    "slem", "slrs" or "auto" (docs/verification.md).
    """
    if isinstance(drafter, Drafter):
        return drafter
    model = target_or_own(target, drafter, wanted=attention_only([drafter]))
    return packages.load_drafter(drafter, model, allow=allow, translate=translate)


def load_draft(
    drafter: DrafterLike,
    target: Target,
    *,
    policy: str | Policy | None = None,
    length: int | None = None,
    nodes: int | None = None,
    rule: str | None = None,
    stop_rule: str | None = None,
    controller: str | None = None,
    parallel: bool | None = None,
    adaptive: bool | None = None,
    allow: Sequence[str] | None = None,
    translate: str = "auto",
    draft_options: Mapping[str, Any] | Sequence[str] | None = None,
) -> LoadedDraft:
    """The drafter with the policy and rule it is to be served by. What is None is as the package
    says, then the family. None or "none" decodes plainly. `draft_options`: options of the drafter
    that its weights do not fix, by name or as words (`window=512`)."""
    settings = {
        "policy": policy,
        "length": length,
        "nodes": nodes,
        "rule": rule,
        "stop_rule": stop_rule,
        "controller": controller,
        "parallel": parallel,
        "adaptive": adaptive,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    for count in sorted({"length", "nodes"} & given.keys()):
        check_count(count, given[count], MOST_DRAFTED)
    options = _read_options(draft_options or {})
    if isinstance(drafter, LoadedDraft):
        if given or options:
            raise SpecctlError(
                "how this drafter drafts was decided when it was loaded",
                found=", ".join((*given, *options)),
                expected="a name or a Drafter beside these settings",
                do="leave them out",
            )
        return drafter
    if drafter is None or drafter == NO_DRAFTER:
        named = {} if translate in ("auto", "none") else {"translate": translate}
        _refuse_settings(given | named | ({"draft_option": options} if options else {}))
        return PLAIN
    name = drafter.family if isinstance(drafter, Drafter) else as_path_word(drafter)
    if not isinstance(drafter, Drafter):
        how = None if translate == "none" else translate
        if how is not None:
            check_method(how)  # also where nothing needs to be translated
        check_stored(target.dtype_name, drafter_names(name))
        loaded = load_drafter(drafter, target, allow=tuple(allow or ()), translate=how)
        source = _source(name)
    else:
        loaded, source = drafter, ""
    if options:
        loaded, source = _with_options(loaded, options), source and f"{source} with {options}"
    if not (policy is None or isinstance(policy, str)):
        if not hasattr(policy, "grow"):
            raise RecipeError(
                "this is no tree policy",
                where="policy",
                found=repr(policy)[:80],
                expected="a name, or a Policy",
                do='policy="chain", length=5',
            )
        return LoadedDraft(name, loaded, policy, rule or "auto", adaptive, bool(parallel), source)
    policies = loaded.policies or policies_of(family(loaded.family))
    serve = _serve({} if loaded.policies else loaded.serve, policies, given)
    adaptive = True if serve.get("adaptive") else adaptive
    return LoadedDraft(
        name,
        loaded,
        make_policy(serve),
        str(serve.get("rule") or "auto"),
        adaptive,
        bool(serve.get("parallel")),
        source,
    )


DRAFTING = tuple(load_draft.__kwdefaults__ or ())  # the settings that it takes


def _with_options(drafter: Drafter, options: Mapping[str, Any]) -> Drafter:
    """The drafter with some options set anew; what is refused is said in words of the command
    line, for there is no recipe to correct."""
    changed = copy.copy(drafter)
    try:
        changed.options = served_anew(getattr(drafter, "options", None), options)
        check_shortlist(changed)
        changed.check_served()
    except RecipeError as error:
        raise RecipeError(
            error.what,
            where=error.where.replace("drafter.options.", OPTION),
            found=error.found,
            expected=error.expected,
            do=re.sub(r"\bwrite (\w+): ([^\s,]+)", rf"{OPTION}\1=\2", error.do),
        ) from error
    return changed


def _read_options(given: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """By name; words are JSON where they can be read as such, else text."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, Any] = {}
    for word in given:
        name, mark, value = word.partition("=")
        if not (name and mark):
            raise RecipeError(
                "an option of the drafter has a name and a value",
                where="--set drafter.options",
                found=word,
                expected="NAME=VALUE",
                do="--set drafter.options.window=512",
            )
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _serve(
    packaged: Mapping[str, Any], policies: Sequence[str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings of serving: what was given over what the package says."""
    serve = dict(packaged)
    if "policy" in given and given["policy"] != packaged.get("policy"):
        kept = ("length", "adaptive", "parallel")  # the rule was chosen for the packaged policy
        serve = {k: v for k, v in serve.items() if k in kept}
    serve |= {k: v for k, v in given.items() if k != "stop_rule"}
    if given.get("stop_rule") is not None and "confidence" not in given:
        serve.pop("confidence", None)  # the rule that the package names
    serve |= _stop_settings(given.get("stop_rule"))
    serve.setdefault("policy", policies[0])
    if serve["policy"] not in policies:
        legal = f"--set serve.policy={policies[0]}"
        is_known = serve["policy"] in POLICY_FIELDS  # no misspelling: there is nothing to guess
        raise RecipeError(
            f"this drafter cannot be grown by policy {serve['policy']!r}",
            where="serve.policy",
            found=str(serve["policy"]),
            expected="one of " + ", ".join(policies),
            do=legal if is_known else did_you_mean(str(serve["policy"]), policies, legal),
        )
    for key in ("nodes", "stop_rule", "controller"):
        field = "stop" if key == "stop_rule" else key
        if key in given and field not in POLICY_FIELDS[serve["policy"]]:
            raise _ignored(field, str(given[key]), serve["policy"], policies)
    return serve


# How the command line says what is no flag.
_SAID = {
    "policy": "serve.policy",
    "nodes": "serve.nodes",
    "stop_rule": "serve.stop",
    "controller": "serve.controller",
    "parallel": "serve.parallel",
    "draft_option": "drafter.options",
    "translate": "drafter.translate",
}


def _refuse_settings(given: Mapping[str, Any]) -> None:
    if given:
        flags = ", ".join(_SAID.get(name, f"--{name}") for name in given)
        raise SpecctlError(
            f"{flags} says how to draft, but there is no drafter",
            where="the command line",
            found="--draft none",
            expected="a package folder, prompt-lookup or token-recycling",
            do="--draft prompt-lookup",
        )


def _stop_settings(word: str | None) -> dict[str, Any]:
    """What serve.stop stands for: a rule, or a file with the weights of one."""
    if word is None:
        return {}
    if is_built_in(word, STOPS, "stop rule") or not Path(word).is_file():
        return {"stop": word}
    return {"stop": read_stop(Path(word))[0], "stop_file": word}


def _ignored(key: str, value: str, policy: str, policies: Sequence[str]) -> RecipeError:
    flag = f"serve.{key}"
    other = next(name for name in (*policies, *POLICY_FIELDS) if key in POLICY_FIELDS[name])
    return RecipeError(
        f"{flag} is ignored by policy {policy}",
        where=flag,
        found=value,
        expected="a policy that has it, such as " + other,
        do=f"--set serve.policy={other}, or leave {flag} out",
    )


def _source(name: str) -> str:
    """What tells two drafters apart: the digest of a package, else the name; of several, each."""
    folders = [(part, package_in(path_named(part))) for part in drafter_names(name)]
    return "+".join(
        part
        if part in drafter_words() or not (folder / MANIFEST).is_file()
        else read_manifest(folder).digest
        for part, folder in folders
    )
