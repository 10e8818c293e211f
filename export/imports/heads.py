"""What importers check of any head: its configuration against what we compute, its vocabulary, its
embedding, and its tensors against those that the family stores.
Letters: D hidden width, K draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from specctl.core.drafter import Drafter
from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.vocab import VocabMap
from specctl.drafters.nets.heads import head_rows
from specctl.runtime.target.target import Target

AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)
JUMP = "economize_jump"  # of config.json: a folder that is no EAGLE-3 head, whatever it is called
STORED = {torch.float32, torch.float16, torch.bfloat16}


def refused(what: str, found: object, expected: object, do: str, where: str = "") -> Exception:
    shown = ascii(found)[1:-1] if isinstance(found, str) else ascii(found)
    return IncompatibleError(what, found=shown[:200], expected=str(expected), do=do, where=where)


def check_value(config: Any, key: str, expected: object, why: str, do: str) -> None:
    """A value that must be this one; `why` says what another would mean."""
    found = getattr(config, key, None)
    if found != expected or isinstance(found, bool) != isinstance(expected, bool):
        raise refused(why, f"{key}: {found}", f"{key}: {expected}", do, f"config.json:{key}")


def count_of(config: Any, key: str) -> int:
    """A size that must be there: an engine has no default for it that fits a head by chance."""
    found = getattr(config, key, None)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found < 1 << 31:
        what = "config.json does not say a size of the head"
        raise refused(what, f"{key}: {found}", "a whole number", REPAIR, f"config.json:{key}")
    return found


REPAIR = "get config.json and the weights again, from one version of the repository"
ELSEWHERE = "serve it with its own engine, or train a drafter with specctl"
OTHER_TARGET = "give the target that it was trained for: --target OWNER/NAME"


# -- vocabulary --------------------------------------------------------------------------------


def vocabulary(tensors: Mapping[str, Tensor], rows: int, target_size: int) -> VocabMap | None:
    """Which target ids the head's rows speak of, by `d2t` as offsets and the mask `t2d`; None for
    the whole vocabulary. A table of absolute ids is refused, and one that could be either."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None:
        if rows != target_size or t2d is not None:
            found = f"{rows:,} head rows without d2t"
            raise refused(VOCABULARY, found, f"d2t, or {target_size:,} rows", REPAIR, "d2t")
        return None
    if d2t.dtype != torch.long or tuple(d2t.shape) != (rows,):
        found = f"{d2t.dtype} {tuple(d2t.shape)}"
        raise refused(VOCABULARY, found, f"torch.int64 ({rows},)", REPAIR, "d2t")
    if t2d is not None and (t2d.dtype != torch.bool or tuple(t2d.shape) != (target_size,)):
        found = f"{t2d.dtype} {tuple(t2d.shape)}"
        raise refused(VOCABULARY, found, f"torch.bool ({target_size},)", REPAIR, "t2d")
    ids_K = d2t + torch.arange(rows)
    as_offsets, as_ids = (_ascends(table_K, target_size) for table_K in (ids_K, d2t))
    if t2d is not None:
        marked = t2d.nonzero()[:, 0]
        as_offsets = as_offsets and torch.equal(marked, ids_K)
        as_ids = as_ids and torch.equal(marked, d2t) and not as_offsets
    if as_ids:
        kind = "could be absolute ids as well (no t2d tells)" if as_offsets else "absolute ids"
        raise refused(
            "d2t is not told to be a table of offsets",
            f"{kind}: {d2t[:4].tolist()} ...",
            "offsets, target id = row + d2t[row]",
            "ask its author; for absolute ids store d2t - torch.arange(len(d2t)), and the mask t2d",
            "d2t",
        )
    if not as_offsets:
        expected = "row + d2t[row] ascends inside the target's ids, which t2d marks"
        raise refused(VOCABULARY, f"d2t begins {d2t[:4].tolist()}", expected, REPAIR, "d2t")
    return None if rows == target_size else VocabMap(ids_K, target_size)


VOCABULARY = "the vocabulary tables contradict each other, the head or the target"


def _ascends(ids_K: Tensor, size: int) -> bool:
    inside = int(ids_K[0]) >= 0 and int(ids_K[-1]) < size
    return inside and bool((ids_K[1:] > ids_K[:-1]).all())


# -- tensors -----------------------------------------------------------------------------------


