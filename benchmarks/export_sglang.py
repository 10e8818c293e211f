"""A sglang export in SGLang's own model files: its classes, loaders and forward passes.

Kernels are replaced by plain torch layers (`engine_standins`), everything between them is SGLang's
code from the unpacked wheel. It fails (exit 1) where a parameter gets no tensor or where the logits
of a draft step differ from the drafter's.

    pip download --no-deps sglang==0.5.23 -d engines
    python -m zipfile -e engines/sglang-*.whl engines/sglang
    python benchmarks/export_sglang.py --sglang engines/sglang runs/NAME/package ...
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from contextlib import nullcontext
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
from specctl.export.formats import Source, export
from specctl.export.load import load_package
from specctl.export.manifest import read_manifest
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

REAL = {f"sglang.srt.models.{name}" for name in ("llama", "llama_eagle", "llama_eagle3")}


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
        },
        "sglang.srt.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": Rows,
            "ParallelLMHead": Rows,
        },
        "sglang.srt.layers.activation": {"SiluAndMul": SiluAndMul},
        "sglang.srt.layers.radix_attention": {"RadixAttention": Attention},
        "sglang.srt.layers.rotary_embedding": {
            "get_rope": lambda head_dim, base, **more: Rope(head_dim, base)
        },
        "sglang.srt.layers.utils": {"get_layer_id": lambda name: None},
        "sglang.srt.model_loader.weight_utils": {"default_weight_loader": copied},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_size=1, pp_group=group),
            "get_spec": lambda: SimpleNamespace(speculative_draft_window_size=None),
        },
        "sglang.srt.utils": {"add_prefix": lambda name, prefix: f"{prefix}.{name}"},
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


def logits(folder: Path, source: Source, trial: Trial) -> Tensor:
    """[N + 1, V] by SGLang's class for this folder."""
    config = AutoConfig.from_pretrained(folder)
    name = config.architectures[0]
    module = importlib.import_module(
        "sglang.srt.models.llama_eagle3" if name.endswith("3") else "sglang.srt.models.llama_eagle"
    )
    with torch.device("cpu"):
        torch.set_default_dtype(torch.float64)
        model = getattr(module, name)(config).double()
        torch.set_default_dtype(torch.float32)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    empty = [n for n, p in model.named_parameters() if bool(p.isnan().any())]
    spared = ["model.embed_tokens.weight"] + ([] if name.endswith("3") else ["lm_head.weight"])
    empty = [n for n in empty if n not in spared]
    if empty:
        raise SystemExit(f"{name}: {empty[0]} gets no tensor")
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
    parser.add_argument("packages", type=Path, nargs="+")
    wanted = parser.parse_args()
    worst = 0.0
    print("| package | class | parameters | largest error of a logit |\n|---|---|---|---|")
    for package in wanted.packages:
        manifest = read_manifest(package)
        target = load_target(manifest.target.name)
        with tempfile.TemporaryDirectory() as out:
            export(package, "sglang", Path(out) / "draft", target)
            source = Source(package, manifest, load_package(package, target), target)
            trial = Trial.of(source, 4)
            ours_NV = drafted_logits(twin(source, without_router(source.drafter)), trial)
            with engine(wanted.sglang, REAL, parts()), torch.no_grad():
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
