"""Speculators exports of eagle3 and p-eagle in vLLM's own model files, without its kernels.

The configuration, the loader and the forward pass are those of the unpacked wheel (0.33.0): its
speculators reader derives the draft model's config, AutoWeightsLoader fills Eagle3LlamaForCausalLM
or Eagle3Qwen3ForCausalLM, and rows go through their layers. Linear layers, norms, rope, attention
and the LM head are plain torch (`engine_standins`). What vLLM's proposer does around the model
(which token stands beside which state, masked rows) is written here. It fails (exit 1) where a
parameter gets no tensor or a logit differs by more than 1e-5 of the largest.

    pip download --no-deps vllm==0.33.0 -d engines; python -m zipfile -e engines/vllm-*.whl vllm
    python benchmarks/export_vllm_eagle.py --vllm vllm --draft runs/eagle3/package
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from engine_standins import (
    Merged,
    Norm,
    Qkv,
    Rope,
    Rows,
    SiluAndMul,
    Single,
    copied,
    engine,
)
from export_speculators import SHAPES, random_drafter
from safetensors.torch import load_file
from torch import Tensor, nn

from specctl import load_drafter, load_target
from specctl.core.errors import GateError
from specctl.export.formats import ExportSource, export
from specctl.export.layouts.speculators.p_eagle import mask_token
from specctl.export.package.folder import save_package
from specctl.export.package.manifest import read_manifest
from specctl.export.readers.trial import (
    Trial,
    chained,
    compare,
    drafted_logits,
    twin,
    without_router,
)

MODELS = ("llama", "qwen2", "qwen3", "llama_eagle3", "qwen3_eagle3", "utils", "interfaces")
REAL = {f"vllm.model_executor.models.{name}" for name in (*MODELS, "interfaces_base")} | {
    f"vllm.transformers_utils.configs.speculators.{name}" for name in ("algos", "base")
}
LAYERS = "vllm.model_executor.layers"
ALONE = SimpleNamespace(is_first_rank=True, is_last_rank=True, world_size=1)
CURRENT: list[Any] = []


class Bare(Single):
    """ReplicatedLinear that gives no bias back."""

    def __init__(self, input_size: int, output_size: int, bias: bool, **how: Any) -> None:
        del how
        super().__init__(input_size, output_size, bias)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]


class Attention(nn.Module):
    """Consecutive rows, each reading those before it and itself."""

    def __init__(
        self, heads: int, head_dim: int, scale: float, num_kv_heads: int, **_: Any
    ) -> None:
        super().__init__()
        self.head_dim, self.scale, self.share = head_dim, scale, heads // num_kv_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.view(len(x), -1, self.head_dim).transpose(0, 1) for x in (query, key, value))
        k, v = k.repeat_interleave(self.share, 0), v.repeat_interleave(self.share, 0)
        score = (q @ k.transpose(1, 2) * self.scale).masked_fill(
            torch.ones(len(query), len(query)).triu(1).bool(), -torch.inf
        )
        return (score.softmax(-1) @ v).transpose(0, 1).flatten(1)


class Logits:
    def __init__(self, size: int, scale: float = 1.0, **_: Any) -> None:
        self.scale = scale

    def __call__(self, head: Rows, states: Tensor) -> Tensor:
        return F.linear(states, head.weight) * self.scale


def rope(head_dim: int, rope_parameters: Any, **_: Any) -> Rope:
    assert rope_parameters["rope_type"] == "default"
    return Rope(head_dim, rope_parameters["rope_theta"])


def merged(input_size: int, output_sizes: list[int], bias: bool, **_: Any) -> Merged:
    return Merged(input_size, output_sizes, bias)


def single(input_size: int, output_size: int, bias: bool, **_: Any) -> Single:
    return Single(input_size, output_size, bias)


PARTS: dict[str, dict[str, Any]] = {
    f"{LAYERS}.layernorm": {"RMSNorm": Norm},
    f"{LAYERS}.linear": {
        "QKVParallelLinear": Qkv,
        "MergedColumnParallelLinear": merged,
        "RowParallelLinear": single,
        "ReplicatedLinear": Bare,
    },
    f"{LAYERS}.logits_processor": {"LogitsProcessor": Logits},
    f"{LAYERS}.vocab_parallel_embedding": {
        "ParallelLMHead": Rows,
        "VocabParallelEmbedding": Rows,
    },
    f"{LAYERS}.activation": {"SiluAndMul": SiluAndMul},
    f"{LAYERS}.attention": {"Attention": Attention},
    f"{LAYERS}.attention.encoder_only_attention": {"Attention": Attention},
    f"{LAYERS}.rotary_embedding": {"get_rope": rope},
    f"{LAYERS}.fusion.fused_act_quant": {"maybe_fused_act_quant": lambda act, x, layer: act(x)},
    "vllm.v1.attention.backend": {"AttentionType": SimpleNamespace(DECODER=1, ENCODER_ONLY=2)},
    "vllm.distributed": {
        "get_tensor_model_parallel_world_size": lambda: 1,
        "get_pp_group": lambda: ALONE,
    },
    "vllm.config": {"get_current_vllm_config": lambda: CURRENT[-1]},
    "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": copied},
    "vllm.transformers_utils.utils": {"without_trust_remote_code": lambda kwargs: kwargs},
    "vllm.transformers_utils.config": {"set_default_rope_theta": lambda *given, **_: None},
}


def loaded(folder: Path, source: ExportSource) -> tuple[Any, Any]:
    """vLLM's model of this folder, filled by its own loader, and its config."""
    configs = importlib.import_module("vllm.transformers_utils.configs.speculators.base")
    config = configs.SpeculatorsConfig.from_pretrained(folder)
    (architecture,) = config.architectures
    parallel, is_qwen = architecture.startswith("Peagle"), "Qwen3" in architecture
    kind = "qwen3_eagle3" if is_qwen else "llama_eagle3"
    module = importlib.import_module(f"vllm.model_executor.models.{kind}")
    module.get_draft_quant_config = lambda config: None
    spec = source.manifest.model_spec
    draft = SimpleNamespace(hf_config=config)
    how = SimpleNamespace(draft_model_config=draft, parallel_drafting=parallel, kv_cache_dtype=None)
    target = SimpleNamespace(
        dtype=torch.float64,
        hf_config=config,
        get_total_num_hidden_layers=lambda: spec.num_layers,
        get_vocab_size=lambda: spec.vocab_size,
    )
    CURRENT.append(
        SimpleNamespace(
            speculative_config=how, model_config=target, cache_config=None, quant_config=None
        )
    )
    torch.set_default_dtype(torch.float64)
    name = "Eagle3Qwen3ForCausalLM" if is_qwen else "Eagle3LlamaForCausalLM"
    model = getattr(module, name)(vllm_config=CURRENT[-1])
    torch.set_default_dtype(torch.float32)
    model.load_weights(list(load_file(folder / "model.safetensors").items()))
    empty = [n for n, p in model.named_parameters() if p.is_floating_point() and p.isnan().any()]
    empty = [n for n in empty if "hidden_norm" not in n or "layers.0." in n]  # later ones: unused
    if empty:
        raise SystemExit(f"{folder}: {empty[0]} gets no tensor")
    return model, config


