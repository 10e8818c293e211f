"""Whether a transformers module computes what its class and configuration say, and no more.

Our own forward reads the weights and the configuration. What somebody has added to a module by hand
it would leave out: hooks, a replaced forward, parts of another kind, layers taken out, numbers
written over. `change_of` names the first such thing. What transformers itself hangs on modules, to
hand out hidden states, changes nothing and is not counted, nor is a forward that torch.compile has
wrapped.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from specctl.models.hf.without_fills import without_fills

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
LIBRARIES = ("transformers.", "torch.")
OF_TRAINING = frozenset({"training", "gradient_checkpointing"})  # read by no forward in eval mode
KERNELS = ("eager", "sdpa", "flash", "flex", "paged", "specctl")  # beginnings of names
ROUNDING = 2.0**-7  # relative: what a cast to bfloat16 makes of a rotary frequency


def added_to(model: nn.Module) -> str | None:
    """The first hook or replaced forward in a module of any kind; None if there is none."""
    for name in GLOBAL_HOOKS:
        if any(map(_is_foreign, getattr(torch_module, name, {}).values())):
            return "a hook on all modules (torch.nn.modules.module)"
    for name, part in model.named_modules():
        for kind in HOOKS:
            if any(map(_is_foreign, getattr(part, kind).values())):
                return f"a forward hook on {_named(name, part)}"
        replaced = part.__dict__.get("forward")
        if replaced is not None and not _is_own(replaced, part):
            return f"a replaced forward of {_named(name, part)}"
        forward = getattr(type(part).forward, "__module__", None) or ""
        if _is_library(type(part).__module__) and not _is_library(forward):
            return f"a replaced forward of class {type(part).__name__} (by {forward})"
    return None


class GivenModel:
    """The module that somebody handed us, as it was then; our own forward reads its weights. Held
    weakly: who has let go of it cannot change it. It is no part of a copy."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._weights = [weakref.ref(weight) for weight in model.parameters()]

    def change(self) -> str | None:
        """What was added or replaced since then; weights that were written to are read as they are
        now."""
        model = self._model()
        if model is None:
            return None
        now = list(model.parameters())
        is_same = len(now) == len(self._weights) and all(
            ref() is weight for ref, weight in zip(self._weights, now, strict=True)
        )
        return added_to(model) or (None if is_same else "another weight")


def change_of(model: Any) -> str | None:
    """How a module differs from a new one of its class and configuration, weights aside; None if it
    does not."""
    kernel = own_attention(model)
    found = added_to(model) or (None if kernel is None else f"attention implementation {kernel}")
    if found is not None:
        return found
    if not _is_library(type(model).__module__):
        return f"class {type(model).__name__} of {type(model).__module__}"
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # others may need a library
    with without_fills():
        fresh = type(model)(config)
    theirs, ours = dict(model.named_modules()), dict(fresh.named_modules())
    return (
        _missing(theirs, ours)
        or next(
            filter(None, (_other(name, theirs[name], part) for name, part in ours.items())), None
        )
        or _other_weights(model, fresh)
    )


def is_head_changed(model: Any) -> bool:
    """Whether logits may be more than the product with the head: it is of another kind, or it, the
    norm in front of it or the model has a hook. Of a spread module, whose forwards are replaced by
    those that bring the weights."""
    head = model.get_output_embeddings()
    parts = [model, head, getattr(model.base_model, "norm", head)]
    hooks = [hook for part in parts for kind in HOOKS for hook in getattr(part, kind).values()]
    return type(head) is not nn.Linear or any(map(_is_foreign, hooks))


def _named(name: str, part: nn.Module) -> str:
    return f"{name or 'the model'} ({type(part).__name__})"


def _is_library(module: str) -> bool:
    return f"{module}.".startswith(LIBRARIES)


def _is_foreign(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("transformers.")


def _is_own(replaced: Any, part: nn.Module) -> bool:
    """Whether it is the class's forward, perhaps compiled."""
    inner = getattr(replaced, "_torchdynamo_orig_callable", replaced)
    return getattr(inner, "__func__", None) is type(part).forward


def own_attention(model: Any) -> str | None:
    """The name of an attention implementation that somebody has registered with transformers, where
    the module runs by it."""
    name = getattr(model.config, "_attn_implementation", None)
    if not isinstance(name, str) or name.startswith(KERNELS) or "/" in name:
        return None
    return name


def _missing(theirs: Mapping[str, nn.Module], ours: Mapping[str, nn.Module]) -> str | None:
    gone = [name for name in ours if name not in theirs]
    more = [name for name in theirs if name not in ours]
    if gone:
        return f"no {gone[0]}, which its configuration has"
    return (
        f"{_named(more[0], theirs[more[0]])}, which its configuration does not have"
        if more
        else None
    )


def _other(name: str, theirs: nn.Module, ours: nn.Module) -> str | None:
    """Another kind of part, or another number written in one."""
    if type(theirs) is not type(ours):
        return f"{_named(name, theirs)} in place of {type(ours).__name__}"
    for key, value in _numbers(theirs):
        if key in ours.__dict__ and ours.__dict__[key] != value:
            return f"{name}.{key} = {value}, {ours.__dict__[key]} by its configuration"
    return None


def _numbers(part: nn.Module) -> Iterator[tuple[str, object]]:
    for key, value in part.__dict__.items():
        is_plain = isinstance(value, (int, float, str)) or value is None
        if is_plain and not key.startswith("_") and key not in OF_TRAINING:
            yield key, value


def _other_weights(model: nn.Module, fresh: nn.Module) -> str | None:
    theirs = dict(model.named_parameters(remove_duplicate=False))
    ours = dict(fresh.named_parameters(remove_duplicate=False))
    for name in sorted({*theirs, *ours}):
        if name not in theirs or name not in ours:
            return f"{'no' if name in ours else 'a'} weight {name}"
        if theirs[name].shape != ours[name].shape:
            return f"{name} of shape {list(theirs[name].shape)}, not {list(ours[name].shape)}"
    kinds = {weight.dtype for weight in theirs.values()}
    return f"weights of {', '.join(sorted(map(str, kinds)))}" if len(kinds) > 1 else None


def is_about(given: Tensor, wanted: Tensor) -> bool:
    """Equal but for the rounding of a cast; of tensors without content always."""
    if type(given) is not Tensor or given.is_meta or given.shape != wanted.shape:
        return type(given) is not Tensor or given.is_meta
    given, wanted = given.float().cpu(), wanted.float().cpu()
    return bool(((given - wanted).abs() <= ROUNDING * wanted.abs()).all())
