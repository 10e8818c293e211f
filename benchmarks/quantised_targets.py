"""Quantised checkpoints as targets: which load here, what they take, and whether they answer right.

    python benchmarks/quantised_targets.py            # a table
    python benchmarks/quantised_targets.py gptq awq   # of some formats

A random Llama (for MXFP4 a random gpt-oss) is written in each format: packed here by the format's
own layout, or by the library that owns it (bitsandbytes, torchao). `loads`: packed (the library
computes with the packed weights) or widened to plain numbers; else what is missing. `counted`:
bytes that the memory check counts, over those that parameters and buffers then have. `away`: the
distance of its logits from those of the numbers that were packed, over their size. `greedy`:
whether drafts by prompt lookup leave the answers as they are without.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from specctl.core.errors import SpecctlError
from specctl.drafters import families
from specctl.recipes.targets import resolve
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target import checkpoint
from specctl.runtime.target.checkpoint import check_config
from specctl.runtime.target.folders.folder_tokenizer import load_tokenizer
from specctl.runtime.target.target import Target, load_target

GROUP = 64  # inputs that share a scale
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SIZES = {
    "vocab_size": 6144, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512,
    "max_position_embeddings": 256, "initializer_range": 0.1, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 9]]


Pack = Callable[[str, Tensor], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint in a folder, and the model without storage tricks that it should be."""

    folder: Path
    meant: Any


def main() -> int:
    """Print the table; 1 if something loads and answers wrongly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("formats", nargs="*", default=list(FORMATS))
    given, wrong = parser.parse_args(), False
    print("| Format | loads | counted | away | greedy |\n|---|---|---|---|---|")
    for name in given.formats:
        with tempfile.TemporaryDirectory() as place:
            line, is_right = row(name, Path(place))
        wrong |= not is_right
        print(f"| {name} | {line} |", flush=True)
    return int(wrong)


def row(name: str, folder: Path) -> tuple[str, bool]:
    """What came of one format."""
    try:
        written = FORMATS[name](folder)
    except ImportError as error:
        return f"not written here: {str(error).splitlines()[0]} | | | ", True
    counted: list[int] = []
    checked, checkpoint.check_memory = checkpoint.check_memory, lambda n, *_: counted.append(n)
    try:
        target = load_target(str(folder), dtype="float32", device="cpu")
    except SpecctlError as error:
        return f"refused: {error.found} | | | ", True
    finally:
        checkpoint.check_memory = checked
    module = target.lm.module
    held = {s.data_ptr(): s.nbytes() for each in tensors(module) for s in storages(each)}
    kinds = {kind_of(p) for p in tensors(module) if p.ndim > 1}
    how = "widened" if kinds == {"float32"} else f"packed ({', '.join(sorted(kinds))})"
    away = distance(target, written.meant)
    same = answers(target, None) == answers(target, "prompt-lookup")
    share = counted[0] / sum(held.values())
    shown = f"{how} | {share:.2f} | {away:.4f} | {'same' if same else 'DIFFERS'}"
    return shown, same and away < 0.2


def tensors(module: Any) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def kind_of(tensor: Any) -> str:
    """The dtype of a plain tensor, or the name of a library's own kind."""
    data = tensor.data
    is_plain = not hasattr(data, "__tensor_flatten__")
    return str(data.dtype).removeprefix("torch.") if is_plain else type(data).__name__


def storages(tensor: Any) -> list[Any]:
    """Of a plain tensor, or of those that a library's own kind of tensor consists of."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor.untyped_storage()]
    names, _ = tensor.__tensor_flatten__()
    return [storage for name in names for storage in storages(getattr(tensor, name))]


@torch.no_grad()
def distance(target: Target, meant: Any) -> float:
    ids = torch.arange(40, 64)[None]
    masks = target.lm.document_masks(ids * 0)
    found = target.lm.dense(ids, torch.arange(24)[None], masks).logits_BTV
    wanted = meant.float()(input_ids=ids).logits
    assert found is not None
    return float((found.float() - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())


def answers(target: Target, family: str | None) -> list[tuple[int, ...]]:
    drafter = None
    if family is not None:
        made = families()[family]
        drafter = made.build(made.options(), target.spec, None)
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
    done = generate(target, PROMPTS, drafter=drafter, sampling=sampling, batch=1)
    return [tuple(output.token_ids) for output in done.outputs]


# -- writing --------------------------------------------------------------------------------------


def model_of(kind: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **fields})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def with_tokenizer(folder: Path) -> None:
    tiny = resolve("tiny").path
    assert tiny is not None
    load_tokenizer(tiny, check_config(tiny)).save_pretrained(folder)


def packed(folder: Path, how: dict[str, Any], pack: Pack) -> Written:
    """A Llama whose matrices of layers are replaced by what `pack` makes of each: the numbers that
    are meant, and the stored tensors by the end of their names."""
    model = model_of()
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                meant, parts = pack(name, module.weight.detach())
                module.weight.copy_(meant)
                del stored[f"{name}.weight"]
                stored |= {f"{name}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    with_tokenizer(folder)
    return Written(folder, model)


def rounded(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers 0..15 about a zero of 8 with a half-precision scale a group: numbers [O, I],
    scales [O, I / GROUP], and what they mean."""
    groups = weight_OI.view(weight_OI.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).half()
    whole = (groups / scale[..., None].float()).round().clamp(-8, 7) + 8
    meant = (whole - 8) * scale[..., None].float()
    return whole.flatten(1).int(), scale, meant.flatten(1)


