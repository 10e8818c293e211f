"""Read a package: hashes first, then the pair, then the tensors, then the drafter itself.

Letters: K draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specctl.core.drafter import Drafter, Family
from specctl.core.errors import (
    IncompatibleError,
    IntegrityError,
    SpecctlError,
    is_out_of_memory,
    nearest,
    one_of,
)
from specctl.core.messages.installed import way_to_newer
from specctl.core.spec import ModelSpec
from specctl.core.vocab import VocabMap
from specctl.drafters import families
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.drafters.nets.options import read_options
from specctl.export.package.compat import (
    Mismatch,
    check_compatible,
    made_for,
    other_numbers,
    raise_first,
)
from specctl.export.package.files import open_folder
from specctl.export.package.held_file import held_drafter
from specctl.export.package.manifest import (
    CARD,
    MANIFEST,
    MODEL,
    WEIGHTS,
    Manifest,
    check_files,
    is_held_name,
    read_manifest,
    refuse_export,
    written_by,
)
from specctl.export.package.padding import DrafterParts, padded_parts, padded_small_lm
from specctl.export.package.target_rows import check_target_rows, with_target_rows
from specctl.export.package.tensors import MAP_NAMES, read_tensors, widest_float
from specctl.models.hf.from_config import config_of
from specctl.models.hf.without_fills import without_fills
from specctl.runtime.target.folders.checkpoint_folder import check_counts, check_size, refuse_code
from specctl.runtime.target.target import Target

# Options that count modules, and how many may share a tensor.
_STACKED = ("layers", "lstm_layers", "mlp_heads", "num_blocks", "num_heads", "prefix")
_MODULES = 64
# Options that packages may still name, with the value that is fixed now.
REMOVED: Mapping[str, Mapping[str, object]] = {
    "hierarchy": {"built_mib": 512},
    "superposed": {"penalty": 200.0},
    "swift": {"patience": 300},
}


def load_package(path: Path, target: Target, allow: Sequence[str] = ()) -> Drafter:
    """The drafter of a package folder, after every check; on the target's device and dtype (a GGUF
    file that a package holds is read as any)."""
    drafter = read_package(path, target, allow)
    if drafter.file is None:
        drafter = drafter.to(target.device, target.dtype)
    if note := other_numbers(read_manifest(path), target):
        drafter.note = f"{drafter.note}; {note}" if drafter.note else note
    return drafter


def read_package(
    path: Path, target: Target | None, allow: Sequence[str] = (), widened: bool = False
) -> Drafter:
    """The drafter of a package folder, after every check; on the CPU, in the dtype it is stored, or
    in that of the target's rows where these are wider and left out of the package; that of a GGUF
    file as files are read, or `widened`: as float32, to be trained or written in another form.
    Without a target the package is read as it is, fitting or not."""
    folder = open_folder(path)
    manifest = check_files(folder)
    refuse_export(manifest, path, ("specctl",))
    if target is not None:
        check_compatible(manifest, target, allow)
    family = _family(manifest)
    tensors = _tensors(manifest, folder)
    vocab = _vocab(manifest, tensors)
    if target is not None:
        _check_eos(manifest, vocab, target, allow)
    held = manifest.held_file
    if held is None:
        _check_modest(manifest, len(tensors))
    options = parse_options(family, manifest.options)
    if held is not None:
        parts = DrafterParts(family, options, manifest.model_spec, vocab, {})
        with _building():
            return held_drafter(manifest, folder / held, parts, target, widened)
    _check_architecture(manifest, tensors)
    own = {name: t for name, t in tensors.items() if name not in MAP_NAMES}
    own = with_target_rows(manifest, own, vocab, target)
    size = manifest.vocabulary.target_size if target is None else target.spec.vocab_size
    with _building():
        if size == manifest.vocabulary.target_size:
            return _built(manifest, family, options, vocab, own)
        return _padded(
            manifest, DrafterParts(family, options, manifest.model_spec, vocab, own), size
        )


def _padded(manifest: Manifest, parts: DrafterParts, size: int) -> Drafter:
    """The drafter for a target of as many ids, padded otherwise than the one it was made for."""
    if issubclass(parts.family.options, SmallLmOptions):
        made = _built(manifest, parts.family, parts.options, parts.vocab, parts.tensors)
        assert isinstance(made, SmallLm)
        return padded_small_lm(made, parts, size)
    fit = padded_parts(parts, size)
    try:
        return _built(manifest, fit.family, fit.options, fit.vocab, fit.tensors, fit.spec)
    except SpecctlError as error:
        raise IncompatibleError(
            f"vocab_size: a drafter of family {parts.family.name} cannot be padded otherwise",
            found=f"{size:,} ids; {error.what}",
            expected=f"{parts.spec.vocab_size:,} ids, as in {made_for(manifest)}",
            do="load the target it was made for, or train a drafter for this one with `specctl "
            "train-draft`",
            where="vocab_size",
        ) from error


def _built(
    manifest: Manifest,
    family: Family,
    options: Any,
    vocab: VocabMap | None,
    own: Mapping[str, Tensor],
    padded: ModelSpec | None = None,
) -> Drafter:
    spec = manifest.model_spec if padded is None else padded
    with without_fills():  # shapes first, so that no option can take memory
        shell = family.build(options, spec, vocab)
        if padded is None:
            _check_needs(manifest, shell)
        else:  # what it was trained on has the sizes of before
            whole = VocabMap(vocab.ids_K, manifest.model_spec.vocab_size) if vocab else None
            _check_needs(manifest, family.build(options, manifest.model_spec, whole))
    check_target_rows(manifest, shell)
    own = shell.completed(own)
    _check_layout(shell, own)
    drafter = family.build(options, spec, vocab)
    dtype = widest_float(own) if manifest.target_rows else manifest.dtype
    drafter.to(torch.device("cpu"), getattr(torch, dtype))
    drafter.load_tensors(own)
    if drafter.module is not None:
        drafter.module.eval()
    return drafter


@contextmanager
def _building() -> Iterator[None]:
    """Options and shape that are each possible may not go together; a package of ours never raises
    anything else there."""
    try:
        yield
    except SpecctlError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise IntegrityError(
            "no drafter can be built from the manifest and the weights",
            found=f"{type(error).__name__}: {ascii(str(error))[1:-1][:200]}",
            expected="options, shape and weights of one drafter",
            do="get the package again, or export it again from its run",
            where=MANIFEST,
        ) from error


def _family(manifest: Manifest) -> Family:
    known = families()
    if manifest.family in known:
        return known[manifest.family]
    raise IncompatibleError(
        "family: this specctl does not know the drafter's family",
        found=ascii(manifest.family)[1:-1][:80],
        expected=one_of(known, "specctl recipes ls --all"),
        do=f"{way_to_newer(written_by(manifest.versions))}; or train one of "
        + nearest(manifest.family, known)
        + f" for {made_for(manifest)}",
        where=f"{MANIFEST}:family",
    )


def parse_options(family: Family, options: Mapping[str, Any]) -> Any:
    """The family's options from JSON: every field present, no other, of the right type. One that
    packages once had not (ADDED) is as it was then, and one that they had (REMOVED) is passed over
    if it has the value that is fixed now."""
    fixed = REMOVED.get(family.name, {})
    options = {n: v for n, v in options.items() if n not in fixed or v != fixed[n]}
    wanted = {field.name: field for field in fields(family.options)}
    added = {
        name: f.metadata.get("before", f.default)
        for name, f in wanted.items()
        if f.metadata.get("added")
    }
    try:
        if set(options) | set(added) != set(wanted):
            odd = set(wanted) ^ (set(options) | set(added))
            raise ValueError(f"missing or unknown: {', '.join(sorted(odd))}")
        return read_options(family.options, {**added, **options})
    except (ValueError, TypeError, ArithmeticError, SpecctlError) as error:
        raise IncompatibleError(
            f"options: not the options of family {family.name} in this specctl",
            found=str(error).replace("\n", " ")[:300],
            expected="exactly " + (", ".join(sorted(wanted)) or "none"),
            do="install the specctl version named in the manifest, or train again",
            where=f"{MANIFEST}:options",
        ) from error


def _check_modest(manifest: Manifest, num_tensors: int) -> None:
    """No size among the options may exceed what the weights could fill, and no stack of modules the
    tensors that are stored: even without storage each module takes its time to make."""
    counts = [manifest.options.get(name) for name in _STACKED]
    modules = math.prod(count for count in counts if isinstance(count, int) and count > 1)
    if modules > _MODULES * max(1, num_tensors):
        raise IntegrityError(
            "options: more modules than the package has tensors for",
            found=f"{modules:,} modules",
            expected=f"the modules of {num_tensors:,} tensors",
            do="get the package again",
            where=f"{MANIFEST}:options",
        )
    stored = manifest.files.get(WEIGHTS)
    limit = max(1 << 20, 0 if stored is None else stored.bytes)
    for name, value in manifest.options.items():
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > limit:
                raise IntegrityError(
                    f"options: {ascii(name)[1:-1][:60]} is larger than the package could fill",
                    found=f"{number:,}"[:60],
                    expected=f"at most {limit:,}",
                    do="get the package again",
                    where=f"{MANIFEST}:options",
                )


def _check_architecture(manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
    """A configuration in a package is looked at like the config.json of a folder."""
    architecture = manifest.options.get("architecture")
    if not isinstance(architecture, dict):
        return
    where = f"{MANIFEST}:options.architecture"
    refuse_code(architecture, where)
    check_counts(architecture, where)
    with _building():
        config = config_of(architecture, manifest.vocabulary.target_size)
        check_size(config, [tuple(t.shape) for t in tensors.values()], where)


def _tensors(manifest: Manifest, folder: Path) -> dict[str, Tensor]:
    unknown = sorted(n for n in manifest.files if n not in (WEIGHTS, CARD) and not is_held_name(n))
    if unknown:
        raise IntegrityError(
            "the package lists files that this format does not have",
            found=unknown[0],
            expected=f"{WEIGHTS}, {CARD}, {MODEL}.gguf",
            do="get the package again",
        )
    if WEIGHTS not in manifest.files:
        return {}
    return read_tensors(folder / WEIGHTS)


def _vocab(manifest: Manifest, tensors: Mapping[str, Tensor]) -> VocabMap | None:
    """The vocabulary map, its two tables and the manifest agreeing with each other."""
    record = manifest.vocabulary
    present = [name for name in MAP_NAMES if name in tensors]
    if record.digest is None and not present:
        return None
    if record.digest is None or len(present) != 2:
        raise _bad_map("d2t", f"tables {present}", f"draft size {record.draft_size:,}")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if d2t.dtype != torch.long or tuple(d2t.shape) != (record.draft_size,):
        raise _bad_map("d2t", f"{d2t.dtype} {tuple(d2t.shape)}", f"int64 ({record.draft_size},)")
    if t2d.dtype != torch.bool or tuple(t2d.shape) != (record.target_size,):
        raise _bad_map("t2d", f"{t2d.dtype} {tuple(t2d.shape)}", f"bool ({record.target_size},)")
    try:
        vocab = VocabMap.from_d2t(d2t, record.target_size)
    except SpecctlError as error:
        raise _bad_map("d2t", error.found, error.expected) from error
    if not torch.equal(vocab.t2d(), t2d):
        raise _bad_map("t2d", f"{int(t2d.sum()):,} marked ids", f"the {vocab.size:,} ids of d2t")
    if vocab.digest() != record.digest:
        raise _bad_map("d2t", vocab.digest()[:12], f"vocabulary digest {record.digest[:12]}")
    return vocab


def _bad_map(field: str, found: str, expected: str) -> IncompatibleError:
    return IncompatibleError(
        f"{field}: the vocabulary map of the package contradicts itself",
        found=found,
        expected=expected,
        do="rebuild it with `specctl vocab-trim`",
        where=field,
    )


def _check_eos(
    manifest: Manifest, vocab: VocabMap | None, target: Target, allow: Sequence[str]
) -> None:
    if vocab is None:
        return
    kept = set(vocab.ids_K.tolist())
    cut = [i for i in target.usual_ends if i not in kept]
    if cut:
        miss = Mismatch(
            "eos",
            f"end-of-text id {cut[0]} was cut from the drafter's vocabulary",
            f"all of {list(target.usual_ends)} kept",
            "trim again with `specctl vocab-trim`, which always keeps special tokens",
            "eos",
        )
        raise_first([miss], allow, made_for(manifest))


def _check_needs(manifest: Manifest, drafter: Drafter) -> None:
    needs, taps = drafter.needs(), manifest.taps
    found = (list(needs.taps), needs.topk, needs.borrow)
    expected = (list(taps.indices), taps.topk, taps.borrow)
    if found != expected:
        raise IncompatibleError(
            "taps: the drafter built from the manifest wants other inputs than it was trained on",
            found=f"taps {found[0]}, top-k {found[1]}, borrow {found[2]}",
            expected=f"taps {expected[0]}, top-k {expected[1]}, borrow {expected[2]}",
            do="install the specctl version named in the manifest, or train again",
            where=f"{MANIFEST}:taps",
        )


def _check_layout(drafter: Drafter, tensors: Mapping[str, Tensor]) -> None:
    """Exactly the tensors that the family stores, in their shapes (a memory checks itself)."""
    if drafter.holds_data:
        return
    wanted = {name: tuple(t.shape) for name, t in drafter.tensors().items()}
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise IntegrityError(
                "the weights do not fit the manifest",
                found=f"{ascii(name)[1:-1][:100]} {found.get(name, 'missing')}",
                expected=str(wanted.get(name, "no such tensor")),
                do="get the package again, or export it again from its run",
                where=WEIGHTS,
            )
