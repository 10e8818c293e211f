"""A transformers folder before transformers sees it: what may lie there, which files count as its
weights, and what its JSON may contain. No torch, and nothing here reads a weight.

transformers follows names: an index may name a pickle or a file outside the folder, config.json
another file of weights or code of a hub repository. Whatever such a name could lead to besides
plain safetensors of this folder is refused before, and `from_folder` is the one door to weights.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specctl.core.errors import (
    FileError,
    IncompatibleError,
    IntegrityError,
    SpecctlError,
    is_out_of_memory,
)
from specctl.core.storage.diffusion_kinds import diffusion_kind
from specctl.core.storage.grid_kinds import grid_kind
from specctl.core.storage.model_folder import (
    ADAPTER,
    check_regular,
    is_adapter_alone,
    refuse_link,
    refuse_pointer,
    refuse_stand_ins,
    something_else,
)
from specctl.models.hf.added_kinds import make_known
from specctl.models.hf.quiet import without_bars
from specctl.runtime.target.folders.adapter_alone import AdapterAlone
from specctl.runtime.target.folders.stored_names import check_unwrapped, renamed

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# JSON that transformers reads for a model and its tokenizer, and follows.
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json",
    "preprocessor_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.json",
)  # fmt: skip
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CODE_KEYS = ("auto_map", "custom_pipelines", "custom_code", "trust_remote_code")
KERNEL_KEYS = (
    "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation",
)  # fmt: skip
MAX_JSON_BYTES, MAX_JSON_DEPTH = 32 << 20, 64
# Counts of which transformers makes lists and modules one by one, and the most that they may be
# (Llama 405B has 126 layers, Switch-C 2,048 experts).
MOST = {
    re.compile(r"(^|_)(layers?|depth|blocks?)$"): 1024,
    re.compile(r"(^|_)n?(heads?|experts?)(_|$)"): 1 << 16,
}
LARGEST_NUMBER = 1 << 60
MAX_BUFFERS = 1 << 29  # numbers that a model keeps beside its weights, such as masks of positions
_OTHER_LAYOUT = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors")


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json, after all that transformers would follow in it and beside it was looked at; its
    architecture is one that transformers has, or is made known to it."""
    refuse_special_files(folder)
    refuse_stand_ins(folder)
    if is_adapter_alone(folder):
        raise AdapterAlone(folder)
    config = read_object(folder / "config.json")
    if diffusion_kind(config) is not None:
        raise IncompatibleError(
            "this is a masked diffusion model, which no drafter drafts for and no server serves",
            found=f"model_type {config['model_type']}",
            expected="a causal language model",
            do=f'specctl generate --target {folder} "def main(" decodes it (in Python: denoise)',
            where=str(folder),
        )
    if grid_kind(config) is not None:
        raise IncompatibleError(
            "this model writes pictures in an order of its own: no drafter drafts for it",
            found=f"model_type {config['model_type']}",
            expected="a causal language model",
            do=f"specctl generate --target {folder} 7 writes a picture (in Python: grid_images)",
            where=str(folder),
        )
    refuse_named_code(folder)
    _refuse_other_weights(folder, config)
    check_counts(config, str(folder / "config.json"))
    make_known(config.get("model_type"))
    return config


