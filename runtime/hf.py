"""Everything that reads a transformers checkpoint: what is refused, its dtype, its memory.

Refused before transformers sees the folder: code in the checkpoint (`auto_map`), weights that are
only pickled. Refused before weights are read: architectures whose cache cannot be rolled back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.drafters.parts.hf_lm import refuse_stateful
from specctl.recipes.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    ResourceError,
    SpecctlError,
    nearest,
)
from specctl.recipes.targets import ResolvedTarget
from specctl.runtime import hub

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LARGE = 200_000_000  # parameters from which bfloat16 is the default on a CPU that has it
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint in memory, and the commit it came from where that is known."""

    model: Any
    tokenizer: Any
    revision: str | None


def load_checkpoint(
    resolved: ResolvedTarget,
    dtype: str = "auto",
    device: torch.device | None = None,
    offline: bool = False,
) -> Loaded:
    """Model and tokenizer of a resolved name; every failure says what to do next."""
    folder = resolved.path or hub.download(resolved, offline, check_config)
    config = check_folder(folder)
    device = device or torch.device("cpu")
    wanted = choose_dtype(dtype, device, config, _count(folder, config))
    _check_memory(folder, config, wanted, device)
    tokenizer = _load_tokenizer(folder, config)
    model = _load_model(folder, wanted).to(device)
    commit = folder.name if resolved.path is None and folder.parent.name == "snapshots" else None
    return Loaded(model, tokenizer, commit or resolved.revision)


def check_folder(folder: Path) -> Any:
    """The transformers configuration of a folder that may be loaded; raises for every other."""
    config = check_config(folder)
    _check_weights(folder)
    return config


def check_config(folder: Path) -> Any:
    """The configuration of a folder whose weights need not be there yet."""
    raw = _read_json(folder / "config.json")
    for name in ("config.json", "tokenizer_config.json"):
        if (folder / name).exists() and "auto_map" in _read_json(folder / name):
            raise IntegrityError(
                "the checkpoint brings its own code, which specctl never runs",
                found="auto_map",
                expected="an architecture that transformers has built in",
                do="choose a target without custom code",
                where=str(folder / name),
            )
    return _read_config(folder, raw)


