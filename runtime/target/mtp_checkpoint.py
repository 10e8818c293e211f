"""The multi-token-prediction modules in a target's own checkpoint: read, and named as there.

transformers leaves these tensors out when it loads a model, so they are read from the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from specctl.core.errors import FileError, IncompatibleError, IntegrityError, SpecctlError
from specctl.drafters.features.mtp import LAST_NORM, Mtp, MtpOptions
from specctl.models.hf.foreign_layer import as_published, from_published, one_layer, read_config
from specctl.models.hf.spread import whole_weight
from specctl.models.weights.fused_qkv import FUSED, fused, says_fused, unfused
from specctl.models.weights.mtp_layout import (
    EMBEDDING,
    KINDS,
    MOST_MODULES,
    MtpLayout,
    layout_of,
    number_of,
    ours,
)
from specctl.recipes.targets import resolve
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.checkpoint_folder import read_settings, weight_files
from specctl.runtime.target.target import Target

ELSEWHERE = "train one: specctl train-draft --recipe eagle3"
ROWS = 4096  # compared at a time
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def checkpoint_of(target: Target) -> Path:
    """The folder that a target was loaded from."""
    try:
        found = resolve(target.name, target.revision)
    except SpecctlError as error:  # a model in memory
        raise _none(target.name, "a target without a folder") from error
    # of a GGUF file the parts beside the layers are not written by llama.cpp
    if found.file is not None or found.gguf is not None:
        raise _none(target.name, "a GGUF file")
    if found.path is not None:
        return found.path
    return hub.download(found, True, lambda folder: None)


def read_layout(folder: Path) -> tuple[Any, MtpLayout]:
    """A checkpoint's configuration, and where it keeps modules or would keep them."""
    read_settings(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    layout = check_kind(config, str(folder))
    names = [name for path in weight_files(folder) for name in _names(path)]
    held, count = layout.held(names), layout.count
    _check_count(folder, layout, names, held)
    whole = layout_of(config, held or count or 1)
    assert whole is not None, "it was known above"
    return config, whole


def check_kind(config: Any, name: str) -> MtpLayout:
    """Where such a target keeps a module. FileError where that is not known, of its configuration
    alone: before it is loaded."""
    layout = layout_of(config, 1)
    if layout is None:
        raise _none(name, f"model_type {config.get_text_config(decoder=True).model_type}")
    return layout


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _check_count(folder: Path, layout: MtpLayout, names: list[str], held: int) -> None:
    """Refuse a checkpoint that says other than it holds: an engine would read what it says."""
    seen = {number_of(name) for name in layout.of(names)} - {None}
    if not held <= MOST_MODULES or len(seen) < held:
        raise IntegrityError(
            "modules of the checkpoint are missing",
            found=f"{len(seen)} modules, the last one is number {held}",
            expected="modules numbered without a gap",
            do="get all files of the weights again",
            where=str(folder),
        )
    count = layout.count
    is_number = isinstance(count, int) and 0 <= count <= MOST_MODULES
    if (count is not None and not is_number) or (held and count and count != held):
        raise IncompatibleError(
            "the checkpoint holds another number of modules than it says",
            found=f"{layout.count_key}: {ascii(count)[:40]}, tensors of {held}",
            expected=f"config.json that says how many modules there are, {MOST_MODULES} at most",
            do=f"set {layout.count_key} to {held}, or get the missing files",
            where=f"{folder}/config.json",
        )


def stored_module(folder: Path, layout: MtpLayout) -> dict[str, Tensor]:
    """The module's tensors as they are stored, by name; empty where there are none."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in layout.of(file.keys()):
                found[name] = file.get_tensor(name)
    for name, tensor in found.items():
        if tensor.dtype not in DTYPES or not bool(torch.isfinite(tensor).all()):
            raise IntegrityError(
                "the module's weights are quantised, or not finite",
                found=f"{ascii(name)[1:-1][:100]} of {tensor.dtype}",
                expected="finite float32, float16 or bfloat16",
                do="take the checkpoint as it was before it was quantised",
                where=str(folder),
            )
    return found


def check_copies(copies: Mapping[str, Tensor], layout: MtpLayout, target: Target) -> None:
    """Copies of the target's matrices must equal these."""
    borrowed = target.borrowed()
    for name, copy in copies.items():
        matrix = layout.copies[name]
        theirs = borrowed.embedding_VD if matrix == EMBEDDING else borrowed.head_VD
        same = copy.shape == theirs.shape and all(
            torch.equal(copy[at : at + ROWS].to(theirs.dtype), theirs[at : at + ROWS].cpu())
            for at in range(0, len(copy), ROWS)
        )
        if not same:
            raise IncompatibleError(
                f"the module has an {matrix} of its own",
                found=f"{name} {tuple(copy.shape)} that differs from the target's",
                expected=f"a copy of that of {target.name}, which is shared",
                do="give the target, and the revision, that the module belongs to",
            )


def drafter_of(
    config: Any, layout: MtpLayout, tensors: Mapping[str, Tensor], target: Target
) -> Mtp:
    """The modules as a drafter, their weights as they are stored."""
    parts = layout.split(tensors)
    check_copies(parts.copies, layout, target)
    options = _options(config, layout)
    with torch.device("meta"):
        shell = Mtp(options, target.spec)
    assert options.layer is not None
    one, own = read_config(options.layer, KINDS), shell.tensors()
    found = dict(parts.beside)
    for module, layer in enumerate(parts.layers):
        block = _of_layer(own, module)
        layer = unfused(config, layer, block)
        is_joined = layer.keys() == block.keys()  # the experts stand in one tensor each, as here
        wanted = block if is_joined else as_published(one, block)
        _check_names(layer, wanted, layout.layers[module])
        layer = layer if is_joined else from_published(one, layer)
        found |= {ours(module) + name: tensor for name, tensor in layer.items()}
    _check_names(parts.beside, {name: own[name] for name in layout.named})
    if options.before_norm:
        found[LAST_NORM] = last_norm(target)
    drafter = Mtp(options, target.spec)
    kinds = {tensor.dtype for tensor in tensors.values()}
    drafter.to(torch.device("cpu"), kinds.pop() if len(kinds) == 1 else torch.float32)
    drafter.load_tensors(found)
    drafter.module.eval()
    drafter.bind(target.borrowed())
    return drafter


def _options(config: Any, layout: MtpLayout) -> MtpOptions:
    num = layout.num
    steps = max(num, MtpOptions().ttt_steps)
    return MtpOptions(
        layer=one_layer(config),
        modules=num,
        shared=layout.is_shared and num > 1,
        ttt_steps=steps,
        before_norm=layout.before_norm,
    )


def last_norm(target: Target) -> Tensor:
    """[D]: the weights of the target's last norm, none of them 0."""
    weight_D = whole_weight(target.lm.module, "model.norm.weight").cpu().clone()
    if not bool((weight_D != 0).all()):
        raise IncompatibleError(
            "what the target's last norm takes away cannot be had back",
            found=f"{int((weight_D == 0).sum())} weights of 0 in the last norm of {target.name}",
            expected="a module that reads the state behind that norm",
            do=ELSEWHERE,
        )
    return weight_D


def _of_layer(tensors: Mapping[str, Tensor], module: int) -> dict[str, Tensor]:
    before = ours(module)
    return {n.removeprefix(before): t for n, t in tensors.items() if n.startswith(before)}


def _check_names(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], before: str = ""
) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [
            str(tuple(each[name].shape)) if name in each else "none" for each in (found, wanted)
        ]
        if shapes[0] != shapes[1]:
            raise IncompatibleError(
                "the module is not of the target's own kind of layer",
                found=f"{before}{ascii(name)[1:-1][:100]} {shapes[0]}",
                expected=shapes[1],
                do="get config.json and the weights again, from one version of the repository",
            )


