"""Targets whose layers are spread over devices, host memory and disk: what goes where, what must
fit there, and the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import specctl.recipes
from specctl.core.errors import IncompatibleError, ResourceError, SpecctlError
from specctl.core.kv_cache import KVShape, SlotKV
from specctl.drafters import families
from specctl.models.hf import hf_lm
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_probe import Plain, ask_plainly
from specctl.models.hf.spread import layer_devices
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.placement import placement
from specctl.runtime.target.placement.placement import place_target
from specctl.runtime.target.placement.quantised import StoredTensor
from specctl.runtime.target.target import Target, load_target

CUDA, CPU = torch.device("cuda:0"), torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=6, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=32, tie_word_embeddings=False,
)  # fmt: skip
LAYER = 2 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16)  # bytes in bfloat16
OUTSIDE = 2 * (2 * 100 * 16 + 16)
SMALL = 1e-6  # more than what a layer lacks to fill a room


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """machine(gpus, host): layers that have room on each GPU beside nothing else, and in memory."""

    def of(gpus: list[float], host: float) -> None:
        def free(device: torch.device) -> int:
            layers = host if device.type == "cpu" else gpus[device.index]
            return round((layers + SMALL) * LAYER / placement.SHARE) + 1

        monkeypatch.setattr(placement, "available_bytes", free)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))

    return of


def test_layers_are_spread_evenly_and_all_else_is_on_the_first_gpu(
    machine: Callable[..., None],
) -> None:
    machine([100, 100, 100], 100)
    placed = place_target(CONFIG, "auto", CUDA, 2)
    counts = [placed.layers.count(f"cuda:{i}") for i in range(3)]
    assert sorted(placed.layers) == list(placed.layers)
    assert counts[0] < counts[1]
    assert sum(counts) == 6
    for name in ("model.embed_tokens", "model.norm", "lm_head"):
        assert placed.device_map[name] == "cuda:0"
    assert placed.need["cuda:0"] == OUTSIDE + counts[0] * LAYER
    assert placed.need["cuda:1"] == counts[1] * LAYER
    assert placed.fields()["device_map"]["model.layers.5"] == 2


def test_what_no_gpu_holds_goes_to_host_memory_and_then_to_disk(
    machine: Callable[..., None],
) -> None:
    """A layer's room stays free on the first GPU, where the others are computed."""
    machine([OUTSIDE / LAYER + 3, 1], 2)
    placed = place_target(CONFIG, "auto", CUDA, 2)
    assert placed.layers == ("cuda:0", "cuda:0", "cuda:1", "cpu", "cpu", "disk")
    with pytest.raises(ResourceError, match="does not fit on these GPUs"):
        place_target(CONFIG, "balanced", CUDA, 2)
    assert set(place_target(CONFIG, "cpu-offload", CUDA, 2).layers) == {"cpu"}
    machine([OUTSIDE / LAYER + 6], 0)
    assert place_target(CONFIG, "balanced", CUDA, 2).is_one


def test_the_rest_of_a_target_that_memory_does_not_hold_stays_on_disk(
    machine: Callable[..., None],
) -> None:
    machine([], OUTSIDE / LAYER + 3)
    assert place_target(CONFIG, "auto", CPU, 2).layers == ("cpu",) * 2 + ("disk",) * 4
    with pytest.raises(ResourceError, match="needs a GPU"):
        place_target(CONFIG, "cpu-offload", CPU, 2)


