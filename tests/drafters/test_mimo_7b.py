"""MiMo-7B's module: what it drafts is what its authors' code computes, written here in plain torch
over the tensors of the checkpoint by their published names.
Letters: D hidden width, E head width, T tokens.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, Qwen2Config, Qwen2ForCausalLM

from specctl import load_target
from specctl.core.errors import IncompatibleError, RecipeError
from specctl.drafters.features.mtp import Mtp
from specctl.models.hf.from_config import lm_from
from specctl.recipes.load import load_recipe
from specctl.runtime.target.mtp_checkpoint import own_module
from specctl.runtime.target.target import Target
from specctl.train.init.initial import initial_of
from specctl_testing.export.mtp_cases import Tensors, checkpoint
from specctl_testing.train.small_runs import random_target

TEXT = [5, 17, 3, 40, 8, 21, 33, 2, 9]
KNOWN = 6
BESIDE = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
Carried = tuple[Target, Tensors, Mtp]


@pytest.fixture(scope="module")
def carried(tmp_path_factory: Any) -> Carried:
    """Loaded from its folder, as a user's is."""
    folder: Path = tmp_path_factory.mktemp("mimo")
    tokenizer = random_target(0).tokenizer
    checkpoint("mimo", folder, tokenizer=tokenizer)
    tokenizer.save_pretrained(folder)
    target = load_target(str(folder), device="cpu", dtype="float32")
    tensors = {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}
    return target, tensors, own_module(target)


@torch.no_grad()
def in_front_of_the_norm(target: Target, tensors: Tensors, ids: list[int]) -> Tensor:
    """[T, D]: the residual that Qwen2, which MiMo-7B is, hands to its last norm."""
    config = target.lm.module.config.to_dict()
    model = Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in config.items() if k != "model_type"}))
    model.load_state_dict({n: t for n, t in tensors.items() if "mtp_layers" not in n})
    seen = list[Tensor]()
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    model.eval()(torch.tensor([ids]))
    return seen[0]


def module_says(target: Target, tensors: Tensors, ids: list[int], state_TD: Tensor) -> Tensor:
    """[T, D]: of the module behind tokens `ids` beside the states before them."""
    c = target.lm.module.config
    before = "model.mtp_layers.0."
    t = {n.removeprefix(before): x.double() for n, x in tensors.items() if n.startswith(before)}
    assert all(f"{name}.weight" in t for name in BESIDE)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(c.rms_norm_eps).rsqrt() * t[f"{name}.weight"]

    def heads(x: Tensor, name: str, num: int) -> Tensor:
        out = x @ t[f"self_attn.{name}.weight"].T + t[f"self_attn.{name}.bias"]
        return out.view(len(x), num, -1).transpose(0, 1)

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1]).double()[:, None] * c.rope_parameters["rope_theta"] ** (
            -torch.arange(half).double() / half
        )
        a, b = x[..., :half], x[..., half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    token_TD = tensors["model.embed_tokens.weight"][torch.tensor(ids)].double()
    both = [norm(state_TD.double(), "hidden_layernorm"), norm(token_TD, "token_layernorm")]
    x = torch.cat(both, -1) @ t["input_proj.weight"].T
    into = norm(x, "input_layernorm")
    num, kv = c.num_attention_heads, c.num_key_value_heads
    query = turned(heads(into, "q_proj", num))
    key = turned(heads(into, "k_proj", kv)).repeat_interleave(num // kv, 0)
    value = heads(into, "v_proj", kv).repeat_interleave(num // kv, 0)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    x = x + out.transpose(0, 1).flatten(1) @ t["self_attn.o_proj.weight"].T
    into = norm(x, "post_attention_layernorm")
    gate, up, down = (t[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
    x = x + (F.silu(into @ gate.T) * (into @ up.T)) @ down.T
    return norm(x, "final_layernorm")


def error(carried: Carried, drafter: Mtp, features: Any, drive: Any) -> list[float]:
    """Of each drafted token: how far its logits are from plain torch, as a share of the largest."""
    target, tensors, _ = carried
    state_TD = in_front_of_the_norm(target, tensors, TEXT[: KNOWN - 1])
    theirs = list[Tensor]()
    for at in range(KNOWN, len(TEXT) + 1):
        out_TD = module_says(target, tensors, TEXT[1:at], state_TD)
        theirs.append(out_TD[-1] @ tensors["lm_head.weight"].double().T)
        state_TD = torch.cat([state_TD, out_TD[-1:]])
    with torch.no_grad():
        ours_NV = drive(target, drafter).chain_logits(TEXT, KNOWN)
    far_NV = (ours_NV - torch.stack(theirs)).abs()
    return (far_NV.amax(-1) / torch.stack(theirs).abs().max()).tolist()


def test_it_drafts_what_its_authors_code_computes(
    carried: Carried, features: Any, drive: Any
) -> None:
    """State first in the concatenation, from in front of the target's last norm; four tokens."""
    target, _, drafter = carried
    assert drafter.options.before_norm
    assert max(error(carried, drafter, features, drive)) < 1e-4
    other = Mtp(replace(drafter.options, before_norm=False), target.spec)
    other.load_tensors({n: t for n, t in drafter.tensors().items() if n != "last_norm"})
    other.bind(target.borrowed())
    assert min(error(carried, other, features, drive)) > 1e-2


@torch.no_grad()
def test_training_unrolls_what_is_drafted(carried: Carried, make_batch: Any, drive: Any) -> None:
    target, _, drafter = carried
    batch = make_batch(target, drafter, rows=1, seq_len=24)
    steps, ids = drafter.unroll(batch), batch.ids_BS[0, :9].tolist()
    served = drive(target, drafter).chain_logits(ids[: 5 + len(steps) - 1], 5)
    for i, step in enumerate(steps):
        trained = step.ready_BSD[0, 3] @ drafter.head_weight().T
        torch.testing.assert_close(served[i], trained, rtol=1e-4, atol=1e-4)


def test_a_draft_model_of_that_kind_is_built_from_its_package_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process that has met no checkpoint of it."""
    monkeypatch.delitem(CONFIG_MAPPING._extra_content, "mimo", raising=False)
    monkeypatch.delitem(sys.modules, "specctl.models.hf.mimo", raising=False)
    made = lm_from({
        "model_type": "mimo", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }, 40)  # fmt: skip
    assert type(made.module).__name__ == "MiMoForCausalLM"


def test_what_cannot_be_had_back_is_refused(tmp_path: Path) -> None:
    target, _ = checkpoint("mimo", tmp_path)
    part = load_recipe("mtp", ["drafter.options.before_norm=true"]).drafter
    with pytest.raises(RecipeError, match="does not know the weights of the target's last norm"):
        initial_of(part, target, None)
    module: Any = target.lm.module
    with torch.no_grad():
        module.model.norm.weight[3] = 0.0
    with pytest.raises(IncompatibleError, match="1 weights of 0 in the last norm"):
        own_module(target)
