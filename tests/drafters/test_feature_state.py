"""FeatureState: the compiled step computes of a round what PyTorch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specctl.core.vocab import VocabMap
from specctl.drafters.states.feature_state import FeatureState
from specctl.models.native.library import library
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.drafters.kept_logits import kept_logits

PROMPTS = [[5, 17, 3, 88], [41, 9], [60, 2, 33, 71, 12, 8]]


@pytest.mark.skipif(library().functions is None, reason=f"no compiled step: {library().missing}")
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("eagle3", {}),
        ("eagle3", {"window": 5, "sink": 2}),
        *(
            pytest.param("eagle3", options, marks=pytest.mark.proof)
            for options in (
                {"norm_output": True, "qk_norm": True, "heads": 4, "kv_heads": 1},
                {"norm_before_residual": True, "rope_theta": 500.0},
                {"head_groups": 4, "head_top": 2},
            )
        ),
        ("eagle", {}),
        ("hass", {}),
    ],
)
def test_the_compiled_step_drafts_what_pytorch_drafts(
    family: str, options: dict[str, Any], make_target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    half = VocabMap(torch.arange(0, target.spec.vocab_size, 2), target.spec.vocab_size)
    drafter = make_heads(target, family, half, **options)
    for parameter in drafter.module.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)

    def logits(policy: dict[str, Any]) -> tuple[list[Tensor], int]:
        """Of every call of a generation, and how many forwards the compiled step did."""
        calls, compiled = [0], FeatureState.compiled

        def counted(self: FeatureState, *given: Any, **named: Any) -> Any:
            out = compiled(self, *given, **named)
            calls[0] += out is not None
            return out

        sampling = Sampling(temperature=0.0, max_new_tokens=9, ignore_eos=True)
        with kept_logits(monkeypatch) as found, monkeypatch.context() as patch:
            patch.setattr(FeatureState, "compiled", counted)
            generate(
                target, PROMPTS, drafter=drafter, policy=make_policy(policy), sampling=sampling
            )
        return found, calls[0]

    for policy in ({"policy": "chain", "length": 3}, {"policy": "dynamic-tree", "nodes": 5}):
        mine, compiled = logits(policy)
        with monkeypatch.context() as patch:
            patch.setattr(FeatureState, "compiled", lambda *_, **__: None)
            theirs, none = logits(policy)
        assert compiled > len(mine) / 2
        assert none == 0
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(library().functions is None, reason=f"no compiled step: {library().missing}")
def test_weights_that_move_while_it_is_open_are_followed(
    make_target: Any, drive: Any, round_view: Any
) -> None:
    target = make_target()
    drafter = make_heads(target, "eagle3")
    text = [5, 17, 3, 88, 41, 9]

    def root(moves: bool) -> Tensor:
        state = drive(target, drafter).open()
        if moves:  # no version tells of it
            down.data = torch.randn(down.shape, generator=torch.Generator().manual_seed(3))
        drive(target, drafter).start(state, 0, text)
        return state.root(round_view({0: text}))

    down = drafter.module.layer.mlp.down_proj.weight
    with torch.no_grad():
        before, moved, after = root(False), root(True), root(False)
    assert not torch.allclose(before, moved)
    torch.testing.assert_close(moved, after)
