"""The module that a target carries is tuned: from the checkpoint, and ready to go back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specctl.core.errors import SpecctlError
from specctl.drafters.features.mtp import Mtp
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.train.planning.plan import plan
from specctl.train.run import train_draft
from specctl_testing.export.mtp_cases import checkpoint
from specctl_testing.train.small_runs import Talk, random_target, small_recipe, words

FEW = {"train.steps": 2, "train.save_every": 2, "data.prompts": 12, "drafter.init": "target"}


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "mimo"])
def test_training_starts_from_the_module_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """Qwen3-Next is read here, not run: its answers are the text itself."""
    num = 2 if kind == "deepseek_v3" else 1
    tokenizer = random_target(0).tokenizer
    target, _ = checkpoint(kind, tmp_path / "target", tokenizer=tokenizer, modules=num)
    before, talk, left = own_module(target).tensors(), Talk(), list[Any]()
    few: dict[str, Any] = FEW | ({} if target.can_run else {"data.regenerate": "false"})
    recipe = small_recipe("qwen3-next-mtp", words(tmp_path), **few)
    train_draft(
        recipe,
        tmp_path / "run",
        target=target,
        package=lambda drafter, *_: left.append(drafter),
        reporter=talk,
    )
    assert any(line.startswith("starts from target") for line in talk.said)
    (drafter,) = left
    assert isinstance(drafter, Mtp)
    assert drafter.options.layer == own_module(target).options.layer
    assert drafter.options.modules == num
    after = drafter.tensors()
    moved = {name: float((after[name].cpu() - before[name]).abs().max()) for name in before}
    # two steps of a small rate: every weight a little; the bias that balances experts is no weight
    still = {name for name, far in moved.items() if far == 0.0} - {"last_norm"}  # the target's
    assert still <= {f"layers.{k}.block.mlp.gate.e_score_correction_bias" for k in range(num)}
    assert max(moved.values()) < 1e-2


def test_a_target_that_carries_none_is_told(tmp_path: Path) -> None:
    recipe, target = small_recipe("mtp", words(tmp_path), **FEW), random_target(0)
    with pytest.raises(SpecctlError, match="carries no module"):
        train_draft(recipe, tmp_path / "run", target=target, reporter=Talk())
    with pytest.raises(SpecctlError, match="carries no module"):
        plan(recipe, target.spec)  # nothing is loaded
