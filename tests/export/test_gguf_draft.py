"""A GGUF file as a draft model."""

from __future__ import annotations

from pathlib import Path

import pytest

from specctl.api.arguments.drafting import load_drafter
from specctl.api.bench import bench
from specctl.api.generate import generate
from specctl.api.vocab_trim import vocab_trim
from specctl.core.errors import IncompatibleError, IntegrityError, SpecctlError
from specctl.core.storage.gguf_header import read_header
from specctl.drafters.lm.small_lm import SmallLm
from specctl.export.package.find import Kind, locate
from specctl.recipes.installed_models import InstalledModel
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.folders import hub
from specctl.runtime.target.target import Target, load_target
from specctl_testing.export.gguf_files import rewritten

PROMPT = "def f(x):\n    return x\n\ndef f(x):"


@pytest.fixture(scope="module")
def small(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target in 5 bits, which drafts for itself."""
    kinds = {"token_embd.weight": "Q8_0", "_norm.weight": "F32", ".weight": "Q5_0"}
    return rewritten(tiny_gguf, tmp_path_factory.mktemp("draft") / "small-Q5_0.gguf", kinds)


def text(target: Target, drafter: str | None) -> tuple[tuple[int, ...], float]:
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    found = generate(target, [target.encode(PROMPT)], sampling=sampling, drafter=drafter)
    return tuple(found.outputs[0].token_ids), found.stats.tau


@pytest.mark.parametrize("packed", [False, True], ids=["folder target", "packed target"])
def test_it_drafts_for_a_target_of_its_tokenizer(
    packed: bool, small: Path, tiny_target: Target
) -> None:
    target = load_target(str(small)) if packed else tiny_target
    drafted, tau = text(target, str(small))
    assert drafted == text(target, None)[0]
    assert tau > 2
    assert isinstance(load_drafter(str(small), target), SmallLm)


def test_a_folder_that_holds_it_is_the_same_draft(small: Path) -> None:
    assert locate(small.parent) == locate(small)
    assert locate(str(small)).kind is Kind.GGUF


def test_its_vocabulary_is_trimmed(small: Path, tmp_path: Path) -> None:
    """Its rows are cut as they are packed, for a packed target too (test_held_file.py)."""
    target, out = load_target(str(small)), tmp_path / "trimmed"
    done = vocab_trim(
        str(small), out, target=target, size=512, num_prompts=1, max_new_tokens=8,
        recipe="fr-spec",
    )  # fmt: skip
    assert done.report.size == 512
    drafted, tau = text(target, str(done.package))
    assert drafted == text(target, None)[0]
    assert tau > 1.5


def test_bench_measures_it_beside_transformers(small: Path, tiny_target: Target) -> None:
    found = bench(
        tiny_target,
        str(small),
        num_prompts=1,
        samplings=Sampling(),
        max_new_tokens=8,
        repeats=1,
        against="hf",
    )
    assert any("transformers with" in row.name for row in found.rows)
    assert {row.identical for row in found.rows} <= {None, True}


def test_a_file_that_is_cut_short_is_refused(
    small: Path, tiny_target: Target, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[:1000])
    with pytest.raises(SpecctlError, match="cut short"):
        load_drafter(str(cut), tiny_target)


@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "output_norm.weight"])
def test_one_whose_numbers_are_not_finite_is_refused(
    tensor: str, small: Path, tiny_target: Target, tmp_path: Path
) -> None:
    at = read_header(small).tensors[tensor].offset
    body = bytearray(small.read_bytes())
    body[at : at + 4] = b"\x00\x7e\xc0\x7f"  # NaN in half precision, and in float32
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(body)
    with pytest.raises(IntegrityError, match="not finite"):
        load_drafter(str(damaged), tiny_target)


def test_an_alias_of_an_installed_package_is_a_draft(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "cached_folder", lambda resolved: None)
    monkeypatch.setattr(InstalledModel, "checked", lambda self: small)
    found = locate("smollm2-135m")
    assert (found.kind, found.folder) == (Kind.GGUF, small)


def test_it_is_no_package(small: Path, tmp_path: Path) -> None:
    from specctl.api.export import export

    with pytest.raises(IncompatibleError, match="a model, not a package") as refused:
        export(small, "vllm", tmp_path / "out")
    assert f"--draft {small}" in refused.value.do
