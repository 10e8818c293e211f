"""Kept prompts: long prompts of which the target keeps a part. Approximate by design.

A model beside the target (`--mix`) reads the prompt first and says what of it matters (Draft-based
Approximate Inference, arXiv 2506.08373). `specpc`: the target reads only the tokens that the
model's attention found important. `speckv`: the target reads all, and of each head keeps the keys
and values that an answer drafted by the model looks at. `speckvpc` does one behind the other. A
prompt with no more tokens than are kept is read as ever, and its answer is the target's own.
Drafting changes nothing of either.
"""

from __future__ import annotations

from collections.abc import Mapping

from specctl.core.drafter import Drafter
from specctl.runtime.kept_prompts.base import Answering, KeptPrompts
from specctl.runtime.kept_prompts.spec_kv import SpecKV
from specctl.runtime.kept_prompts.spec_kv_pc import SpecKVPC
from specctl.runtime.kept_prompts.spec_pc import SpecPC
from specctl.runtime.policies.base import Policy
from specctl.runtime.policies.length import LengthChooser
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import apart

KINDS: Mapping[str, type[KeptPrompts]] = {
    "specpc": SpecPC,
    "speckv": SpecKV,
    "speckvpc": SpecKVPC,
}

__all__ = ["KINDS", "KeptPrompts", "make_kept_prompts"]


def make_kept_prompts(
    target: Target,
    drafter: Drafter | None,
    policy: Policy | None,
    rule: str,
    num_slots: int = 1,
    chooser: LengthChooser | None = None,
) -> KeptPrompts:
    """What answers for a target with a model beside it that chooses; the drafter is the target's,
    as ever."""
    mixture = target.mixture
    assert mixture is not None, f"{target.name} reads whole prompts"
    own, (beside,) = apart(target)
    writing = Answering(own, drafter, policy, rule, num_slots, chooser)
    return KINDS[mixture.law](writing, beside, mixture)
