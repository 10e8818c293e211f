"""What a `target` argument stands for: a name, a folder, a transformers model, or a Target."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.api.failures import raises_user_errors
from specctl.core.errors import FileError, IncompatibleError, SpecctlError
from specctl.core.storage.model_folder import refuse_stand_ins
from specctl.recipes.built_in import as_path_word
from specctl.recipes.drafter_names import drafter_names, drafter_words
from specctl.recipes.published import path_named
from specctl.recipes.targets import resolve

if TYPE_CHECKING:
    from specctl.core.forward.attention_only import AttentionOnly
    from specctl.export.package.manifest import TargetRecord
    from specctl.runtime.target.target import Target

TargetLike = Any  # str, Path, Target, or a causal language model of transformers


@raises_user_errors
def load_target(
    target: TargetLike,
    *,
    tokenizer: Any = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    inflate: str | None = None,
    offline: bool = False,
    compile: bool | None = False,
    adapters: Sequence[str] = (),
    device_map: str | None = None,
    tensor_parallel: bool = False,
    mix: str | None = None,
    images: bool = False,
) -> Target:
    """The target of that name: an alias such as "tiny" or "llama3-8b", a folder, or a hub id.

    `adapters`: LoRA adapters as peft writes them, each FOLDER or FOLDER@WEIGHT, added in order.
    `device_map`: auto, balanced, cpu-offload, or a map as JSON text or in a .json file, for a
    target that one device does not hold; `tensor_parallel`: spread over torchrun's processes.
    `compile`: rounds are recorded in fixed shapes (CUDA graphs); None: on a GPU, where our own
    forward reads the target. `mix`: METHOD[:NUMBER...]=MODEL, a target made of both
    (docs/verification.md). `images`: a multimodal target with its vision, which reads images; else
    its text side alone.
    A transformers model is frozen, put in evaluation mode and used as it is, with `tokenizer`, else
    the one of the folder or repository it was loaded from. A Target is returned as it is.
    """
    from specctl.runtime.target.target import Target

    if isinstance(target, Target):
        target.lm.check_unchanged()
        return target
    if isinstance(target, (str, Path)):
        return _named(
            str(target),
            revision=revision,
            dtype=dtype,
            device=device,
            inflate=inflate,
            offline=offline,
            compile=compile,
            adapters=adapters,
            device_map=device_map,
            tensor_parallel=tensor_parallel,
            mix=mix,
            images=images,
        )
    if images:
        raise SpecctlError(
            "a model that is in memory is used as it is, for text",
            where="target",
            found=f"{type(target).__name__} and images=True",
            expected="a folder or a name, whose vision is loaded with it",
            do="save_pretrained the model and its processor, and name the folder",
        )
    if not (hasattr(target, "config") and hasattr(target, "generate")):
        raise SpecctlError(
            "this is no target",
            where="target",
            found=type(target).__name__,
            expected="a name or folder, a causal language model of transformers, or a Target",
            do='specctl.load_target("tiny")',
        )
    name = str(getattr(target, "name_or_path", "") or type(target).__name__)
    return Target.from_model(target, tokenizer or tokenizer_of(target), name)


def _named(name: str, mix: str | None = None, **how: Any) -> Target:
    """The target of that name, and warnings of what is to be known of it."""
    from specctl.runtime.target.variants.mixed import load_mixed

    found = load_mixed(mix, name, **how)
    for note in found.notes:
        warnings.warn(note, stacklevel=3)
    if found.rounding is not None and found.rounding.is_doubtful:
        warnings.warn(found.rounding.warning(found.dtype_name), stacklevel=3)
    if found.mixture is not None:
        warnings.warn(found.mixture.warning(name), stacklevel=3)
    return found


def tokenizer_of(model: Any) -> Any:
    """The tokenizer that lies where the model came from; None if there is none."""
    from transformers import AutoTokenizer

    source = getattr(model, "name_or_path", "")
    if not source:
        return None
    if (folder := Path(source)).is_dir():
        refuse_stand_ins(folder)
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        return None


def in_memory(target: TargetLike | None) -> Target | None:
    """The target of a model or a Target, to train for; None where a name stands for one."""
    if target is None or isinstance(target, (str, Path)):
        return None
    found = load_target(target)
    if found.mixture is not None:
        raise IncompatibleError(
            "drafters are trained for a target alone",
            where="target",
            found=f"{found.name} with {found.mixture}",
            expected="a target that was loaded without mix",
            do="train for the target alone: what is made for it drafts for the mixture as well",
        )
    return found


def target_or_own(
    target: TargetLike | None,
    *drafters: object,
    dtype: str = "auto",
    wanted: Sequence[AttentionOnly] = (),
) -> Target:
    """The target; where none was named, the one that the first package was made for, else tiny.
    `wanted`: what will be done with it that needs attention alone."""
    record = own_target(*drafters) if target is None else None
    if record is not None:
        return _named(
            record.name,
            revision=record.revision,
            inflate=record.inflated,
            dtype=dtype,
            adapters=record.adapter_words(),
            wanted=wanted,
        )
    name = "tiny" if target is None else target
    if isinstance(name, (str, Path)):
        return _named(str(name), dtype=dtype, wanted=wanted)
    return load_target(name)


def own_target(*drafters: object) -> TargetRecord | None:
    """What the first of these drafters that is a package was made for; no torch. FileError where
    that target is not on this machine under the name that the package gives it."""
    from specctl.export.package.manifest import read_manifest

    package = _package(drafters)
    if package is None:
        return None
    record = read_manifest(package).target
    try:
        resolve(record.name)
    except SpecctlError as error:
        raise _not_here(record, package) from error
    return record


def _package(drafters: Sequence[object]) -> Path | None:
    from specctl.export.package.manifest import MANIFEST, package_in

    named = (as_path_word(one) for one in drafters if isinstance(one, (str, Path)))
    parts = (part for one in named for part in drafter_names(one) if part not in drafter_words())
    folders = (package_in(path_named(part)) for part in parts)
    return next((f for f in folders if (f / MANIFEST).is_file()), None)


def _not_here(record: TargetRecord, package: Path) -> FileError:
    return FileError(
        "the target that the package was made for is not found from here",
        where=f"{package}: target.name",
        found=ascii(record.name),
        expected=f"a folder or a name of this machine, with fingerprint {record.fingerprint[:12]}",
        do="name it: --target FOLDER (in Python: target=)",
    )


def inflated_note(target: Target) -> str:
    """What every report about an inflated target must say."""
    from specctl.runtime.target.variants import inflate

    return inflate.inflated_note(target.name, str(target.inflated))


def target_json(target: Target) -> dict[str, Any]:
    """How results name the target."""
    return {
        "name": target.name,
        "revision": target.revision,
        "fingerprint": target.fingerprint,
        "dtype": target.dtype_name,
        "device": str(target.device),
        "spread": target.spread,
        "inflated": target.inflated,
        "adapters": [asdict(one) for one in target.adapters],
        "mixture": None if target.mixture is None else str(target.mixture),
        "note": inflated_note(target) if target.inflated else None,
        "rounding": None if target.rounding is None else asdict(target.rounding),
    }
