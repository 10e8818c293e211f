"""A GGUF target whose matrices are held as the file packs them, and GGUF files of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.api.generate import generate
from specctl.core.errors import FileError, IncompatibleError, SpecctlError
from specctl.models.native.library import no_int8
from specctl.recipes.schema import TargetPart
from specctl.recipes.targets import resolve
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.folders import hub
from specctl.runtime.target.folders.hub import named_gguf, with_file
from specctl.runtime.target.target import Target, load_part, load_target
from specctl_testing.export.gguf_files import rewritten

PROMPT = "def f(x):\n    return x\n\ndef f(x):"
needs_step = pytest.mark.skipif(no_int8() is not None, reason=f"no packed weights: {no_int8()}")


@pytest.fixture(scope="module", params=[False, True], ids=["tied", "own head"])
def file(request: Any, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {
        "token_embd.weight": "Q8_0",
        "output.weight": "Q5_0",
        "attn_v.weight": "Q8_0",
        "ffn_down.weight": "F16",
        **dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_output.weight"), "Q4_1"),
        **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight"), "Q5_1"),
    }
    name = "own-head.gguf" if request.param else "tied.gguf"
    folder = tmp_path_factory.mktemp("packed")
    return rewritten(tiny_gguf, folder / name, kinds, request.param)


def text(target: Target, drafter: str | None = None) -> tuple[int, ...]:
    sampling = Sampling(max_new_tokens=24, ignore_eos=True)
    prompt = target.encode(PROMPT)
    return tuple(
        generate(target, [prompt], sampling=sampling, drafter=drafter).outputs[0].token_ids
    )


@needs_step
def test_a_packed_target_holds_the_numbers_of_its_file_and_no_others(file: Path) -> None:
    """Every matrix widens to what the float32 target has, rows of query and key in its order."""
    packed, wide = load_target(str(file), dtype="gguf"), load_target(str(file), dtype="float32")
    assert (packed.dtype_name, wide.dtype_name) == ("gguf", "float32")
    assert packed.fingerprint == wide.fingerprint
    own = packed.lm.module.packs.packed
    for layer, found in zip(wide.lm.module.model.layers, own.layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        theirs = {
            "query": attention.q_proj, "key": attention.k_proj, "value": attention.v_proj,
            "output": attention.o_proj, "gate": mlp.gate_proj, "up": mlp.up_proj,
            "down": mlp.down_proj,
        }  # fmt: skip
        for name, linear in theirs.items():
            assert torch.equal(found[name].widened(), linear.weight), name
    assert torch.equal(own.head.widened(), wide.lm.module.head_weight)
    assert torch.equal(packed.borrowed().head_VD, wide.borrowed().head_VD)
    assert torch.equal(packed.borrowed().embedding_VD, wide.borrowed().embedding_VD)


@needs_step
@pytest.mark.parametrize("drafter", ["prompt-lookup", "swift", "token-recycling"])
def test_drafted_text_is_that_of_plain_decoding(file: Path, drafter: str) -> None:
    target = load_target(str(file), dtype="gguf")
    assert text(target, drafter) == text(target)


@needs_step
def test_it_is_the_default_where_it_is_decoded_and_not_where_it_is_learnt_from(
    file: Path, tiny_gguf: Path
) -> None:
    found = load_target(str(file))
    assert found.dtype_name == "gguf"
    [note] = found.notes
    assert note.startswith(f"{file.name}: weights as they are packed (")
    assert note.endswith("rounded to 8 bits as in llama.cpp; --dtype float32 rounds nothing")
    assert load_target(str(file), is_widened=True).dtype_name == "float32"
    assert load_part(TargetPart(name=str(file)), is_widened=True).dtype_name == "float32"
    assert load_target(str(tiny_gguf)).dtype_name == "float32"  # nothing in it is packed


@needs_step
def test_what_needs_stored_weights_is_refused_with_the_dtype_that_has_them(file: Path) -> None:
    target = load_target(str(file))
    with pytest.raises(IncompatibleError, match="stored weights") as refused:
        generate(target, [target.encode(PROMPT)], drafter="quantspec")
    assert refused.value.do.startswith("--dtype float32")
    with pytest.raises(IncompatibleError, match="not in memory in any other form"):
        target.lm.module.model.layers[0].mlp.up_proj.weight.sum()


@needs_step
@pytest.mark.parametrize("more", [{"inflate": "100m"}, {"compile": True}])
def test_it_is_read_as_it_is_or_not_at_all(file: Path, more: dict[str, Any]) -> None:
    with pytest.raises(SpecctlError, match="as they are"):
        load_target(str(file), dtype="gguf", **more)


def test_types_that_are_not_read_packed_are_widened_or_refused_by_name(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setattr("specctl.runtime.target.gguf.packed.no_int8", lambda: "a CPU without AVX2")
    assert load_target(str(file)).dtype_name == "float32"
    with pytest.raises(IncompatibleError, match="as it is packed here") as refused:
        load_target(str(file), dtype="gguf")
    assert refused.value.found == "a CPU without AVX2"
    with pytest.raises(IncompatibleError, match="not packed as in a GGUF file"):
        load_target("tiny", dtype="gguf")


# -- files of the hub ------------------------------------------------------------------------------

NAMES = (
    "README.md", "mmproj-model-Q8_0.gguf", "model-Q8_0.gguf", "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf", "big/model-F16-00001-of-00002.gguf", "big/model-F16-00002-of-00002.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q8_0", ["model-Q8_0.gguf"]),
        ("q4_k_m", ["model-Q4_K_M.gguf"]),
        ("F16", ["big/model-F16-00001-of-00002.gguf", "big/model-F16-00002-of-00002.gguf"]),
    ],
)
def test_a_file_of_a_repository_is_named_by_its_type(kind: str, files: list[str]) -> None:
    assert named_gguf(NAMES, kind, "owner/model") == files


@pytest.mark.parametrize(
    ("names", "kind", "says"),
    [
        (NAMES, "Q4_K", "no GGUF file of type Q4_K"),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), "Q8_0", "several GGUF files of type Q8_0"),
        (("model.safetensors",), "Q8_0", "no GGUF file of type Q8_0"),
    ],
)
def test_a_type_that_names_no_file_or_several_is_refused(
    names: tuple[str, ...], kind: str, says: str
) -> None:
    with pytest.raises(FileError, match=says) as refused:
        named_gguf(names, kind, "owner/model")
    assert "--target owner/model" in refused.value.do


@pytest.mark.parametrize("offline", [False, True])
def test_a_file_of_the_hub_is_a_target(
    offline: bool, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    commit = tmp_path / "snapshots" / ("0" * 39 + "1")
    commit.mkdir(parents=True)
    (commit / "tiny-F32.gguf").symlink_to(tiny_gguf)
    asked: list[dict[str, Any]] = []

    def fetched(repo: str, **words: Any) -> str:
        asked.append(words)
        return str(commit)

    def listed(self: object, repo_id: str, revision: str) -> list[str]:
        assert not offline, "the hub is not asked"
        return ["tiny-F32.gguf", "tiny-Q8_0.gguf"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(hub, "forbidden_by", list)
    named = resolve("owner/model:f32")
    assert (named.repo, named.gguf, named.file) == ("owner/model", "f32", None)
    found = with_file(named, offline)
    assert found.file == commit / "tiny-F32.gguf"
    assert found.revision == commit.name
    only = {"local_files_only": True} if offline else {"allow_patterns": ["tiny-F32.gguf"]}
    assert asked[-1] == {"revision": "main", **only}
    assert load_target("owner/model:F32", offline=offline).revision == commit.name
