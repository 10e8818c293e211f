"""benchmarks/grpo.py: the reward; two steps of GRPO by TRL with a drafter that follows."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).parent / "stored_run" / "package"
HAS_TRL = importlib.util.find_spec("trl") is not None


@pytest.fixture
def grpo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("grpo")


def test_the_reward_is_the_share_of_lines_that_are_statements(grpo: ModuleType) -> None:
    found = grpo.parses(["if x:\n\n    y = 1\n", "a = [\nb = 2\n", "", "x = = 1"])
    assert found == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.skipif(not HAS_TRL, reason="trl is not installed: make grpo")
def test_two_steps_of_grpo_move_the_policy_and_its_drafter(
    grpo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trl import GRPOTrainer

    words = ["--out", str(tmp_path), "--target", str(ROOT / "recipes" / "tiny")]
    words += ["--draft", str(PACKAGE), "--steps", "2", "--every", "1", "--follow", "2"]
    words += ["--prompts-per-step", "1", "--generations", "4", "--new-tokens", "12"]
    words += ["--measured", "2", "--measured-tokens", "8", "--no-control"]
    given = grpo.options().parse_args(words)
    logged: list[tuple[torch.Tensor, torch.Tensor]] = []
    loss = GRPOTrainer._compute_loss

    def kept(
        trainer: GRPOTrainer, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
    ) -> object:
        """What TRL trains on, and its own log-probabilities of it."""
        both = [inputs[f"{part}_ids"] for part in ("prompt", "completion")]
        masks = [inputs[f"{part}_mask"] for part in ("prompt", "completion")]
        with torch.no_grad():
            theirs = trainer._get_per_token_logps_and_entropies(
                model, torch.cat(both, 1), torch.cat(masks, 1), both[1].shape[1]
            )[0]
        is_real = inputs["completion_mask"].bool()
        logged.append((theirs[is_real], inputs["sampling_per_token_logps"][is_real]))
        return loss(trainer, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", kept)
    result = grpo.run(given)
    assert len(logged) == len(result["rewards"]) == 2
    for theirs, ours in logged:
        assert theirs.numel() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert {name: len(tau) for name, tau in result["tau"].items()} == {
        "before": 2, "frozen": 2, "following": 2,
    }  # fmt: skip
    assert result["following"] > 0
