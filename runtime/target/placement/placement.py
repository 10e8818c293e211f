"""Where the parts of a target go that one device does not hold, and what each place must hold.

It is reckoned on a model without storage, before a weight is read; transformers and accelerate then
load every weight straight to its place. Embedding, final norm and LM head stay on one device, the
first: drafters share them, and every forward begins and ends there. That is why the map is made
here: transformers' own puts the head beside the last layers. A layer that is kept in host memory or
left in its files is brought to the first device for the while of its forward, one at a time.

Bytes are those of the dtype that is loaded; of a quantised checkpoint, those that are stored.
"""

from __future__ import annotations

import atexit
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specctl.core.errors import IncompatibleError, ResourceError, SpecctlError, nearest
from specctl.core.messages.sizes import size_text
from specctl.models.hf.spread import layer_path, place_of
from specctl.runtime.target.placement.device import available_bytes
from specctl.runtime.target.placement.quantised import StoredTensor

MODES = ("auto", "balanced", "cpu-offload")
CPU, DISK = "cpu", "disk"
SHARE = 0.9  # of free memory that weights may take; the rest is for caches and activations


@dataclass(frozen=True, slots=True)
class Placement:
    """`device_map`: module -> device, cpu or disk, as transformers takes it. `layers`: the place of
    each layer; `main`: that of all else. `need`: bytes of weights at each place."""

    device_map: Mapping[str, str]
    layers: tuple[str, ...]
    main: torch.device
    need: Mapping[str, int]

    @property
    def is_one(self) -> bool:
        """Whether all of it is on the first device."""
        return set(self.device_map.values()) == {str(self.main)}

    def text(self) -> str:
        """How many layers are where, with the bytes of weights of each place."""
        shown = []
        for place, need in self.need.items():
            count = self.layers.count(place)
            what = f"{count} of {len(self.layers)} layers"
            what += " and all else" if place == str(self.main) else ""
            shown.append(f"{what} on {place} ({size_text(need)})")
        return ", ".join(shown)

    def fields(self) -> dict[str, Any]:
        """For `from_pretrained`. Experts that files hold one by one are written anew, together,
        where they are left on disk; that copy goes when the process ends."""
        places = {name: _as_number(place) for name, place in self.device_map.items()}
        if DISK not in places.values():
            return {"device_map": places}
        folder = tempfile.mkdtemp(prefix="specctl-offload-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return {"device_map": places, "offload_folder": folder}

    def check(self, what: str) -> None:
        """Raise where the weights of a place do not fit there."""
        for place, need in self.need.items():
            free = None if place == DISK else available_bytes(torch.device(place))
            if free is not None and need > free:
                raise ResourceError(
                    f"{what} does not fit in memory",
                    found=f"{size_text(free)} free on {place}",
                    expected=f"{size_text(need)} for the weights that the device map puts there",
                    do="--set target.device_map=auto fills what is free, then host memory, then "
                    "the disk",
                )


def read_device_map(word: str) -> str | dict[str, str]:
    """What target.device_map says: a mode, or a map as JSON text or in a JSON file."""
    if word in MODES:
        return word
    is_text = word.lstrip().startswith("{")
    if not is_text and not word.endswith(".json"):
        raise SpecctlError(
            f"unknown device map {ascii(word)[:80]}",
            where="target.device_map",
            found=ascii(word)[:80],
            expected=f"{', '.join(MODES)}, a JSON object, or a .json file",
            do=f"--set target.device_map={nearest(word, MODES, 1)}",
        )
    try:
        body = json.loads(word if is_text else Path(word).expanduser().read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise _bad_map(str(error)[:160]) from error
    if not isinstance(body, dict) or not body:
        raise _bad_map(type(body).__name__)
    return {str(name): _device_name(place) for name, place in body.items()}


def _as_number(place: str) -> str | int:
    """GPUs by number: accelerate takes the first of a set as the main one, and words have no order
    there."""
    return int(place.partition(":")[2]) if place.startswith("cuda:") else place


def _bad_map(found: str) -> SpecctlError:
    return SpecctlError(
        "the device map cannot be read",
        where="target.device_map",
        found=found,
        expected='modules and places, e.g. {"model.embed_tokens": 0, "model.layers.0": "cpu", ...}',
        do=f"correct it, or take one of {', '.join(MODES)}",
    )


def _device_name(place: object) -> str:
    """cpu, disk or cuda:N, also written as N."""
    if type(place) is int:
        place = f"cuda:{place}"
    found = "cuda:0" if place == "cuda" else str(place)
    if found not in (CPU, DISK) and not re.fullmatch(r"cuda:\d{1,4}", found):
        raise _bad_map(f"the place {ascii(place)[:60]}")
    number = found.partition(":")[2]
    if number and int(number) >= torch.cuda.device_count():
        raise ResourceError(
            "the device map names a GPU that is not there",
            where="target.device_map",
            found=f"{found}, {torch.cuda.device_count()} GPUs",
            expected="cpu, disk, or a GPU that torch finds",
            do="--set target.device_map=auto",
        )
    return found


def place_target(
    config: Any,
    word: str,
    main: torch.device,
    itemsize: int,
    stored: Mapping[str, StoredTensor] | None = None,
) -> Placement:
    """Where the parts of a model of that configuration go. `itemsize`: bytes of a loaded number;
    `stored`: the tensors of a checkpoint that stays quantised, by name."""
    wanted = read_device_map(word)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = config.get_text_config().num_hidden_layers
    path = layer_path(model, count)
    if stored is None:
        sizes = _sizes({n: p.numel() * itemsize for n, p in model.named_parameters()}, path, count)
    else:
        sizes = _sizes({n: t.bytes(itemsize) for n, t in stored.items()}, path, count)
    outside = _outside(model, path)
    if isinstance(wanted, str):
        main = _numbered(main)
        layers = _fill(wanted, main, sizes)
    else:
        main, layers = _given(wanted, model, path, count, outside)
    places = dict.fromkeys(outside, str(main))
    places |= {f"{path}.{index}": place for index, place in enumerate(layers)}
    need = {str(main): sizes.outside}
    for place, size in zip(layers, sizes.layers, strict=True):
        need[place] = need.get(place, 0) + size
    return Placement(places, tuple(layers), main, need)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of each layer and of all else."""

    layers: tuple[int, ...]
    outside: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.outside


def _sizes(tensors: Mapping[str, int], path: str, count: int) -> _Sizes:
    leaf = path.rpartition(".")[2]
    inside = re.compile(rf"(?:^|\.){re.escape(leaf)}\.(\d+)\.")
    layers, outside = [0] * count, 0
    for name, size in tensors.items():
        found = inside.search(name)
        if found is not None and int(found[1]) < count:
            layers[int(found[1])] += size
        else:
            outside += size
    return _Sizes(tuple(layers), outside)


def _outside(model: Any, path: str) -> list[str]:
    """The modules, and parameters of no smaller module, that together are all but the layers."""
    found, at = list[str](), ""
    for step in path.split("."):
        part = model.get_submodule(at)
        prefix = f"{at}." if at else ""
        leaves = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        found += [f"{prefix}{name}" for name, _ in leaves]
        found += [f"{prefix}{name}" for name, _ in part.named_children() if name != step]
        at = f"{prefix}{step}"
    return found


def _numbered(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _fill(mode: str, main: torch.device, sizes: _Sizes) -> list[str]:
    """The place of each layer, in order."""
    if main.type == CPU and mode != "auto":
        raise ResourceError(
            f"--set target.device_map={mode} needs a GPU",
            where="target.device_map",
            found="no GPU, or --device cpu",
            expected="a GPU beside the host's memory",
            do="--set target.device_map=auto, which leaves on disk what does not fit in memory",
        )
    if mode == "cpu-offload":
        return [CPU] * len(sizes.layers)
    others = range(torch.cuda.device_count()) if main.type == "cuda" else ()
    gpus = [main, *(torch.device("cuda", i) for i in others if i > (main.index or 0))]
    rooms = {str(gpu): _room(gpu) for gpu in gpus}
    rooms[str(main)] -= sizes.outside
    layers = _evenly(sizes, rooms, str(main))
    if layers is not None:
        return layers
    if mode == "balanced":
        raise ResourceError(
            "the target does not fit on these GPUs",
            where="target.device_map",
            found=f"{', '.join(rooms)} with {size_text(sum(map(_room, gpus)))} for weights",
            expected=size_text(sizes.total),
            do="--set target.device_map=auto, which keeps the rest in host memory or on disk",
        )
    rooms[str(main)] -= max(sizes.layers)  # where a layer kept elsewhere comes to be computed
    if main.type != CPU:
        rooms[CPU] = _room(torch.device(CPU))
    return _in_order(sizes.layers, {**rooms, DISK: math.inf}) or [DISK] * len(sizes.layers)


def _room(device: torch.device) -> float:
    free = available_bytes(device)
    return math.inf if free is None else SHARE * free


def _evenly(sizes: _Sizes, rooms: Mapping[str, float], main: str) -> list[str] | None:
    """As little as possible on the fullest device; None where all of them do not suffice."""
    least = sizes.total // len(rooms)
    for extra in range(len(sizes.layers) + 1):
        share = least + extra * max(sizes.layers)
        shares = {p: min(r, share - (sizes.outside if p == main else 0)) for p, r in rooms.items()}
        found = _in_order(sizes.layers, shares)
        if found is not None:
            return found
    return None


def _in_order(layers: Iterable[int], rooms: Mapping[str, float]) -> list[str] | None:
    """Each layer at the first place, not before that of the layer below, that has room for it."""
    places, left = list(rooms), dict(rooms)
    found, at = list[str](), 0
    for size in layers:
        while at < len(places) and size > left[places[at]]:
            at += 1
        if at == len(places):
            return None
        left[places[at]] -= size
        found.append(places[at])
    return found


def _given(
    places: Mapping[str, str], model: Any, path: str, count: int, outside: Sequence[str]
) -> tuple[torch.device, list[str]]:
    """The first device and the place of each layer of a map that a user wrote."""
    known = {name for name, _ in [*model.named_modules(), *model.named_parameters()]}
    for name in places:
        if name not in known:
            near = nearest(name, sorted(n for n in known if n.count(".") <= name.count(".")), 1)
            raise _refused(f"no module {ascii(name)[:80]}", f"modules of the target, e.g. {near}")
        if name.startswith(f"{path}.") and name.count(".") > path.count(".") + 1:
            raise _refused(f"{name}, a part of a layer", "layers in one piece")
    layers = [place_of(f"{path}.{index}", places) for index in range(count)]
    rest = {name: place_of(name, places) for name in outside}
    missing = [name for name, place in rest.items() if place is None]
    missing += [f"{path}.{i}" for i, place in enumerate(layers) if place is None]
    if missing:
        raise _refused(f"no place for {missing[0]}", 'a place for every module, or one for ""')
    numbers = [n for n in map(_as_number, {*layers, *rest.values()}) if isinstance(n, int)]
    first = f"cuda:{min(numbers)}" if numbers else CPU
    for name, place in rest.items():
        if place != first:
            raise _refused(
                f"{name} on {place}",
                f"{first}: drafters share the embedding and the head, so all but the layers is on "
                "the first device of the map",
            )
    return torch.device(first), layers


def _refused(found: str, expected: str) -> IncompatibleError:
    return IncompatibleError(
        "the device map does not fit this target",
        where="target.device_map",
        found=found,
        expected=expected,
        do=f"correct the map, or take one of {', '.join(MODES)}",
    )
