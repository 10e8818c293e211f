"""Adapters that requests choose: every row is written as by the target that has its adapter
merged, whoever stands beside it and whatever drafts for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specctl.core import language_model
from specctl.core.errors import IncompatibleError, IntegrityError, RowsError, SpecctlError
from specctl.drafters import families
from specctl.models.compiled import PATIENCE, CompiledLM
from specctl.models.llama.llama import LlamaModel
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.adapter import TENSORS, AppliedAdapter
from specctl.runtime.target.variants.inflate import SIZES, Size, inflate
from specctl.runtime.target.variants.row_adapted import with_row_adapters
from specctl.runtime.target.variants.row_adapters import RowAdapters

pytest.importorskip("peft")
from specctl_testing.hybrids import EXPERTS, LATENT, tiny_hybrid
from specctl_testing.models import build_model
from specctl_testing.runtime.lora import write_adapter

VOCAB = 64
PROMPTS = [(3, 1, 4, 1, 5, 9), (2, 7, 1, 8), (1, 6, 1, 8, 0, 3, 3, 9), (3, 1, 4, 1, 5, 9)]
NAMES = ["a", None, "b", "b"]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENTS = ["kv_b_proj", "kv_a_proj_with_mqa"]
GREEDY = Sampling(max_new_tokens=16, ignore_eos=True)
Texts = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def models(request: Any, make_model: Any, tmp_path_factory: Any) -> tuple[Target, dict[Any, Any]]:
    """A target with the adapters a and b, and the models that peft makes of each: None, a, b."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_model(request.param, num_layers=3, vocab=VOCAB)
    merged: dict[Any, Any] = {None: Target.from_model(copy.deepcopy(model))}
    for seed, (name, modules) in enumerate({"a": EVERY, "b": ["q_proj", "down_proj"]}.items()):
        wrapped = write_adapter(
            copy.deepcopy(model), folder / name, seed, size=0.6, target_modules=modules
        )
        merged[name] = Target.from_model(wrapped.merge_and_unload())
    folders = {"a": str(folder / "a"), "b": str(folder / "b")}
    return with_row_adapters(Target.from_model(model), folders), merged


def written(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    names: Sequence[str | None],
    draft: str | None = None,
    policy: str = "chain",
    slots: int = 4,
) -> tuple[Texts, int]:
    """The texts, and how many drafted tokens were accepted."""
    drafter = None
    if draft is not None:
        family = families()[draft]
        torch.manual_seed(1)
        drafter = family.build(family.options(), target.spec, None)
        if drafter.needs().borrow:
            drafter.bind(target.borrowed())
    engine = Engine(
        target, drafter, None if drafter is None else make_policy({"policy": policy}),
        num_slots=slots,
    )  # fmt: skip
    done = engine.run(
        [Request(p, GREEDY, adapter=name) for p, name in zip(prompts, names, strict=True)]
    )
    return [one.tokens for one in done], sum(one.stats.tokens - one.stats.rounds for one in done)


DRAFTERS = [
    (None, "chain"), ("prompt-lookup", "direct"), ("layer-skip", "chain"), ("eagle3", "chain"),
    ("small-lm", "static-tree"),
]  # fmt: skip


