"""Does a package belong to this target? Every difference is named, with what would cure it.

Verification keeps the output distribution whatever the drafter proposes, so a wrong pair is not
dangerous but slow, and silently so. That is why the default is to refuse: what would only lower
acceptance may be let through by name, what cannot work at all may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specctl.core.errors import IncompatibleError, SpecctlError, nearest
from specctl.export.package.manifest import Manifest
from specctl.runtime.target.variants.adapter import combined_fingerprint

if TYPE_CHECKING:
    from specctl.runtime.target.target import Target

# Fields of ModelSpec that say how the target computes; a drafter copies some of them.
_SOFT_SPEC = (
    "model_type",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_positions",
    "bos_id",
    "eos_ids",
    "pad_id",
    "embed_scale",
)
_SHAPE = ("num_layers", "hidden_size")
# What may differ where a model is the same in other numbers: its files say it in other ways.
_OF_FILES = ("target", "tokenizer", "template", "max-positions", "bos-id", "eos-ids", "pad-id")

ALLOWABLE = (
    "target",
    "adapter",
    "tokenizer",
    "template",
    "eos",
    "padding",
    *(name.replace("_", "-") for name in (*_SHAPE, *_SOFT_SPEC)),
)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One difference: `allow` is the name that lets it pass, None if nothing may."""

    field: str
    found: str
    expected: str
    do: str
    allow: str | None


def check_allow(allow: Sequence[str]) -> frozenset[str]:
    """The names in `allow`, dashes for underscores; an unknown one is refused."""
    names = frozenset(name.removeprefix("--allow").strip(" -=").replace("_", "-") for name in allow)
    for name in sorted(names - set(ALLOWABLE)):
        raise SpecctlError(
            f"there is no --allow {name}",
            found=name,
            expected="one of " + ", ".join(sorted(ALLOWABLE)),
            do=f"--allow {nearest(name, ALLOWABLE, 1)}",
        )
    return names


def check_compatible(manifest: Manifest, target: Target, allow: Sequence[str] = ()) -> None:
    """Refuse a target that the package was not made for."""
    raise_first(mismatches(manifest, target), allow, made_for(manifest))


def raise_first(found: Sequence[Mismatch], allow: Sequence[str], origin: str) -> None:
    """Raise for the gravest difference that is not allowed, naming the others too."""
    allowed = check_allow(allow)
    left = [m for m in found if m.allow not in allowed]
    if not left:
        return
    first, others = left[0], ", ".join(m.field for m in left[1:])
    cure = first.do
    if all(m.allow for m in left):
        flags = " ".join(f"--allow {m.allow}" for m in left)
        cure += f"; or accept slower drafting (the output distribution stays exact) with {flags}"
    raise IncompatibleError(
        f"{first.field} of target and drafter differ" + (f" (and {others})" if others else ""),
        found=first.found,
        expected=f"{first.expected}, as in {origin}",
        do=cure,
        where=first.field,
    )


def made_for(manifest: Manifest) -> str:
    """The target of a package in words: name, revision, inflation."""
    target = manifest.target
    text = target.name + (f"@{target.revision[:12]}" if target.revision else "")
    text += f" inflated to {target.inflated}" if target.inflated else ""
    return text + (f" with {', '.join(target.adapter_words())}" if target.adapters else "")


def mismatches(manifest: Manifest, target: Target) -> list[Mismatch]:
    """Every difference between a package's manifest and a target, the gravest first; those between
    the files of one model in two precisions are none (`other_numbers`)."""
    found = _differences(manifest, target)
    if not _is_same_model(manifest, target):
        return found
    return [one for one in found if one.allow not in _OF_FILES]


def other_numbers(manifest: Manifest, target: Target) -> str:
    """What a user should know of a target that is the package's in other numbers; empty for the
    very same, and for another model."""
    if not _is_same_model(manifest, target):
        return ""
    others = [one.field for one in _differences(manifest, target) if one.field != "target"]
    if manifest.target.fingerprint == target.fingerprint:
        of = f"{target.name} has the weights that the drafter was made for, and other files"
        return f"{of}: they differ in {', '.join(others)}" if others else ""
    text = (
        f"the drafter was made for {made_for(manifest)} in other numbers (weights "
        f"{_short(manifest.target.fingerprint)}) than those of {target.name} (weights "
        f"{_short(target.fingerprint)}): the same model, judged by its norms and its embedding. "
        "Its card was measured with those; acceptance may be lower here, answers are the target's "
        "in any case"
    )
    return text + (f". Their files differ in {', '.join(others)}, too" if others else "")


def _is_same_model(manifest: Manifest, target: Target) -> bool:
    """Whether a target is the model that a published drafter was made for: with the same weights
    (a GGUF file of them, too), quantised, or as it was before."""
    from specctl.runtime.target.likeness import Sketch, are_alike, sketch_of

    record = manifest.target
    if record.sketch is None or target.adapters:
        return False
    if record.fingerprint == target.fingerprint:
        return True
    here = sketch_of(target)
    there = Sketch(record.sketch.vectors, record.sketch.signs)
    return here is not None and are_alike(here, there)


