"""A speculators export of dflash or dspark in vLLM's own model files: the config that it derives,
its classes, loaders and forward passes.

Kernels are replaced by plain torch layers (`engine_standins`), everything between them is vLLM's
code from the unpacked wheel. It fails (exit 1) where a parameter gets no tensor that vLLM does not
share from the target, or where a logit or a confidence differs from the drafter's.

    pip download --no-deps vllm==0.33.0 -d engines
    python -m zipfile -e engines/vllm-*.whl engines/vllm
    python benchmarks/export_vllm_blocks.py --vllm engines/vllm runs/NAME/package ...
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from engine_standins import Attention, Merged, Norm, Qkv, Rope, Rows, SiluAndMul, Single, engine
from engine_standins import copied as copied_into
from safetensors.torch import load_file
from torch import Tensor, nn

from specctl import load_target
from specctl.export.formats import ExportSource, export
from specctl.export.layouts.blocks import check_confidence
from specctl.export.package.load import load_package
from specctl.export.package.manifest import read_manifest
from specctl.export.readers.trial import (
    Trial,
    compare,
    drafted_logits,
    embedding_of,
    over_targets,
    twin,
)

MODELS, SPEC = "vllm.model_executor.models", "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils"
LAYERS, ALGOS = "vllm.model_executor.layers", "vllm.transformers_utils.configs.speculators.algos"
REAL = {f"{MODELS}.{name}" for name in ("qwen3_dflash", "qwen3_dspark", "utils")} | {ALGOS, SPEC}
CLASSES = {"dflash": "DFlashQwen3ForCausalLM", "dspark": "Qwen3DSparkForCausalLM"}
BATCH = SimpleNamespace(seen={})


class Replicated(Single):
    def __init__(
        self, input_size: int, output_size: int, bias: bool = True, return_bias: bool = True,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(input_size, output_size, bias)
        self.input_size, self.returns_bias = input_size, return_bias

    def forward(self, x: Tensor) -> Any:
        out, none = super().forward(x)
        return (out, none) if self.returns_bias else out


class Unquantized:
    """The method of a linear layer whose weight may be sliced."""


class Fused(Qkv):
    quant_method = Unquantized()


class Mlp(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, **more: Any) -> None:
        super().__init__()
        self.gate_up_proj = Merged(hidden_size, [intermediate_size] * 2, bias=False)
        self.down_proj, self.act = Single(intermediate_size, hidden_size, bias=False), SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act(self.gate_up_proj(x)[0]))[0]
        return out


class Placed(Attention):
    """Its layer stands in its name, and its cache in `BATCH`."""

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, *, num_kv_heads: int, prefix: str,
        **more: Any,
    ) -> None:  # fmt: skip
        layer = int(prefix.split("layers.")[1].split(".")[0])
        super().__init__(num_heads, head_dim, scaling, num_kv_heads, layer, "encoder")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any = BATCH) -> Tensor:
        return super().forward(query, key, value, batch)


class Head(nn.Module):
    """LogitsProcessor."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__()

    def forward(self, head: Any, x: Tensor) -> Tensor:
        return F.linear(x, head.weight)


def rope(head_dim: int, rope_parameters: dict[str, Any], **more: Any) -> Rope:
    made = Rope(head_dim, rope_parameters["rope_theta"])
    made.head_size, made.is_neox_style, made.cos_sin_cache = head_dim, True, torch.zeros(1)
    return made


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """One weight, or one per entry of the first axis."""
    if weight.dim() > 1:
        weight = weight.view(len(weight), *[1] * (x.dim() - 2), -1)
    out.copy_(weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def parts(config: Any) -> dict[str, dict[str, Any]]:
    """What vLLM's model files import and use."""
    platform = SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: False)
    quiet = SimpleNamespace(info=print, warning=print, debug=lambda *args: None)
    return {
        "vllm": {"_custom_ops": SimpleNamespace(rms_norm=rms_norm)},
        "vllm.compilation.decorators": {"support_torch_compile": lambda model: model},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {"get_tensor_model_parallel_world_size": lambda: 1},
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.platforms": {"current_platform": platform},
        "vllm.transformers_utils.config": {"set_default_rope_theta": lambda *a, **k: None},
        "vllm.transformers_utils.repo_utils": {"get_hf_file_bytes": lambda *a: None},
        "vllm.v1.attention.backend": {"AttentionType": SimpleNamespace(DECODER="decoder")},
        "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": copied_into},
        "vllm.model_executor.model_loader.reload": {
            "support_quantized_model_reload_from_hp_weights": lambda method: method
        },
        f"{LAYERS}.attention": {"Attention": Placed},
        f"{LAYERS}.layernorm": {"RMSNorm": Norm},
        f"{LAYERS}.linear": {
            "QKVParallelLinear": Fused,
            "ReplicatedLinear": Replicated,
            "RowParallelLinear": Single,
            "UnquantizedLinearMethod": Unquantized,
        },
        f"{LAYERS}.logits_processor": {"LogitsProcessor": Head},
        f"{LAYERS}.rotary_embedding": {"get_rope": rope},
        f"{LAYERS}.vocab_parallel_embedding": {
            "ParallelLMHead": Rows,
            "VocabParallelEmbedding": Rows,
        },
        f"{MODELS}.interfaces": {"supports_any_eagle": lambda model: True},
        f"{MODELS}.qwen2": {"Qwen2MLP": Mlp},
        f"{MODELS}.qwen3": {"Qwen3ForCausalLM": nn.Module},
    }


