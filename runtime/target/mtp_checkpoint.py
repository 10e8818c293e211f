"""The multi-token-prediction module in a target's own checkpoint: found, read, and named as there.

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

from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IncompatibleError, IntegrityError, SpecctlError
from specctl.drafters.mtp import Mtp, MtpOptions
from specctl.models.foreign_layer import as_published, from_published, one_layer, read_config
from specctl.models.mtp_layout import EMBEDDING, HEAD, KINDS, OURS, MtpLayout, layout_of
from specctl.recipes.targets import resolve
from specctl.runtime.target import hub
from specctl.runtime.target.checkpoint_folder import read_settings, weight_files
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
    """A checkpoint's configuration, and where it keeps a module or would keep one."""
    read_settings(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    layout = layout_of(config)
    if layout is None:
        found = f"model_type {config.get_text_config(decoder=True).model_type}"
        raise _none(str(folder), found)
    if layout.count is not None and layout.count > 1:
        raise IncompatibleError(
            "the checkpoint has more than one module, of which each drafts one token",
            found=f"{layout.count_key}: {layout.count}",
            expected="1, which is used for every token of a draft",
            do=ELSEWHERE,
            where=f"{folder}/config.json",
        )
    return config, layout


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


def check_copies(beside: dict[str, Tensor], target: Target) -> None:
    """Take the copies of the target's matrices out of what was read, each equal to the target's."""
    borrowed = target.borrowed()
    for name, theirs in ((EMBEDDING, borrowed.embedding_VD), (HEAD, borrowed.head_VD)):
        copy = beside.pop(name, None)
        if copy is None:
            continue
        same = copy.shape == theirs.shape and all(
            torch.equal(copy[at : at + ROWS].to(theirs.dtype), theirs[at : at + ROWS].cpu())
            for at in range(0, len(copy), ROWS)
        )
        if not same:
            raise IncompatibleError(
                f"the module has an {name} of its own",
                found=f"a {name} {tuple(copy.shape)} that differs from the target's",
                expected=f"a copy of that of {target.name}, which is shared",
                do="give the target, and the revision, that the module belongs to",
            )


def drafter_of(
    config: Any, layout: MtpLayout, tensors: Mapping[str, Tensor], target: Target
) -> Mtp:
    """The module as a drafter, its weights as they are stored."""
    beside, layer = layout.split(tensors)
    check_copies(beside, target)
    text = one_layer(config)
    options = MtpOptions(layer=text)
    with torch.device("meta"):
        shell = Mtp(options, target.spec)
    block = {n.removeprefix(OURS): t for n, t in shell.tensors().items() if n.startswith(OURS)}
    one = read_config(text, KINDS)
    is_joined = layer.keys() == block.keys()  # the experts stand in one tensor each, as here
    wanted = block if is_joined else as_published(one, block)
    _check_names({**beside, **layer}, {**_beside(shell), **wanted})
    block = layer if is_joined else from_published(one, layer)
    drafter = Mtp(options, target.spec)
    kinds = {tensor.dtype for tensor in tensors.values()}
    drafter.to(torch.device("cpu"), kinds.pop() if len(kinds) == 1 else torch.float32)
    drafter.load_tensors({**beside, **{OURS + name: tensor for name, tensor in block.items()}})
    drafter.module.eval()
    drafter.bind(target.borrowed())
    return drafter


def _beside(drafter: Drafter) -> dict[str, Tensor]:
    return {name: t for name, t in drafter.tensors().items() if not name.startswith(OURS)}


def _check_names(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(found.keys() | wanted.keys()):
        shapes = [
            str(tuple(each[name].shape)) if name in each else "none" for each in (found, wanted)
        ]
        if shapes[0] != shapes[1]:
            raise IncompatibleError(
                "the module is not of the target's own kind of layer",
                found=f"{ascii(name)[1:-1][:100]} {shapes[0]}",
                expected=shapes[1],
                do="get config.json and the weights again, from one version of the repository",
            )


def named_as_stored(
    drafter: Mtp, layout: MtpLayout, target: Target, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """The module's tensors under the checkpoint's names, in the dtype that each is to have (its
    copies of the target's matrices, where the layout has them, as well). `dtypes` may lack names:
    those are as most are."""
    tensors = {name: tensor.detach().cpu() for name, tensor in drafter.tensors().items()}
    block = {n.removeprefix(OURS): t for n, t in tensors.items() if n.startswith(OURS)}
    assert drafter.options.layer is not None
    layer = block
    if not dtypes or not dtypes.keys() >= {layout.layer + name for name in block}:
        layer = as_published(read_config(drafter.options.layer, KINDS), block)
    beside = {name: t for name, t in tensors.items() if not name.startswith(OURS)}
    if layout.copies and (not dtypes or layout.copies[EMBEDDING] in dtypes):
        borrowed = target.borrowed()
        beside[EMBEDDING] = borrowed.embedding_VD.detach().cpu()
        beside[HEAD] = borrowed.head_VD.detach().cpu()
    usual = target.dtype
    return {
        name: tensor.to(dtypes.get(name, usual)).contiguous()
        for name, tensor in layout.joined(beside, layer).items()
    }


def own_module(target: Target) -> Mtp:
    """The module that a target carries, as a drafter for it."""
    folder = checkpoint_of(target)
    config, layout = read_layout(folder)
    tensors = stored_module(folder, layout)
    if not tensors:
        raise _none(target.name, f"no tensor {layout.prefix}*")
    return drafter_of(config, layout, tensors, target)


def first_module(target: Target) -> Mtp:
    """The module to train from: the target's own; where it carries none, a fresh one whose layer
    is the target's kind of layer."""
    folder = checkpoint_of(target)
    config, layout = read_layout(folder)
    tensors = stored_module(folder, layout)
    if tensors:
        return drafter_of(config, layout, tensors, target)
    drafter = Mtp(MtpOptions(layer=one_layer(config)), target.spec)
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
    """config.json that says that there is one module."""
    changed = json.loads(json.dumps(body))
    inner = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    inner[layout.count_key] = 1
    return dict(changed)
