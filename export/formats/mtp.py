"""A target's checkpoint with the modules for multi-token prediction written back into it: a whole
copy, in which the engine that serves the target finds them where the original had them.

Only files that hold tensors of the modules are written anew, without these; the modules have a file
of their own. The index lists every tensor, config.json says how many modules there are. The
original is only read.
Letters: N nodes, V target vocabulary.
"""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open

from specctl.core.errors import GateError, IncompatibleError
from specctl.core.storage.model_folder import is_inside
from specctl.drafters.features.mtp import Mtp
from specctl.export.formats import ExportSource, Format
from specctl.export.layouts.engines import dump_json
from specctl.export.package.files import read_header
from specctl.export.package.manifest import CARD, MANIFEST, check_files
from specctl.export.package.tensors import compare_tensors, refuse_not_finite, write_tensors
from specctl.export.readers.mtp import ENGINE, MtpReader, fed_back
from specctl.export.readers.trial import Trial, compare, drafted_logits, twin
from specctl.models.weights.mtp_layout import MIMO, MIMO_7B, NEXTN, MtpLayout, layout_of
from specctl.runtime.target.folders.checkpoint_folder import INDEX, weight_files
from specctl.runtime.target.mtp_checkpoint import (
    checkpoint_of,
    named_as_stored,
    read_layout,
    stored_module,
    with_count,
)

MODULE, CONFIG = "mtp.safetensors", "config.json"
KEPT = (".json", ".jinja", ".model", ".txt", ".tiktoken")
WHOLE, TRIMMED = "model.safetensors", "the module has no LM head of its own to trim"


def write(source: ExportSource, folder: Path) -> None:
    drafter = _drafter(source)
    origin = checkpoint_of(source.target)
    config, there = read_layout(origin)
    dtypes = _dtypes(origin, there)
    layout = _layout(config, there, drafter, bool(dtypes))
    tensors = named_as_stored(drafter, config, layout, source.target, dtypes)
    refuse_not_finite(tensors)
    placed: dict[str, str] = {}
    for path in weight_files(origin):
        names = list(read_header(path))
        left = sorted(set(names) - set(layout.of(names)))
        name = _shard(path.name)
        if len(left) == len(names):
            shutil.copyfile(path, folder / name)
        elif left:
            with safe_open(path, framework="pt") as file:
                write_tensors({each: file.get_tensor(each) for each in left}, folder / name)
        placed |= dict.fromkeys(left, name)
    write_tensors(tensors, folder / MODULE)
    placed |= dict.fromkeys(tensors, MODULE)
    total = sum(_data_bytes(path) for path in folder.iterdir())
    dump_json({"metadata": {"total_size": total}, "weight_map": placed}, folder / INDEX)
    for path in origin.iterdir():
        is_text = path.is_file() and path.suffix in KEPT and is_inside(path)
        if is_text and path.name not in (INDEX, CONFIG, MANIFEST, CARD):
            shutil.copyfile(path, folder / path.name)
    body = json.loads((origin / CONFIG).read_text(encoding="utf-8"))
    dump_json(with_count(body, layout), folder / CONFIG)


def _data_bytes(path: Path) -> int:
    with path.open("rb") as stream:
        return path.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _shard(name: str) -> str:
    """model.safetensors goes before an index for those who look for it first."""
    return "model-00001-of-00001.safetensors" if name == WHOLE else name


def _dtypes(origin: Path, layout: MtpLayout) -> dict[str, torch.dtype]:
    """In which each tensor of the module was stored; empty where there was none."""
    return {name: tensor.dtype for name, tensor in stored_module(origin, layout).items()}


def _drafter(source: ExportSource) -> Mtp:
    drafter = cast(Mtp, source.drafter)
    if drafter.options.layer is None:
        raise IncompatibleError(
            "the target's architecture has no place for a module in its checkpoints",
            found=f"a module with a Llama layer, for {source.target.name}",
            expected="a module with a layer of the target's own kind (drafter.init: target)",
            do="use it with specctl, or train eagle3 for other engines",
        )
    if drafter.vocab is not None:
        raise IncompatibleError(
            TRIMMED,
            found=f"a vocabulary of {drafter.vocab.size:,} ids",
            expected="the target's whole vocabulary",
            do="train it with vocab.size: null",
        )
    return drafter