@pytest.mark.parametrize(("draft", "policy"), DRAFTERS)
def test_every_row_is_written_as_with_its_adapter_merged(
    models: tuple[Target, dict[Any, Any]],
    draft: str | None,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the verification would go on from layers that a draft has run."""
    monkeypatch.setattr(language_model, "LEAST_SAVED", 0)
    target, merged = models
    wanted = [
        written(merged[name], [prompt], [None])[0][0]
        for prompt, name in zip(PROMPTS, NAMES, strict=True)
    ]
    assert len({wanted[0], wanted[3], written(merged[None], PROMPTS[:1], [None])[0][0]}) == 3
    for slots in (4, 2):
        texts, accepted = written(target, PROMPTS, NAMES, draft, policy, slots)
        assert texts == wanted
    assert accepted > 0 or draft != "prompt-lookup"


def test_a_conversation_is_not_gone_on_with_from_another_adapter(
    models: tuple[Target, dict[Any, Any]],
) -> None:
    target, merged = models
    prompt = tuple(range(1, 30))
    engine = Engine(target, None, None, num_slots=1)
    for name in ("a", None, "b", "b"):
        request = Request(prompt, GREEDY, conversation="one", adapter=name)
        [done] = engine.run([request])
        assert done.tokens == written(merged[name], [prompt], [None])[0][0]


@pytest.mark.parametrize("form", ["plain", "recorded", "inflated"])
def test_rows_without_an_adapter_do_not_see_their_neighbours(
    make_model: Any, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward of the target is the compiled step or a recording, whoever is in the round."""
    model = make_model("llama", num_layers=3, vocab=VOCAB)
    wrapped = write_adapter(copy.deepcopy(model), tmp_path / "a", size=0.6)
    [plain] = written(Target.from_model(copy.deepcopy(model)), PROMPTS[:1], [None])[0]
    target = Target.from_model(model)
    if form == "recorded":  # as on a GPU, where nobody has chosen
        target = replace(target, lm=CompiledLM(target.lm, patience=PATIENCE))
    if form == "inflated":
        monkeypatch.setitem(SIZES, "600k", Size(600_000, 128, 7))
        target = inflate(target, "600k", torch.float32)
    [adapted] = written(Target.from_model(wrapped.merge_and_unload()), PROMPTS[:1], [None])[0]
    chosen = with_row_adapters(target, {"a": str(tmp_path / "a")})
    calls = list[object]()
    monkeypatch.setattr(LlamaModel, "native", lambda *given: calls.append(given))
    texts, _ = written(chosen, [PROMPTS[0]] * 2, [None, "a"])
    assert texts == [plain, adapted]
    assert plain != adapted
    assert written(chosen, PROMPTS[:1], [None])[0] == [plain]
    assert not calls
    assert not isinstance(chosen.lm, CompiledLM)


def test_any_number_of_adapters_and_parts_of_one_are_loaded(
    make_model: Any, tmp_path: Path
) -> None:
    model = make_model("llama", num_layers=3, vocab=VOCAB)
    write_adapter(copy.deepcopy(model), tmp_path / "a")
    folders = {f"a{part}": f"{tmp_path / 'a'}@{part}" for part in range(1, 18)}
    adapters = with_row_adapters(Target.from_model(model), folders).row_adapters
    assert adapters is not None
    scales = [adapters.factors[name][0, "q_proj"].scale for name in folders]
    assert scales == [2.0 * part for part in range(1, 18)]  # alpha 8 over rank 4


def test_a_file_that_is_written_over_changes_no_adapter_that_is_served(
    make_model: Any, tmp_path: Path
) -> None:
    model = make_model("llama", num_layers=3, vocab=VOCAB)
    write_adapter(copy.deepcopy(model), tmp_path / "a")
    adapters = with_row_adapters(Target.from_model(model), {"a": str(tmp_path / "a")}).row_adapters
    assert adapters is not None
    halves = [half for one in adapters.factors["a"].values() for half in (one.down, one.up)]
    before = [half.clone() for half in halves]
    with (tmp_path / "a" / TENSORS).open("r+b") as stream:
        stream.seek(-4096, 2)  # all of them numbers
        stream.write(bytes(4096))
    assert all(map(torch.equal, halves, before))


@pytest.mark.parametrize(
    ("value", "dtype", "kind"),
    [
        (float("nan"), torch.float32, IntegrityError),
        (1e30, torch.float16, IncompatibleError),
    ],
)
def test_adapters_that_are_no_numbers_are_refused(
    make_model: Any, tmp_path: Path, value: float, dtype: torch.dtype, kind: type[SpecctlError]
) -> None:
    model = make_model("llama", num_layers=3, vocab=VOCAB, dtype=dtype)
    write_adapter(make_model("llama", num_layers=3, vocab=VOCAB), tmp_path / "a")
    tensors = load_file(tmp_path / "a" / TENSORS)
    key = min(tensors)
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed[key][0, 0] = value
    save_file(changed, tmp_path / "a" / TENSORS)
    with pytest.raises(kind, match="not finite"):
        with_row_adapters(Target.from_model(model), {"a": str(tmp_path / "a")})


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_linear"])
def test_what_reads_all_cached_latents_takes_no_additions(kind: str) -> None:
    """It is read out of its weight, and of tokens that other forwards have fed."""
    model = tiny_hybrid(kind) if kind == "kimi_linear" else build_model(kind, 3, **LATENT | EXPERTS)
    lm, layers = Target.from_model(model).lm, model.config.num_hidden_layers
    every = [lm.linear_at(layer, name) for layer in range(layers) for name in LATENTS]
    assert any(every[1::2])
    assert not any(every[::2])


def test_an_adapter_that_overflows_is_named_and_fails_alone(
    make_model: Any, tmp_path: Path
) -> None:
    model = make_model("llama", num_layers=3, vocab=VOCAB)
    write_adapter(copy.deepcopy(model), tmp_path / "a", size=1e25)
    target = with_row_adapters(Target.from_model(model), {"a": str(tmp_path / "a")})
    engine, errors, done = Engine(target, None, None, num_slots=2), list[RowsError](), list[Any]()
    [wanted] = written(target, PROMPTS[:1], [None])[0]
    engine.open(64)
    for index, name in enumerate(["a", None]):
        engine.submit(index, Request(PROMPTS[0], GREEDY, adapter=name))
    while engine.is_busy:
        try:
            done += [each.row for each in engine.step() if each.row.finished]
        except RowsError as error:
            errors.append(error)
    assert [(error.rows, "adapter 'a'" in error.what) for error in errors] == [((0,), True)]
    assert [row.completion().tokens for row in done] == [wanted]


def test_a_name_that_there_is_not_is_refused(models: tuple[Target, dict[Any, Any]]) -> None:
    for target in models[0], replace(models[0], row_adapters=None):
        with pytest.raises(SpecctlError, match="no such adapter"):
            Engine(target, None, None).submit(0, Request((1, 2), GREEDY, adapter="c"))


def test_rules_that_change_how_drafts_are_read_are_refused(make_target: Any) -> None:
    target = make_target(num_layers=3, vocab=VOCAB)
    adapters = RowAdapters({"a": AppliedAdapter("a", 1.0, "")}, {"a": {}})
    family = families()["small-lm"]
    drafter = family.build(family.options(), target.spec, None)
    policy = make_policy({"policy": "chain"})
    with pytest.raises(SpecctlError, match="whole forwards"):
        Engine(replace(target, row_adapters=adapters), drafter, policy, "reflect:0.5")


def test_what_cannot_be_chosen_is_refused(
    make_model: Any, tmp_path: Path, make_target: Any
) -> None:
    folder = str(tmp_path / "a")
    write_adapter(make_model("llama", num_layers=4, vocab=VOCAB), tmp_path / "a")
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: with_row_adapters(make_target(num_layers=2), {"a": str(tmp_path / "a")}),
            "choose",
        ),
        (lambda: with_row_adapters(make_target(), {"a b": str(tmp_path / "a")}), "called so"),
    ]
    for make, what in refused:
        with pytest.raises(SpecctlError, match=what):
            make()
    few, hybrid = make_target(hidden=64), Target.from_model(tiny_hybrid("qwen3_next"))
    recorded = replace(few, lm=CompiledLM(few.lm))  # as target.compile makes it
    few = replace(few, lm=few.lm.in_bits(8))
    without = "Qwen3NextDecoderLayer without"
    for target, found in ((few, "int8"), (recorded, "target.compile"), (hybrid, without)):
        with pytest.raises(IncompatibleError, match="cannot choose adapters") as caught:
            with_row_adapters(target, {"a": folder})
        assert found in caught.value.found
