"""Names that wrappers of training put before those of a model's weights, and what is left of them:
torch.compile's `_orig_mod`, the `module` of DDP and DeepSpeed, FSDP's, and peft's
`base_model.model`. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specctl.core.errors import IncompatibleError, IntegrityError

OUTER = (
    "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module",
    "base_model.model",
)  # fmt: skip
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer")
_LEADING = re.compile(rf"(?:(?:{'|'.join(map(re.escape, OUTER))})\.)+")
_INSIDE = re.compile(rf"\.(?:{'|'.join(INNER)})(?=\.)")
_FACTOR = re.compile(r"\.(lora_(A|B|magnitude_vector|embedding_A|embedding_B)|modules_to_save)\.")


def plain_name(name: str) -> str:
    """The name that a weight has in the model itself."""
    match = _LEADING.match(name)
    bare = name if match is None else name[match.end() :]
    return _INSIDE.sub("", bare)


def renamed(names: Iterable[str]) -> dict[str, str]:
    """transformers' key mapping: patterns of what is left out; empty for plain names."""
    patterns: dict[str, str] = {}
    for name in names:
        if match := _LEADING.match(name):
            patterns["^" + re.escape(match[0])] = ""
        for inner in _INSIDE.findall(name):
            patterns[re.escape(inner) + r"(?=\.)"] = ""
    return dict(sorted(patterns.items(), key=lambda item: (item[0][0] != "^", -len(item[0]))))


def wrapper_note(names: Iterable[str]) -> str:
    """What is said of them, empty for plain names."""
    found = sorted({part for name in names for part in (*_leading(name), *_INSIDE.findall(name))})
    if not found:
        return ""
    shown = ", ".join(part.strip(".") + "." for part in found)
    return f"the names of its weights were saved with {shown} of a wrapper: left out"


def _leading(name: str) -> tuple[str, ...]:
    match = _LEADING.match(name)
    return () if match is None else (match[0],)


def check_unwrapped(names: Iterable[str], where: str) -> None:
    """Refuse weights that are no model's once the wrappers are left out: LoRA factors that were not
    merged, and two tensors of one name."""
    known = list(names)
    factors = [name for name in known if _FACTOR.search(name)]
    if factors:
        raise IncompatibleError(
            "the weights are a model inside peft whose adapter was not merged",
            found=ascii(factors[0])[1:-1][:120],
            expected="the weights of a model, or an adapter in a folder of its own",
            do="save it again from peft: model.merge_and_unload().save_pretrained(FOLDER) for a "
            "whole model, or model.save_pretrained(FOLDER) for the adapter alone",
            where=where,
        )
    seen: set[str] = set()
    for name in known:
        if (plain := plain_name(name)) in seen:
            raise IntegrityError(
                "two tensors have one name once the wrapper's part is left out",
                found=ascii(plain)[1:-1][:120],
                expected="every tensor once",
                do="save the model again without its wrapper (model._orig_mod, model.module)",
                where=where,
            )
        seen.add(plain)
