"""Every pair that does not belong together is refused, naming the field and the cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core.errors import Exit, IncompatibleError, IntegrityError, SpecctlError
from specctl.core.vocab import VocabMap
from specctl.export.package.compat import ALLOWABLE, mismatches
from specctl.export.package.folder import load_drafter
from specctl.export.package.load import load_package
from specctl.export.package.manifest import WEIGHTS, read_manifest
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.ends import EndsOfText, NamedEnds, NoEnd, united


def altered(target: Target, **fields: Any) -> Target:
    """The target with other properties; fields of its spec may be given as well."""
    own = {k: v for k, v in fields.items() if k in Target.__dataclass_fields__}
    inside = {k: v for k, v in fields.items() if k not in own}
    lm = target.lm
    if inside:
        lm = SimpleNamespace(  # type: ignore[assignment]
            spec=replace(target.spec, **inside),
            device=target.device,
            dtype=target.dtype,
            borrowed=lm.borrowed,
        )
    return replace(target, lm=lm, **own)


# name of the case -> (changes of the target, the field that is named, --allow name or None)
TARGETS: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "fewer layers than the taps": ({"num_layers": 2}, "taps", None),
    "one layer less": ({"num_layers": 3}, "num_layers", None),
    "one layer more": ({"num_layers": 5}, "num_layers", None),
    "other width": ({"hidden_size": 32}, "hidden_size", None),
    "smaller vocabulary": ({"vocab_size": 47}, "vocab_size", None),
    "more than one difference": ({"num_layers": 5, "norm_eps": 1.0}, "num_layers", None),
    "padded vocabulary": ({"vocab_size": 64}, "vocab_size", None),
    "other tokenizer of the same size": ({"tokenizer_fingerprint": "0" * 64}, "tokenizer", "same"),
    "no tokenizer": ({"tokenizer_fingerprint": None}, "tokenizer", "same"),
    "other chat template": ({"template_digest": "0" * 64}, "template", "same"),
    "no chat template": ({"template_digest": None}, "template", "same"),
    "fine-tuned weights": ({"fingerprint": "0" * 64}, "target", "same"),
    "other revision of the weights": (
        {"fingerprint": "0" * 64, "revision": "f" * 40},
        "target",
        "same",
    ),
    "other architecture": ({"model_type": "qwen3"}, "model_type", "model-type"),
    "other number of heads": ({"num_heads": 8}, "num_heads", "num-heads"),
    "other number of key heads": ({"num_kv_heads": 4}, "num_kv_heads", "num-kv-heads"),
    "other head width": ({"head_dim": 8}, "head_dim", "head-dim"),
    "other MLP width": ({"intermediate_size": 99}, "intermediate_size", "intermediate-size"),
    "other norm epsilon": ({"norm_eps": 1e-3}, "norm_eps", "norm-eps"),
    "other rope base": ({"rope_theta": 5e5}, "rope_theta", "rope-theta"),
    "longer context": ({"max_positions": 512}, "max_positions", "max-positions"),
    "other begin of text": ({"bos_id": 7}, "bos_id", "bos-id"),
    "other padding": ({"pad_id": 8}, "pad_id", "pad-id"),
    "scaled embedding": ({"embed_scale": 4.0}, "embed_scale", "embed-scale"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_an_incompatible_target_is_refused_by_field(
    case: str, package: Path, plain_target: Target
) -> None:
    changes, field, allow = TARGETS[case]
    target = altered(plain_target, **changes)
    with pytest.raises(IncompatibleError) as caught:
        load_package(package, target)
    error = caught.value
    assert error.exit == Exit.INCOMPATIBLE
    assert error.where == field
    assert error.what.startswith(f"{field} of target and drafter differ")
    assert error.found
    assert "some/target@" in error.expected
    assert error.do
    if allow is None:
        assert "--allow" not in error.do
        with pytest.raises(IncompatibleError):
            load_package(package, target, ALLOWABLE)
    else:
        name = field if allow == "same" else allow
        assert f"--allow {name}" in error.do
        load_package(package, target, [name])
        load_package(package, target, [f"--allow-{name}"])


def altered_spec(target: Target, **fields: Any) -> Any:
    return SimpleNamespace(
        spec=replace(target.spec, **fields), device=target.device, dtype=target.dtype
    )


def ending(target: Target, *ids: int) -> Target:
    return replace(target, lm=altered_spec(target, eos_ids=ids), eos_ids=ids)


@pytest.mark.parametrize("known", [(), (2,), (2, 9), (9, 2)])
def test_a_package_that_knows_no_other_ends_of_text_fits(
    known: tuple[int, ...], package: Path, plain_target: Target, reseal: Any
) -> None:
    reseal(package, lambda body: body["spec"].update(eos_ids=list(known)))
    load_package(package, ending(plain_target, 2, 9))


@pytest.mark.parametrize("known", [(9,), (2, 9)])
def test_an_end_of_text_that_the_target_lacks_is_refused(
    known: tuple[int, ...], package: Path, plain_target: Target, reseal: Any
) -> None:
    reseal(package, lambda body: body["spec"].update(eos_ids=list(known)))
    target = ending(plain_target, 2)
    with pytest.raises(IncompatibleError, match="eos_ids of target and drafter differ") as caught:
        load_package(package, target)
    assert "--allow eos-ids" in caught.value.do
    load_package(package, target, ["eos-ids"])
    default = NoEnd(9, "config", "an ordinary token of the tokenizer")
    load_package(package, replace(target, ends=EndsOfText(left_out=(default,))))


def test_an_end_that_no_drafter_needs_may_be_cut(
    make_toy: Any, save: Any, plain_target: Target
) -> None:
    folder = save(make_toy(VocabMap(torch.tensor([0, 2, 3, 4]), plain_target.spec.vocab_size)))
    named = [NamedEnds("generation_config", 2), NamedEnds("tokenizer", 9)]
    ends = united(named, None, plain_target.spec.vocab_size)
    load_package(folder, replace(ending(plain_target, 2, 9), ends=ends))


def test_all_differences_are_told_at_once(package: Path, plain_target: Target) -> None:
    target = altered(plain_target, tokenizer_fingerprint="0" * 64, rope_theta=1.0, pad_id=3)
    with pytest.raises(IncompatibleError) as caught:
        load_package(package, target)
    assert caught.value.what == "tokenizer of target and drafter differ (and rope_theta, pad_id)"
    assert "--allow tokenizer --allow rope-theta --allow pad-id" in caught.value.do
    with pytest.raises(IncompatibleError, match="rope_theta of"):
        load_package(package, target, ["tokenizer"])
    load_package(package, target, ["tokenizer", "rope-theta", "pad-id"])


def test_width_of_the_target_is_free_for_a_drafter_without_features(
    make_toy: Any, save: Any, plain_target: Target
) -> None:
    folder = save(make_toy())
    target = altered(plain_target, hidden_size=64, num_layers=9, fingerprint="0" * 64)
    with pytest.raises(IncompatibleError, match="--allow hidden-size"):
        load_package(folder, target)
    load_package(folder, target, ["hidden-size", "num-layers", "target"])
    borrowing = save(make_toy(borrow=True), "borrowing")
    with pytest.raises(IncompatibleError) as caught:
        load_package(borrowing, target)
    assert "--allow" not in caught.value.do


def test_the_right_target_has_no_mismatch(package: Path, plain_target: Target) -> None:
    manifest = read_manifest(package)
    assert mismatches(manifest, plain_target) == []
    assert mismatches(manifest, altered(plain_target, inflated="300m", revision=None)) == []


@pytest.mark.parametrize("name", ["everything", "tokeniser", "vocab_size", "taps", ""])
def test_an_unknown_allow_name_is_refused(name: str, package: Path, plain_target: Target) -> None:
    with pytest.raises(SpecctlError, match="there is no --allow "):
        load_drafter(package, plain_target, allow=[name])


# name of the case -> (change of a manifest that is sealed again, error, what must be named)
Change = Callable[[dict[str, Any]], None]


def put(*path: str, value: Any) -> Change:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        body[path[-1]] = value

    return change


def drop(*path: str) -> Change:
    def change(body: dict[str, Any]) -> None:
        for key in path[:-1]:
            body = body[key]
        del body[path[-1]]

    return change


MANIFESTS: dict[str, tuple[Change, type[SpecctlError], str]] = {
    "unknown family": (put("family", value="warp-drive"), IncompatibleError, "family"),
    "option that is gone": (put("options", "depth", value=3), IncompatibleError, "depth"),
    "option that is missing": (drop("options", "scale"), IncompatibleError, "scale"),
    "option of another type": (put("options", "scale", value="x"), IncompatibleError, "scale"),
    "taps that the options do not ask for": (
        put("taps", "indices", value=[1, 2]),
        IncompatibleError,
        "taps",
    ),
    "taps beyond the last layer": (put("taps", "indices", value=[9]), IncompatibleError, "taps"),
    "other top-k": (put("taps", "topk", value=5), IncompatibleError, "taps"),
    "borrowing that the family does not do": (
        put("taps", "borrow", value=True),
        IncompatibleError,
        "borrow",
    ),
    "target vocabulary": (
        put("vocabulary", value={"target_size": 50, "draft_size": 50, "digest": None}),
        IncompatibleError,
        "vocab_size",
    ),
    "shape of the weights": (put("spec", "vocab_size", value=47), IntegrityError, "table.weight"),
    "a map without tables": (
        put("vocabulary", value={"target_size": 48, "draft_size": 6, "digest": "0" * 64}),
        IncompatibleError,
        "d2t",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_sealed_manifest_that_cannot_be_right_is_refused(
    case: str, package: Path, plain_target: Target, reseal: Any
) -> None:
    change, kind, named = MANIFESTS[case]
    reseal(package, change)
    with pytest.raises(kind) as caught:
        load_package(package, plain_target, ALLOWABLE)
    assert named in caught.value.text()
    assert caught.value.do


def test_a_newer_format_is_refused_with_the_version(package: Path, plain_target: Target) -> None:
    path = package / "manifest.json"
    text = path.read_text().replace('"format_version": 1', '"format_version": 2')
    path.write_text(text.replace('"family"', '"kin"'))
    with pytest.raises(IncompatibleError, match=r"format_version.*2.*at most 1.*pip install"):
        load_drafter(package, plain_target)


IDS = torch.tensor([0, 2, 3, 5, 7, 40])
TABLES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], None], str]] = {
    "absolute ids instead of offsets": (lambda t: t.update(d2t=IDS.clone()), "d2t"),
    "sign turned round": (lambda t: t.update(d2t=-t["d2t"]), "d2t"),
    "not ascending": (lambda t: t["d2t"].__setitem__(1, -1), "d2t"),
    "outside the vocabulary": (lambda t: t["d2t"].__setitem__(5, 43), "d2t"),
    "one id shifted": (lambda t: t["d2t"].__setitem__(5, 36), "t2d"),
    "int32 map": (lambda t: t.update(d2t=t["d2t"].int()), "d2t"),
    "map too long": (lambda t: t.update(d2t=torch.arange(7)), "d2t"),
    "mask too short": (lambda t: t.update(t2d=t["t2d"][:-1].clone()), "t2d"),
    "mask of integers": (lambda t: t.update(t2d=t["t2d"].int()), "t2d"),
    "mask with one id more": (lambda t: t["t2d"].__setitem__(9, True), "t2d"),
    "mask with one id less": (lambda t: t["t2d"].__setitem__(0, False), "t2d"),
    "mask missing": (lambda t: t.__delitem__("t2d"), "d2t"),
    "map missing": (lambda t: t.__delitem__("d2t"), "d2t"),
    "both shifted, other digest": (
        lambda t: (t["d2t"].__setitem__(5, 36), t["t2d"].__setitem__(slice(40, 42), _swap())),
        "digest",
    ),
}


def _swap() -> torch.Tensor:
    return torch.tensor([False, True])


@pytest.mark.parametrize("case", TABLES)
def test_a_vocabulary_map_that_contradicts_itself_is_refused(
    case: str, make_toy: Any, save: Any, plain_target: Target, reseal: Any
) -> None:
    folder = save(make_toy(VocabMap(IDS, plain_target.spec.vocab_size)))
    change, named = TABLES[case]
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    reseal(folder)
    with pytest.raises(IncompatibleError) as caught:
        load_package(folder, plain_target, ALLOWABLE)
    assert named in caught.value.text()
    assert "vocab-trim" in caught.value.do


def test_a_cut_end_of_text_is_refused(make_toy: Any, save: Any, plain_target: Target) -> None:
    folder = save(make_toy(VocabMap(torch.tensor([0, 1, 3, 4]), plain_target.spec.vocab_size)))
    with pytest.raises(IncompatibleError, match="end-of-text id 2 was cut") as caught:
        load_package(folder, plain_target)
    assert caught.value.where == "eos"
    assert "--allow eos" in caught.value.do
    load_package(folder, plain_target, ["eos"])


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], None]] = {
    "missing": lambda t: (t.__delitem__("table.weight"), t.update(other=torch.zeros(2))),
    "additional": lambda t: t.update(other=torch.zeros(2)),
    "prefixed": lambda t: t.update({"module.table.weight": t.pop("table.weight")}),
    "transposed": lambda t: t.update({"table.weight": torch.zeros(2304)}),
    "one row less": lambda t: t.update({"table.weight": t["table.weight"][1:].clone()}),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_other_than_the_familys_are_refused(
    case: str, package: Path, plain_target: Target, reseal: Any
) -> None:
    tensors = load_file(package / WEIGHTS)
    TENSORS[case](tensors)
    save_file(tensors, package / WEIGHTS)
    reseal(package)
    with pytest.raises(IntegrityError, match="weights do not fit the manifest") as caught:
        load_package(package, plain_target)
    assert caught.value.where == WEIGHTS