def check_embedding(rows_VD: Tensor | None, target: Target) -> None:
    """The head reads the target's own embedding: it is borrowed, never stored."""
    borrowed = target.borrowed()
    if rows_VD is None:
        if borrowed.embed_scale != 1.0:
            found = f"a target that scales its embeddings by {borrowed.embed_scale:g}"
            what = "an engine hands this head the target's bare embeddings"
            raise refused(what, found, "a target that reads them as they are", ELSEWHERE)
        return
    theirs_VD = (borrowed.embedding_VD * borrowed.embed_scale).detach().cpu().to(rows_VD.dtype)
    name = "embed_tokens.weight"
    if rows_VD.shape != theirs_VD.shape:
        expected = f"{tuple(theirs_VD.shape)}, as of {target.name}"
        raise refused(EMBEDDING, f"{tuple(rows_VD.shape)}", expected, OTHER_TARGET, name)
    others = int((rows_VD != theirs_VD).any(-1).sum())
    if others:
        do = "give the target (and the revision) that it was trained for; " + ELSEWHERE
        found = f"{others:,} rows that differ"
        raise refused(EMBEDDING, found, f"the rows of {target.name}", do, name)


EMBEDDING = "the head has an embedding of its own, not the target's"


@dataclass(frozen=True, slots=True)
class HeadTensors:
    """Tensors of which `lm_head.weight` is one, and what is to be said of where it came from."""

    tensors: Mapping[str, Tensor]
    notes: tuple[str, ...] = ()


def with_head(
    tensors: Mapping[str, Tensor], rows: int, target: Target, is_tied: bool = False
) -> HeadTensors:
    """The head's tensors; where none is an LM head, with the target's rows for the ids that it
    speaks of: those of its embedding where config.json ties them."""
    if HEAD in tensors:
        return HeadTensors(tensors, (STORED_HEAD,) if is_tied else ())
    vocab, borrowed = vocabulary(tensors, rows, target.spec.vocab_size), target.borrowed()
    if is_tied:
        borrowed = replace(borrowed, head=borrowed.embedding_VD * borrowed.embed_scale)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    rows_KD = head_rows(borrowed, vocab).detach().to("cpu", dtype).clone()
    whose = "embedding" if is_tied else "LM head"
    note = f"the folder has no LM head: it drafts with the rows of the {whose} of {target.name}"
    return HeadTensors({**tensors, HEAD: rows_KD}, (note,))


HEAD = "lm_head.weight"
STORED_HEAD = (
    "config.json says tie_word_embeddings: true beside an LM head: the head is read, as it was "
    "trained. SGLang reads the embedding in its place; set the key to false for it"
)


def check_head(rows_KD: Tensor | None, vocab: VocabMap | None, target: Target) -> None:
    """The head reads the target's own LM head, of all ids or of its vocabulary's."""
    if rows_KD is None:
        return
    theirs_KD = head_rows(target.borrowed(), vocab).detach().cpu().to(rows_KD.dtype)
    name = "lm_head.weight"
    if rows_KD.shape != theirs_KD.shape:
        expected = f"{tuple(theirs_KD.shape)}, as of {target.name}"
        raise refused(LM_HEAD, f"{tuple(rows_KD.shape)}", expected, OTHER_TARGET, name)
    others = int((rows_KD != theirs_KD).any(-1).sum())
    if others:
        found = f"{others:,} rows that differ"
        do = "give the target (and the revision) that it was trained for; " + ELSEWHERE
        raise refused(LM_HEAD, found, f"the rows of {target.name}", do, name)


LM_HEAD = "the folder has an LM head of its own, not the target's"


def filled(make: Callable[[], AnyDrafter], weights: Mapping[str, Tensor]) -> AnyDrafter:
    """The drafter that `make` makes, with these weights as they are stored: exactly its own."""
    with torch.device("meta"):  # shapes first, so that no size can take memory
        shell = make()
    check_names(weights, shell.tensors())
    drafter = make()
    drafter.to(torch.device("cpu"), dtype_of(weights))
    drafter.load_tensors(weights)
    assert drafter.module is not None
    drafter.module.eval()
    return drafter


def check_names(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Exactly the tensors that the family stores, in their shapes."""
    for name in sorted(tensors.keys() | wanted.keys()):
        shown = ascii(name)[1:-1][:100]
        if name not in wanted:
            what, found = "a tensor that the drafter does not have", f"{shown} "
            raise refused(what, found + str(tuple(tensors[name].shape)), "none such", ELSEWHERE)
        expected = f"{shown} {tuple(wanted[name].shape)}"
        if name not in tensors:
            raise refused("a tensor of the head is missing", f"no {shown}", expected, REPAIR)
        if tensors[name].shape != wanted[name].shape:
            found = f"{shown} {tuple(tensors[name].shape)}"
            what = "a tensor has another shape than config.json gives it"
            raise refused(what, found, expected, REPAIR)


def dtype_of(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype that holds every weight as it is stored."""
    kinds = {tensor.dtype for tensor in tensors.values()}
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in STORED]
    if odd:
        raise IntegrityError(
            "the head's weights are quantised, or no weights",
            found=f"{ascii(odd[0])[1:-1][:100]} of {tensors[odd[0]].dtype}",
            expected="float32, float16 or bfloat16",
            do="get the version of the head that is not quantised",
        )
    return kinds.pop() if len(kinds) == 1 else torch.float32
