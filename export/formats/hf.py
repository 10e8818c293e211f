"""An independent draft as a plain transformers folder: usable as `assistant_model`, by vLLM's
`draft_model`, SGLang's STANDALONE and every converter that reads Hugging Face models.

The vocabulary always has one row per target token (engines compare the two sizes). A trimmed draft
is scattered back; see `specctl.export.layouts.widen` for why the cut rows can never be drafted.
One of another architecture is written as transformers keeps it, with as many rows as it has.
Letters: B rows, K draft vocabulary, S sequence, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.core.errors import GateError, IncompatibleError
from specctl.drafters.lm.small_lm import SmallLm
from specctl.drafters.nets.routed import PREFIX
from specctl.export.formats import TARGET, ExportSource, Format
from specctl.export.layouts.engines import (
    draft_length,
    dtype_fields,
    dump_json,
    sglang_command,
    special_ids,
    vllm_command,
)
from specctl.export.layouts.widen import MARGIN, Widened, widen
from specctl.export.package.files import list_files
from specctl.export.package.manifest import WEIGHTS, check_files
from specctl.export.package.pretrained import inspect_folder
from specctl.export.package.tensors import compare_tensors, write_tensors
from specctl.models.hf.from_config import move
from specctl.models.hf.quiet import quietly
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.runtime.target.folders.checkpoint_folder import from_folder
from specctl.runtime.target.save_target import write_tokenizer


def write(source: ExportSource, folder: Path) -> None:
    plain = _plain(source)
    write_tensors(plain.tensors, folder / WEIGHTS)
    if source.target.tokenizer is not None:
        write_tokenizer(source.target.tokenizer, folder)
    dump_json(plain.config, folder / "config.json")
    dump_json(_generation_config(source), folder / "generation_config.json")
    list_files(folder)  # no tokenizer may have written anything but plain files


@dataclass(frozen=True, slots=True)
class _Plain:
    """What a transformers folder holds: weights and config.json."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]


def _plain(source: ExportSource) -> _Plain:
    drafter = source.drafter
    if isinstance(drafter.module, LlamaModel):
        wide = widened(source)
        return _Plain(wide.tensors, config_of(wide.shape, source))
    architecture = drafter.options.architecture
    if architecture is None:
        raise IncompatibleError(
            "this draft cannot be written as a transformers folder",
            found=type(drafter.module).__name__,
            expected="a draft that was trained, pruned or packaged by specctl",
            do="--to specctl, or use the transformers folder that the draft came from",
        )
    assert drafter.module is not None
    more = {"architectures": [type(drafter.module).__name__], "use_cache": True}
    more |= {"vocab_size": drafter.lm.spec.vocab_size} if isinstance(drafter, SmallLm) else {}
    config = {**architecture, **more, **special_ids(source), **dtype_fields(source)}
    return _Plain(_own_tensors(source), config)


def refuse_other_architectures(source: ExportSource) -> None:
    """Raise where a format holds Llama-shaped drafts alone."""
    if isinstance(source.drafter, SmallLm) and not isinstance(source.drafter.module, LlamaModel):
        raise IncompatibleError(
            "this format holds Llama-shaped drafts alone",
            found=type(source.drafter.module).__name__,
            expected="a draft trained without an architecture of its own",
            do="--to hf or --to specctl",
        )


def widened(source: ExportSource) -> Widened:
    """The draft over the target's whole vocabulary, in the dtype of the package."""
    drafter = source.drafter
    assert isinstance(drafter, SmallLm)
    refuse_other_architectures(source)
    assert isinstance(drafter.module, LlamaModel)
    kept_K = None if drafter.vocab is None else drafter.vocab.ids_K.cpu()
    return widen(drafter.module.shape, _own_tensors(source), kept_K)


def _own_tensors(source: ExportSource) -> dict[str, Tensor]:
    dtype = getattr(torch, source.manifest.dtype)
    return {
        n: t.detach().to("cpu", dtype, copy=True).contiguous()
        for n, t in source.drafter.tensors().items()
        if not n.startswith(PREFIX)  # the whole head is written, a router has no place there
    }


def config_of(shape: LlamaShape, source: ExportSource) -> dict[str, Any]:
    """config.json: the plainest transformers architecture that computes this shape. Rope is written
    in the new and in the old spelling."""
    spec = source.manifest.model_spec
    scaling = spec.rope_scaling
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": shape.rope_theta}
    return {
        **_architecture(shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_parameters": rope,
        "rope_theta": shape.rope_theta,
        "rope_scaling": scaling,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tied,
        **special_ids(source),
        **dtype_fields(source),
        "use_cache": True,
    }


def _architecture(shape: LlamaShape) -> dict[str, Any]:
    switches = (shape.qk_norm, shape.attention_bias, shape.output_bias, shape.window is not None)
    known: dict[tuple[bool, ...], tuple[str, str, dict[str, Any]]] = {
        (False, False, False, False): ("llama", "Llama", {"attention_bias": False}),
        (False, True, True, False): ("llama", "Llama", {"attention_bias": True}),
        (True, False, False, False): ("qwen3", "Qwen3", {"attention_bias": False}),
        (True, True, True, False): ("qwen3", "Qwen3", {"attention_bias": True}),
        (False, True, False, False): ("qwen2", "Qwen2", {}),
        (False, False, False, True): ("mistral", "Mistral", {"sliding_window": shape.window}),
    }
    if switches not in known:
        raise IncompatibleError(
            "no transformers architecture has this combination of switches",
            found="qk_norm {}, attention_bias {}, output_bias {}, window {}".format(*switches),
            expected="those of Llama, Qwen2, Qwen3 or Mistral",
            do="--to specctl",
        )
    model_type, name, extra = known[switches]
    if model_type == "llama":
        extra |= {"mlp_bias": False, "pretraining_tp": 1}
    if model_type.startswith("qwen"):
        extra |= {"use_sliding_window": False, "sliding_window": None}
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, **extra}