def _layout(config: Any, layout: MtpLayout, drafter: Mtp, has_modules: bool) -> MtpLayout:
    """Where the drafter's modules go in a checkpoint that has as many, or none."""
    if has_modules and drafter.options.modules != layout.num:
        raise IncompatibleError(
            "the checkpoint holds another number of modules than the drafter",
            found=f"{drafter.options.modules} for {layout.num}",
            expected="the modules of this checkpoint, tuned or as they are",
            do="train them from it: drafter.init: target",
        )
    if layout.is_shared and drafter.options.modules > 1 and not drafter.options.shared:
        raise IncompatibleError(
            "the checkpoint's layout has one fc and one set of norms for all modules",
            found="a drafter with one of each for every module",
            expected="drafter.options.shared: true",
            do="train it from the target: drafter.init: target",
        )
    own = layout_of(config, drafter.options.modules)
    assert own is not None, "the layout was read"
    return own


def check(source: ExportSource, folder: Path) -> None:
    """The module lies there as it was, draws what the drafter draws, and all other tensors are the
    original's."""
    check_files(folder)
    origin = checkpoint_of(source.target)
    config, layout = read_layout(folder)
    found = stored_module(folder, layout)
    dtypes = _dtypes(origin, layout)
    wanted = named_as_stored(_drafter(source), config, layout, source.target, dtypes)
    compare_tensors(wanted, found)
    _compare_rest(origin, folder, layout)
    if layout.count_key is not None and layout.count != layout.num:
        raise GateError(
            "config.json does not say how many modules there are", found=str(layout.count)
        )
    fed = fed_back(layout.num) if _drafter(source).options.norm_output else 0
    trial = Trial.of(source, fed)
    written = twin(source, _drafter(source))
    before_norm = written.options.before_norm
    theirs_NV = MtpReader(config, layout, found, source, before_norm).drafted_logits(trial)
    tolerance = 1e-5 if set(dtypes.values()) <= {torch.float32} else 2e-2
    compare(ENGINE, theirs_NV, drafted_logits(written, trial), tolerance)


def _compare_rest(origin: Path, folder: Path, layout: MtpLayout) -> None:
    """All tensors beside the module, bit for bit."""
    places = {name: path for path in weight_files(folder) for name in read_header(path)}
    for path in weight_files(origin):
        with safe_open(path, framework="pt") as file:
            for name in sorted(set(file.keys()) - set(layout.of(file.keys()))):
                with safe_open(places[name], framework="pt") as copy:
                    compare_tensors({name: file.get_tensor(name)}, {name: copy.get_tensor(name)})


def serve(source: ExportSource, folder: str) -> tuple[str, ...]:
    length = source.manifest.serve.get("length") or 1
    given = json.dumps({"method": "mtp", "num_speculative_tokens": length})
    nodes = str(int(cast(int, length)) + 1)
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", folder]
    sglang += ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", str(length)]
    sglang += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", nodes]
    return (
        shlex.join(["vllm", "serve", folder, "--speculative-config", given]),
        shlex.join(sglang),
    )


def notes(source: ExportSource) -> tuple[str, ...]:
    origin = checkpoint_of(source.target)
    config, _ = read_layout(origin)
    lines = ["A whole checkpoint: the folder stands in the place of the target's."]
    if config.get_text_config(decoder=True).model_type in NEXTN:
        lines.append(
            "From the second drafted token on vLLM feeds the module's state back without its norm, "
            "SGLang and transformers with it; this one was made for "
            + ("the latter." if _drafter(source).options.norm_output else "the former.")
        )
    if config.get_text_config(decoder=True).model_type in MIMO:
        lines.append("vLLM reads the first module alone.")
    if config.get_text_config(decoder=True).model_type in MIMO_7B:
        lines.append(
            "vLLM gives the module the target's state in front of its last norm, SGLang the one "
            "behind it; this one was made for "
            + ("the former." if _drafter(source).options.before_norm else "the latter.")
        )
    return tuple(lines)


FORMAT = Format(
    name="mtp",
    summary="the target's checkpoint with the modules for multi-token prediction in it",
    families=("mtp",),
    write=write,
    check=check,
    serve=serve,
    notes=notes,
)
