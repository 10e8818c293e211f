"""Rollouts of a policy that moves: written with the weights of the moment, followed, only read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import specctl
from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.drafters import family
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.variants.moving import MovingTarget
from specctl.train import rollouts as module
from specctl.train.rollouts import RolloutDrafter, at_temperature
from specctl_testing.models import build_model

VOCAB, NEW = 64, 24
PROMPTS = [list(range(1, 41)), [5, 9, 2], list(range(60, 20, -1))]  # read by both of our forwards


def fused_adamw(policy: Any) -> None:
    """As transformers' Trainer moves a policy; PyTorch counts no write of these."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, fused=True)
    policy(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def through_data(policy: Any) -> None:
    for weight in policy.parameters():
        weight.data.mul_(1.0 + 0.3 * torch.randn_like(weight))


def elsewhere(policy: Any) -> None:
    """Their memory is another one."""
    for weight in policy.parameters():
        weight.data = weight.data * (1.0 + 0.3 * torch.randn_like(weight))


def policy_and(name: str, sampling: Sampling, **fields: Any) -> tuple[Any, RolloutDrafter]:
    """A random policy, and a drafter of that family beside it."""
    policy = build_model(vocab=VOCAB, seed=3, **fields).train()
    method = family(name)
    drafter = method.build(method.options(), MovingTarget(policy).now().spec, None)
    return policy, specctl.follow_policy(policy, drafter, sampling=sampling, batch=4)


def greedy(policy: Any, prompt: list[int]) -> tuple[int, ...]:
    """By transformers."""
    model = copy.deepcopy(policy).eval()
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize(  # kangaroo runs layers of the policy
    ("name", "move"),
    [("eagle3", fused_adamw), ("kangaroo", elsewhere)],
)
def test_rollouts_are_those_of_the_weights_of_the_moment(
    name: str, move: Callable[[Any], None]
) -> None:
    policy, follower = policy_and(name, Sampling(max_new_tokens=NEW))
    assert follower._policy.is_fast, "the forward that keeps packed copies"
    before = follower.rollouts(PROMPTS)
    assert before.ids == tuple(greedy(policy, prompt) for prompt in PROMPTS)
    torch.manual_seed(0)
    move(policy)
    after = follower.rollouts(PROMPTS)
    assert after.ids == tuple(greedy(policy, prompt) for prompt in PROMPTS)
    assert after.ids != before.ids
    assert after.stats.drafted > 0


@pytest.mark.parametrize("move", [fused_adamw, elsewhere])
def test_features_and_logprobs_are_those_of_the_weights_of_the_moment(
    move: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, follower = policy_and("eagle3", Sampling(temperature=0.7, max_new_tokens=NEW))
    follower.rollouts(PROMPTS)
    torch.manual_seed(0)
    move(policy)
    read: list[TrainBatch] = []

    def kept(*given: Any) -> TrainBatch:
        read.append(capture(*given))
        return read[-1]

    capture = module.capture
    monkeypatch.setattr(module, "capture", kept)
    follower.follow(1)
    still = copy.deepcopy(policy).eval()
    row = 0
    own_S = read[0].document_BS[row] == read[0].document_BS[row, 0]
    with torch.no_grad():
        theirs = still(read[0].ids_BS[row, own_S][None], output_hidden_states=True)
    for tap, state_BSD in read[0].taps.items():
        torch.testing.assert_close(
            state_BSD[row, own_S], theirs.hidden_states[tap][0], rtol=1e-3, atol=1e-3
        )
    made = follower.rollouts(PROMPTS)
    for prompt, new, logprobs in zip(PROMPTS, made.ids, made.logprobs, strict=True):
        with torch.no_grad():
            logits = still(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
        log_p = (logits / 0.7).log_softmax(-1)[torch.arange(len(new)), torch.tensor(new)]
        torch.testing.assert_close(torch.tensor(logprobs), log_p, rtol=1e-3, atol=1e-3)


@pytest.mark.proof
def test_sampled_rollouts_have_the_distribution_of_the_changed_policy() -> None:
    policy, follower = policy_and(
        "eagle3", Sampling(temperature=0.5, max_new_tokens=2, ignore_eos=True)
    )
    follower.batch, draws = 512, 1536
    follower.rollouts([[7, 8, 9]] * 8)
    torch.manual_seed(0)
    through_data(policy)
    halves = [follower.rollouts([[7, 8, 9]] * (draws // 2)).ids for _ in range(2)]
    assert halves[0] != halves[1], "every call draws anew"
    still = copy.deepcopy(policy).eval()
    with torch.no_grad():
        first_V = (still(torch.tensor([[7, 8, 9]])).logits[0, -1] / 0.5).softmax(-1)
        after_VS = torch.tensor([[7, 8, 9, token] for token in range(VOCAB)])
        second_VV = (still(after_VS).logits[:, -1] / 0.5).softmax(-1)
    joint_VV = first_V[:, None] * second_VV
    counts_VV = torch.zeros(VOCAB, VOCAB)
    for first, second in (*halves[0], *halves[1]):
        counts_VV[first, second] += 1
    likely = joint_VV > 5 / draws
    expected = torch.cat([joint_VV[likely], (1 - joint_VV[likely].sum())[None]]) * draws
    seen = torch.cat([counts_VV[likely], counts_VV[~likely].sum()[None]])
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert freedom > 10
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_the_drafter_learns_and_the_policy_is_only_read() -> None:
    policy, follower = policy_and("eagle3", Sampling(temperature=0.5, max_new_tokens=NEW))
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    loss = policy(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    with torch.no_grad():  # as a trainer calls for rollouts
        follower.rollouts(PROMPTS)
        first, last = (follower.follow(8) for _ in range(2))
    assert last.loss < 0.9 * first.loss
    assert (first.skipped, first.steps) == (0, 8)
    loss.backward()  # autograd finds nothing written between the two passes
    assert policy.training
    assert all(weight.requires_grad for weight in policy.parameters())
    assert all(torch.equal(weights[name], now) for name, now in policy.state_dict().items())


def test_the_loss_has_the_temperature_of_the_rollouts() -> None:
    _, follower = policy_and("eagle3", Sampling(temperature=0.5), num_layers=2)
    assert follower.drafter.options.temperature == 0.5
    lookup = specctl.load_drafter("prompt-lookup", follower.target)
    with pytest.raises(RecipeError, match="knows no temperature"):
        at_temperature(lookup, 0.5)


def test_adapters_are_part_of_the_policy_and_come_first() -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    policy, early = policy_and("eagle3", Sampling(max_new_tokens=NEW))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5)
    adapted = peft.get_peft_model(policy, config)
    with pytest.raises(IncompatibleError, match="other parameters"):
        early.rollouts(PROMPTS)
    follower = specctl.follow_policy(
        adapted, early.drafter, sampling=Sampling(max_new_tokens=NEW), batch=4
    )
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.3)
    found = follower.rollouts(PROMPTS).ids
    assert found == tuple(greedy(adapted, prompt) for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"sampling": Sampling(temperature=1.0, top_p=0.9)}, "top_p"),
        ({"drafter": "prompt-lookup"}, "nothing to train"),
        ({"rows": 0}, "rows"),
        ({"rule": "typical"}, "own distribution"),
        ({"policy": "tiny"}, "no policy"),
        ({"lenght": 3}, "lenght"),
        ({"sampling": {"temperature": 1.0}}, "how rollouts are drawn"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], named: str) -> None:
    policy, follower = policy_and("eagle3", Sampling(), num_layers=2)
    words = {"policy": policy, "drafter": follower.drafter} | given
    with pytest.raises(SpecctlError, match=named):
        specctl.follow_policy(words.pop("policy"), words.pop("drafter"), **words)


def test_a_policy_in_bfloat16_is_followed_by_a_drafter_in_float32() -> None:
    policy, follower = policy_and(
        "eagle3", Sampling(temperature=1.0, max_new_tokens=4), num_layers=2, dtype=torch.bfloat16
    )
    before = {name: weight.clone() for name, weight in follower.drafter.tensors().items()}
    assert all(len(ids) == 4 for ids in follower.rollouts(PROMPTS).ids)
    assert follower.follow(1).skipped == 0
    after = follower.drafter.tensors()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    assert follower.rollouts(PROMPTS).stats.drafted > 0
    assert policy.dtype == torch.bfloat16


def test_there_is_nothing_to_write_or_to_follow_without_prompts_rollouts_or_steps() -> None:
    _, follower = policy_and("eagle3", Sampling(), num_layers=2)
    with pytest.raises(SpecctlError, match="no rollouts"):
        follower.follow(1)
    with pytest.raises(SpecctlError, match="no prompts"):
        follower.rollouts([])
    for steps in (0, -1, 1.5):
        with pytest.raises(SpecctlError, match="no number of steps"):
            follower.follow(steps)  # type: ignore[arg-type]
