"""A module that was changed by hand is run as it is, or refused with the reason: never as if it had
not been changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from specctl.core.errors import IncompatibleError
from specctl.models.hf.as_published import added_to, change_of
from specctl.models.hf.hf_lm import HfLM
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl_testing.runtime.failing import FailingDrafter

PROMPT, NEW = [3, 1, 4, 1, 5], 10


def answer(model):
    """By transformers alone, without a cache."""
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(NEW):
            best = model.eval()(ids, use_cache=False).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], 1)
    return tuple(ids[0, len(PROMPT) :].tolist())


def written(target, drafter=None):
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    return generate(target, [PROMPT], drafter=drafter, sampling=sampling).outputs[0].token_ids


def scaled_output(factor):
    def hook(module, args, out):
        return (out[0] * factor, *out[1:]) if isinstance(out, tuple) else out * factor

    return hook


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Louder(nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.tensor(-1.0)


def hook_on_a_layer(model):
    model.model.layers[1].register_forward_hook(scaled_output(0.2))


def pre_hook(model):
    model.model.layers[1].register_forward_pre_hook(lambda part, args: (args[0] * 0.1, *args[1:]))


def hook_on_the_head(model):
    model.lm_head.register_forward_hook(lambda part, args, out: -out)


def patched_forward(model):
    old = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: old(x) * 0.0


def adapter(model):
    torch.manual_seed(0)
    model.model.layers[1].mlp.up_proj = Adapted(model.model.layers[1].mlp.up_proj)


def own_linear(model):
    model.lm_head.__class__ = Louder


def weight_norm(model):
    nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.parametrizations.weight.original0.mul_(0.1)


def layers_taken_from_the_end(model):
    del model.model.layers[-2:]


def layers_taken_from_the_middle(model):
    del model.model.layers[1:3]


def another_scale(model):
    model.model.layers[0].self_attn.scaling = 3.0


def other_angles(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.25


def another_activation(model):
    model.model.layers[0].mlp.act_fn = nn.Tanh()


CHANGES = [
    hook_on_a_layer,
    pre_hook,
    hook_on_the_head,
    patched_forward,
    adapter,
    own_linear,
    weight_norm,
    layers_taken_from_the_end,
    layers_taken_from_the_middle,
    another_scale,
    other_angles,
    another_activation,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_answers_as_transformers_runs_it(make_model, change):
    model = make_model("llama")
    change(model)
    model.eval().requires_grad_(False)
    expected = answer(model)
    target = Target.from_model(model)
    assert type(target.lm) is HfLM
    assert written(target) == expected
    assert written(target, FailingDrafter(target, "never")) == expected


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_as_published_runs_by_our_forward(make_model, kind):
    model = make_model(kind)
    model(torch.tensor([PROMPT]), output_hidden_states=True)  # transformers adds hooks of its own
    assert change_of(model) is None
    assert type(Target.from_model(model).lm) is FastLlama


def test_a_forward_that_was_compiled_is_the_class_s_own(make_model):
    model = make_model("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    assert added_to(model) is None


def test_layers_that_share_a_place_in_the_cache_are_named(make_model):
    model = make_model("llama")
    model.model.layers.append(model.model.layers[1])
    model.config.num_hidden_layers = 5
    with pytest.raises(IncompatibleError, match=r"numbered 0, 1, 2, 3, 1 for the cache, of 5"):
        Target.from_model(model)


def test_an_attention_of_somebody_s_own_is_refused_by_name(make_model):
    AttentionInterface.register("mine", AttentionInterface()["sdpa"])
    model = make_model("llama")
    model.config._attn_implementation = "mine"
    with pytest.raises(IncompatibleError, match="'mine'"):
        Target.from_model(model)


def new_weight(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight * 2)


@pytest.mark.parametrize("change", [hook_on_a_layer, patched_forward, adapter, new_weight])
def test_what_is_changed_after_loading_is_refused(make_model, change):
    model = make_model("llama")
    target = Target.from_model(model)
    written(target)
    change(model)
    with pytest.raises(IncompatibleError, match="changed after it was loaded"):
        written(target)


def test_weights_that_are_written_to_are_read_as_they_are(make_model):
    model = make_model("llama")
    target = Target.from_model(model)
    written(target)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    assert written(target) == answer(model)
