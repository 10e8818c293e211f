"""LoRA adapters of a target in peft's format (arXiv 2106.09685): W + weight * scale * B A.

A folder holds adapter_config.json and adapter_model.safetensors. It is checked before peft sees
anything of it: the settings are read from bounded JSON, the tensors from plain safetensors, the
modules are those that the tensors name, and each must be a linear layer of the target of the very
shape. peft itself never opens the folder; it gets a configuration made here, and makes the layers
and the merge. What would change the base weights first, or is more than LoRA on linear layers
(DoRA, biases, saved modules, PiSSA and the like), is refused rather than read in part.

Several adapters are added in the order given, each times its own weight. A target that our fast
forward runs gets them merged, since that forward reads weights and not modules; every other keeps
them unmerged as peft's layers, so that quantised weights stay as they are.

Letters: I inputs, O outputs, R rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import FileError, IncompatibleError, IntegrityError, SpecctlError
from specctl.core.messages.installed import library
from specctl.core.storage.model_folder import is_inside, refuse_pointer, refuse_stand_ins
from specctl.runtime.target.folders.checkpoint_folder import (
    read_object,
    refuse_code,
    refuse_special_files,
)

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MOST_ADAPTERS, LARGEST_WEIGHT, LARGEST_RANK = 16, 100.0, 10_000
_KEY = re.compile(r"base_model\.model\.([\w.]{1,300})\.lora_(A|B)\.weight")
_PATTERN = re.compile(r"\^?[\w.]{1,300}")  # of peft's regular expressions, plain names alone
_WEIGHTED = re.compile(r"(.+)@(\d+(?:\.\d+)?)")
# Settings that say nothing about a trained adapter's product: where it came from, how it was
# trained, and which modules it is made to (the tensors name them).
_SILENT = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    "ensure_weight_tying", "fan_in_fan_out",
})  # fmt: skip
_PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")  # leave the base as it is


@dataclass(frozen=True, slots=True)
class AppliedAdapter:
    """An adapter as a target's identity names it: its folder, how much of it is added, and the
    sha256 of its settings and tensors."""

    name: str
    weight: float
    digest: str

    def text(self) -> str:
        """As --adapter takes it."""
        return self.name if self.weight == 1.0 else f"{self.name}@{self.weight:g}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter whose folder was checked: `ranks` of the modules it adds to, `scales` of the
    products B A (alpha / R, or alpha / sqrt(R) with rslora), `shapes` of A [R, I] and B [O, R]."""

    applied: AppliedAdapter
    folder: Path
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    shapes: Mapping[str, tuple[int, int]]  # [O, I]


def plain_config(
    rank: int, alpha: float, base: str | None, modules: Sequence[str]
) -> dict[str, Any]:
    """adapter_config.json of plain LoRA on those linear layers."""
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": list(modules),
    }


def combined_fingerprint(base: str, adapters: Sequence[Any]) -> str:
    """The fingerprint of a base with adapters (anything with `digest` and `weight`), in order."""
    if not adapters:
        return base
    body = [base, *([one.digest, float(one.weight)] for one in adapters)]
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()


def read_adapters(words: Sequence[str], option: str = "--adapter") -> tuple[Adapter, ...]:
    """The adapters of `FOLDER` or `FOLDER@WEIGHT`, checked; no torch, no peft. `option`: where the
    words were given."""
    if len(words) > MOST_ADAPTERS:
        raise SpecctlError(
            "too many adapters for one target",
            where=option,
            found=f"{len(words)}",
            expected=f"at most {MOST_ADAPTERS}",
            do="merge some of them into one first",
        )
    found = tuple(_read(*_split(word, option), option) for word in words)
    twice = len({one.applied.digest for one in found}) < len(found)
    if twice:
        raise SpecctlError(
            "the same adapter is named twice",
            where=option,
            found=", ".join(words),
            expected="each adapter once",
            do="give its weight instead: --adapter FOLDER@2",
        )
    return found


def _split(word: str, option: str) -> tuple[str, float]:
    """Folder and weight; a folder that exists under the whole word is meant."""
    match = None if Path(word).expanduser().is_dir() else _WEIGHTED.fullmatch(word)
    name, weight = (match[1], float(match[2])) if match else (word, 1.0)
    if not 0.0 < weight <= LARGEST_WEIGHT:
        raise SpecctlError(
            "an adapter cannot have this weight",
            where=option,
            found=word,
            expected=f"a number above 0 and at most {LARGEST_WEIGHT:g}",
            do="leave the adapter out, or give another weight",
        )
    return name, weight


