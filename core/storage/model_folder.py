"""What lies where a model's files were expected: pointers of Git LFS, links, checkpoints of a
training, a GGUF, an adapter alone. Each is named, with a way on that ends otherwise. No torch.
"""

from __future__ import annotations

import os
import re
import stat
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
# What a library may read of a model's folder, which is not listed one by one.
READ_SUFFIXES = frozenset(
    [".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken", ".tokenizer", ".spm", ".bpe"]
)
TEMPLATES = "additional_chat_templates"  # a folder of chat templates that transformers reads
LONGEST = {".jinja": 1 << 20, ".safetensors": None}  # bytes; no tokenizer has a file of half a GiB
USUAL_LONGEST = 512 << 20
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


def refuse_stand_ins(folder: Path, names: Iterable[str] = TOKENIZER_FILES) -> None:
    """Refuse what only stands where a file should: links out of the folder, pipes, devices and what
    is too long under any name that is read, pointers of Git LFS under these."""
    for path in _read_of(folder):
        refuse_link(path, folder)
        if path.exists():
            _refuse_special(path, folder)
    for name in names:
        if (folder / name).is_file():
            refuse_pointer(folder / name)


def refuse_link(path: Path, folder: Path | None = None) -> None:
    """Refuse a link out of a model's folder (None: the folder in which it lies)."""
    if path.is_symlink() and not is_inside(path, folder):
        raise IntegrityError(
            "a file of the model is a link out of its folder",
            found=ascii(path.name)[1:-1][:120],
            expected="files of the folder, or of the hub's own cache",
            do="copy the file into the folder, or give the folder where it lies",
            where=str(path.parent),
        )


def check_regular(path: Path, folder: Path) -> os.stat_result:
    """The status of a regular file of the folder. A pipe or a device would be waited for."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise IntegrityError(
            "the folder contains something that is no file",
            found=ascii(path.name),
            expected="regular files",
            do="remove it, or copy the checkpoint again",
            where=str(folder),
        )
    return about


def _refuse_special(path: Path, folder: Path) -> None:
    about = check_regular(path, folder)
    longest = LONGEST.get(path.suffix.lower(), USUAL_LONGEST)
    if longest is not None and about.st_size > longest:
        raise IntegrityError(
            "a file of the model is too long to be read",
            found=f"{ascii(path.name)[1:-1][:120]}: {about.st_size:,} bytes",
            expected=f"at most {longest:,} bytes",
            do="fetch it again",
            where=str(folder),
        )


def _read_of(folder: Path) -> list[Path]:
    """Whatever of a folder a library may read by its name, and the folder of chat templates."""
    seen = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    found = [path for path in seen if path.suffix.lower() in READ_SUFFIXES]
    templates = folder / TEMPLATES
    if not templates.is_symlink():
        inside = templates.iterdir() if templates.is_dir() else ()
        return [path for path in (*found, *sorted(inside)) if not path.is_dir()]
    return [*(path for path in found if not path.is_dir()), templates]


def is_inside(path: Path, folder: Path | None = None) -> bool:
    """Whether a file lies in a folder (None: the one where its name is), links followed; a snapshot
    of the hub's cache may link into the blobs of its repository."""
    folder = (path.parent if folder is None else folder).resolve()
    real = _real(path)
    return real is not None and (real.is_relative_to(folder) or _is_blob(real, folder))


def is_hub_link(path: Path) -> bool:
    """Whether a file of a snapshot is a link of the hub's cache to a blob of that repository."""
    real = _real(path)
    return real is not None and _is_blob(real, path.parent.resolve())


def _is_blob(real: Path, snapshot: Path) -> bool:
    repository = snapshot.parent.parent
    is_ours = snapshot.parent.name == "snapshots" and repository.name.startswith("models--")
    return is_ours and real.parent == repository / "blobs"


def _real(path: Path) -> Path | None:
    """Where links lead; None for those that lead in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


def has_weights(folder: Path) -> bool:
    """Whether the safetensors of a model lie in a folder."""
    return any((folder / name).is_file() for name in WEIGHTS)


def is_adapter_alone(folder: Path) -> bool:
    """Whether a folder holds a LoRA adapter of peft, and no model that it could be added to."""
    return (folder / ADAPTER).is_file() and not has_weights(folder)


def is_file_name(path: Path) -> bool:
    """Whether a model of that name is one file and no folder."""
    return path.suffix.lower() == ".gguf"


def no_gguf_file(path: Path) -> FileError:
    """The error for a GGUF file that is not there."""
    return FileError(
        "there is no such GGUF file",
        found=str(path),
        expected="an existing file",
        do=near_name(path),
    )


def near_name(path: Path) -> str:
    """What may have been meant by a model that is not there: the folder, or the GGUF file, beside
    it that is most alike by name, if one is."""
    parent, is_file = path.parent, is_file_name(path)
    if not parent.is_dir():
        return f"check the path: {parent} does not exist"
    try:
        every = [each for each in parent.iterdir() if not _hidden(each)]
    except OSError:
        every = []
    of_kind = [e for e in every if (e.is_file() and is_file_name(e) if is_file else e.is_dir())]
    near = alike(path.name, [each.name for each in of_kind], cutoff=NEAR)
    if near:
        return f"did you mean {parent / near[0]}"
    place = "this folder" if parent == Path() else str(parent)
    kind = "GGUF file" if is_file else "folder"
    return f"check the path: {place} has no {kind} of a name like {path.name}"


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
    if (folder / CONFIG).is_file() and has_weights(folder):
        return True
    return all((folder / name).is_file() for name in (ADAPTER, ADAPTER_WEIGHTS))


def something_else(folder: Path) -> SpecctlError | None:
    """What a folder without a model or drafter of its own holds instead; None where nothing
    tells."""
    inside = _inside(folder)
    if inside:
        return _models_inside(folder, inside)
    if (folder / PACKAGE).is_file():
        return FileError(
            "the folder is a specctl package: a drafter, not a model",
            found=PACKAGE,
            expected=f"{CONFIG}, tokenizer and {WEIGHTS[0]}",
            do=f"give it as drafter: --draft {folder}",
            where=str(folder),
        )
    models = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    if models:
        return gguf_error(models[0])
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
    """A model in llama.cpp's format in the place of a package."""
    return IncompatibleError(
        "a GGUF file is a model, not a package of specctl",
        found=ascii(path.name)[1:-1][:120],
        expected=f"a folder with {PACKAGE}, or one with {CONFIG}, tokenizer and {WEIGHTS[0]}",
        do=f"specctl generate with it as --target {path} or as --draft {path}",
        where=str(path),
    )
