"""The flags that say what drafts and how; torch comes late."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from specctl.api.drafting import LoadedDraft
    from specctl.runtime.target.target import Target

NO_DRAFTER = "none"


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

    def given(self) -> dict[str, Any]:
        """The settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(DraftingFlags)}

    def of(self, draft: str) -> DraftChoice:
        """The same settings for the drafter of that name."""
        return DraftChoice(draft, **self.given())


@dataclass(frozen=True, slots=True)
class DraftChoice(DraftingFlags):
    """What the drafting flags say, drafter included."""

    draft: Draft = NO_DRAFTER

    def load(self, target: Target) -> LoadedDraft:
        """The drafter with the policy and rule it is to be served by."""
        from specctl.api.drafting import load_draft

        return load_draft(self.draft, target, **self.given())
