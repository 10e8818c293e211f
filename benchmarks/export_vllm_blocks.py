"""An export of a block drafter in vLLM's own model files: the config that it derives, its classes,
loaders and forward passes. DFlash, DFlash2 and DSpark are read from the format of speculators,
LiLiCorr from the flat one, XPress from vLLM's own.

Kernels are replaced by plain torch layers (`engine_standins`), everything between them is vLLM's
code from the unpacked wheel. It fails (exit 1) where a parameter gets no tensor that vLLM does not
share from the target, or where a logit or a confidence differs from the drafter's. All slots are
compared, among them the first and the last, which show a wrong layout of the slots.

    pip download --no-deps vllm==0.33.0 -d engines
    python -m zipfile -e engines/vllm-*.whl engines/vllm
    python benchmarks/export_vllm_blocks.py --vllm engines/vllm runs/NAME/package ...
    python benchmarks/export_vllm_blocks.py --vllm engines/vllm --random runs/random
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from engine_standins import Attention, Merged, Norm, Qkv, Rope, Rows, SiluAndMul, Single, engine
from engine_standins import copied as copied_into
from export_sglang import candidates_of, chosen, random_packages
from safetensors.torch import load_file
from torch import Tensor, nn

from specctl import load_target
from specctl.drafters.blocks.xpress import XPress
from specctl.export.formats import ExportSource, export
from specctl.export.formats.vllm_xpress import at_the_root
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
CLASSES = {  # of a family: file, class
    "dflash": ("qwen3_dflash", "DFlashQwen3ForCausalLM"),
    "dflash2": ("qwen3_dflash2", "DFlash2Qwen3ForCausalLM"),
    "dspark": ("qwen3_dspark", "Qwen3DSparkForCausalLM"),
    "lilicorr": ("lilicorr", "LiLiCorrForCausalLM"),
    "xpress": ("qwen3_xpress", "Qwen3XPressForCausalLM"),
}
FORMATS = {"lilicorr": "sglang", "xpress": "vllm-xpress"}  # others: speculators
REAL = {f"{MODELS}.{file}" for file, _ in CLASSES.values()} | {f"{MODELS}.utils", ALGOS, SPEC}
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


class Plain(nn.Module):
    """NemotronHMLP, which has no gate."""

    def __init__(
        self, config: Any, hidden_size: int, intermediate_size: int, *, hidden_act: str,
        output_size: int | None = None, bias: bool = False, **more: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        assert (config, hidden_act) == (None, "silu")
        self.up_proj = Single(hidden_size, intermediate_size, bias)
        self.down_proj = Single(intermediate_size, output_size or hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.up_proj(x)[0]))[0]
        return out


class Table(Rows):
    quant_method = Unquantized()


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

    def get_top_k_tokens(
        self, head: Any, x: Tensor, count: int, return_log_probs: bool = False
    ) -> tuple[Tensor, Tensor]:
        said = F.linear(x, head.weight)
        best = (said.log_softmax(-1) if return_log_probs else said).topk(count, dim=-1)
        return best.indices, best.values


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
        "vllm.compilation.backends": {"set_model_tag": lambda tag: nullcontext()},
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
            "ParallelLMHead": Table,
            "VocabParallelEmbedding": Table,
        },
        f"{MODELS}.interfaces": {"supports_any_eagle": lambda model: True},
        f"{MODELS}.nemotron_h": {"NemotronHMLP": Plain},
        f"{MODELS}.qwen2": {"Qwen2MLP": Mlp},
        f"{MODELS}.qwen3": {"Qwen3ForCausalLM": nn.Module},
    }


def derived(folder: Path) -> tuple[Any, int]:
    """The draft model's config as vLLM derives it, and how many tokens are drafted."""
    body = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" not in body:  # flat: as it is
        return SimpleNamespace(**body), int(body["block_size"]) - 1
    layer = body["transformer_layer_config"]
    derive = importlib.import_module(ALGOS).SUPPORTED_SPECULATORS_TYPES
    derive[body["speculators_model_type"]](config_dict=body, pre_trained_config=layer)
    length = body["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return SimpleNamespace(**layer), length


def loaded(folder: Path, source: ExportSource, config: Any) -> Any:
    """vLLM's class for this folder, filled by its own loader; embedding and LM head are shared from
    the target where the folder has none."""
    derived_config, length = derived(folder)
    draft = SimpleNamespace(hf_config=derived_config, model=str(folder), revision=None)
    spec = source.manifest.model_spec
    config.speculative_config = SimpleNamespace(
        draft_model_config=draft, length=length, num_speculative_tokens=length
    )
    config.model_config = SimpleNamespace(
        dtype=torch.float64,
        get_num_layers=lambda parallel: spec.num_layers,
        get_total_num_hidden_layers=lambda: spec.num_layers,
        get_vocab_size=lambda: spec.vocab_size,
    )
    config.cache_config, config.use_v2_model_runner = None, True
    config.parallel_config, config.scheduler_config = None, SimpleNamespace(max_num_seqs=1)
    file, name = CLASSES[source.manifest.family]
    for each in {"qwen3_dflash", "qwen3_dspark", file}:
        made = importlib.import_module(f"{MODELS}.{each}")
        made.get_draft_quant_config = lambda config: None  # type: ignore[attr-defined]
        made.map_draft_quant_config = lambda *args: None  # type: ignore[attr-defined]
    torch.set_default_dtype(torch.float64)
    model = getattr(importlib.import_module(f"{MODELS}.{file}"), name)(vllm_config=config).double()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        if parameter.is_floating_point():  # others are tables of ids
            parameter.data.fill_(torch.nan)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    shared = {"model.embed_tokens.weight": embedding_of(source)}
    if source.drafter.vocab is None:
        shared["lm_head.weight"] = source.target.borrowed().head_VD.double()
    for key, parameter in model.named_parameters():
        if not bool(parameter.isnan().any()) or key.endswith("mask_embedding"):
            continue
        if key not in shared:
            raise SystemExit(f"{name}: {key} gets no tensor")
        parameter.data = shared[key]
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
        family = source.manifest.family
        if family in SPOKEN:
            return SPOKEN[family](model, source, trial, out_TD, context_SD)
        if not speaks:
            said_NV: Tensor = model.compute_logits(out_TD[1:])
            return said_NV
        markov = model.markov_embed(torch.tensor([trial.ids[-1], *trial.drafted]))
        said_NK = model.compute_draft_logits(out_TD) + model.markov_bias(markov)
        net.confidence_head.float()  # as vLLM keeps it
        check_confidence(source, model.compute_confidence(out_TD, markov), trial)
        ids_K = model.map_draft_to_target(torch.arange(said_NK.shape[1]))
        return over_targets(said_NK, ids_K, source.manifest.model_spec.vocab_size)


def selected(
    model: Any, source: ExportSource, trial: Trial, out_TD: Tensor, context_SD: Tensor
) -> Tensor:
    """[N + 1, V] of DFlash2's selector, as `DFlash2Speculator` calls it."""
    state_ND, anchor = out_TD[1:], torch.tensor(trial.ids[-1:])
    ids_NC, said_NC = model.compute_candidates(state_ND)
    edges = model.model.candidate_selector(ids_NC[None], said_NC[None], state_ND[None], anchor)
    return chosen(model.compute_logits(state_ND), ids_NC, edges[0], trial)


def correlated(
    model: Any, source: ExportSource, trial: Trial, out_TD: Tensor, context_SD: Tensor
) -> Tensor:
    """[N + 1, V] of LiLiCorr's lattice, as `LiLiCorrSpeculator` calls it."""
    state_ND, seen = out_TD[1:], torch.ones(1, dtype=torch.bool)
    ids_NC, logp_NC = model.compute_candidates(state_ND)
    rows_NCD, last_1D = embedding_of(source)[ids_NC], model.model.hidden_norm(context_SD[-1:])
    edges = model.model.lilicorr(rows_NCD[None], logp_NC[None], state_ND[None], last_1D, seen)
    return chosen(model.compute_logits(state_ND), ids_NC, edges[0], trial)


def refined(
    model: Any, source: ExportSource, trial: Trial, out_TD: Tensor, context_SD: Tensor
) -> Tensor:
    """[N + 1, V] of XPress over all tokens: one pass behind the drafted tokens, at which the rounds
    of `XPressSpeculator` end. The root stands for the token before it, as there."""
    head, root = model.model.xpress_head, trial.ids[-1]
    before_1T = torch.tensor([[root, root, *trial.drafted]])
    added_TV = head.w2(head._refine_latent(before_1T, head.hidden_cache(out_TD[None])))[0]
    out: Tensor = (model.compute_draft_logits(out_TD) + added_TV)[1:]
    return out


SPOKEN = {"dflash2": selected, "lilicorr": correlated, "xpress": refined}


def trial_of(source: ExportSource, folder: Path) -> Trial:
    """Drafted tokens that no mask stands for; of the candidates where only those are scored."""
    body = json.loads((folder / "config.json").read_text())
    nested = body.get("dflash_config", body)
    mask = body.get("mask_token_id", nested.get("mask_token_id"))
    trial = Trial.of(source, source.drafter.options.num_heads - 1, without=mask)
    chooses = source.manifest.family in ("dflash2", "lilicorr")
    return candidates_of(source, trial) if chooses else trial


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, required=True, help="the unpacked wheel")
    parser.add_argument("--random", type=Path, metavar="FOLDER", help="as export_sglang.py has it")
    parser.add_argument("packages", type=Path, nargs="*")
    wanted = parser.parse_args()
    if wanted.random:
        wanted.packages += random_packages(wanted.random, list(CLASSES))
    print("| package | class | largest error of a logit |\n|---|---|---|")
    for package in wanted.packages:
        manifest = read_manifest(package)
        target = load_target(manifest.target.name)
        source = ExportSource(package, manifest, load_package(package, target), target)
        with tempfile.TemporaryDirectory() as out:
            folder = Path(out) / "draft"
            export(package, FORMATS.get(manifest.family, "speculators"), folder, target)
            trial = trial_of(source, folder)
            theirs_NV = logits(wanted.vllm, folder, source, trial)
        drafter = source.drafter
        drafter = at_the_root(drafter) if isinstance(drafter, XPress) else drafter
        ours_NV = drafted_logits(twin(source, drafter), trial)
        error = compare("vLLM 0.33", theirs_NV, ours_NV)
        print(f"| {package} | {CLASSES[manifest.family][1]} | {error:.1e} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
