"""A sglang export in SGLang's own model files: its classes, loaders and forward passes.

Kernels are replaced by plain torch layers (`engine_standins`), everything between them is SGLang's
code from the unpacked wheel. It fails (exit 1) where a parameter gets no tensor or where the logits
of a draft step differ from the drafter's.

    pip download --no-deps sglang==0.5.23 -d engines
    python -m zipfile -e engines/sglang-*.whl engines/sglang
    python benchmarks/export_sglang.py --sglang engines/sglang runs/NAME/package ...
    python benchmarks/export_sglang.py --sglang engines/sglang --random runs/random

With --random it writes packages of random drafters of `tiny` there, one a family, and reads them.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_standins import (
    Attention,
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
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig

from specctl import load_target
from specctl.drafters import families
from specctl.export.formats import ExportSource, export
from specctl.export.layouts.blocks import check_confidence
from specctl.export.package.folder import save_package
from specctl.export.package.load import load_package
from specctl.export.package.manifest import read_manifest
from specctl.export.readers.sglang_eagle import captured
from specctl.export.readers.trial import (
    Trial,
    chained,
    drafted_logits,
    embedding_of,
    over_targets,
    twin,
    without_router,
)

MODELS = ("llama", "llama_eagle", "llama_eagle3", "dflash", "dspark", "lilicorr")
REAL = {f"sglang.srt.models.{name}" for name in MODELS} | {
    "sglang.srt.speculative.dflash_utils",
    "sglang.srt.speculative.lilicorr_utils",
    "sglang.srt.speculative.dspark_components.dspark_config",
}


class Struct:
    """msgspec's records."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        del kwargs
        dataclass(cls)


def normed_heads(query: Tensor, key: Tensor, *norms: Any, **more: Any) -> list[Tensor]:
    del more
    pairs, width = zip((query, key), norms[:2], strict=True), norms[2]
    return [norm(x.unflatten(-1, (-1, width))).flatten(-2) for x, norm in pairs]  # type: ignore


def rope_config(config: Any) -> tuple[float, Any]:
    return config.rope_parameters["rope_theta"], config.rope_parameters


class Boundary:
    """How SGLang's layers keep their residual: normed before a stage, or read as it is, and added
    behind it."""

    def __init__(self, read: Any, norm: nn.Module) -> None:
        self.read, self.norm, self.residual = read, norm, torch.empty(0)

    def prepare(self, x: Tensor, batch: Any, capture: Any = None) -> Tensor:
        del batch, capture
        self.residual = x
        out: Tensor = x if self.read == "plain" else self.norm(x)
        return out

    def finish(self, x: Tensor, batch: Any) -> Tensor:
        del batch
        return self.residual + x


class Whole(nn.Linear):
    """A layer that every rank has."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, **more: Any) -> None:
        del more
        super().__init__(inputs, outputs, bias=bias)
        self.input_size, self.output_size = inputs, outputs

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


def parts() -> dict[str, dict[str, Any]]:
    """What SGLang's model files import and use."""
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    boundary = "sglang.srt.layers.layer_boundary"
    keep = SimpleNamespace(
        start=lambda batch: None,
        fold=lambda x, batch: x,
        take_output=lambda x, batch: x,
    )
    return {
        "sglang.srt.layers.layernorm": {"RMSNorm": Norm},
        "sglang.srt.layers.linear": {
            "QKVParallelLinear": Qkv,
            "MergedColumnParallelLinear": Merged,
            "RowParallelLinear": Single,
            "ReplicatedLinear": Whole,
        },
        "sglang.kernels.ops.speculative.lilicorr": {"MAX_FUSED_CANDIDATE_TOPK": 16},
        "sglang.srt.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": Rows,
            "ParallelLMHead": Rows,
        },
        "sglang.srt.layers.activation": {"SiluAndMul": SiluAndMul},
        "sglang.srt.layers.radix_attention": {
            "RadixAttention": Attention,
            "AttentionType": SimpleNamespace(DECODER="decoder", ENCODER_ONLY="encoder"),
        },
        "sglang.srt.layers.logits_processor": {"LogitsProcessorOutput": SimpleNamespace},
        "sglang.srt.models.utils": {"apply_qk_norm": normed_heads},
        "sglang.srt.utils.hf_transformers_utils": {"get_rope_config": rope_config},
        "sglang.srt.utils.common": {"get_compiler_backend": lambda: "eager"},
        "msgspec": {"Struct": Struct},
        "sglang.srt.layers.rotary_embedding": {
            "get_rope": lambda head_dim, base, **more: Rope(head_dim, base)
        },
        "sglang.srt.layers.utils": {"get_layer_id": lambda name: None},
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": copied},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_size=1, pp_group=group),
            "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
        },
        "sglang.srt.utils": {
            "add_prefix": lambda name, prefix: f"{prefix}.{name}",
            "is_npu": lambda: False,
            "is_gfx95_supported": lambda: False,
        },
        boundary: {
            "layer_stack": nullcontext,
            "declare_attn": lambda read: read,
            "declare_ffn": lambda **facts: "norm",
            "append_stages": lambda *stages: [Boundary(read, norm) for read, norm in stages],
        },
        f"{boundary}.residual": {"batch": keep},
        f"{boundary}.residual.add_norm": {"NORM_QUANT_READOUT": "norm"},
        f"{boundary}.residual.post_norm": {"PLAIN_READOUT": "plain"},
    }


