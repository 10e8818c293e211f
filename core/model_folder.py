"""What lies where a model's files were expected: pointers of Git LFS, checkpoints of a training, a
GGUF, an adapter alone. Each is named, with a way on that ends otherwise. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    SpecctlError,
    alike,
)

CONFIG, PACKAGE = "config.json", "manifest.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Files of a tokenizer, whichever of them there are.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "spiece.model", "spm.model",
    "sentencepiece.bpe.model", "source.spm", "vocab.json", "vocab.txt", "merges.txt",
    "tekken.json", "qwen.tiktoken", "tiktoken.model",
)  # fmt: skip
NEAR = 0.7  # a name less alike than this is another
_POINTER = b"version https://git-lfs"
_NUMBERED = re.compile(r"(?:.*[-_])?(?:checkpoint|ckpt|step|epoch|iter)[-_]?(\d+)")


def refuse_pointer(path: Path) -> None:
    """Refuse a file that git left in the place of a large one."""
    with path.open("rb") as stream:
        if stream.read(len(_POINTER)) != _POINTER:
            return
    raise IntegrityError(
        "the file is a pointer of Git LFS in the place of the file itself",
        found=f"{ascii(path.name)[1:-1][:100]}: {path.stat().st_size:,} bytes, which name another",
        expected="the file that the pointer names",
        do=f"git -C {path.parent} lfs pull (git lfs install comes first), or fetch the repository "
        "by `hf download OWNER/NAME --local-dir FOLDER`",
        where=str(path),
    )


def refuse_pointers(folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """The same of every file of these names that is there."""
    for name in names:
        if (folder / name).is_file():
            refuse_pointer(folder / name)


def is_inside(path: Path) -> bool:
    """Whether a file lies in its folder; a snapshot of the hub's cache links into its blobs."""
    real, folder = path.resolve(), path.parent.resolve()
    if real.parent == folder:
        return True
    is_snapshot = folder.parent.name == "snapshots"
    return is_snapshot and real.parent == (folder.parent.parent / "blobs").resolve()


def is_adapter_alone(folder: Path) -> bool:
    """Whether a folder holds a LoRA adapter of peft, and no model that it could be added to."""
    return (folder / ADAPTER).is_file() and not any((folder / name).is_file() for name in WEIGHTS)


def near_folder(path: Path) -> str:
    """What may have been meant by a folder that is not there: the one beside it that is most alike
    by name, if one is."""
    parent = path.parent
    if not parent.is_dir():
        return f"check the path: {parent} does not exist"
    try:
        names = [each.name for each in parent.iterdir() if each.is_dir() and not _hidden(each)]
    except OSError:
        names = []
    near = alike(path.name, names, cutoff=NEAR)
    if near:
        return f"did you mean {parent / near[0]}"
    place = "this folder" if parent == Path() else str(parent)
    return f"check the path: {place} has no folder of a name like {path.name}"


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the most steps among the folders inside that can be loaded."""
    numbered = [(match, path) for path in _inside(folder) if (match := _step(path)) is not None]
    return max(numbered, default=(0, None))[1]


def _step(path: Path) -> int | None:
    match = _NUMBERED.fullmatch(path.name.lower())
    return None if match is None else int(match[1])


def _inside(folder: Path) -> list[Path]:
    """Folders inside that hold a model or an adapter, in the order of their names."""
    there = (path for path in sorted(folder.iterdir()) if not _hidden(path))
    return [path for path in there if path.is_dir() and _is_whole(path)]


def _is_whole(folder: Path) -> bool:
    has_weights = any((folder / name).is_file() for name in WEIGHTS)
    if (folder / CONFIG).is_file() and has_weights:
        return True
    return all((folder / name).is_file() for name in (ADAPTER, ADAPTER_WEIGHTS))


def something_else(folder: Path) -> SpecctlError | None:
    """What a folder without a model of its own holds instead; None where nothing tells."""
    inside = _inside(folder)
    if inside:
        return _models_inside(folder, inside)
    models = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if models:
        return gguf_error(models[0])
    if (folder / PACKAGE).is_file():
        return FileError(
            "the folder is a specctl package: a drafter, not a model",
            found=PACKAGE,
            expected=f"{CONFIG}, tokenizer and {WEIGHTS[0]}",
            do=f"give it as drafter: --draft {folder}",
            where=str(folder),
        )
    return None


def _models_inside(folder: Path, inside: list[Path]) -> FileError:
    newest = newest_checkpoint(folder)
    names = [path.name for path in inside]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return FileError(
        "the folder has no weights of its own; folders inside it have",
        found=shown,
        expected=f"{CONFIG} and {WEIGHTS[0]} in the folder that is given",
        do=f"give the newest checkpoint: {newest}" if newest else f"give one of them: {inside[0]}",
        where=str(folder),
    )


def gguf_error(path: Path) -> IncompatibleError:
    """A model in llama.cpp's format, which is not loaded."""
    name, folder = ascii(path.name)[1:-1][:120], str(path.parent)
    return IncompatibleError(
        "this is a GGUF, the format of llama.cpp, and is not loaded as it is",
        found=name,
        expected=f"{CONFIG}, tokenizer and {WEIGHTS[0]}",
        do="give the repository of safetensors that the GGUF was made from, or convert it with "
        f"transformers (pip install gguf): AutoModelForCausalLM.from_pretrained({folder!r}, "
        f"gguf_file={name!r}, quantization_config=GgufConfig(dequantize=True))"
        ".save_pretrained('FOLDER'), and AutoTokenizer with gguf_file alone",
        where=str(path),
    )
