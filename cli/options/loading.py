"""The flags that say what drafts and how; torch comes late."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from specctl.cli.app.follow_up import given_flags
from specctl.cli.options.flags import (
    AdaptiveFlag,
    Allow,
    ControllerSetting,
    Draft,
    DraftOptionSetting,
    LengthFlag,
    NodesSetting,
    ParallelSetting,
    PolicySetting,
    RuleFlag,
    StopRuleSetting,
    TranslateSetting,
)
from specctl.cli.options.names import check_drafter, check_drafting
from specctl.core.errors import one_of_two

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specctl.api.arguments.drafting import LoadedDraft
    from specctl.core.forward.attention_only import AttentionOnly
    from specctl.runtime.target.target import Target

NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingFlags:
    """How to draft; None leaves it to the package, then to the family."""

    policy: PolicySetting = None
    length: LengthFlag = None
    nodes: NodesSetting = None
    rule: RuleFlag = None
    stop_rule: StopRuleSetting = None
    controller: ControllerSetting = None
    parallel: ParallelSetting = None
    adaptive: AdaptiveFlag = None
    allow: Allow = None
    translate: TranslateSetting = "auto"
    draft_options: DraftOptionSetting = None

    def given(self) -> dict[str, Any]:
        """The settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(DraftingFlags)}

    def words(self) -> list[str]:
        """The flags that were given, as they are typed; the drafter is not among them."""
        return given_flags(self, DraftingFlags(), ("draft",))

    def check(self, *drafts: str) -> None:
        """Refuse names that nothing has, before torch is imported or a target is read."""
        check_drafting(self.policy, self.rule, self.controller, self.stop_rule)
        for draft in drafts:
            check_drafter(draft)

    def wanted(self, *drafts: str, may_be_parallel: bool = True) -> Sequence[AttentionOnly]:
        """What these drafters need of the target that only one of attention alone has;
        `may_be_parallel`: whether they may draft beside it."""
        from specctl.api.arguments.attention_only import attention_only

        names = [draft for draft in drafts if draft != NO_DRAFTER]
        parallel = self.parallel if may_be_parallel else False
        return attention_only(names, parallel, self.policy, self.rule)

    def of(self, draft: str) -> DraftChoice:
        """The same settings for the drafter of that name."""
        return DraftChoice(draft, **self.given())


@dataclass(frozen=True, slots=True)
class DraftChoice(DraftingFlags):
    """What the drafting flags say, drafter included."""

    draft: Draft = NO_DRAFTER

    def positional(self) -> list[str]:
        """The drafter as a word of its own; nothing where nothing drafts."""
        return [] if self.draft == NO_DRAFTER else [self.draft]

    def worded(self, drafter: str | None) -> DraftChoice:
        """This choice with the drafter that stands as a word of its own, and all names checked."""
        found = self
        if drafter is not None:
            if self.draft != NO_DRAFTER:
                raise one_of_two(
                    "the drafter was given twice",
                    f"{drafter} and --draft {self.draft}",
                    f"leave out --draft {self.draft}",
                )
            found = replace(self, draft=drafter)
        found.check(found.draft)
        return found

    def in_step(self) -> DraftChoice:
        """This choice where several processes do the same at every step: nothing may be decided by
        the clock, nor run beside the target."""
        for flag, given in (("--adaptive", self.adaptive), ("serve.parallel", self.parallel)):
            if given:
                raise one_of_two(
                    f"tensor parallelism keeps processes in step, and {flag} goes by the clock of "
                    "each",
                    f"target.tensor_parallel and {flag}",
                    f"leave out {flag}",
                )
        return replace(self, adaptive=False)

    def load(self, target: Target) -> LoadedDraft:
        """The drafter with the policy and rule it is to be served by."""
        from specctl.api.arguments.drafting import load_draft

        return load_draft(self.draft, target, **self.given())