FILES = {
    "LlamaForCausalLMEagle3": "llama_eagle3",
    "LlamaForCausalLMEagle": "llama_eagle",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    "LiLiCorrDraftModel": "lilicorr",
}


RANDOM: dict[str, dict[str, Any]] = {  # options of each family
    "eagle3": {},
    "eagle": {},
    "dflash": {},
    "dflash2": {},
    "lilicorr": {},
    "dspark": {},
    "dspark-gated": {"correction": "gated"},
    "dspark-rnn": {"correction": "rnn"},
    "xpress": {},
}


def random_packages(folder: Path, names: Sequence[str]) -> list[Path]:
    """Packages of drafters of `tiny` in which no weight is zero and no norm the identity."""
    target, made = load_target("tiny", dtype="float32"), []
    for name in names:
        found, options = families()[name.partition("-")[0]], dict(RANDOM[name])
        if not name.startswith("eagle"):
            options["mask_id"] = 2
        torch.manual_seed(0)
        drafter = found.build(found.options(**options), target.spec, None)
        drafter.bind(target.borrowed())
        assert drafter.module is not None
        with torch.no_grad():
            for key, weight in drafter.module.named_parameters():
                if key.endswith("norm.weight"):
                    weight.uniform_(0.5, 1.5)
                else:
                    weight.normal_(std=0.05)
        serve = {"policy": "chain", "length": 3}
        words: dict[str, Any] = {"recipe_digest": "0" * 64, "command": sys.argv}
        save_package(drafter, target, folder / name, serve=serve, acceptance=None, **words)
        made.append(folder / name)
    return made


def loaded(folder: Path) -> Any:
    """SGLang's class for this folder, filled by its own loader."""
    config = AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    module = importlib.import_module(f"sglang.srt.models.{FILES[name]}")
    torch.set_default_dtype(torch.float64)
    model = getattr(module, name)(config).double()
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    empty = [n for n, p in model.named_parameters() if bool(p.isnan().any())]
    spared = ["model.embed_tokens.weight"] + ([] if name.endswith("3") else ["lm_head.weight"])
    empty = [n for n in empty if n not in spared]
    if empty:
        raise SystemExit(f"{name}: {empty[0]} gets no tensor")
    return model


