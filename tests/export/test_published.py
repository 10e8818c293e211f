"""Rows that are the target's own are not stored; weights in bfloat16; published drafters."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specctl import published
from specctl.api.export import publish
from specctl.core.drafter import Drafter
from specctl.core.errors import FileError, IncompatibleError, IntegrityError, SpecctlError
from specctl.drafters.nets.heads import head_rows
from specctl.export.formats import export
from specctl.export.package.find import locate
from specctl.export.package.folder import load_drafter, seal_folder
from specctl.export.package.load import read_package
from specctl.export.package.manifest import WEIGHTS, check_files, read_manifest
from specctl.recipes.built_in import HiddenName
from specctl.recipes.drafter_names import drafter_words
from specctl.recipes.published import published_names
from specctl.recipes.targets import aliases, is_hub_id
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import AppliedAdapter
from specctl_testing.export.engine_cases import KEPT, packaged, shaken
from specctl_testing.models import build_model

HEAD = "lm_head.weight"
Made = tuple[Target, Drafter, Path]


def with_head_of(target: Target, kept: tuple[int, ...] | None = KEPT) -> Drafter:
    """A random EAGLE-3 drafter that reads with the target's own rows."""
    drafter = shaken("eagle3", target, kept, lm_head="frozen")
    assert drafter.module is not None
    with torch.no_grad():
        drafter.module.get_parameter(HEAD).copy_(head_rows(target.borrowed(), drafter.vocab))
    return drafter