def test_packed_weights_count_as_they_are_stored(machine: Callable[..., None]) -> None:
    """Four bits a weight: a quarter of the layer, and the scales."""
    machine([], 100)
    stored = {"lm_head.weight": StoredTensor((100, 16), "BF16")}
    for index in range(6):
        name = f"model.layers.{index}.mlp.up_proj"
        stored[f"{name}.qweight"] = StoredTensor((2, 32), "I32")
        stored[f"{name}.scales"] = StoredTensor((1, 32), "F16")
    placed = place_target(CONFIG, "auto", CPU, 4, stored)
    assert placed.need == {"cpu": 100 * 16 * 4 + 6 * (2 * 32 * 4 + 32 * 4)}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("balance", "unknown device map"),
        ("{", "cannot be read"),
        ('{"": "gpu"}', "cannot be read"),
        ('{"": 3}', "a GPU that is not there"),
        ('{"model.layers": "cpu"}', "does not fit this target"),
        ('{"": "cpu", "model.layer.0": "disk"}', "does not fit this target"),
        ('{"": "cpu", "model.layers.0.mlp": "disk"}', "does not fit this target"),
        ('{"": "cpu", "lm_head": "disk"}', "does not fit this target"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused(word: str, message: str) -> None:
    with pytest.raises(SpecctlError, match=message):
        place_target(CONFIG, word, CPU, 2)


def test_a_place_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = place_target(CONFIG, '{"": "cpu", "model.layers.5": "disk"}', CPU, 2)
    monkeypatch.setattr(placement, "available_bytes", lambda device: OUTSIDE + 5 * LAYER)
    placed.check("the target")
    monkeypatch.setattr(placement, "available_bytes", lambda device: OUTSIDE + 5 * LAYER - 1)
    with pytest.raises(ResourceError, match="does not fit") as caught:
        placed.check("the target")
    assert "on cpu" in caught.value.found


@pytest.mark.parametrize(
    "flags", [{"inflate": "100m"}, {"compile": True}, {"adapters": ("x",)}, {"tensor_parallel": 1}]
)
def test_what_needs_one_device_is_refused_with_a_map(flags: dict[str, Any]) -> None:
    with pytest.raises(SpecctlError) as caught:
        load_target("tiny", device_map="auto", **flags)
    assert "target.device_map" in caught.value.found


def test_keys_and_values_are_where_their_layer_computes() -> None:
    """`meta` stands for a second device."""
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))
    module.embedding = torch.nn.Embedding(2, 2)
    module.get_input_embeddings = lambda: module.embedding  # type: ignore[assignment]
    module.hf_device_map = {"layers.0": "cpu", "layers.1": "disk", "layers.2": "meta"}  # type: ignore[assignment]
    devices = layer_devices(module, 3)
    assert [device.type for device in devices] == ["cpu", "cpu", "meta"]
    kv = SlotKV.of([KVShape(1, 2, 1, 2)] * 3, 2, 8, torch.float32, CPU, devices)
    assert [store.device.type for store in kv.key_ZJLE] == ["cpu", "cpu", "meta"]
    kv.begin((1, 0), torch.tensor([1, 0]), torch.tensor([0, 3]), 2, 5)
    new_BJTE = torch.ones(2, 1, 2, 2, device="meta")
    assert kv.update(2, new_BJTE, new_BJTE)[0].device.type == "meta"
    kv.keep(torch.tensor([1, 0]), torch.tensor([0, 3]), torch.tensor([[0, 1], [0, -1]]))


# -- loaded for real, with layers on disk ---------------------------------------------------------


@pytest.fixture
def folder(make_model: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """folder(model_type): a random target in several files, under the embedded tokenizer."""

    def made(model_type: str, **fields: Any) -> str:
        model = make_model(model_type, vocab=6144, **fields)
        model.save_pretrained(tmp_path, max_shard_size="300KB")
        tiny = Path(specctl.recipes.__path__[0]) / "tiny"
        AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path)
        return str(tmp_path)

    return made


ODD_ON_DISK = json.dumps({"": "cpu", "model.layers.1": "disk", "model.layers.3": "disk"})


def answers(target: Target, family: str) -> list[tuple[int, ...]]:
    made = families()[family]
    torch.manual_seed(0)
    drafter = made.build(made.options(), target.spec, None)
    if drafter.needs().borrow:
        drafter.bind(target.borrowed())
    sampling = Sampling(max_new_tokens=10, ignore_eos=True)
    prompts = [[5, 6, 7, 5, 6], [9, 8]]
    done = generate(target, prompts, drafter=drafter, sampling=sampling, batch=2)
    return [tuple(output.token_ids) for output in done.outputs]


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_layers_on_disk_answer_as_layers_in_memory(
    folder: Callable[..., str], model_type: str
) -> None:
    """A mixture's experts are joined on the way, so those are written anew."""
    name = folder(model_type)
    plain = load_target(name, dtype="float32", device="cpu")
    spread = load_target(name, dtype="float32", device="cpu", device_map=ODD_ON_DISK)
    assert isinstance(plain.lm, FastLlama) == (model_type == "llama")
    assert isinstance(spread.lm, HfLM)
    assert spread.spread is not None
    assert "2 of 4 layers on disk" in spread.spread
    away = {n for n, p in spread.lm.module.named_parameters() if p.is_meta}
    assert {n.split(".")[2] for n in away} == {"1", "3"}
    assert spread.fingerprint == plain.fingerprint
    for family in ("prompt-lookup", "medusa"):
        assert answers(spread, family) == answers(plain, family)
    with pytest.raises(IncompatibleError, match="does not lend its layers"):
        spread.lm.check_lending()


def test_half_precision_on_disk_is_tried_in_float32_too(
    folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rounding would pass for a wrong mask, or hide one."""
    seen: list[Plain] = []

    def spied(model: Any, windows: tuple[int, ...]) -> Plain:
        seen.append(ask_plainly(model, windows))
        return seen[-1]

    monkeypatch.setattr(hf_lm, "ask_plainly", spied)
    name = folder("llama")
    target = load_target(name, dtype="bfloat16", device="cpu", device_map=ODD_ON_DISK)
    assert seen[0].is_exact
    wide = load_target(name, dtype="bfloat16", device="cpu").lm
    assert isinstance(wide, FastLlama)
    ids = seen[0].ids_RS[:1]
    masks = wide.document_masks(ids * 0)
    found = wide.dense(ids, torch.arange(ids.shape[1])[None], masks).logits_BTV
    assert found is not None
    assert float((seen[0].logits_RSV[0] - found[0]).norm() / found.norm()) < 0.05
    assert {p.dtype for p in target.lm.module.parameters()} == {torch.bfloat16}