def refuse_named_code(folder: Path) -> None:
    """Refuse code that any JSON of a folder names, which transformers would follow."""
    for name in SETTINGS:
        if (folder / name).exists():
            refuse_code(read_object(folder / name), str(folder / name))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size and depth."""
    try:
        refuse_link(path)
        refuse_pointer(path)
        with path.open("rb") as stream:
            raw = stream.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            raise ValueError(f"more than {MAX_JSON_BYTES:,} bytes")
        content = json.loads(raw.decode("utf-8"))
        if _depth(content) > MAX_JSON_DEPTH:
            raise ValueError(f"nested more than {MAX_JSON_DEPTH} deep")
    except FileNotFoundError:
        raise something_else(path.parent) or FileError(
            "the folder is not a transformers checkpoint",
            found=f"no {path.name}",
            expected="config.json, tokenizer and safetensors weights",
            do="give the folder that holds config.json",
            where=str(path.parent),
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{path.name} cannot be read",
            found=_short(error),
            expected="a JSON object in UTF-8",
            do="download the folder again",
            where=str(path),
        ) from None
    if not isinstance(content, dict):
        raise IntegrityError(
            f"{path.name} is not a JSON object",
            found=type(content).__name__,
            do="download the folder again",
            where=str(path),
        )
    return content


def _depth(content: object) -> int:
    """How deep lists and objects are nested in each other."""
    deepest, stack = 0, [(content, 1)]
    while stack and deepest <= MAX_JSON_DEPTH:
        item, depth = stack.pop()
        deepest = max(deepest, depth)
        if isinstance(item, dict):
            stack += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            stack += [(inner, depth + 1) for inner in item]
    return deepest


def _entries(body: object) -> Iterator[tuple[str, object]]:
    """Every key of a JSON object and its value, however deep."""
    stack = [body]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield from item.items()
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def refuse_code(body: Mapping[str, Any], where: str) -> None:
    """Refuse a transformers JSON that names code to be imported, however deep it is hidden: of the
    folder, or a kernel that a hub repository holds."""
    for key, value in _entries(body):
        is_code = key in CODE_KEYS and value
        names = value.values() if isinstance(value, dict) else (value,)
        is_kernel = key in KERNEL_KEYS and any("/" in str(name) for name in names)
        if is_code or is_kernel:
            raise IntegrityError(
                "the folder asks for its own code to be run, which specctl never does",
                found=f"{key}: {ascii(value)[:120]}",
                expected="an architecture that transformers has built in",
                do=f"remove {key} if the model is a standard one, or choose another",
                where=where,
            )


def refuse_special_files(folder: Path) -> None:
    """None but files and folders may lie there."""
    for path in sorted(folder.iterdir()):
        if path.exists() and not path.is_dir():
            check_regular(path, folder)


def _refuse_other_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Ways to weights besides model.safetensors and its index."""
    names = sorted(path.name for path in folder.iterdir())
    if ADAPTER in names:
        raise IntegrityError(
            "the folder holds a whole model and an adapter, and does not say which is meant",
            found=f"{ADAPTER} beside the weights",
            expected="one of the two",
            do=f"where the weights are merged already, take {ADAPTER} out of the folder; else keep "
            "the adapter in a folder of its own, and give that folder",
            where=str(folder),
        )
    found = [name for name in names if _OTHER_LAYOUT.fullmatch(name)]
    found += [key for key, value in _entries(config) if key == "transformers_weights" and value]
    if found:
        raise IntegrityError(
            "the folder names other weights than model.safetensors and its index",
            found=found[0],
            expected="a whole model in model.safetensors, or in the shards of its index",
            do="merge it into one model with save_pretrained of transformers, where you trust it",
            where=str(folder),
        )


