"""shared-kv: whose keys its queries may look at, and what the log says of its head."""

from __future__ import annotations

from typing import Any

import pytest

from specctl.core.errors import IncompatibleError
from specctl.drafters import family
from specctl.drafters.features.shared_kv import SharedKv, SharedKvOptions
from specctl.runtime.target.target import Target
from specctl.train.assemble import what_trains
from specctl_testing.export.gemma4 import gemma4_target

SCALED = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip


def bound(target: Target, **options: Any) -> SharedKv:
    drafter = SharedKv(SharedKvOptions(layers=1, **options), target.spec)
    drafter.bind(target.borrowed())
    return drafter


def test_keys_that_are_rotated_otherwise_are_not_looked_at(make_target: Any) -> None:
    """A part of a head, pairs side by side, no rotation in some layers, another base in some."""
    for kind in ("gpt_neox", "cohere", "smollm3", "gemma3_text"):
        with pytest.raises(IncompatibleError, match=r"rotated otherwise.*layer 3"):
            bound(make_target(kind))
    with pytest.raises(IncompatibleError, match=r"rotated otherwise.*layer 3"):
        bound(gemma4_target(0), reads=(3,), head_dims=(16,))  # wider than those of its other layers
    bound(make_target("smollm3"), reads=(2,))
    local = {"rope_thetas": (10_000.0,), "rotated": (0,)}
    bound(make_target("gemma3_text"), **local)  # said by hand
    for kind, fields in (("qwen3", {}), ("gemma2", {}), ("llama", {"rope_parameters": SCALED})):
        bound(make_target(kind, **fields))


def test_layers_that_cannot_be_left_out_are_refused_in_words(make_target: Any) -> None:
    """Where a layer unpacks what its experts return."""
    with pytest.raises(IncompatibleError, match="does not lend its layers"):
        bound(make_target("gpt_oss"))


def test_the_log_names_what_is_the_targets(make_target: Any) -> None:
    said = what_trains(bound(make_target()))
    assert said[-1] == "frozen, shared with the target: embedding", "its LM head is its own"


def test_others_that_look_at_the_targets_keys_are_refused_there_too(make_target: Any) -> None:
    """glide reads the last layer's, m2r2 all those below its exit; both have a way without."""
    for kind in ("gpt_neox", "cohere", "glm", "gemma3_text"):
        target = make_target(kind)
        for name, without, do in (
            ("glide", {"own_keys": True}, "own_keys to true"),
            ("m2r2", {"attends": False}, "attends to false"),
        ):
            drafter, other = (
                family(name).build(family(name).options(**options), target.spec, None)
                for options in ({}, without)
            )
            with pytest.raises(IncompatibleError, match=f"rotated otherwise.*{do}"):
                drafter.bind(target.borrowed())
            other.bind(target.borrowed())
    scaled = make_target("llama", rope_parameters=SCALED)
    for name in ("glide", "m2r2"):
        family(name).build(family(name).options(), scaled.spec, None).bind(scaled.borrowed())