def _differences(manifest: Manifest, target: Target) -> list[Mismatch]:
    return [
        *_taps(manifest, target),
        *_shape(manifest, target),
        *_texts(manifest, target),
        *_spec(manifest, target),
        *_weights(manifest, target),
    ]


def _load_it(manifest: Manifest) -> str:
    return f"load the target the drafter was made for: --target {made_for(manifest)}"


def _taps(manifest: Manifest, target: Target) -> list[Mismatch]:
    layers = target.spec.num_layers
    outside = [tap for tap in manifest.taps.indices if tap > layers]
    if not outside:
        return []
    return [
        Mismatch(
            "taps",
            f"tap {outside[0]} of a target with {layers} layers",
            f"taps {list(manifest.taps.indices)} of {manifest.model_spec.num_layers} layers",
            _load_it(manifest),
            None,
        )
    ]


def _shape(manifest: Manifest, target: Target) -> list[Mismatch]:
    """Sizes that a drafter reading taps or borrowing weights is built around."""
    spec, found = manifest.model_spec, []
    tied = bool(manifest.taps.indices) or manifest.taps.borrow
    for name in _SHAPE:
        here, there = getattr(target.spec, name), getattr(spec, name)
        if here != there:
            allow = None if tied else name.replace("_", "-")
            found.append(Mismatch(name, f"{here:,}", f"{there:,}", _load_it(manifest), allow))
    here, there = target.spec.vocab_size, manifest.vocabulary.target_size
    if here != there and not _is_padding(manifest, target):
        cure = f"{_load_it(manifest)}, or train a drafter for this one with `specctl train-draft`"
        allow = None if target.tokenizer is None else "padding"
        found.append(Mismatch("vocab_size", f"{here:,} ids", f"{there:,} ids", cure, allow))
    return found


def _is_padding(manifest: Manifest, target: Target) -> bool:
    """Whether the sizes of the vocabularies differ by rows that no text has ids for."""
    from specctl.runtime.target.unpadded import fits_both

    return fits_both(target, manifest.tokenizer, manifest.vocabulary.target_size)


def _texts(manifest: Manifest, target: Target) -> list[Mismatch]:
    whose = made_for(manifest)
    tokenizer = f"use the tokenizer of {whose}, or train a drafter for this one"
    template = f"use the chat template of {whose}, or distill on this one"
    read = (
        ("tokenizer", target.tokenizer_fingerprint, manifest.tokenizer, tokenizer),
        ("template", target.template_digest, manifest.chat_template, template),
    )
    return [
        Mismatch(name, _short(here), _short(there), do, name)
        for name, here, there, do in read
        if here != there
    ]


def _spec(manifest: Manifest, target: Target) -> list[Mismatch]:
    spec = manifest.model_spec
    return [
        Mismatch(
            name,
            str(getattr(target.spec, name)),
            str(getattr(spec, name)),
            _load_it(manifest),
            name.replace("_", "-"),
        )
        for name in _SOFT_SPEC
        if getattr(target.spec, name) != getattr(spec, name)
        and not (name == "eos_ids" and _are_among(spec.eos_ids, target))
    ]


def _are_among(eos_ids: Sequence[int], target: Target) -> bool:
    """The package's ends of text end the target's texts, beside others that a drafter need not
    know; ids that only a configuration class brought along ended nothing."""
    defaults = {one.token_id for one in target.ends.left_out}
    return set(eos_ids) - defaults <= set(target.spec.eos_ids)


def _weights(manifest: Manifest, target: Target) -> list[Mismatch]:
    record = manifest.target
    if target.mixture is not None:  # the target's own layers are in it
        target = replace(target, fingerprint=str(target.base_fingerprint), mixture=None)
    if record.fingerprint == target.fingerprint:
        return []
    if _is_padded_only(manifest, target):
        return []
    base = target.base_fingerprint or target.fingerprint
    if record.fingerprint == combined_fingerprint(base, record.adapters):
        theirs = ", ".join(record.adapter_words()) or "none"
        ours = ", ".join(one.text() for one in target.adapters) or "none"
        return [
            Mismatch(
                "adapter",
                _with_digests(ours, target.adapters),
                _with_digests(theirs, record.adapters),
                _load_it(manifest),
                "adapter",
            )
        ]
    here = target.name + (f"@{target.revision[:12]}" if target.revision else "")
    here += f" inflated to {target.inflated}" if target.inflated else ""
    return [
        Mismatch(
            "target",
            f"{here}, weights {_short(target.fingerprint)}",
            f"weights {_short(record.fingerprint)}",
            _load_it(manifest),
            "target",
        )
    ]


def _is_padded_only(manifest: Manifest, target: Target) -> bool:
    """Whether the target has the very weights, and more rows behind the tokenizer's ids."""
    from specctl.runtime.target.unpadded import fingerprint_without

    size = manifest.vocabulary.target_size
    if size >= target.spec.vocab_size or not _is_padding(manifest, target):
        return False
    return fingerprint_without(target, size) == manifest.target.fingerprint


def _with_digests(text: str, adapters: Sequence[Any]) -> str:
    """Names of adapters and what tells them apart."""
    return text if not adapters else f"{text} ({', '.join(_short(a.digest) for a in adapters)})"


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]
