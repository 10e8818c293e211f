"""Files of a pre-training run: checkpoints that resume bit for bit, exports, the journal.

Everything is written beside its final name and then renamed: a reader sees the old or the new file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specctl.core.errors import FileError
from specctl.train.data.tokenizer import end_ids
from specctl.train.pretrain.recipe import PretrainProgress

CHECKPOINT = "checkpoint.safetensors"
NOT_A_LANGUAGE_MODEL = {
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states",
    "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path",
}  # fmt: skip
LOCAL_SETTINGS = {"is_local", "local_files_only", "backend"}


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, atomically."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def save_checkpoint(
    out: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: PretrainProgress,
) -> None:
    """Weights, optimizer states and progress in one safetensors file."""
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer.{index}.{number}.{key}"] = value.contiguous()
    partial = out / (CHECKPOINT + ".partial")
    save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress))})
    os.replace(partial, out / CHECKPOINT)


def load_checkpoint(
    out: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> PretrainProgress:
    """Restore what `save_checkpoint` wrote; returns where the run stood."""
    path = out / CHECKPOINT
    if not path.exists():
        raise FileError(
            f"no checkpoint at {path}", do="run without --resume, or name another --out"
        )
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    parameters = dict(model.named_parameters())
    with safe_open(path, framework="pt") as file, torch.no_grad():
        for name in list(file.keys()):
            kind, rest = name.split(".", 1)
            if kind == "model":
                parameters[rest].copy_(file.get_tensor(name))
            else:
                index, number, key = rest.split(".")
                states[int(index)].setdefault(int(number), {})[key] = file.get_tensor(name)
        progress = PretrainProgress(**json.loads(file.metadata()["progress"]))
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return progress


def config_of(model: Any) -> dict[str, Any]:
    """The config of an export: nothing that says no more than the default, old spellings beside
    the new ones, so that earlier transformers and other engines read the same values."""
    config: Any = model.config
    kept = {k: v for k, v in config.to_dict().items() if k not in NOT_A_LANGUAGE_MODEL}
    return {
        **kept,
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": config.rope_parameters["rope_theta"],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def export_snapshot(folder: Path, model: Any, tokenizer: Any) -> None:
    """A folder that AutoModelForCausalLM loads: bf16 weights, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()
    }
    partial = folder / "model.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    write_json(folder / "config.json", config_of(model))
    model.generation_config.eos_token_id = end_ids(tokenizer)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    portable = {key: value for key, value in settings.items() if key not in LOCAL_SETTINGS}
    # the names that every version of transformers knows
    portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    portable["additional_special_tokens"] = portable.pop("extra_special_tokens", [])
    write_json(folder / "tokenizer_config.json", portable)
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")


class Journal:
    """The JSONL log of a run, and the same line on stderr for whoever watches."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **values: Any) -> None:
        shown = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(shown) + "\n")
        print(" ".join(f"{k} {v}" for k, v in shown.items()), file=sys.stderr, flush=True)
