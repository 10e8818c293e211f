"""A draft vocabulary made before training, when there is no drafter whose speed could be measured.

Ids are ranked by the recipe's selector over the run's own data (or its raw text); with size "auto"
as few are kept as cover `min_coverage`, or all that were seen where these cover less. The map is
kept beside the rows: its ids are rows of the drafter's head, so it stays when the run gets more
data.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specctl.core.errors import RecipeError
from specctl.core.storage.files import digest_of, write_bytes
from specctl.core.vocab import VocabMap
from specctl.recipes.schema import DataPart, VocabPart
from specctl.runtime.target.target import Target
from specctl.train.data.records.layouts import field_choices
from specctl.train.data.records.records import Sample, without_images
from specctl.train.data.rows.rows import TokenData
from specctl.train.data.sources.defects import Defects
from specctl.train.data.sources.self_source import with_file
from specctl.train.data.sources.sources import read_samples
from specctl.train.vocab.coverage import (
    always_kept,
    count_tokens,
    fewest,
    ranking,
    seen_ranking,
    vocab_map,
)
from specctl.train.vocab.selectors import Evidence, selector

KEPT = "draft-vocab.json"  # in OUT/data


def draft_vocab(how: VocabPart, part: DataPart, target: Target, data: TokenData) -> VocabMap | None:
    """The map of that size, coverage and selector: the one that is kept with the first part of the
    rows, else counted in them or in the text of `part`; None keeps every id."""
    if how.size is None:
        return None
    kept = _kept(data.folder / KEPT)
    if kept.get("key") == _key(how, target, data):
        return VocabMap(torch.tensor(kept["kept"], dtype=torch.long), target.spec.vocab_size)
    return _counted(how, part, target, data)


def keep_vocab(vocab: VocabMap, how: VocabPart, target: Target, data: TokenData) -> None:
    """Write the map down beside the rows, for when they become more."""
    body = {"key": _key(how, target, data), "kept": vocab.ids_K.tolist()}
    if _kept(data.folder / KEPT) != body:
        write_bytes(data.folder / KEPT, json.dumps(body).encode())


def _key(how: VocabPart, target: Target, data: TokenData) -> str:
    """What a map follows from."""
    fields, (first, _) = how.model_dump(mode="json"), data.parts()[0]
    return digest_of({"rows": first, "vocab": fields, "ids": target.spec.vocab_size})


def _kept(path: Path) -> dict[str, Any]:
    """What the file of a map says; nothing where there is none, or not a whole one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _counted(how: VocabPart, part: DataPart, target: Target, data: TokenData) -> VocabMap:
    assert how.size is not None, "the caller has looked"
    chosen = selector(how.selector, "vocab.selector")
    if chosen.needs_drafter:
        raise RecipeError(
            "a drafter that is yet to be trained has drafted nothing to count",
            found=chosen.name,
            expected="vocab.selector vocab-trim or fr-spec",
            do="train with vocab.selector=vocab-trim, or trim afterwards: specctl vocab-trim",
            where="vocab.selector",
        )
    if how.search != "exhaustive":
        raise RecipeError(
            "before training there is no drafter whose speed could be searched",
            found=f"vocab.search {how.search}",
            expected="vocab.search exhaustive",
            do="train with vocab.search=exhaustive, then: specctl vocab-trim --search tpe",
            where="vocab.search",
        )
    evidence = Evidence(target, data=data, samples=partial(recipe_samples, part, data.folder))
    counts, heldout = count_tokens(chosen.count(evidence), target.spec.vocab_size)
    always = always_kept(target)
    rank, size = ranking(counts, always), how.size
    if size == "auto":
        size = fewest(seen_ranking(counts, always), heldout, always, how.min_coverage)
    return vocab_map(rank, int(size), always, target.spec.vocab_size)


def recipe_samples(part: DataPart, folder: Path) -> Iterable[Sample]:
    """The text of the recipe's source; `folder` holds what the target wrote of it."""
    part = with_file(part, folder)
    choices = field_choices(part)
    found = read_samples(part.source, part.format, part.split, part.seed, Defects(), choices)
    return map(without_images, found)
