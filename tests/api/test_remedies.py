"""No advice leads to the same error again: every remedy that an error of loading names is walked.

A row of REMEDIES makes an input that is refused, says which words the advice must hold, and does
what it says. What comes then may be another error of the same input, never the same one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specctl.api.arguments.drafting import load_drafter
from specctl.api.import_head import import_head
from specctl.core.errors import SpecctlError
from specctl.recipes.targets import resolve
from specctl.runtime.target.target import Target, load_target

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
WEIGHTS = "model.safetensors"

# What walks on: given the folder and the advice, the name that is to be given next.
Walk = Callable[[Path, str], str]
Make = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Remedy:
    """`make` turns a whole model in a folder into what is refused, and returns the name to give;
    `says` is what the advice holds; `walk` does it."""

    make: Make
    says: str
    walk: Walk
    ways: tuple[str, ...] = ("target", "draft")


def into(folder: Path, *names: str) -> None:
    """Move the model of a folder into folders inside it."""
    held = [path for path in folder.iterdir() if path.is_file()]
    for name in names:
        (folder / name).mkdir(parents=True)
        for path in held:
            shutil.copy(path, folder / name)
    for path in held:
        path.unlink()


def trainer(folder: Path) -> str:
    into(folder, "checkpoint-90", "checkpoint-200", "checkpoint-1000")
    (folder / "checkpoint-1000" / WEIGHTS).unlink()  # killed while it was saved
    (folder / "training_args.bin").write_bytes(b"pickle")
    return str(folder)


def several(folder: Path) -> str:
    into(folder, "base", "instruct")
    return str(folder)


def named_path(folder: Path, do: str) -> str:
    """The path that the advice ends with."""
    return do.rsplit(": ", 1)[1]


def pointer(name: str) -> Make:
    def make(folder: Path) -> str:
        shutil.copy(folder / name, folder.parent / name)
        (folder / name).write_text(POINTER)
        return str(folder)

    return make


def pulled(name: str) -> Walk:
    def walk(folder: Path, do: str) -> str:
        shutil.copy(folder.parent / name, folder / name)  # as git lfs pull does
        return str(folder)

    return walk


def adapter(base: str) -> Make:
    def make(folder: Path) -> str:
        lora = folder.parent / "lora"
        lora.mkdir()
        torch.manual_seed(0)
        stored = load_file(folder / WEIGHTS)
        name = "model.layers.0.self_attn.q_proj"
        out, into = stored[f"{name}.weight"].shape
        key = f"base_model.model.{name}.lora_"
        factors = {f"{key}A.weight": torch.randn(2, into), f"{key}B.weight": torch.randn(out, 2)}
        save_file(factors, lora / "adapter_model.safetensors")
        about = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": base}
        (lora / "adapter_config.json").write_text(json.dumps(about))
        return str(lora)

    return make


def with_base(folder: Path, do: str) -> str:
    """Name the base where the advice says. (A test below walks its other way.)"""
    config = folder.parent / "lora" / "adapter_config.json"
    body = json.loads(config.read_text()) | {"base_model_name_or_path": str(folder)}
    config.write_text(json.dumps(body))
    return str(folder.parent / "lora")


def beside_weights(folder: Path) -> str:
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def without_adapter(folder: Path, do: str) -> str:
    (folder / "adapter_config.json").rename(folder.parent / "adapter_config.json")
    return str(folder)


def unmerged(folder: Path) -> str:
    stored = load_file(folder / WEIGHTS)
    stored = {f"base_model.model.{name}": tensor for name, tensor in stored.items()}
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    stored[f"{name}.base_layer.weight"] = stored.pop(f"{name}.weight")
    stored[f"{name}.lora_A.default.weight"] = torch.ones(1, 4)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


def merged(folder: Path, do: str) -> str:
    stored = load_file(folder / WEIGHTS)
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor
        for name, tensor in stored.items()
        if ".lora_" not in name
    }
    save_file(plain, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


def pickled(folder: Path) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    return str(folder)


def converted(folder: Path, do: str) -> str:
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    own = {name: tensor.clone() for name, tensor in stored.items()}
    save_file(own, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


def one_file(folder: Path) -> str:
    return str(folder / WEIGHTS)


def link_out(folder: Path) -> str:
    shutil.move(folder / WEIGHTS, folder.parent / WEIGHTS)
    (folder / WEIGHTS).symlink_to(folder.parent / WEIGHTS)
    return str(folder)


def copied(folder: Path, do: str) -> str:
    (folder / WEIGHTS).unlink()
    shutil.copy(folder.parent / WEIGHTS, folder / WEIGHTS)
    return str(folder)


def gguf(folder: Path) -> str:
    inside = folder.parent / "quantised"
    inside.mkdir()
    (inside / "model-q8.gguf").write_bytes(b"GGUF")
    return str(inside)


def own_repository(folder: Path, do: str) -> str:
    return str(folder)


def no_tokenizer(folder: Path) -> str:
    for path in folder.glob("*token*"):
        path.rename(folder.parent / path.name)
    return str(folder)


def with_tokenizer(folder: Path, do: str) -> str:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder.parent / name, folder / name)
    return str(folder)


def own_code(folder: Path) -> str:
    change(folder, auto_map={"AutoModel": "evil.Model"})
    return str(folder)


def without_code(folder: Path, do: str) -> str:
    change(folder, auto_map=None)
    return str(folder)


def change(folder: Path, **fields: Any) -> None:
    body = json.loads((folder / "config.json").read_text()) | fields
    kept = {key: value for key, value in body.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


BOTH, TARGET, DRAFT = ("target", "draft"), ("target",), ("draft",)
REMEDIES: dict[str, Remedy] = {
    "a Trainer's folder": Remedy(trainer, "checkpoint-200", named_path, (*BOTH, "import")),
    "a folder of models": Remedy(several, "/base", named_path, TARGET),
    "pointer for the weights": Remedy(pointer(WEIGHTS), "lfs pull", pulled(WEIGHTS)),
    "pointer for config.json": Remedy(pointer("config.json"), "lfs pull", pulled("config.json")),
    "pointer for the tokenizer": Remedy(
        pointer("tokenizer.json"), "lfs pull", pulled("tokenizer.json")
    ),
    "an adapter whose base is gone": Remedy(
        adapter("./gone"), "base_model_name_or_path", with_base
    ),
    "an adapter beside whole weights": Remedy(beside_weights, "out of the folder", without_adapter),
    "a model inside peft": Remedy(unmerged, "merge_and_unload", merged),
    "pickled weights": Remedy(pickled, "save_pretrained", converted),
    "the file of weights": Remedy(one_file, "give the folder", own_repository),
    "a link out of the folder": Remedy(link_out, "copy", copied),
    "a GGUF cut short as draft": Remedy(gguf, "fetch the file again", own_repository, DRAFT),
    "a GGUF cut short": Remedy(gguf, "fetch the file again", own_repository, TARGET),
    "no tokenizer": Remedy(no_tokenizer, "tokenizer.json", with_tokenizer, TARGET),
    "code of its own": Remedy(own_code, "remove auto_map", without_code),
}
CASES = [(name, way) for name, remedy in REMEDIES.items() for way in remedy.ways]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers with the tokenizer of tiny."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder, tiny = tmp_path_factory.mktemp("whole") / "model", resolve("tiny").path
    size = LlamaConfig.from_pretrained(tiny).vocab_size
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def load(way: str, name: str, beside: Target, out: Path) -> Any:
    if way == "target":
        return load_target(name, device="cpu")
    if way == "draft":
        return load_drafter(name, beside)
    return import_head(name, out, target=beside, prompts=0)


@pytest.mark.parametrize(("case", "way"), CASES, ids=lambda part: part.replace(" ", "-"))
def test_no_advice_leads_to_the_same_error_again(
    case: str, way: str, whole: Path, tiny_target: Target, tmp_path: Path
) -> None:
    remedy, folder = REMEDIES[case], tmp_path / "room" / "model"
    shutil.copytree(whole, folder)
    name = remedy.make(folder)
    with pytest.raises(SpecctlError) as caught:
        load(way, name, tiny_target, tmp_path / "out")
    first = caught.value
    assert remedy.says in first.do, first.do
    assert not re.search(r"pytest-\d+\S*/\S*/\.\./", first.do)
    then = remedy.walk(folder, first.do)
    if way != "import":
        assert load(way, then, tiny_target, tmp_path / "out") is not None
        return
    with pytest.raises(SpecctlError, match="whole language model is a drafter") as again:
        load(way, then, tiny_target, tmp_path / "out")  # a model is no head, and that is said
    assert again.value.what != first.what


def test_what_lies_beside_a_model_is_left_alone(
    whole: Path, tiny_target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    for name in ("original/params.json", "onnx/model.onnx", "checkpoint-7/x", ".git/HEAD"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    for name in ("pytorch_model.bin", "training_args.bin", "figure.png", ".gitattributes"):
        (folder / name).write_bytes(b"not read")
    (folder / "README.md").symlink_to(tmp_path)  # what is not read may be a link, too
    assert load("target", str(folder), tiny_target, tmp_path).tokenizer is not None
    assert load("draft", str(folder), tiny_target, tmp_path).family == "small-lm"


def test_an_adapter_given_as_a_model_is_its_base_with_the_adapter(
    whole: Path, tiny_target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    lora = adapter("../model")(folder)
    with_it = load_target(lora, device="cpu")
    by_hand = load_target(str(folder), device="cpu", adapters=[lora])
    assert with_it.fingerprint == by_hand.fingerprint != load_target(str(folder)).fingerprint
    assert with_it.name == lora
    assert with_it.notes == (f"{lora} is a LoRA adapter: loaded with its base, {lora}/../model",)
    assert load_target(lora, device="cpu", adapters=[lora]).fingerprint == with_it.fingerprint
    drafter = load_drafter(lora, tiny_target)
    assert "LoRA adapter" in drafter.note


@pytest.mark.parametrize("prefix", ["module._orig_mod.", "base_model.model."])
def test_what_a_wrapper_puts_before_names_is_left_out_and_said(
    prefix: str, whole: Path, tiny_target: Target, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(whole, folder)
    stored = load_file(folder / WEIGHTS)
    named = {prefix + name: tensor for name, tensor in stored.items()}
    save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
    target = load_target(str(folder), device="cpu")
    assert target.fingerprint == load_target(str(whole), device="cpu").fingerprint
    assert prefix in target.notes[0]
    assert prefix in load_drafter(str(folder), tiny_target).note