def named_as_stored(
    drafter: Mtp,
    config: Any,
    layout: MtpLayout,
    target: Target,
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """The module's tensors under the checkpoint's names, in the dtype that each is to have (its
    copies of the target's matrices, where the layout has them, as well). `dtypes` may lack names:
    those are as most are."""
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.tensors().items()}
    assert drafter.options.layer is not None
    one, layers = read_config(drafter.options.layer, KINDS), []
    for module, before in enumerate(layout.layers):
        block = _of_layer(tensors, module)
        is_joined = bool(dtypes) and dtypes.keys() >= {before + name for name in block}
        layer = block if is_joined else as_published(one, block)
        is_fused = before + FUSED in dtypes if dtypes else says_fused(config)
        layers.append(fused(config, layer) if is_fused else layer)
    beside = {name: tensors[name] for name in layout.named}
    found, borrowed = layout.joined(beside, layers), target.borrowed()
    for name, matrix in layout.copies.items():
        if not dtypes or name in dtypes:
            theirs = borrowed.embedding_VD if matrix == EMBEDDING else borrowed.head_VD
            found[name] = theirs.detach().cpu().clone()  # a file holds no tensor twice
    usual = target.dtype
    return {name: tensor.to(dtypes.get(name, usual)).contiguous() for name, tensor in found.items()}


def own_module(target: Target) -> Mtp:
    """The module that a target carries, as a drafter for it."""
    folder = checkpoint_of(target)
    config, layout = read_layout(folder)
    tensors = stored_module(folder, layout)
    if not tensors:
        raise _none(target.name, f"no tensor {layout.prefix}*")
    return drafter_of(config, layout, tensors, target)


def first_module(target: Target, modules: int | None = None) -> Mtp:
    """The modules to train from: the target's own; where it carries none, fresh ones whose layer is
    the target's kind of layer. `modules`: how many the recipe wants, None as many as there are."""
    folder = checkpoint_of(target)
    config, layout = read_layout(folder)
    tensors = stored_module(folder, layout)
    if tensors and modules not in (None, layout.num):
        raise IncompatibleError(
            "the target carries another number of modules than the recipe wants",
            where="drafter.options.modules",
            found=f"modules: {modules}, the checkpoint holds {layout.num}",
            expected=f"modules: {layout.num}, or left out",
            do=f"--set drafter.options.modules={layout.num}",
        )
    if tensors:
        return drafter_of(config, layout, tensors, target)
    if modules is not None:
        whole = layout_of(config, modules)
        assert whole is not None, "it was known above"
        layout = whole
    drafter = Mtp(_options(config, layout), target.spec)
    if layout.before_norm:
        drafter.load_tensors(drafter.tensors() | {LAST_NORM: last_norm(target)})
    drafter.bind(target.borrowed())
    return drafter


def _none(name: str, found: str) -> FileError:
    return FileError(
        "the target carries no module for multi-token prediction that is known here",
        found=f"{found} in {name}"[:200],
        expected="a checkpoint of " + ", ".join(KINDS) + " with its module",
        do=ELSEWHERE,
    )


def with_count(body: Mapping[str, Any], layout: MtpLayout) -> dict[str, Any]:
    """config.json that says how many modules there are."""
    changed = json.loads(json.dumps(body))
    inner = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    if layout.count_key is not None:
        inner[layout.count_key] = layout.num
    return dict(changed)