def bits(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of four bits in each int32, along the last axis."""
    eight = numbers.view(*numbers.shape[:-1], -1, 8).long()
    found = sum(eight[..., source] << (4 * place) for place, source in enumerate(order))
    assert isinstance(found, Tensor)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def gptq(folder: Path) -> Written:
    """qweight packs inputs, qzeros outputs; a zero is stored as one less."""

    def pack(name: str, weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        del name
        whole, scale, meant = rounded(weight_OI)
        zeros = torch.full((scale.shape[1], scale.shape[0]), 7)
        index = torch.arange(weight_OI.shape[1], dtype=torch.int32) // GROUP
        parts = {"qweight": bits(whole).T, "qzeros": bits(zeros), "scales": scale.T}
        return meant, {**parts, "g_idx": index}

    how = {
        "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq",
    }  # fmt: skip
    return packed(folder, how, pack)


def awq(folder: Path) -> Written:
    """Inputs by outputs; eight outputs in one number, in an order of their own."""

    def pack(name: str, weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        del name
        whole, scale, meant = rounded(weight_OI)
        zeros = torch.full((scale.shape[1], scale.shape[0]), 8)
        parts = {"qweight": bits(whole.T.contiguous(), AWQ_ORDER), "scales": scale.T}
        return meant, {**parts, "qzeros": bits(zeros, AWQ_ORDER)}

    how = {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm",
    }  # fmt: skip
    return packed(folder, how, pack)


def compressed(folder: Path) -> Written:
    """pack-quantized of compressed-tensors: whole numbers about 0, offset by 8 and packed."""

    def pack(name: str, weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        del name
        whole, scale, meant = rounded(weight_OI)
        shape = torch.tensor(weight_OI.shape, dtype=torch.int64)
        parts = {"weight_packed": bits(whole), "weight_scale": scale.float()}
        return meant, {**parts, "weight_shape": shape}

    weights = {
        "num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True,
        "dynamic": False,
    }  # fmt: skip
    group = {"weights": weights, "targets": ["Linear"], "format": "pack-quantized"}
    how = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, "quantization_status": "compressed",
    }  # fmt: skip
    return packed(folder, how, pack)


def fp8(folder: Path) -> Written:
    """Blocks of 128 x 128 of eight-bit floats, as DeepSeek publishes them."""

    def pack(name: str, weight_OI: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        del name
        blocks = weight_OI.unfold(0, 128, 128).unfold(1, 128, 128)
        scale = blocks.abs().amax((-1, -2)) / torch.finfo(torch.float8_e4m3fn).max
        wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        small = (weight_OI / wide).to(torch.float8_e4m3fn)
        return small.float() * wide, {"weight": small, "weight_scale_inv": scale}

    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    return packed(folder, how, pack)


def mxfp4(folder: Path) -> Written:
    """gpt-oss: experts in four-bit floats, 32 of which share a power of two."""
    model = model_of("gpt_oss", num_local_experts=4, num_experts_per_tok=2, hidden_size=128,
                     intermediate_size=128, head_dim=32)  # fmt: skip
    model.save_pretrained(folder)
    stored, levels = load_file(folder / "model.safetensors"), torch.tensor(FP4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("gate_up_proj", "down_proj")):
                continue
            groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # experts, outputs, groups, 32
            power = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
            scaled = groups / 2 ** power[..., None]
            nearest = (scaled.abs()[..., None] - levels).abs().argmin(-1)
            meant = levels[nearest] * scaled.sign() * 2 ** power[..., None]
            weight.copy_(meant.flatten(2).transpose(1, 2))
            code = (nearest + 8 * (scaled < 0)).to(torch.uint8)
            del stored[name]
            stored[f"{name}_blocks"] = (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous()
            stored[f"{name}_scales"] = (power + 127).to(torch.uint8).contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": [*skipped, "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    with_tokenizer(folder)
    return Written(folder, model)


def by_library(folder: Path, how: Any) -> Written:
    """Rounded by the library that owns the format, as transformers loads and saves it."""
    model = model_of()
    plain = folder / "plain"
    model.save_pretrained(plain)
    small = AutoModelForCausalLM.from_pretrained(
        plain, quantization_config=how, dtype=torch.float32, device_map="cpu"
    )
    small.save_pretrained(folder)
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith("_proj"):
                module.weight.copy_(unpacked(small.get_submodule(name)))
    del small
    gc.collect()
    with_tokenizer(folder)
    return Written(folder, model)


def unpacked(module: Any) -> Tensor:
    """The numbers that a library's layer computes with."""
    weight: Any = module.weight
    if hasattr(weight, "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(weight.data, weight.quant_state)
        return found
    if weight.dtype == torch.int8 and hasattr(weight, "SCB"):
        return (weight.data * weight.SCB[:, None] / 127).float()
    wide: Tensor = weight.dequantize()
    return wide


def bitsandbytes(**how: Any) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        import bitsandbytes as library  # noqa: F401
        from transformers import BitsAndBytesConfig

        return by_library(folder, BitsAndBytesConfig(**how))

    return write


def torchao(folder: Path) -> Written:
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return by_library(folder, TorchAoConfig(Int8WeightOnlyConfig()))


FORMATS: dict[str, Callable[[Path], Written]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": compressed,
    "bitsandbytes 4": bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes 8": bitsandbytes(load_in_8bit=True),
    "torchao int8": torchao,
}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    sys.exit(main())
