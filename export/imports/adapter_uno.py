"""A LoRA adapter of peft read as UNO's: the target drafts with it at rows of noise.

Nothing in such a folder says what it was trained for, so that one is read only where the command
names this family. What it adds must be plain LoRA of one rank and one alpha, on the same linear
layers of every layer. The rename is proved bit for bit, and its scale by peft's rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specctl.core.errors import GateError
from specctl.core.forward.row_additions import ATTENTION, MLP
from specctl.drafters.tokens.uno import Uno, UnoOptions
from specctl.export.formats import ExportSource
from specctl.export.imports import Imported, Importer
from specctl.export.imports.heads import ELSEWHERE, refused
from specctl.export.imports.published import Published
from specctl.export.layouts.adapter import own, published
from specctl.export.package.tensors import compare_tensors
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import CONFIG, read_adapters

ROWS = 9  # the newest token's and eight of noise, as vLLM's reader drafts by default
UNREAD = ("use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "modules_to_save", "bias")


def knows(config: Mapping[str, Any], names: Set[str]) -> bool:
    return config.get("peft_type") == "LORA"


def read(folder: Published, target: Target) -> Imported:
    body = folder.config
    for key in UNREAD:
        if body.get(key) not in (None, False, "none", {}, []):
            what = "the adapter is not the plain LoRA that UNO's rows have"
            raise refused(what, f"{key}: {body[key]}", f"no {key}", ELSEWHERE, f"{CONFIG}:{key}")
    (adapter,) = read_adapters((str(folder.folder),))
    rank, tensors = int(body["r"]), own(folder.tensors)
    targets = tuple(name for name in ATTENTION + MLP if f"layers.0.{name}.down" in tensors)
    if not targets:
        raise refused(
            "the adapter adds to none of the linear layers that UNO's rows have",
            f"{ascii(min(folder.tensors))[1:-1][:120]}",
            f"factors of {', '.join(ATTENTION + MLP)} in every layer, under model.layers",
            ELSEWHERE,
        )
    options = UnoOptions(
        num_heads=ROWS, rank=rank, alpha=float(body["lora_alpha"]), targets=targets
    )
    drafter = Uno(options, target.spec)
    _check(drafter, folder)
    drafter.module.to(next(iter(tensors.values())).dtype)
    drafter.load_tensors(tensors)
    drafter.bind(target.borrowed())

    def prove(source: ExportSource) -> None:
        compare_tensors(dict(folder.tensors), published(drafter.tensors()))
        scale = options.alpha / options.rank
        if {*adapter.scales.values()} != {scale}:
            raise GateError(
                "the adapter is scaled otherwise",
                found=str({*adapter.scales.values()}),
                expected=str(scale),
                do="report it",
            )

    notes = (
        "read as UNO's because you said so: nothing in an adapter says what it was trained for; "
        "one of anything else drafts two tokens a round, and no more",
        "its noise is of the whole vocabulary; --set drafter.options.mask_id=N keeps it below id N",
    )
    return Imported(drafter, "peft", prove, ROWS, notes)


def _check(drafter: Uno, folder: Published) -> None:
    """The very factors of some linear layers of every layer, in one dtype."""
    wanted = {n: tuple(t.shape) for n, t in published(drafter.tensors()).items()}
    found = {n: tuple(t.shape) for n, t in folder.tensors.items()}
    wrong = sorted(n for n in wanted.keys() | found.keys() if wanted.get(n) != found.get(n))
    if wrong:
        here, there = found.get(wrong[0]), wanted.get(wrong[0])
        raise refused(
            "the adapter is of another model, or not on the same linear layers of every layer",
            f"{ascii(wrong[0])[1:-1][:120]} {here or 'missing'}",
            f"{there or 'none of that name'}",
            "give the target that it was trained on",
        )
    kinds = {tensor.dtype for tensor in folder.tensors.values()}
    if len(kinds) != 1:
        raise refused("the adapter mixes dtypes", str(sorted(map(str, kinds))), "one", ELSEWHERE)


IMPORTER = Importer("peft", "a LoRA adapter, with --family uno", knows, read)