def block_logits(model: Any, source: ExportSource, trial: Trial) -> Tensor:
    """[N + 1, V]: a block behind the context, as SGLang's workers drive the model."""
    draft, config = model.draft_config, model.config
    ids = draft.resolve_target_layer_ids(target_num_layers=len(trial.states) - 1)
    taken = [trial.states[k] for k in range(len(trial.states)) if k in {v + 1 for v in ids}]
    context_SD, batch = model.project_target_hidden(torch.cat(taken, -1)), SimpleNamespace(seen={})
    for index, layer in enumerate(model.layers):
        key, value = layer.self_attn.kv_proj_only(context_SD)
        key = layer.self_attn.apply_k_norm(key)
        key = layer.self_attn.apply_k_rope(torch.arange(len(context_SD)), key)
        batch.seen[index] = [(key, value)]
    ids_T = torch.tensor([trial.ids[-1]] + [draft.mask_token_id] * (model.block_size - 1))
    position_T = len(context_SD) + torch.arange(len(ids_T))
    out_TD = model(ids_T, position_T, batch, embedding_of(source)[ids_T]).hidden_states
    head_VD = source.target.borrowed().head_VD.double()
    name = config.architectures[0]
    if name == "DFlashDraftModel":
        return out_TD[1:] @ head_VD.T
    if name in ("DFlash2DraftModel", "LiLiCorrDraftModel"):
        said_PV = out_TD[1:] @ head_VD.T
        edges = selector_edges if name.startswith("DFlash2") else lattice_edges
        return chosen(said_PV, *edges(model, source, trial, out_TD[1:], said_PV, context_SD), trial)
    said, before_N, memory = [], torch.tensor([trial.ids[-1], *trial.drafted]), None
    if hasattr(model.markov_head, "init_state"):
        memory = model.markov_head.init_state(out_TD[:1])
    for row_V, state_D, token in zip(out_TD @ head_VD.T, out_TD, before_N, strict=True):
        bias, memory = model.markov_head.step_bias(
            token[None], hidden_states=state_D[None], state=memory
        )
        said.append(row_V + bias[0])
    sure_N, _ = model.confidence_head.predict(
        out_TD,
        anchor_tokens=before_N[:1],
        draft_tokens=torch.cat([before_N[1:], before_N[:1]])[None],
        markov_head=model.markov_head,
    )
    check_confidence(source, sure_N[0], trial)
    return torch.stack(said)