def check_counts(config: Mapping[str, Any], where: str) -> None:
    """Sizes of a model that somebody could have trained."""
    for key, value in _entries(config):
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        limits = [most for name, most in MOST.items() if name.search(key)]
        most = min(limits, default=LARGEST_NUMBER)
        if abs(value) > most:
            raise IntegrityError(
                f"no model has such a {ascii(key)[1:-1][:60]}",
                found=f"{value:,}"[:60],
                expected=f"at most {most:,}",
                do="fetch config.json again",
                where=where,
            )


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights, by transformers' own order: model.safetensors, else what its
    index names. Each, and all that an index names, is a safetensors file of this very folder."""
    whole = [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    named = _named_by_index(folder / INDEX) if (folder / INDEX).is_file() else []
    if not whole and not named:
        raise _no_weights(folder)
    for name in (*whole, *named):
        _check_weight_file(folder, name)
    return tuple(folder / name for name in whole or named)


def _named_by_index(path: Path) -> list[str]:
    weight_map = read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise IntegrityError(
            "the weight index has no weight_map",
            found=type(weight_map).__name__,
            expected="a file for each tensor",
            do="fetch the checkpoint again",
            where=str(path),
        )
    return sorted({str(name) for name in weight_map.values()})


def _check_weight_file(folder: Path, name: str) -> None:
    is_plain = Path(name).name == name and "\\" not in name and not name.startswith(".")
    if not is_plain or not name.endswith(".safetensors"):
        raise IntegrityError(
            "the weight index names a file that is no safetensors file of the folder; "
            "loading a pickle can run any code",
            found=ascii(name)[1:-1][:120],
            expected="names such as model-00001-of-00002.safetensors",
            do="fetch the checkpoint again, or choose another",
            where=str(folder / INDEX),
        )
    path = folder / name
    if not path.is_file():
        raise IntegrityError(
            "a file of weights is missing",
            found=f"no {ascii(name)[1:-1][:120]}",
            expected="every file that the index names",
            do="fetch the checkpoint again",
            where=str(folder),
        )
    refuse_link(path)
    refuse_pointer(path)


def _no_weights(folder: Path) -> SpecctlError:
    names = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in names if Path(name).suffix in PICKLES]
    if other := something_else(folder):
        return other
    if not pickled:
        return FileError(
            "the folder holds no weights",
            found=", ".join(names[:6]) or "an empty folder",
            expected=f"{WEIGHTS}, or {INDEX} and the files that it names",
            do="fetch the checkpoint again",
            where=str(folder),
        )
    return IntegrityError(
        "the weights are pickled, and loading a pickle can run any code",
        found=", ".join(pickled[:3]),
        expected=WEIGHTS,
        do="convert them where you trust the file: model.save_pretrained(FOLDER) of "
        "transformers writes safetensors",
        where=str(folder),
    )


def stored_shapes(files: Iterable[Path]) -> list[tuple[int, ...]]:
    """The shape of every tensor, from the headers alone."""
    from safetensors import SafetensorError, safe_open

    shapes: list[tuple[int, ...]] = []
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                shapes += [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise IntegrityError(
                "a weight file is damaged",
                found=_short(error),
                expected="a safetensors file",
                do="fetch the checkpoint again",
                where=str(path),
            ) from error
    return shapes


def stored_names(files: Iterable[Path]) -> list[str]:
    """The name of every tensor, from headers that were found whole."""
    from safetensors import safe_open

    names: list[str] = []
    for path in files:
        with safe_open(path, framework="numpy") as file:
            names += file.keys()
    return names


def check_size(config: Any, shapes: Iterable[tuple[int, ...]], where: str) -> None:
    """Refuse a configuration of a model larger than the weights that are there, before a number of
    it is allocated."""
    from transformers import AutoModelForCausalLM

    from specctl.models.hf.without_fills import without_fills

    stored = list(shapes)
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if layers > len(stored):
        expected = f"at most the {len(stored):,} tensors stored"
        raise misfit(f"num_hidden_layers {layers:,}", expected, where)
    with without_fills():
        model = AutoModelForCausalLM.from_config(config)
    count = sum(part.numel() for part in model.parameters())
    there = sum(map(math.prod, stored))
    # Of a quantised model one stored number may hold up to 32.
    most = there * (32 if getattr(config, "quantization_config", None) else 2)
    if count > most:
        raise misfit(f"a model of {count:,} parameters", f"the {there:,} that are stored", where)
    beside = sum(part.numel() for part in model.buffers())
    if beside > max(MAX_BUFFERS, 2 * there):
        raise misfit(f"{beside:,} numbers beside the weights", f"at most {MAX_BUFFERS:,}", where)


def misfit(found: str, expected: str, where: str) -> IntegrityError:
    """The error for weights that are not those of the configuration."""
    return IntegrityError(
        "the weights do not fit config.json",
        found=found,
        expected=expected,
        do="download the model again; a head for another method is not a whole model",
        where=where,
    )


@contextmanager
def foreign_config(what: str, where: str) -> Iterator[None]:
    """Whatever a foreign configuration makes transformers raise, as a refusal of it."""
    try:
        yield
    except SpecctlError:
        raise
    except Exception as error:  # a foreign file through a foreign parser: any type may come
        if is_out_of_memory(error):
            raise
        raise IncompatibleError(
            what,
            found=f"{type(error).__name__}: {_short(error)}",
            expected="a configuration that the installed transformers can build",
            do="pip install -U transformers, or choose another",
            where=where,
        ) from error


def from_folder(kind: Any, folder: Path, **fields: Any) -> Any:
    """`kind.from_pretrained` of a folder: plain safetensors of that folder, no code, no network.
    What wrappers of training put before the names of its weights is left out."""
    names = stored_names(weight_files(folder))
    check_unwrapped(names, str(folder))
    mapping = renamed(names)
    more = {"key_mapping": mapping} if mapping else {}
    with without_bars():
        loaded = kind.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **more,
            **fields,
        )
    if mapping:  # else save_pretrained would write the names of the wrapper again
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        kept = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [c for c in kept if not set(c.source_patterns) & set(mapping)]
    return loaded


def straight_to(device: Any) -> dict[str, Any]:
    """Fields of `from_pretrained` by which weights are read onto a device without passing through
    host memory; on the CPU they are there already."""
    return {} if device.type == "cpu" else {"device_map": {"": device}}


def _short(error: BaseException) -> str:
    lines = str(error).strip().split("\n")
    return ascii(lines[0] or type(error).__name__)[1:-1][:160]
