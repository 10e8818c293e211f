"""Two models as one target: the same tokens, one device, the law of a mixture (mixture.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specctl.core.errors import IncompatibleError, SpecctlError, one_of_two
from specctl.core.forward.attention_only import AttentionOnly
from specctl.models.mixed_lm import MixedLM
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.variants.mixture import Mixture, parse

# What takes the weights of one model apart, blows them up, adds to them or records their rounds.
ALONE = {
    "compile": "target.compile",
    "device_map": "target.device_map",
    "tensor_parallel": "target.tensor_parallel",
    "inflate": "--inflate",
    "adapters": "--adapter",
    "images": "images",
}


def load_mixed(
    mix: str | None,
    name: str,
    *,
    revision: str | None = None,
    wanted: Sequence[AttentionOnly] = (),
    **how: Any,
) -> Target:
    """`load_target`, and with `mix` (METHOD=MODEL) that target mixed with the model named, or
    what they write in turns. All are loaded alike; what does not go with a mixture is refused
    before anything is read."""
    if mix is None:
        return load_target(name, revision=revision, wanted=wanted, **how)
    mixture = parse(mix)
    given = [flag for key, flag in ALONE.items() if how.get(key)]
    if given:
        raise one_of_two(
            "a mixture is made of two models as they are published, on one device",
            f"--mix and {given[0]}",
            f"leave out {given[0]}",
        )
    how = {key: value for key, value in how.items() if key not in ALONE}
    for model in mixture.models:
        _check_named(model)
    own = load_target(name, revision=revision, wanted=wanted, **how)
    loaded = {} if revision else {name: own}
    for model in mixture.models:  # one that is named twice is in memory once
        if model not in loaded:
            loaded[model] = load_target(model, **how)
    beside = [loaded[model] for model in mixture.models]
    if mixture.is_approximate:
        return in_turns(own, beside, mixture)
    return mixed(own, beside[0], mixture)


def _check_named(model: str) -> None:
    """Refuse a model that nothing is called, before the target is read; resolve() speaks of the
    target's own flag."""
    try:
        resolve(model)
    except SpecctlError as error:
        what = error.what.replace("the target", "the model of a mixture")
        raise type(error)(
            what.replace("unknown target", "unknown model of a mixture"),
            where="--mix",
            found=error.found,
            expected=error.expected,
            do=error.do,
        ) from error


def mixed(target: Target, beside: Target, mixture: Mixture) -> Target:
    """The mixture of both as a target. Raises IncompatibleError where their ids differ."""
    _check_same_tokens(target, beside)
    return replace(
        _marked(target, [beside], mixture), lm=MixedLM(target.lm, beside.lm, mixture.mixing())
    )


def in_turns(target: Target, beside: Sequence[Target], mixture: Mixture) -> Target:
    """The target with the models that write beside it, judge, or choose what it keeps of a prompt.
    Raises IncompatibleError where their ids differ, or a cache cannot be gone on with from any
    place."""
    for one in (target, *beside):
        _check_same_tokens(target, one)
        if one.lm.state_bytes or not one.can_run:
            raise IncompatibleError(
                f"{mixture.law} needs models of attention alone",
                where="--mix",
                found=f"{one.name}, with recurrent states or not to be run here",
                expected="models that keep keys and values",
                do="leave out --mix, or name models of attention alone",
            )
    return replace(_marked(target, beside, mixture), beside=tuple(beside))


def _check_same_tokens(target: Target, beside: Target) -> None:
    ours, theirs = target.spec.vocab_size, beside.spec.vocab_size
    if ours != theirs or target.tokenizer_fingerprint != beside.tokenizer_fingerprint:
        are_others = "other tokens" if ours == theirs else f"{theirs:,} ids"
        raise IncompatibleError(
            "a mixture needs two models of the same tokens",
            where="--mix",
            found=f"{are_others} of {beside.name}",
            expected=f"the {ours:,} ids of {target.name}, with the same tokenizer",
            do="name a smaller model of the same family",
        )


def apart(target: Target) -> tuple[Target, tuple[Target, ...]]:
    """The target's own model under the fingerprint of its weights, and the models beside it, which
    end a text where it does."""
    assert target.mixture is not None, f"{target.name} stands alone"
    own = replace(
        target,
        fingerprint=str(target.base_fingerprint),
        base_fingerprint=None,
        mixture=None,
        beside=(),
    )
    others = (replace(one, eos_ids=target.eos_ids, ends=target.ends) for one in target.beside)
    return own, tuple(others)


def _marked(target: Target, beside: Sequence[Target], mixture: Mixture) -> Target:
    """The target under the identity of the mixture."""
    prints = " ".join(one.fingerprint for one in (target, *beside))
    about = f"{prints} {mixture.law} {mixture.numbers}"
    return replace(
        target,
        fingerprint=hashlib.sha256(about.encode()).hexdigest(),
        base_fingerprint=target.fingerprint,
        mixture=mixture,
    )
