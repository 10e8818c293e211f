"""train.compile: the loss and gradients of the layers as they are; no compiler while drafting. The
tracing is torch.compile's own, its code generator is left out for its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.core.drafter import Drafter
from specctl.core.errors import RecipeError
from specctl.drafters import family
from specctl.recipes.load import load_recipe
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.features.capture import capture
from specctl.train.step.compiled_layers import compile_layers
from specctl_testing.models import build_model

OPTIONS: dict[str, dict[str, Any]] = {"eagle3": {"ttt_steps": 2}, "eagle": {}}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_model(build_model(num_layers=3, vocab=24))


def drafter_of(target: Target, name: str) -> Drafter:
    torch.manual_seed(5)
    found = family(name)
    drafter = found.build(found.options(**OPTIONS[name]), target.spec, None)
    drafter.bind(target.borrowed())
    for parameter in drafter.trainable().values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return drafter


@pytest.mark.parametrize("name", OPTIONS)
def test_compiled_layers_learn_alike_and_draft_as_they_are(
    target: Target, name: str, make_batch_of: Callable[..., Any]
) -> None:
    graphs = list[Any]()

    def traced(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain, compiled = drafter_of(target, name), drafter_of(target, name)
    assert compile_layers(compiled.module, name, backend=traced) >= 3
    batch = make_batch_of(target, plain)
    found = []
    for drafter in (plain, compiled):
        torch.manual_seed(2)  # of noise on the features
        out = drafter.loss(batch)
        moved = list(drafter.trainable().values())
        found.append([out.sum, *torch.autograd.grad(out.sum, moved)])
    assert len(graphs) >= 3
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    count, texts = len(graphs), []
    for drafter in (plain, compiled):
        made = generate(
            target, [[1, 2, 3]], drafter=drafter, policy=make_policy({"policy": "chain"}),
            sampling=Sampling(temperature=0.0, max_new_tokens=6, ignore_eos=True),
        )  # fmt: skip
        texts.append((made.outputs[0].token_ids, made.stats.accepted))
    assert texts[0] == texts[1]
    assert len(graphs) == count


@pytest.fixture
def make_batch_of() -> Callable[..., Any]:
    from specctl.core.batch import TrainBatch

    def make(target: Target, drafter: Drafter) -> TrainBatch:
        torch.manual_seed(1)
        at = torch.arange(12).expand(2, 12)
        ids = torch.randint(0, target.spec.vocab_size, (2, 12))
        batch = TrainBatch(ids, at > 0, torch.zeros_like(ids), at)
        return replace(capture(target, batch, drafter.needs()), progress=0.5)

    return make


def test_what_cannot_be_compiled_is_refused(target: Target) -> None:
    medusa = family("medusa").build(family("medusa").options(), target.spec, None)
    with pytest.raises(RecipeError, match="medusa has no layers to compile"):
        compile_layers(medusa.module, "medusa")
    with pytest.raises(RecipeError, match="compile is for whole weights"):
        load_recipe("eagle3", sets=["train.compile=true", "train.parallel=fsdp"])