def _check_weights(folder: Path) -> None:
    if not list(folder.glob("*.safetensors")):
        pickled = [p.name for p in sorted(folder.iterdir()) if p.suffix in (".bin", ".pt", ".pth")]
        if not pickled:
            raise FileError(
                "the folder holds no weights",
                found=", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "an empty folder",
                expected="*.safetensors",
                do="fetch the checkpoint again",
                where=str(folder),
            )
        raise IntegrityError(
            "the weights are pickled, and loading a pickle can run any code",
            found=", ".join(pickled[:3]),
            expected="*.safetensors",
            do="convert them where you trust the file: model.save_pretrained(FOLDER) of "
            "transformers writes safetensors",
            where=str(folder),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(
            "the folder is not a transformers checkpoint",
            found=f"no {path.name}",
            expected="config.json, tokenizer and safetensors weights",
            do="give the folder that holds config.json",
            where=str(path.parent),
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise IntegrityError(
            f"{path.name} cannot be read",
            found=str(error)[:120],
            do="fetch it again",
            where=str(path),
        ) from None
    if not isinstance(content, dict):
        raise IntegrityError(
            f"{path.name} is not a JSON object",
            found=type(content).__name__,
            do="fetch it again",
            where=str(path),
        )
    return content


def _read_config(folder: Path, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = raw.get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model_class = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise IncompatibleError(
            f"{kind} is not a causal language model",
            found=f"model_type {kind!r}",
            expected="a decoder-only model that transformers loads with AutoModelForCausalLM",
            do="choose a causal language model",
            where=str(folder / "config.json"),
        ) from None
    except Exception as error:  # transformers raises many kinds for a bad or unknown config
        raise IncompatibleError(
            f"transformers does not read this configuration (model_type {kind!r})",
            found=str(error).split("\n")[0][:160],
            expected="a model type known to the installed transformers",
            do="pip install -U transformers, or choose another target",
            where=str(folder / "config.json"),
        ) from error
    refuse_stateful(model_class, config)
    return config


def choose_dtype(
    name: str,
    device: torch.device,
    config: Any = None,
    num_parameters: int = 0,
    is_inflated: bool = False,
) -> torch.dtype:
    """The dtype called `name`. "auto": float32 on CPU, but bfloat16 for large or inflated targets
    on a CPU that multiplies bfloat16; on other devices the checkpoint's."""
    if name != "auto":
        if name not in DTYPES:
            raise SpecctlError(
                f"unknown dtype {name!r}",
                expected="auto, float32, bfloat16 or float16",
                do=f"nearest: {nearest(name, DTYPES)}",
            )
        return DTYPES[name]
    if device.type == "cpu":
        is_large = is_inflated or num_parameters >= LARGE
        return torch.bfloat16 if is_large and _has_fast_bf16() else torch.float32
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def _has_fast_bf16() -> bool:
    checks = (getattr(torch.cpu, f"_is_{n}_supported", None) for n in ("avx512_bf16", "amx_tile"))
    return any(check() for check in checks if check is not None)


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the first CUDA device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SpecctlError(
            f"unknown device {name!r}", expected="auto, cpu, cuda or cuda:N", do="use --device auto"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "no CUDA device is usable here",
            found=f"torch {torch.__version__}",
            expected="a CUDA build of torch and a visible GPU",
            do="use --device cpu",
        )
    return device


def _weight_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def _count(folder: Path, config: Any) -> int:
    """Number of parameters, from file sizes."""
    stored = getattr(config, "dtype", None)
    return _weight_bytes(folder) // (stored.itemsize if isinstance(stored, torch.dtype) else 2)


def available_bytes(device: torch.device) -> int | None:
    """Free memory of a device, None where it cannot be asked."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _check_memory(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    need, free = _count(folder, config) * dtype.itemsize, available_bytes(device)
    if free is not None and need > free:
        raise ResourceError(
            "the target does not fit in memory",
            found=f"{free / 1e9:.1f} GB free on {device}",
            expected=f"{need / 1e9:.1f} GB for its weights in {str(dtype).split('.')[-1]}",
            do="use --dtype bfloat16, a smaller target, or a machine with more memory",
            where=str(folder),
        )


def _load_tokenizer(folder: Path, config: Any) -> Any:
    from transformers import AutoTokenizer

    known = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
    if not any((folder / name).exists() for name in known):
        raise FileError(
            "the folder holds no tokenizer",
            expected="tokenizer.json beside the weights",
            do="copy tokenizer.json and tokenizer_config.json of the model into the folder",
            where=str(folder),
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise IntegrityError(
            "the tokenizer cannot be read",
            found=str(error).split("\n")[0][:160],
            do="fetch the tokenizer files again",
            where=str(folder),
        ) from error
    top = max(tokenizer.get_vocab().values(), default=-1)
    if top >= config.get_text_config().vocab_size:
        raise IncompatibleError(
            "the tokenizer has ids that the model lacks",
            found=f"token id {top:,}",
            expected=f"ids below {config.get_text_config().vocab_size:,}",
            do="use the tokenizer that belongs to these weights",
            where=str(folder),
        )
    return tokenizer


def _load_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise IntegrityError(
            "the weights cannot be loaded",
            found=str(error).split("\n")[0][:160],
            do="fetch the checkpoint again; quantised checkpoints need their own library",
            where=str(folder),
        ) from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise IntegrityError(
            "a weight file is damaged",
            found=str(error)[:160],
            do="fetch the checkpoint again",
            where=str(folder),
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()
    _check_complete(info, folder)
    return model


def _check_complete(info: Any, folder: Path) -> None:
    wrong = sorted(info["missing_keys"]) or sorted(str(m) for m in info.get("mismatched_keys", ()))
    if wrong:
        raise IntegrityError(
            "the checkpoint does not hold every weight of its configuration",
            found=f"{len(wrong)} missing or of another shape, first {wrong[0]}",
            expected="one tensor for each parameter",
            do="fetch the checkpoint again",
            where=str(folder),
        )
