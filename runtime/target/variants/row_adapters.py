"""LoRA adapters that requests choose: rows of one forward, each of the target or of an adapter.

Nothing is merged: W x is computed once for all rows, and those of an adapter read
W x + s B A x (S-LoRA, arXiv 2311.03285). So a target and its adapters are held once and
answer in one batch, and every row is written as if it were alone. Drafters draft for all of them;
what they draft is verified by what the row reads.
Letters: B rows, I inputs, O outputs, R rank, T fed tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from safetensors.torch import load_file

from specctl.core.errors import IncompatibleError, IntegrityError, SpecctlError
from specctl.core.forward.row_additions import Factors, Place, RowAdditions
from specctl.core.language_model import Feed, LanguageModel
from specctl.runtime.target.variants.adapter import TENSORS, Adapter, AppliedAdapter, read_adapters

# A layer's number, its attention or MLP, and a linear layer inside it.
_MODULE = re.compile(r"(?:[a-z_]+\.)*(\d+)\.[a-z_]+\.([a-z_]+)")
OPTION = "api.adapters"
_NAME = re.compile(r"[\w.:@/-]{1,128}")


@dataclass(frozen=True, slots=True)
class RowAdapters:
    """By name: where an adapter came from, and s B A of each matrix that it adds to."""

    applied: Mapping[str, AppliedAdapter]
    factors: Mapping[str, Mapping[Place, Factors]]

    def onto(self, feed: Feed, names: Sequence[str | None]) -> Feed:
        """The feed where each row has the adapter of that name."""
        places_BT = torch.arange(feed.ids_BT.numel()).view(feed.ids_BT.shape)
        added = []
        for name in dict.fromkeys(name for name in names if name is not None):
            rows = [at for at, each in enumerate(names) if each == name]
            at_Q = None if len(rows) == len(names) else places_BT[rows].flatten()
            at_Q = at_Q if at_Q is None else at_Q.to(feed.ids_BT.device)
            added.append(RowAdditions(self.factors[name], at_Q=at_Q))
        return replace(feed, added=(*feed.added, *added)) if added else feed

    @classmethod
    def of(cls, lm: LanguageModel, folders: Mapping[str, str]) -> Self:
        """Those of NAME -> FOLDER or FOLDER@WEIGHT, for this model."""
        for name in folders:
            _check_name(name)
        read = {name: read_adapters([folder], OPTION)[0] for name, folder in folders.items()}
        factors = {name: _factors(lm, one) for name, one in read.items()}
        return cls({name: one.applied for name, one in read.items()}, factors)


def check_adapter(adapters: RowAdapters | None, name: str | None) -> None:
    """Refuse a name that is none of them."""
    known = () if adapters is None else tuple(adapters.factors)
    if name is not None and name not in known:
        raise SpecctlError(
            "the target has no such adapter",
            found=ascii(name)[:120],
            expected=", ".join(known) or "no adapter",
            do="name none for the target itself, or load it with its adapters",
        )


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise SpecctlError(
            "an adapter cannot be called so",
            where=OPTION,
            found=ascii(name)[:160],
            expected="letters, digits and . : @ / - _, at most 128",
            do="api.adapters=NAME=FOLDER",
        )


def _factors(lm: LanguageModel, one: Adapter) -> dict[Place, Factors]:
    """Its products, by where they are added. Refused whole if one of them has no place."""
    tensors, found = load_file(one.folder / TENSORS), dict[Place, Factors]()
    for module, shape in one.shapes.items():
        match = _MODULE.fullmatch(module)
        place = None if match is None else (int(match[1]), match[2])
        layers = range(lm.spec.num_layers)
        here = None if place is None or place[0] not in layers else lm.linear_at(*place)
        if place is None or here != shape or place in found:
            raise IncompatibleError(
                "requests cannot choose this adapter",
                where=str(one.folder),
                found=f"{module}: {shape[0]} x {shape[1]} in the adapter, "
                + ("no such layer" if here is None else f"{here[0]} x {here[1]}")
                + " in the target"
                + (", named twice" if place in found else ""),
                expected="linear layers of the target's attentions and MLPs",
                do="give its base as --target, or add it for all requests: --adapter FOLDER",
            )
        keys = [f"base_model.model.{module}.lora_{side}.weight" for side in "AB"]
        # Copied: tensors of a file are mapped, and would change with it while they are served.
        down, up = (tensors[key].to(lm.device, lm.dtype, copy=True) for key in keys)
        for key, half in zip(keys, (down, up), strict=True):
            if not bool(half.isfinite().all()):
                raise _not_finite(one, key, lm.dtype, bool(tensors[key].isfinite().all()))
        found[place] = Factors(down, up, one.scales[module] * one.applied.weight)
    return found


def _not_finite(one: Adapter, key: str, dtype: torch.dtype, is_stored: bool) -> SpecctlError:
    """The error for a tensor that holds no numbers, whether or not it does as it `is_stored`."""
    kind = str(dtype).removeprefix("torch.")
    return (IncompatibleError if is_stored else IntegrityError)(
        "the adapter holds numbers that are not finite",
        where=str(one.folder),
        found=f"{key}, in {kind}",
        expected="finite numbers",
        do="--dtype float32 (or bfloat16, as wide in range)"
        if is_stored
        else "fetch the adapter again, or train it anew",
    )