def _read(name: str, weight: float, option: str) -> Adapter:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise FileError(
            "there is no such adapter folder",
            where=option,
            found=ascii(name)[:160],
            expected=f"a folder with {CONFIG} and {TENSORS}",
            do="give the folder; an adapter of the hub is fetched by: hf download OWNER/NAME",
        )
    refuse_special_files(folder)
    refuse_stand_ins(folder)
    _check_files(folder)
    config = read_object(folder / CONFIG)
    refuse_code({k: v for k, v in config.items() if k not in _SILENT}, str(folder / CONFIG))
    _check_settings(config, str(folder / CONFIG))
    shapes = _shapes(folder / TENSORS)
    ranks = {module: down[0] for module, (down, _) in shapes.items()}
    scales = {module: _scale(config, module, rank, folder) for module, rank in ranks.items()}
    digest = hashlib.sha256(json.dumps(sorted(scales.items())).encode())
    with (folder / TENSORS).open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "sha256").digest())
    applied = AppliedAdapter(name, weight, digest.hexdigest())
    sizes = {module: (up[0], down[1]) for module, (down, up) in shapes.items()}
    return Adapter(applied, folder, ranks, scales, sizes)


def _check_files(folder: Path) -> None:
    for name in (CONFIG, TENSORS):
        path = folder / name
        if not path.exists() and name == TENSORS and (folder / PICKLE).exists():
            raise IntegrityError(
                "the adapter is pickled, and loading a pickle can run any code",
                found=PICKLE,
                expected=TENSORS,
                do="where you trust it, load it with peft and save_pretrained(FOLDER) again",
                where=str(folder),
            )
        if not path.exists():
            raise FileError(
                "the folder is not an adapter of peft",
                found=f"no {name}",
                expected=f"{CONFIG} and {TENSORS}",
                do="give the folder that peft's save_pretrained wrote",
                where=str(folder),
            )
        if not path.is_file() or not is_inside(path):
            raise IntegrityError(
                "a file of the adapter is no regular file, or a link out of its folder",
                found=name,
                expected="files of the folder, or of the hub's own cache",
                do="copy the file into the folder",
                where=str(folder),
            )
        refuse_pointer(path)