def _generation_config(source: ExportSource) -> dict[str, Any]:
    """How transformers should draft with it: the package's own draft length, every round."""
    body = {k: v for k, v in special_ids(source).items() if v is not None}
    length = source.manifest.serve.get("length")
    if isinstance(length, int):
        body |= {"num_assistant_tokens": length, "num_assistant_tokens_schedule": "constant"}
    return {**body, "do_sample": False}


def check(source: ExportSource, folder: Path) -> None:
    """Read the folder back: the same tensors, the same logits in transformers, cut rows below."""
    check_files(folder)
    inspect_folder(folder)
    compare_tensors(_plain(source).tensors, load_file(folder / WEIGHTS))
    ids_1S = probe_ids(source)
    compare_logits(source, _their_logits(folder, ids_1S), own_logits(source, ids_1S), _gate)


def compare_logits(
    source: ExportSource, theirs: Tensor, ours: Tensor, gate: Callable[[str, str], GateError]
) -> None:
    """What an engine computes over the whole vocabulary is what the draft computes over its own,
    and cut tokens are out of reach."""
    vocab = source.drafter.vocab
    kept_K = torch.arange(ours.shape[-1]) if vocab is None else vocab.ids_K.cpu()
    spoken = theirs[..., kept_K]
    scale = max(float(ours.abs().max()), 1.0)
    error = float((spoken - ours).abs().max()) / scale
    eps = float(torch.finfo(getattr(torch, source.manifest.dtype)).eps)
    if not error <= max(8 * eps, 1e-5):
        raise gate(f"logits differ by {error:.1e} of their size", "the drafter's own logits")
    rest = theirs.clone()
    rest[..., kept_K] = -torch.inf
    if float(rest.max()) > float(spoken.min()) - MARGIN / 2:
        raise gate("a cut token comes close to a kept one", f"{MARGIN:g} below every kept logit")


def probe_ids(source: ExportSource) -> Tensor:
    """[1, S]: the same random ids every time."""
    size = source.manifest.vocabulary.target_size
    num_ids = min(64, source.manifest.model_spec.max_positions)
    return torch.randint(size, (1, num_ids), generator=torch.Generator().manual_seed(0))


def own_logits(source: ExportSource, ids_1S: Tensor) -> Tensor:
    """[1, S, K] logits of the draft by our own forward, in float64 on the CPU."""
    drafter = source.drafter
    assert isinstance(drafter, SmallLm)
    copied = copy.deepcopy(drafter.module)
    if not isinstance(copied, LlamaModel):
        move(copied, torch.device("cpu"), torch.float64)
        with torch.no_grad():
            return drafter.draft_logits(copied(ids_1S, use_cache=False).logits)
    lm = FastLlama(copied.to("cpu", torch.float64), drafter.lm.spec)
    document_1S, position_1S = torch.zeros_like(ids_1S), torch.arange(ids_1S.shape[1])[None]
    with torch.no_grad():
        out = lm.dense(ids_1S, position_1S, lm.document_masks(document_1S))
    assert out.logits_BTV is not None
    return out.logits_BTV


def _their_logits(folder: Path, ids_1S: Tensor) -> Tensor:
    """[1, S, V] logits by transformers, in float64 on the CPU."""
    from transformers import AutoModelForCausalLM

    with quietly():
        model = from_folder(AutoModelForCausalLM, folder, dtype=torch.float64)
    with torch.no_grad():
        logits: Tensor = model.eval()(ids_1S).logits
    return logits


def _gate(found: str, expected: str) -> GateError:
    return GateError(
        "the transformers folder does not compute what the drafter computes",
        found=found,
        expected=expected,
        do="report this with the package's manifest.json; --to specctl is unaffected",
    )


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    length = draft_length(source)
    if isinstance(source.drafter, SmallLm) and source.drafter.lm.state_bytes:
        # The engines below take drafts of attention alone.
        return (shlex.join(["specctl", "generate", "--target", TARGET, "--draft", folder]),)
    mlx = ["mlx_lm.generate", "--model", TARGET, "--draft-model", folder]
    mlx += ["--num-draft-tokens", str(length), "--prompt", "def main("]
    return (
        vllm_command("draft_model", length, folder),
        sglang_command("STANDALONE", length, folder),
        shlex.join(mlx),
    )


FORMAT = Format(
    name="hf",
    summary="plain transformers causal-LM folder with the target's tokenizer",
    families=("small-lm",),
    write=write,
    check=check,
    serve=serve,
)
