"""A package that holds a GGUF file: a draft model whose vocabulary is trimmed, still packed."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specctl.api.arguments.drafting import load_drafter
from specctl.api.generate import generate
from specctl.api.train import load_initial
from specctl.api.vocab_trim import VocabTrimResult, vocab_trim
from specctl.core.errors import IncompatibleError, IntegrityError
from specctl.core.storage.gguf_header import read_header
from specctl.drafters import families
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.formats import export
from specctl.export.package.folder import seal_folder
from specctl.export.package.held_file import held_drafter, hold
from specctl.export.package.load import parse_options
from specctl.export.package.manifest import is_held_name, read_manifest
from specctl.export.package.padding import DrafterParts
from specctl.models.native.library import no_int8
from specctl.recipes.schema import DrafterPart, TrainPart
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl.train.init.initial import initial_of
from specctl.train.rollouts import RolloutDrafter
from specctl.train.vocab.measure import moved_bytes
from specctl_testing.export.gguf_files import rewritten

PROMPT = "def f(x):\n    return x\n\ndef f(x):"
SIZE = 509  # no multiple of the 16 rows that are packed together
CPU = torch.device("cpu")
needs_packing = pytest.mark.skipif(no_int8() is not None, reason=f"not packed: {no_int8()}")
KINDS = {"tied Q8_0": ("Q8_0", False), "own head Q4_1": ("Q4_1", True)}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def file(request: Any, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target packed, its head the embedding or its own."""
    kind, has_head = request.param
    kinds = {"token_embd.weight": "Q8_0", "_norm.weight": "F32", "weight": kind}
    path = tmp_path_factory.mktemp("held") / f"small-{kind}.gguf"
    return rewritten(tiny_gguf, path, kinds, has_head)


@pytest.fixture(scope="module")
def done(
    file: Path, tiny_target: Target, tmp_path_factory: pytest.TempPathFactory
) -> VocabTrimResult:
    """The file with a trimmed vocabulary."""
    return vocab_trim(
        str(file), tmp_path_factory.mktemp("trimmed") / "out", target=tiny_target, size=SIZE,
        num_prompts=1, max_new_tokens=8, recipe="fr-spec",
    )  # fmt: skip


def logits(drafter: Any, ids: list[int]) -> Tensor:
    """Of every place of a text [S, K], over the drafter's ids."""
    lm, ids_BS = drafter.lm, torch.tensor([ids])
    with torch.no_grad():
        masks = lm.document_masks(torch.zeros_like(ids_BS))
        found = lm.dense(ids_BS, torch.arange(len(ids))[None], masks).logits_BTV
    assert found is not None
    whole: Tensor = drafter.draft_logits(found)[0]
    return whole


def text(target: Target, drafter: str | None) -> tuple[tuple[int, ...], float]:
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    found = generate(target, [target.encode(PROMPT)], sampling=sampling, drafter=drafter)
    return tuple(found.outputs[0].token_ids), found.stats.tau


def test_kept_ids_have_the_logits_of_the_whole_file(
    done: VocabTrimResult, file: Path, tiny_target: Target
) -> None:
    whole, cut = (load_drafter(str(each), tiny_target) for each in (file, done.package))
    assert isinstance(cut, SmallLm)
    assert cut.vocab is not None
    assert cut.vocab.size == SIZE
    ids = tiny_target.encode(PROMPT)
    assert torch.equal(logits(cut, ids), logits(whole, ids)[:, cut.vocab.ids_K])


@needs_packing
def test_a_step_reads_the_blocks_of_the_kept_rows(
    done: VocabTrimResult, file: Path, tiny_target: Target
) -> None:
    whole, cut = (load_drafter(str(each), tiny_target) for each in (file, done.package))
    heads = [each.module.packs.packed.head for each in (whole, cut)]  # type: ignore[union-attr]
    assert heads[1].type == heads[0].type != "F32"
    sizes = [moved_bytes(each, tiny_target) for each in (whole, cut)]
    assert sizes[0] - sizes[1] == heads[0].data.nbytes - heads[1].data.nbytes
    assert heads[1].data.nbytes < heads[0].data.nbytes / 10
    ratio = done.report.to_json()["byte_ratio"]
    assert ratio["after"] / ratio["before"] == pytest.approx(sizes[1] / sizes[0])


def test_its_text_is_that_of_plain_decoding(done: VocabTrimResult, tiny_target: Target) -> None:
    drafted, tau = text(tiny_target, str(done.package))
    assert drafted == text(tiny_target, None)[0]
    assert tau > 1.5


def test_the_package_holds_the_file_and_the_map_alone(done: VocabTrimResult, file: Path) -> None:
    assert (done.package / "model.gguf").read_bytes() == file.read_bytes()
    assert done.manifest.held_file == "model.gguf"
    assert set(load_file(done.package / "model.safetensors")) == {"d2t", "t2d"}
    assert "as a GGUF file packs them" in (done.package / "README.md").read_text()


