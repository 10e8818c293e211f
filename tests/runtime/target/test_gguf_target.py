"""A GGUF file as a target: its model, in one file or in parts, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from specctl.api.generate import generate
from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.storage.gguf_header import GgufHeader, read_header
from specctl.export.package.folder import target_record
from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.gguf.config import DRAFTS, check_kind
from specctl.runtime.target.mtp_checkpoint import checkpoint_of
from specctl.runtime.target.served import load_served
from specctl.runtime.target.target import Target, load_target
from specctl.train.planning.target_shape import target_shape


@pytest.fixture(scope="module")
def loaded(tiny_gguf: Path) -> Target:
    return load_target(str(tiny_gguf), dtype="float32")


def test_the_model_of_a_file_is_the_one_that_was_written(
    tiny_target: Target, loaded: Target
) -> None:
    ours = dict(loaded.lm.module.named_parameters())
    for name, theirs in tiny_target.lm.module.named_parameters():
        assert torch.equal(ours[name], theirs), name
    assert loaded.fingerprint == tiny_target.fingerprint
    assert set(tiny_target.eos_ids) <= set(loaded.eos_ids)
    assert loaded.template_digest == tiny_target.template_digest
    assert loaded.notes == ()


def test_greedy_text_is_that_of_the_folder_with_a_drafter_or_without(
    tiny_target: Target, loaded: Target
) -> None:
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    prompt = tiny_target.encode("def f(x):\n    return x\n\ndef f(x):")
    assert loaded.encode("def f(x):\n    return x\n\ndef f(x):") == prompt
    plain, theirs, drafted = (
        generate(target, [prompt], sampling=sampling, drafter=drafter).outputs[0].token_ids
        for target, drafter in (
            (loaded, None), (tiny_target, None), (loaded, "prompt-lookup"),
        )
    )  # fmt: skip
    assert plain == theirs == drafted


def test_a_narrower_dtype_rounds_and_says_so_and_is_the_same_target(
    tiny_gguf: Path, loaded: Target
) -> None:
    narrow = load_target(str(tiny_gguf), dtype="bfloat16")
    assert narrow.dtype == torch.bfloat16
    assert narrow.fingerprint == loaded.fingerprint
    [note] = narrow.notes
    assert note == (
        "tiny.gguf: its numbers are rounded to bfloat16; --dtype float32 holds them exactly"
    )


def test_the_target_that_is_served_elsewhere_is_the_same(tiny_gguf: Path, loaded: Target) -> None:
    served = load_served(str(tiny_gguf), dtype="float32")
    assert served.fingerprint == loaded.fingerprint
    assert served.eos_ids == loaded.eos_ids
    assert served.spec == loaded.spec
    assert torch.equal(served.borrowed().head_VD, loaded.borrowed().head_VD)


def test_sizes_are_known_without_its_weights(tiny_gguf: Path, loaded: Target) -> None:
    shape = target_shape(TargetPart(name=str(tiny_gguf)))
    assert shape.parameters == sum(p.numel() for p in loaded.lm.module.parameters())
    assert shape.spec.num_layers == loaded.spec.num_layers


def test_a_package_names_the_file_so_that_it_is_found_from_anywhere(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_gguf.parent)
    record = target_record(load_target("tiny.gguf", dtype="float32"))
    monkeypatch.chdir(tmp_path)
    assert record["repo"] is None
    assert resolve(record["name"]).file == tiny_gguf


def test_a_file_holds_no_module_for_multi_token_prediction(loaded: Target) -> None:
    with pytest.raises(FileError, match="carries no module"):
        checkpoint_of(loaded)


def test_a_file_is_not_spread(tiny_gguf: Path) -> None:
    with pytest.raises(IncompatibleError, match="whole on one device"):
        load_target(str(tiny_gguf), device_map="cpu-offload")


# -- parts -----------------------------------------------------------------------------------------


def split(file: Path, folder: Path, count: int = 2) -> list[Path]:
    """The file in parts of as many tensors each, as llama.cpp's gguf-split writes them."""
    import gguf

    reader = gguf.GGUFReader(file)
    folder.mkdir()
    size = -(-len(reader.tensors) // count)
    writer = gguf.GGUFWriter(folder / "tiny.gguf", "llama", split_max_tensors=size)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def parts(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return split(tiny_gguf, tmp_path_factory.mktemp("parts") / "tiny")


def test_a_model_in_parts_is_one_whichever_part_is_given(
    parts: list[Path], tiny_gguf: Path
) -> None:
    whole = read_header(tiny_gguf)
    for given in parts:
        assert read_header(given).tensors.keys() == whole.tensors.keys()
    found = load_target(str(parts[0].parent), dtype="float32")
    assert found.fingerprint == load_target(str(tiny_gguf), dtype="float32").fingerprint


def test_a_part_that_is_missing_or_of_another_model_is_named(
    parts: list[Path], tmp_path: Path
) -> None:
    alone = shutil.copy(parts[0], tmp_path)
    with pytest.raises(FileError, match="part of the model is missing") as caught:
        load_target(alone)
    assert parts[1].name in str(caught.value.found)
    shutil.copy(parts[0], tmp_path / parts[1].name)
    with pytest.raises(IntegrityError, match="another model or another place"):
        load_target(alone)


# -- files that are no targets ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"general.architecture": "clip"}, "mmproj"),
        ({"general.architecture": "llama", "general.type": "mmproj"}, "mmproj"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "LoRA adapter"),
        *(({"general.architecture": name}, f"architecture {name}") for name in DRAFTS),
        ({"general.architecture": "mamba"}, "architecture mamba"),
        ({}, "not named"),
    ],
)
def test_what_is_no_language_model_is_refused_by_name(fields: dict[str, str], says: str) -> None:
    path = Path("model.gguf")
    with pytest.raises(IncompatibleError, match=says) as caught:
        check_kind(GgufHeader(path, fields, {}, (path,)))
    assert caught.value.do


def test_a_renamed_format_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    with pytest.raises(IntegrityError, match="zip archive"):
        load_target(str(path))