def _check_settings(config: Mapping[str, Any], where: str) -> None:
    """Refuse whatever is more than products added to linear layers."""
    for key, value in config.items():
        if key in _SILENT:
            continue
        is_off = value is None or value is False or value in ("none", {}, [])
        is_read = {
            "peft_type": value == "LORA",
            "r": _is_count(value),
            "lora_alpha": _is_scale(value),
            "use_rslora": isinstance(value, bool),
            "rank_pattern": _is_pattern(value, _is_count),
            "alpha_pattern": _is_pattern(value, _is_scale),
            "init_lora_weights": isinstance(value, (bool, str, type(None)))
            and value in _PLAIN_STARTS,
        }.get(key, is_off)
        if not is_read:
            raise IncompatibleError(
                f"the adapter is not plain LoRA, or its {ascii(key)[1:-1][:60]} is damaged",
                found=f"{ascii(key)[1:-1][:60]}: {ascii(value)[:80]}",
                expected="LoRA on linear layers: no DoRA, biases, saved modules or changed base",
                do="merge it where you trust it (merge_and_unload of peft, save_pretrained) and "
                "give that folder as --target",
                where=where,
            )
    lacking = [key for key in ("peft_type", "r", "lora_alpha") if key not in config]
    if lacking:
        raise IntegrityError(
            f"{CONFIG} lacks a setting",
            found=f"no {lacking[0]}",
            expected="peft_type, r and lora_alpha",
            do="write the adapter again with peft's save_pretrained",
            where=where,
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= LARGEST_RANK


def _is_scale(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < float(value) <= 1e6  # type: ignore[arg-type]


def _is_pattern(value: object, is_good: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(
        _PATTERN.fullmatch(k) and is_good(v) for k, v in value.items()
    )


def _scale(config: Mapping[str, Any], module: str, rank: int, folder: Path) -> float:
    """What multiplies B A in that module, by peft's rules (`r` and alpha by pattern)."""
    said = _by_pattern(config.get("rank_pattern"), module, config["r"])
    if said != rank:
        raise IntegrityError(
            "the adapter's tensors have another rank than its settings",
            found=f"{module}: rank {rank}",
            expected=f"r {said}",
            do="fetch the adapter again",
            where=str(folder / CONFIG),
        )
    alpha = float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """peft's choice: the first pattern that is the name, or its end behind a dot."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return otherwise


def _shapes(path: Path) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Module -> shapes of A and B, from the header alone."""
    from safetensors import SafetensorError, safe_open

    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118
                match = _KEY.fullmatch(key)
                if match is None:
                    raise _foreign_tensor(key, path)
                part = file.get_slice(key)
                if part.get_dtype() not in ("F32", "F16", "BF16"):
                    raise _foreign_tensor(f"{key} of {part.get_dtype()}", path)
                halves.setdefault(match[1], {})[match[2]] = tuple(part.get_shape())
    except (SafetensorError, OSError, ValueError) as error:
        raise IntegrityError(
            "the adapter's tensors cannot be read",
            found=ascii(str(error))[1:160],
            expected="a safetensors file",
            do="fetch the adapter again",
            where=str(path),
        ) from error
    for module, both in halves.items():
        down, up = both.get("A", ()), both.get("B", ())
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or 0 in (*down, *up):
            raise IntegrityError(
                "two tensors of the adapter do not make a product",
                found=f"{module}: lora_A {list(down)}, lora_B {list(up)}",
                expected="lora_A [R, I] and lora_B [O, R]",
                do="fetch the adapter again",
                where=str(path),
            )
    if not halves:
        raise IntegrityError(
            "the adapter holds no tensors", do="fetch the adapter again", where=str(path)
        )
    return {m: ((b["A"][0], b["A"][1]), (b["B"][0], b["B"][1])) for m, b in halves.items()}


def _foreign_tensor(name: str, path: Path) -> IncompatibleError:
    return IncompatibleError(
        "the adapter holds something else than LoRA factors of linear layers",
        found=ascii(name)[1:-1][:160],
        expected="base_model.model.MODULE.lora_A.weight and lora_B.weight",
        do="merge it where you trust it (merge_and_unload of peft, save_pretrained) and give that "
        "folder as --target",
        where=str(path),
    )


def with_adapters(model: Any, adapters: Sequence[Adapter], is_merged: bool) -> Any:
    """The transformers model with the adapters added, in order: merged into its weights, or as
    peft's layers in the places of its linear layers. The model itself is changed."""
    peft = _library()
    for one in adapters:
        _check_modules(model, one)
    from safetensors.torch import load_file

    wrapped, names = None, [f"adapter{index}" for index in range(len(adapters))]
    for name, one in zip(names, adapters, strict=True):
        config = _config(peft, model if wrapped is None else wrapped, one)
        if wrapped is None:
            wrapped = peft.get_peft_model(model, config, adapter_name=name)
        else:
            wrapped.add_adapter(name, config)
        tensors = load_file(one.folder / TENSORS)
        taken = peft.set_peft_model_state_dict(wrapped, tensors, adapter_name=name)
        assert not taken.unexpected_keys, f"peft took no {taken.unexpected_keys[:3]}"
    assert wrapped is not None, "without adapters there is nothing to add"
    wrapped.base_model.set_adapter(names)
    wrapped.eval().requires_grad_(False)
    if is_merged:
        return wrapped.merge_and_unload(adapter_names=names)
    return wrapped.base_model.model


def _config(peft: Any, model: Any, one: Adapter) -> Any:
    """peft's own configuration of that adapter: every module named whole, its rank and alpha too.
    The weight is part of alpha, since both only multiply the product."""
    exact = {module: f"^{re.escape(module)}" for module in one.ranks}
    first = next(iter(one.ranks.values()))
    kinds = {type(m).__name__ for n, m in model.named_modules() if n.endswith(tuple(one.ranks))}
    return peft.LoraConfig(
        r=first,
        lora_alpha=first,
        target_modules=list(one.ranks),
        rank_pattern={exact[m]: rank for m, rank in one.ranks.items()},
        alpha_pattern={
            exact[m]: one.scales[m] * rank * one.applied.weight for m, rank in one.ranks.items()
        },
        fan_in_fan_out="Conv1D" in kinds,
        lora_dropout=0.0,
        inference_mode=True,
    )


def _check_modules(model: Any, one: Adapter) -> None:
    """Refuse an adapter of another model."""
    modules = dict(model.named_modules())
    for name, (out, into) in one.shapes.items():
        module = modules.get(name)
        sizes = (getattr(module, "out_features", None), getattr(module, "in_features", None))
        if module is not None and type(module).__name__ == "Conv1D":
            sizes = (module.weight.shape[1], module.weight.shape[0])
        if sizes != (out, into):
            here = "no such module" if module is None else f"{type(module).__name__} {sizes}"
            raise IncompatibleError(
                "the adapter was made for another model",
                found=f"{name}: {out} x {into} in the adapter, {here} in the target",
                expected="the linear layers of the target",
                do="give the base model that the adapter was trained on as --target",
                where=str(one.folder),
            )


def _library() -> Any:
    return library("peft", "a target with adapters", "lora")