def test_a_model_in_parts_is_held_in_parts(file: Path, tmp_path: Path) -> None:
    header = replace(read_header(file), parts=(file,))
    hold(header.path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert is_held_name("model-00001-of-00002.gguf")
    assert not is_held_name("draft.gguf")


def test_it_is_trimmed_again(done: VocabTrimResult, tiny_target: Target, tmp_path: Path) -> None:
    again = vocab_trim(
        done.package, tmp_path / "again", target=tiny_target, size=200, num_prompts=1,
        max_new_tokens=8, recipe="fr-spec",
    )  # fmt: skip
    assert again.manifest.held_file == "model.gguf"
    assert again.manifest.vocabulary.draft_size == 200
    assert text(tiny_target, str(again.package))[0] == text(tiny_target, None)[0]


@pytest.mark.parametrize("form", ["hf", "specctl"])
def test_it_is_exported(
    form: str, done: VocabTrimResult, tiny_target: Target, tmp_path: Path
) -> None:
    out = tmp_path / form
    export(done.package, form, out, tiny_target)
    assert text(tiny_target, str(out))[0] == text(tiny_target, None)[0]
    assert (read_manifest(out).held_file is None) == (form == "hf")


def test_rounded_it_is_a_package_of_tensors(
    done: VocabTrimResult, tiny_target: Target, tmp_path: Path
) -> None:
    export(done.package, "specctl", tmp_path / "out", tiny_target, store="bfloat16")
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.held_file, manifest.dtype) == (None, "bfloat16")
    assert "packed in a GGUF file and are stored in bfloat16" in manifest.notes[0]
    assert manifest.parameters == done.manifest.parameters


def test_training_starts_from_it_in_float32(
    done: VocabTrimResult, file: Path, tiny_target: Target
) -> None:
    initial = load_initial(str(done.package), tiny_target)
    assert initial.vocab is not None
    assert initial.file is None
    head_VD = load_target(str(file), dtype="float32").borrowed().head_VD
    assert torch.equal(initial.tensors()["lm_head.weight"], head_VD[initial.vocab.ids_K])
    part = DrafterPart(family="small-lm", init=str(done.package), options=asdict(initial.options))
    assert initial_of(part, tiny_target, load_initial) is not None


def test_a_target_of_another_padding_takes_it(done: VocabTrimResult, tiny_target: Target) -> None:
    rows = tiny_target.spec.vocab_size + 8
    padded = SimpleNamespace(spec=replace(tiny_target.spec, vocab_size=rows), device=CPU)
    manifest = read_manifest(done.package)
    vocab = load_drafter(str(done.package), tiny_target).vocab
    whole = families()["small-lm"]
    options = parse_options(whole, manifest.options)
    parts = DrafterParts(whole, options, manifest.model_spec, vocab, {})
    target: Any = padded
    found = held_drafter(manifest, done.package / "model.gguf", parts, target, widened=False)
    assert found.spec.vocab_size == rows
    assert found.vocab is not None
    assert vocab is not None
    assert torch.equal(found.vocab.ids_K, vocab.ids_K)


@needs_packing
def test_where_nothing_is_packed_it_is_read_as_any_file(
    done: VocabTrimResult, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = load_drafter(str(done.package), tiny_target)
    monkeypatch.setattr("specctl.runtime.target.gguf.packed.no_int8", lambda: "a CPU without AVX2")
    wide = load_drafter(str(done.package), tiny_target)
    assert isinstance(wide, SmallLm)
    assert not wide.is_packed
    assert wide.file is not None
    assert not wide.trainable()
    ids = tiny_target.encode(PROMPT)
    assert torch.allclose(logits(wide, ids), logits(packed, ids), atol=0.5)
    assert text(tiny_target, str(done.package))[0] == text(tiny_target, None)[0]


def test_a_damaged_file_is_refused(
    done: VocabTrimResult, tiny_target: Target, tmp_path: Path
) -> None:
    folder = shutil.copytree(done.package, tmp_path / "damaged")
    body = bytearray((folder / "model.gguf").read_bytes())
    body[-100] ^= 1
    (folder / "model.gguf").write_bytes(body)
    with pytest.raises(IntegrityError, match="changed after it was written"):
        load_drafter(str(folder), tiny_target)
    (folder / "model.gguf").unlink()
    with pytest.raises(IntegrityError, match="missing"):
        load_drafter(str(folder), tiny_target)


@pytest.mark.parametrize("change", ["numbers", "layers"])
def test_a_file_of_another_model_is_refused(
    change: str, done: VocabTrimResult, tiny_target: Target, tmp_path: Path
) -> None:
    """Under a manifest that was written for it."""
    folder = shutil.copytree(done.package, tmp_path / change)
    about = read_manifest(folder).to_json()
    if change == "layers":
        about["options"]["layers"] += 1
    else:
        at = read_header(folder / "model.gguf").tensors["output_norm.weight"].offset
        body = bytearray((folder / "model.gguf").read_bytes())
        body[at : at + 4] = b"\x00\x00\xc0\x7f"
        (folder / "model.gguf").write_bytes(body)
    seal_folder(folder, {k: v for k, v in about.items() if k not in ("digest", "files")})
    words = "not the model that its manifest" if change == "layers" else "not finite"
    with pytest.raises(IntegrityError, match=words):
        load_drafter(str(folder), tiny_target)


def test_it_is_not_trained_in_place(done: VocabTrimResult, tiny_target: Target) -> None:
    """A package of it would hold the file as it was."""
    policy: Any = SimpleNamespace(now=lambda: tiny_target)
    drafter = load_drafter(str(done.package), tiny_target)
    with pytest.raises(IncompatibleError, match="not trained in place") as refused:
        RolloutDrafter(policy, drafter, Sampling(temperature=1.0), TrainPart())
    assert "--init" in refused.value.do