def selector_edges(
    model: Any, source: ExportSource, trial: Trial, state_PD: Tensor, said_PV: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """[P, C] candidates of DFlash2, and [P, C, C] their scores behind each of the slot before."""
    del source, rest
    best = said_PV.topk(model.candidate_selector.top_k, dim=-1)
    edges = model.candidate_selector.build_lattice(
        candidate_ids=best.indices[None],
        unary_logits=best.values[None],
        hidden_states=state_PD[None],
        anchor_token_ids=torch.tensor(trial.ids[-1:]),
    )
    return best.indices, edges[0]


def lattice_edges(
    model: Any, source: ExportSource, trial: Trial, state_PD: Tensor, said_PV: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """The same of LiLiCorr, which sees the newest features."""
    head, last_D = model.lilicorr, rest[0][-1]
    head.materialize_inference_buffers(state_PD.device, state_PD.dtype)
    for name in ("_attn_bias", "_fused_edge_weight", "_fused_edge_bias"):
        setattr(head, name, getattr(head, name).double())
    logp, ids = said_PV.log_softmax(-1).topk(head.candidate_topk, dim=-1)
    scores = head.score(
        token_embeddings=embedding_of(source)[ids][None, None],
        candidate_log_probs=logp[None, None],
        pass_hidden=state_PD[None, None],
        anchor_hidden=last_D[None, None],
        anchor_valid=torch.ones(1, 1, dtype=torch.bool),
    )
    first, pairs = (each[0, 0] for each in head.log_factors(*scores))
    return ids, torch.cat([first.expand(1, len(first), -1), pairs])


def chosen(said_PV: Tensor, ids_PC: Tensor, edges_PCC: Tensor, trial: Trial) -> Tensor:
    """[P, V]: the scores behind the drafted tokens, -inf for what is no candidate."""
    out_PV, before = torch.full_like(said_PV, -torch.inf), 0
    for place, ids_C in enumerate(ids_PC):
        out_PV[place, ids_C] = edges_PCC[place, before].double()
        if place < len(trial.drafted):
            before = int((ids_C == trial.drafted[place]).nonzero()[0, 0])
    return out_PV


def candidates_of(source: ExportSource, trial: Trial) -> Trial:
    """The trial with drafted tokens that the drafter would draft, of another rank every time."""
    ids: list[int] = []
    for place in range(len(trial.drafted)):
        drafted = replace(trial, drafted=(*ids, *trial.drafted[place:]))
        said_V = drafted_logits(twin(source, source.drafter), drafted)[place]
        best = said_V.topk(int((said_V > -torch.inf).sum())).indices
        ids.append(int(best[place % len(best)]))
    return replace(trial, drafted=tuple(ids))


def logits(folder: Path, source: ExportSource, trial: Trial) -> Tensor:
    """[N + 1, V] by SGLang's class for this folder."""
    model = loaded(folder)
    config, name = model.config, model.config.architectures[0]
    if FILES[name] in ("dflash", "dspark", "lilicorr"):
        return block_logits(model, source, trial)
    embedding_VD, is_third = embedding_of(source), name.endswith("3")
    head_VD = source.target.borrowed().head_VD.double()
    if is_third:
        taps = [trial.states[k] for k in captured(config, len(trial.states) - 1)]
        state_TD, head = torch.cat(taps, -1), model.lm_head.weight
        ids_K = model.get_hot_token_id()
    else:
        vocab = source.drafter.vocab
        ids_K = None if vocab is None else vocab.ids_K
        state_TD, head = (
            trial.states[max(trial.states)],
            head_VD if ids_K is None else head_VD[ids_K],
        )

    def step(ids_T: Tensor, state_TD: Tensor) -> tuple[Tensor, Tensor]:
        batch = SimpleNamespace(
            seen={},
            spec_info=SimpleNamespace(hidden_states=state_TD),
            forward_mode=SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True),
        )
        position_T, embeds_TD = torch.arange(len(ids_T)), embedding_VD[ids_T]
        out = model.model(ids_T, position_T, batch, embeds_TD)
        read_TD, fed_TD = (out[0], out[1][0]) if is_third else (out, out)
        return read_TD @ head.T, fed_TD

    if is_third and state_TD.shape[-1] != config.hidden_size:  # the engine feeds chunks apart
        said_NK = fed_apart(model, step, trial, state_TD)
    else:
        said_NK = chained(step, trial, state_TD)
    return over_targets(said_NK, ids_K, len(embedding_VD))


def fed_apart(model: Any, step: Any, trial: Trial, taken_TI: Tensor) -> Tensor:
    """Features and the drafter's own states never stand in one call: the features are joined once,
    as the model joins them, and then chained."""
    joined: list[Tensor] = []
    first = model.model.layers[0]
    handle = first.register_forward_pre_hook(
        lambda layer, args: joined.append(args[2]) if not joined else None
    )
    step(torch.tensor(trial.ids[1:]), taken_TI)
    handle.remove()
    return chained(step, trial, joined[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, required=True, help="the unpacked wheel")
    parser.add_argument("--random", type=Path, metavar="FOLDER")
    parser.add_argument("packages", type=Path, nargs="*")
    wanted = parser.parse_args()
    if wanted.random:
        names = [name for name in RANDOM if name != "xpress"]
        wanted.packages += random_packages(wanted.random, names)
    worst = 0.0
    print("| package | class | parameters | largest error of a logit |\n|---|---|---|---|")
    for package in wanted.packages:
        manifest = read_manifest(package)
        target = load_target(manifest.target.name)
        with tempfile.TemporaryDirectory() as out:
            export(package, "sglang", Path(out) / "draft", target)
            source = ExportSource(package, manifest, load_package(package, target), target)
            places = getattr(source.drafter.options, "num_heads", 5) - 1
            mask = getattr(source.drafter.options, "mask_id", None)
            trial = Trial.of(source, places, without=mask)
            if manifest.family in ("dflash2", "lilicorr"):
                trial = candidates_of(source, trial)
            ours_NV = drafted_logits(twin(source, without_router(source.drafter)), trial)
            with engine(wanted.sglang, REAL, parts(), ("msgspec",)), torch.no_grad():
                theirs_NV = logits(Path(out) / "draft", source, trial)
            config = AutoConfig.from_pretrained(Path(out) / "draft")
        said = ours_NV > -torch.inf
        error = float((theirs_NV - ours_NV)[said].abs().max() / ours_NV[said].abs().max())
        same = torch.equal(theirs_NV > -torch.inf, said)
        worst = max(worst, error if same else torch.inf)
        print(f"| {package} | {config.architectures[0]} | {manifest.parameters:,} | {error:.1e} |")
    return 0 if worst < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
