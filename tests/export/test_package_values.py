"""Values of a sealed manifest that no writer of ours writes: each is a typed refusal in a moment,
before anything of that size is made."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import IntegrityError
from specctl.drafters import families
from specctl.drafters.nets.options import read_options
from specctl.export.package.folder import load_drafter
from specctl.export.package.load import read_package
from specctl.export.package.manifest import MANIFEST, WEIGHTS, read_manifest
from specctl.recipes.serve import ServePart, check_serve
from specctl.runtime.target.target import Target
from specctl_testing.export.mutations import is_refused, mutated

Change = Callable[[dict[str, Any]], None]
SERVE: dict[str, dict[str, Any]] = {
    "a negative length": {"length": -1},
    "a length as a word": {"length": "5"},
    "a length that is true": {"length": True},
    "a length of 1e9": {"length": 1e9},
    "a length of a billion": {"length": 10**9},
    "no length": {"length": None},
    "a tree without end": {"policy": "static-tree", "branch": [64] * 64},
    "a tree of 1,122 nodes": {"policy": "mcsd", "branch": [33, 33]},
    "more levels than are drafted": {"policy": "top-plus-one", "branch": [1] * 65},
    "a branch as a word": {"policy": "static-tree", "branch": "44"},
    "chances without end": {"policy": "sequoia", "acceptance": [0.5] * 65},
    "a chance above one": {"policy": "sequoia", "acceptance": [1.5]},
    "a wide profile": {"policy": "hardware-tree", "profile": [[0.5] * 1025]},
    "a billion best tokens": {"policy": "propd", "early_top": 10**9},
    "an unknown policy": {"policy": "../x"},
    "an unknown rule": {"rule": "nn"},
    "an unknown setting": {"lenght": 5},
    "a setting that is ignored": {"policy": "chain", "nodes": 5},
    "a stop file": {"policy": "chain", "stop": "disco", "stop_file": "/etc/passwd"},
    "a switch that is a number": {"adaptive": 1},
}


def sealed(folder: Path, change: Change) -> None:
    """Write the manifest with that change and a digest that fits it, whatever it says."""
    body = json.loads((folder / MANIFEST).read_text())
    change(body)
    del body["digest"]
    digest = hashlib.sha256(spelled(body)).hexdigest()
    (folder / MANIFEST).write_bytes(spelled({**body, "digest": digest}))


def spelled(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def test_a_seal_of_our_own_making_is_as_good_as_a_writers(
    package: Path, plain_target: Target
) -> None:
    sealed(package, lambda body: body["serve"].update(length=4))
    load_drafter(package, plain_target)
    assert read_manifest(package).serve["length"] == 4


@pytest.mark.parametrize("case", SERVE)
def test_serving_settings_of_a_manifest_are_those_of_a_recipe(case: str, package: Path) -> None:
    sealed(package, lambda body: body.update(serve=SERVE[case]))
    with pytest.raises(IntegrityError, match="serve"):
        read_manifest(package)


def test_settings_as_packages_have_them_are_read() -> None:
    for policy in ("chain", "sequoia"):
        whole = ServePart(policy=policy).model_dump(mode="json")
        check_serve(whole)
        check_serve({name: value for name, value in whole.items() if value is not None})
    check_serve({})
    check_serve({"policy": "static-tree", "branch": [4, 2], "rule": "auto"})
    check_serve({"policy": "hardware-tree", "profile": [[0.5, 1], [0.25]], "nodes": 8})


FIELDS: dict[str, Change] = {
    "a module as dtype": lambda body: body.update(dtype="nn"),
    "a float8 dtype": lambda body: body.update(dtype="float8_e4m3fn"),
    "an integer dtype": lambda body: body.update(dtype="int64"),
    "a billion layers": lambda body: body["spec"].update(num_layers=10**9),
    "no layers": lambda body: body["spec"].update(num_layers=0),
    "a huge width": lambda body: body["spec"].update(hidden_size=10**15),
    "a negative width": lambda body: body["spec"].update(head_dim=-8),
    "heads that are true": lambda body: body["spec"].update(num_heads=True),
    "a huge vocabulary": lambda body: body["spec"].update(vocab_size=10**12),
    "a huge end of text": lambda body: body["spec"].update(eos_ids=[10**30]),
    "an endless rotation": lambda body: body["spec"].update(rope_theta=float("inf")),
    "no number for a norm": lambda body: body["spec"].update(norm_eps=float("nan")),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_shape_that_no_model_has_is_refused(case: str, package: Path) -> None:
    sealed(package, FIELDS[case])
    before = time.process_time()
    with pytest.raises(IntegrityError):
        read_package(package, None)
    assert time.process_time() - before < 0.5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantised_weights_are_refused(dtype: torch.dtype, package: Path, reseal: Any) -> None:
    tensors = load_file(package / WEIGHTS)
    save_file({n: t.to(dtype) for n, t in tensors.items()}, package / WEIGHTS)
    reseal(package)
    with pytest.raises(IntegrityError, match="quantised"):
        read_package(package, None)


SHAPES = [[0, 1 << 47], [0, 1 << 47, 1 << 47], [1] * 7 + [0], [1 << 40, 0, 1 << 40, 1 << 40]]


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_an_absurd_shape_of_nothing_is_refused(
    shape: list[int], package: Path, reseal: Any
) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"table.weight": entry}).encode()
    (package / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    reseal(package)
    with pytest.raises(IntegrityError):
        read_package(package, None)


COUNTS = [True, "1", None, 1.0, [1], {}]


@pytest.mark.parametrize("wrong", COUNTS, ids=str)
def test_what_is_no_count_is_no_option(wrong: Any) -> None:
    options = families()["medusa"].options
    whole = asdict(options())
    read_options(options, {**whole, "num_heads": 3})
    with pytest.raises(ValueError, match="num_heads"):
        read_options(options, {**whole, "num_heads": wrong})


def test_an_option_that_may_be_none_is_read_as_none() -> None:
    options = families()["dflash"].options
    assert read_options(options, {"taps": None, "decay": 1}).decay == 1.0
    assert read_options(options, {"taps": [1, 2, 3]}).taps == (1, 2, 3)


def test_options_cannot_ask_for_modules_without_end(
    plain_target: Target, save: Any, reseal: Any
) -> None:
    family = families()["medusa"]
    folder = save(family.build(family.options(), plain_target.spec, None))
    load_drafter(folder, plain_target)
    reseal(folder, lambda body: body["options"].update(num_heads=9999, num_blocks=9999))
    before = time.process_time()
    with pytest.raises(IntegrityError, match="more modules"):
        load_drafter(folder, plain_target)
    assert time.process_time() - before < 1


def test_two_hundred_mutated_manifests_load_or_are_refused(
    package: Path, plain_target: Target
) -> None:
    """Sealed again each time. None is a bug, none takes long."""
    whole, refused = (package / MANIFEST).read_bytes(), 0
    draw, before = random.Random(5), time.process_time()
    for _ in range(200):
        (package / MANIFEST).write_bytes(whole)
        part = draw.choice(("options", "serve", "spec", "taps", "vocabulary"))
        sealed(package, lambda body, part=part: mutated(body[part], draw))
        refused += is_refused(lambda: load_drafter(package, plain_target))
    assert 100 < refused < 200
    assert time.process_time() - before < 20
