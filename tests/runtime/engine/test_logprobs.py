"""Log-probabilities of emitted tokens against the target read afresh."""

from __future__ import annotations

import pytest
import torch

from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.pairs import disturbed


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(num_layers=2)


def wanted(target, text, sampling):
    """log-softmax of the logits after `text`, with the bias and the penalties of `sampling`."""
    ids_1S = torch.tensor([text])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    at_1S = torch.arange(len(text))[None]
    logits_V = target.lm.dense(ids_1S, at_1S, masks).logits_BTV[0, -1].clone()
    for token, bias in (sampling.logit_bias or {}).items():
        logits_V[token] += bias
    for token in set(text):
        logits_V[token] -= sampling.presence_penalty or 0.0
    return logits_V.log_softmax(-1)


SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "top_k": 5, "seed": 3},
    "biased": {"temperature": 1.3, "seed": 1, "logit_bias": {5: 4.0, 6: -float("inf")}},
    "penalised": {"presence_penalty": 1.5},
}


@pytest.mark.parametrize("serve", [None, {"policy": "chain"}, {"policy": "static-tree"}])
@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_are_of_the_distribution_before_temperature(make_target, target, name, serve):
    sampling = Sampling(max_new_tokens=16, **SETTINGS[name])
    drafter = None if serve is None else disturbed(make_target, target, num_layers=2)
    policy = None if serve is None else make_policy(serve)
    engine = Engine(target, drafter, policy, "target-only", 2)
    engine.open(64)
    prompt = (3, 1, 4, 1, 5, 3, 1, 4)
    engine.submit(0, Request(prompt, sampling, None, 4))
    engine.submit(1, Request(prompt[:3], sampling))
    text, said = list(prompt), 0
    while engine.is_busy:
        for emission in engine.step():
            if emission.row.index == 1:
                assert emission.logprobs is None
                continue
            assert len(emission.logprobs) == len(emission.tokens)
            for token, one in zip(emission.tokens, emission.logprobs, strict=True):
                logp_V = wanted(target, text, sampling)
                assert one.token == token
                assert one.logprob == pytest.approx(float(logp_V[token]), abs=1e-3)
                best = logp_V.topk(4)
                assert [t for t, _ in one.top] == best.indices.tolist()
                assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=1e-3)
                text.append(token)
                said += 1
    assert said == 16


def test_what_cannot_be_drawn_has_a_number_that_json_can_write(target):
    sampling = Sampling(max_new_tokens=1, logit_bias={i: -float("inf") for i in range(95)})
    engine = Engine(target, num_slots=1)
    engine.open(8)
    engine.submit(0, Request((3,), sampling, None, 2))
    (emission,) = engine.step()
    assert emission.logprobs[0].top[0] == (95, 0.0)
    assert emission.logprobs[0].top[1][1] == -9999.0