def loaded(folder: Path, source: ExportSource, config: Any) -> Any:
    """vLLM's class for this folder, filled by its own loader; embedding and LM head are shared from
    the target where the folder has none."""
    body = json.loads((folder / "config.json").read_text())
    kind, layer = body["speculators_model_type"], body["transformer_layer_config"]
    derive = importlib.import_module(ALGOS).SUPPORTED_SPECULATORS_TYPES[kind]
    derive(config_dict=body, pre_trained_config=layer)
    draft = SimpleNamespace(hf_config=SimpleNamespace(**layer), model=str(folder), revision=None)
    length = body["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    spec = source.manifest.model_spec
    config.speculative_config = SimpleNamespace(draft_model_config=draft, length=length)
    config.model_config = SimpleNamespace(
        dtype=torch.float64,
        get_total_num_hidden_layers=lambda: spec.num_layers,
        get_vocab_size=lambda: spec.vocab_size,
    )
    config.cache_config, config.use_v2_model_runner = None, True
    module = importlib.import_module(f"{MODELS}.qwen3_{kind}")
    for file in ("qwen3_dflash", "qwen3_dspark"):
        made = importlib.import_module(f"{MODELS}.{file}")
        made.get_draft_quant_config = lambda config: None  # type: ignore[attr-defined]
        made.map_draft_quant_config = lambda *args: None  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    model = getattr(module, CLASSES[kind])(vllm_config=config).double()
    torch.set_default_dtype(torch.float32)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    shared = {"model.embed_tokens.weight": embedding_of(source)}
    if source.drafter.vocab is None:
        shared["lm_head.weight"] = source.target.borrowed().head_VD.double()
    for name, parameter in model.named_parameters():
        if not bool(parameter.isnan().any()):
            continue
        if name not in shared:
            raise SystemExit(f"{CLASSES[kind]}: {name} gets no tensor")
        parameter.data = shared[name]
    return model


def logits(root: Path, folder: Path, source: ExportSource, trial: Trial) -> Tensor:
    """[N + 1, V]: a block behind the context, as vLLM's speculators drive the model."""
    config: Any = SimpleNamespace()
    with engine(root, REAL, parts(config)), torch.no_grad():
        model = loaded(folder, source, config)
        layers = importlib.import_module(SPEC).get_eagle3_aux_layers_from_config
        taps = [trial.states[k] for k in sorted(layers(config.speculative_config))]
        net, draft = model.model, config.speculative_config.draft_model_config.hf_config
        context_SD = model.combine_hidden_states(torch.cat(taps, -1))
        sizes = (len(context_SD), len(net.layers), net._num_kv_heads, net._head_dim)
        keys, values = net._project_context_kv(context_SD, *sizes)
        keys, turn = net._normalize_context_k(keys), net.layers[0].self_attn.rotary_emb._turned
        BATCH.seen.clear()
        for key, value, layer in zip(keys, values, net.layers, strict=True):
            assert not layer.self_attn.causal
            turned = turn(torch.arange(len(context_SD)), key.flatten(1))
            BATCH.seen[layer.self_attn.attn.layer_id] = [(turned, value.flatten(1))]
        speaks = getattr(draft, "sample_from_anchor", False)
        masks = [net.mask_token_id] * (config.speculative_config.length - int(speaks))
        ids_T = torch.tensor([trial.ids[-1], *masks])
        out_TD = model(ids_T, len(context_SD) + torch.arange(len(ids_T)))
        if not speaks:
            said_NV: Tensor = model.compute_logits(out_TD[1:])
            return said_NV
        markov = model.markov_embed(torch.tensor([trial.ids[-1], *trial.drafted]))
        said_NK = model.compute_draft_logits(out_TD) + model.markov_bias(markov)
        net.confidence_head.float()  # as vLLM keeps it
        check_confidence(source, model.compute_confidence(out_TD, markov), trial)
        ids_K = model.map_draft_to_target(torch.arange(said_NK.shape[1]))
        return over_targets(said_NK, ids_K, source.manifest.model_spec.vocab_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="the unpacked wheel")
    parser.add_argument("packages", type=Path, nargs="+")
    wanted = parser.parse_args()
    print("| package | largest error of a logit |\n|---|---|")
    for package in wanted.packages:
        manifest = read_manifest(package)
        target = load_target(manifest.target.name)
        source = ExportSource(package, manifest, load_package(package, target), target)
        with tempfile.TemporaryDirectory() as out:
            folder = Path(out) / "draft"
            export(package, "speculators", folder, target)
            mask = json.loads((folder / "config.json").read_text())["mask_token_id"]
            trial = Trial.of(source, source.drafter.options.num_heads - 1, without=mask)
            theirs_NV = logits(wanted.vllm, folder, source, trial)
        ours_NV = drafted_logits(twin(source, source.drafter), trial)
        print(f"| {package} | {compare('vLLM 0.33', theirs_NV, ours_NV):.1e} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
