"""Modules for multi-token prediction of real layouts: what they say is what plain torch says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from specctl.core.drafter import RoundView
from specctl.core.errors import IncompatibleError
from specctl.drafters.features.mtp import Mtp, MtpNet, MtpOptions
from specctl.models.hf.foreign_layer import ForeignLayer, as_published, one_layer, read_config
from specctl.models.weights.mtp_layout import KINDS
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.runtime.target.target import Target
from specctl_testing.drafters.head_cases import make_heads
from specctl_testing.export.mtp_cases import MODELS, Tensors, checkpoint, logits

TEXT = [5, 17, 3, 40, 8, 21, 33, 2, 9]
KNOWN = 6
VIEW = RoundView(
    (0,),
    torch.tensor([0]),
    torch.tensor([TEXT[KNOWN - 1]]),
    torch.tensor([KNOWN - 1]),
    (tuple(TEXT[:KNOWN]),),
)


@pytest.fixture(scope="module", params=MODELS)
def carried(request: Any, tmp_path_factory: Any) -> tuple[Target, Tensors, Mtp]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    target, tensors = checkpoint(request.param, folder)
    return target, tensors, own_module(target)


def chained(target: Target, tensors: Tensors, state_TD: Tensor) -> Tensor:
    """Logits after the root at `KNOWN` tokens and after each token behind it, by plain torch."""
    said = []
    for at in range(KNOWN, len(TEXT) + 1):
        logits_TV, out_TD = logits(target, tensors, torch.tensor(TEXT[1:at]), state_TD)
        said.append(logits_TV[-1])
        state_TD = torch.cat([state_TD, out_TD[-1:]])
    return torch.stack(said)


def error(carried: tuple[Target, Tensors, Mtp], features: Any, drive: Any) -> float:
    """Between what the drafter says along a chain and plain torch, as a share of the largest."""
    target, tensors, drafter = carried
    tap = drafter.tap
    state_TD = features(target, TEXT[: KNOWN - 1], (tap,))[tap]
    hand = drive(target, drafter)
    state = hand.open()
    state.start(0, TEXT[:KNOWN], {tap: state_TD})
    with torch.no_grad():
        ours = [state.root(VIEW)[0]]
        for step, token in enumerate(TEXT[KNOWN:]):
            ours.append(state.expand(torch.tensor([[token]]), torch.tensor([[step - 1]]))[0, 0])
    theirs = chained(target, tensors, state_TD.double())
    return float((torch.stack(ours) - theirs).abs().max() / theirs.abs().max())


def test_it_says_what_plain_torch_says(carried: Any, features: Any, drive: Any) -> None:
    """Four tokens deep: concatenation, norms, attention, experts, cache, what is fed back."""
    assert error(carried, features, drive) < 1e-4


def swapped(self: MtpNet, token: Tensor, state: Tensor) -> Tensor:
    return self.fc(torch.cat([self.hnorm(state), self.enorm(token)], -1))


def unnormed(self: MtpNet, token: Tensor, state: Tensor) -> Tensor:
    return self.fc(torch.cat([token, self.hnorm(state)], -1))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mix", swapped),
        ("mix", unnormed),
        ("ready", lambda self, out: out),
        ("fed_back", lambda self, out: out),
    ],
    ids=["swapped", "no norm in front", "no norm behind", "fed back without its norm"],
)
def test_a_mistake_would_show(
    carried: Any, features: Any, drive: Any, name: str, wrong: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(MtpNet, name, wrong)
    assert error(carried, features, drive) > 1e-2


def test_a_row_of_the_neighbour_would_show(
    carried: Any, features: Any, drive: Any, monkeypatch: Any
) -> None:
    """Token t + 1 stands beside the state of token t."""
    from specctl.drafters.states.feature_state import FeatureState

    start = FeatureState.start

    def late(self: Any, slot: int, tokens: Any, taps: Any) -> None:
        start(self, slot, tokens, {tap: value.roll(1, 0) for tap, value in taps.items()})

    monkeypatch.setattr(FeatureState, "start", late)
    assert error(carried, features, drive) > 1e-2


@torch.no_grad()
def test_training_unrolls_what_is_drafted(
    carried: Any, capture_batch: Any, make_batch: Any, drive: Any
) -> None:
    target, _, drafter = carried
    batch = make_batch(target, drafter, rows=1, seq_len=24)
    steps = drafter.unroll(batch)
    ids = batch.ids_BS[0, :9].tolist()  # the first document
    served = drive(target, drafter).chain_logits(ids[: 5 + len(steps) - 1], 5)
    for i, step in enumerate(steps):
        trained = step.ready_BSD[0, 3] @ drafter.head_weight().T
        torch.testing.assert_close(served[i], trained, rtol=1e-4, atol=1e-4)


def test_drafting_changes_no_text(carried: Any) -> None:
    """Greedy texts, three rows at once, as a chain and as a tree."""
    target, _, drafter = carried
    if not target.can_run:
        with pytest.raises(IncompatibleError):
            target.new_kv(1, 8)
        return
    prompts = [TEXT[:4], TEXT[:7], [11]]
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    plain = generate(target, prompts, sampling=sampling, batch=3)
    for policy in ({"policy": "chain", "length": 3}, {"policy": "dynamic-tree", "nodes": 6}):
        drawn = generate(
            target, prompts, drafter=drafter, sampling=sampling, policy=make_policy(policy), batch=3
        )
        assert [one.token_ids for one in drawn.outputs] == [one.token_ids for one in plain.outputs]


@torch.no_grad()
def test_the_ablation_hides_the_states(make_target: Any, features: Any, drive: Any) -> None:
    """With it nothing of the target is read but tokens; without it the states decide."""
    target = make_target()

    def moved(**options: Any) -> float:
        drafter = make_heads(target, "mtp", **options)
        hand, said = drive(target, drafter), []
        for factor in (1.0, -1.0):
            state = hand.open()
            taps = features(target, TEXT[: KNOWN - 1], (drafter.tap,))
            state.start(0, TEXT[:KNOWN], {tap: factor * value for tap, value in taps.items()})
            said.append(state.root(VIEW)[0])
        return float((said[0] - said[1]).abs().max())

    assert moved(read_states=False) == 0.0
    assert moved() > 1e-2


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next"])
def test_the_layer_behind_the_last_has_experts(kind: str) -> None:
    """Also where the first layers have none (GLM-4.7-Flash says it layer by layer)."""
    fields = MODELS.get(kind, MODELS["deepseek_v3"])
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **{**sizes, **fields})
    one = read_config(one_layer(config), KINDS)
    with torch.device("meta"):
        layer = ForeignLayer(one)
    names = as_published(one, layer.block.state_dict())
    assert "mlp.experts.3.up_proj.weight" in names
    assert "self_attn.o_proj.weight" in names


@pytest.mark.parametrize(
    "layer",
    ["{", "[]", '{"model_type": "llama", "vocab_size": 1}',
     '{"model_type": "deepseek_v3", "vocab_size": 1, "num_hidden_layers": 61}',
     '{"model_type": "deepseek_v3", "vocab_size": 1, "auto_map": {"AutoModel": "x.y"}}'],
)  # fmt: skip
def test_a_layer_that_no_model_has_is_refused(layer: str, make_target: Any) -> None:
    with pytest.raises(IncompatibleError, match="layer cannot be built"):
        Mtp(MtpOptions(layer=layer), make_target().spec)