def vllm_logits(folder: Path, source: ExportSource, trial: Trial) -> Tensor:
    """[N + 1, V]: as vLLM's proposer drives the model."""
    model, config = loaded(folder, source)
    taken = [
        trial.states[k]
        for k in range(len(trial.states) - 1)
        if k in config.eagle_aux_hidden_state_layer_ids
    ]
    state_TD = model.combine_hidden_states(torch.cat(taken, dim=-1))

    def step(ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        read_TD, fed_TD = model(ids_T, torch.arange(len(ids_T)), state_TD)
        return model.compute_logits(read_TD), fed_TD

    if not hasattr(model, "mask_hidden"):
        return chained(step, trial, state_TD)
    masked_1D = model.combine_hidden_states(model.mask_hidden)
    masks = len(trial.drafted)
    ids_T = torch.tensor([*trial.ids[1:], *[config.pard_token] * masks])
    state_TD = torch.cat([state_TD, masked_1D.expand(masks, -1)])
    return step(ids_T, state_TD)[0][-1 - masks :]


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", action="append", default=[], help="package for the target tiny")
    parser.add_argument("--vllm", type=Path, required=True, help="unpacked wheel of 0.33.0")
    args = parser.parse_args()
    target, failed = load_target("tiny", dtype="float32"), False
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temp, engine(args.vllm, REAL, PARTS):
        cases = [(name, Path(name)) for name in args.draft]
        for index, (name, family, trimmed, options) in enumerate(SHAPES):
            package = Path(temp) / f"p{index}"
            about: dict[str, Any] = {"serve": {"length": 4}, "recipe_digest": "", "command": []}
            drafter = random_drafter(family, target, trimmed, options)
            save_package(drafter, target, package, acceptance=None, **about)
            cases.append((name, package))
        for index, (name, package) in enumerate(cases):
            folder = Path(temp) / f"f{index}"
            export(package, "speculators", folder, target)
            drafter = load_drafter(package, target)
            source = ExportSource(package, read_manifest(package), drafter, target)
            mask = mask_token(source) if drafter.family == "p-eagle" else None
            trial = Trial.of(source, 3, without=mask)
            ours_NV = drafted_logits(twin(source, without_router(drafter)), trial)
            try:
                error = compare("vLLM 0.33.0", vllm_logits(folder, source, trial), ours_NV)
                print(f"{name:44} largest error {error:.1e}")
            except GateError as fault:
                failed = True
                print(f"{name:44} DIFFERS: {fault.found}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