@pytest.fixture
def made(plain_target: Target, tmp_path: Path) -> Made:
    """A target under a public name, a drafter with its rows, and the package of that."""
    target = replace(plain_target, name="tiny", revision=None)
    drafter = with_head_of(target)
    return target, drafter, packaged(drafter, target, tmp_path / "package")


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty room of published drafters."""
    monkeypatch.setattr("specctl.recipes.published.published_room", lambda: tmp_path / "published")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    return tmp_path / "published"


def decoded(target: Target, drafter: Drafter) -> tuple[tuple[int, ...], int]:
    """The tokens of a greedy answer, and how many of them were drafted."""
    engine = Engine(target, drafter, make_policy({"policy": "chain", "length": 3}), num_slots=1)
    (done,) = engine.run([Request((1, 5, 9, 5), Sampling(max_new_tokens=24, ignore_eos=True))])
    return done.tokens, done.stats.accepted


def in_other_numbers(target: Target, seed: int = 0) -> Target:
    """The random model of that seed with matrices in about 16 levels a row, and a tokenizer that
    says the same in another way."""
    model = build_model(num_layers=4, hidden=16, vocab=48, seed=seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                step = weight.abs().amax(1, keepdim=True) / 8
                weight.copy_((weight / step).round() * step)
    known = {"name": target.name, "template_digest": target.template_digest}
    ids = {"eos_ids": target.eos_ids, "tokenizer_fingerprint": "e" * 64}
    return replace(Target.from_model(model), **known, **ids)


@pytest.mark.parametrize("kept", [KEPT, None])
def test_rows_of_the_target_are_left_out_and_come_back_bit_for_bit(
    kept: tuple[int, ...] | None, plain_target: Target, tmp_path: Path
) -> None:
    drafter = with_head_of(plain_target, kept)
    package = packaged(drafter, plain_target, tmp_path / "package")
    assert read_manifest(package).target_rows == (HEAD,)
    assert HEAD not in load_file(package / WEIGHTS)
    loaded = load_drafter(package, plain_target)
    assert torch.equal(loaded.tensors()[HEAD], drafter.tensors()[HEAD])
    assert decoded(plain_target, loaded) == decoded(plain_target, drafter)


def test_rows_that_differ_in_one_bit_are_stored(plain_target: Target, tmp_path: Path) -> None:
    drafter = with_head_of(plain_target)
    with torch.no_grad():
        drafter.tensors()[HEAD][3, 5] *= 1 + 2**-20
    package = packaged(drafter, plain_target, tmp_path / "package")
    assert read_manifest(package).target_rows == ()
    assert torch.equal(load_file(package / WEIGHTS)[HEAD], drafter.tensors()[HEAD])
    assert torch.equal(load_drafter(package, plain_target).tensors()[HEAD], drafter.tensors()[HEAD])


def test_rounded_rows_of_a_finer_target_are_stored(plain_target: Target, tmp_path: Path) -> None:
    drafter = with_head_of(plain_target).to(torch.device("cpu"), torch.bfloat16)
    assert read_manifest(packaged(drafter, plain_target, tmp_path / "package")).target_rows == ()


def test_without_a_target_the_error_says_whose_rows_are_missing(made: Made) -> None:
    with pytest.raises(IncompatibleError) as caught:
        read_package(made[2], None)
    assert (caught.value.found, "tiny" in caught.value.expected) == (HEAD, True)


def test_an_engine_s_format_holds_the_rows(made: Made, tmp_path: Path) -> None:
    target, drafter, package = made
    manifest = export(package, "speculators", tmp_path / "out", target)
    assert manifest.target_rows == ()
    written = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(written[HEAD], drafter.tensors()[HEAD])
    assert manifest.parameters == read_manifest(package).parameters + written[HEAD].numel()
    with pytest.raises(SpecctlError, match="of no other format"):
        export(package, "speculators", tmp_path / "small", target, store="bfloat16")


@pytest.mark.parametrize(("named", "what"), [("fc.weight", "no target has"), (HEAD, "said to be")])
def test_a_manifest_that_leaves_out_something_else_is_refused(
    named: str, what: str, plain_target: Target, tmp_path: Path
) -> None:
    package = packaged(shaken("eagle3", plain_target, KEPT), plain_target, tmp_path / "package")
    tensors = load_file(package / WEIGHTS)
    if named != HEAD:
        tensors.pop(named)
        from specctl.export.package.tensors import write_tensors

        write_tensors(tensors, package / WEIGHTS)
    about = {**read_manifest(package).to_json(), "target_rows": [named]}
    seal_folder(package, {k: v for k, v in about.items() if k not in ("digest", "files")})
    with pytest.raises(IntegrityError, match=what):
        read_package(package, plain_target)


def test_a_package_in_bfloat16_keeps_the_rows_as_the_target_has_them(
    made: Made, tmp_path: Path
) -> None:
    target, drafter, package = made
    manifest = export(package, "specctl", tmp_path / "small", target, store="bfloat16")
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert {t.dtype for n, t in stored.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert (manifest.dtype, manifest.target_rows) == ("bfloat16", (HEAD,))
    assert any("before they were rounded" in note for note in manifest.notes)
    loaded = load_drafter(tmp_path / "small", target).tensors()
    assert torch.equal(loaded[HEAD], drafter.tensors()[HEAD])
    assert torch.equal(loaded["fc.weight"], drafter.tensors()["fc.weight"].bfloat16().float())


def test_a_dtype_that_nothing_is_stored_in_is_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(SpecctlError, match="not stored in 'bf16'"):
        export(made[2], "specctl", tmp_path / "small", made[0], store="bf16")
    assert not (tmp_path / "small").exists()


def test_a_published_drafter_is_found_by_its_name_and_names_no_path(
    made: Made, room: Path, tmp_path: Path
) -> None:
    target, drafter, package = made
    card = tmp_path / "card.md"
    card.write_text(
        "# tiny on qa\n\nspecctl bench /tmp/k/run40 --suite qa\n\n## tau\n\n| a | b |\n"
    )
    publish(package, "tiny-eagle3", license="apache-2.0", target=target, measured=card)
    manifest = read_manifest(room / "tiny-eagle3")
    assert (manifest.license, manifest.target.name, manifest.dtype) == (
        "apache-2.0",
        "tiny",
        "bfloat16",
    )
    readme = (room / "tiny-eagle3" / "README.md").read_text()
    assert "license: apache-2.0" in readme
    assert "specctl generate --target tiny --draft tiny-eagle3" in readme
    assert "## tiny on qa\n\nspecctl bench run40 --suite qa\n\n### tau" in readme
    assert str(tmp_path) not in readme + json.dumps(manifest.to_json())
    loaded = load_drafter("tiny-eagle3", target)
    assert torch.equal(loaded.tensors()[HEAD], drafter.tensors()[HEAD])
    assert loaded.note == ""
    shutil.copytree(package, "tiny-eagle3")
    with pytest.warns(HiddenName, match="not the published drafter"):
        assert locate("tiny-eagle3").folder == tmp_path / "tiny-eagle3"
    with pytest.raises(FileError, match="unknown drafter") as caught:
        load_drafter("tiny-eagle4", target)
    assert "tiny-eagle3" in caught.value.expected


def test_a_published_name_is_replaced_by_force_alone(
    made: Made, room: Path, plain_target: Target
) -> None:
    target, _, package = made
    about: dict[str, Any] = {"license": "apache-2.0", "target": target}
    publish(package, "one", **about)
    before = (room / "one" / "manifest.json").read_bytes()
    with pytest.raises(FileError, match="published as one already"):
        publish(package, "one", **about)
    assert (room / "one" / "manifest.json").read_bytes() == before
    publish(package, "one", **about | {"license": "mit"}, force=True)
    assert read_manifest(room / "one").license == "mit"
    with pytest.raises(SpecctlError, match="licence of its weights"):
        publish(package, "two", **about | {"license": ""})
    for name in ("eagle3", "tiny", "none", "../two", "a/b", "..", ".two", "TWO", "two\n", ""):
        with pytest.raises(SpecctlError, match="no drafter can be published as"):
            publish(package, name, **about)
    adapter = AppliedAdapter(str(room), 1.0, "d" * 64)
    for private in (replace(target, name=str(package)), replace(target, adapters=(adapter,))):
        with pytest.raises(SpecctlError, match="names its target as everybody can"):
            publish(package, "two", license="mit", target=private)
    assert [path.name for path in room.iterdir()] == ["one"]


def test_what_a_killed_writer_left_is_no_published_drafter(made: Made, room: Path) -> None:
    target, _, package = made
    publish(package, "one", license="mit", target=target)
    left = room / ".two.tmp-4194305-0123abcd"  # of a process that cannot be
    shutil.copytree(room / "one", left)
    assert published_names() == ("one",)
    publish(package, "two", license="mit", target=target)
    assert not left.exists()
    assert published_names() == ("one", "two")


def test_published_drafters_are_whole_and_name_nothing_of_a_machine(made: Made, room: Path) -> None:
    publish(made[2], "one", license="mit", target=made[0])
    shipped = Path(published.__file__).parent
    for folder in (room / "one", *(file.parent for file in shipped.glob("*/manifest.json"))):
        manifest = check_files(folder)
        assert manifest.license, folder
        assert manifest.target.sketch, folder
        assert manifest.target.name in aliases() or is_hub_id(manifest.target.name), folder
        assert folder.name not in drafter_words()
        words = json.dumps(manifest.to_json()) + (folder / "README.md").read_text()
        assert not re.search(r"[\s\"=](/|~/)\w", words), folder


def test_nothing_is_published_outside_of_a_checkout(made: Made, room: Path, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").unlink()
    with pytest.raises(FileError, match="what it publishes would be lost"):
        publish(made[2], "one", license="mit", target=made[0])
    assert not room.exists()


def test_the_same_model_in_other_numbers_takes_a_published_drafter_and_says_so(
    made: Made, room: Path
) -> None:
    target, _, package = made
    publish(package, "one", license="mit", target=target)
    rounded = in_other_numbers(target)
    assert rounded.fingerprint != target.fingerprint
    loaded = load_drafter("one", rounded)
    assert "in other numbers" in loaded.note
    assert "differ in tokenizer, too" in loaded.note
    whole = replace(target, tokenizer_fingerprint="e" * 64)  # as a GGUF file in float32 has it
    assert "other files: they differ in tokenizer" in load_drafter("one", whole).note
    with pytest.raises(IncompatibleError, match="tokenizer of target and drafter differ"):
        load_drafter(package, whole)
    own_rows = head_rows(rounded.borrowed(), loaded.vocab)
    assert torch.equal(loaded.tensors()[HEAD], own_rows), "rows are those of the model at hand"
    with pytest.raises(IncompatibleError, match="tokenizer of target and drafter differ"):
        load_drafter(package, rounded)


@pytest.mark.parametrize("change", ["seed", "norm"])
def test_another_model_of_the_same_shape_is_refused(
    change: str, made: Made, room: Path, make_target: Callable[..., Target]
) -> None:
    target, _, package = made
    publish(package, "one", license="mit", target=target)
    other = in_other_numbers(target, seed=1 if change == "seed" else 0)
    if change == "norm":  # a model that was trained further moves its norms
        with torch.no_grad():
            other.lm.module.get_parameter("model.norm.weight")[0] = 1.01
    with pytest.raises(IncompatibleError, match="differ"):
        load_drafter("one", other)
