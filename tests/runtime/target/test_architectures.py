"""Targets of many architectures: what they answer, drafted or not, is what transformers answers.

A slice of benchmarks/architectures.py, which makes the table of docs/targets.md of all of them.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers

from specctl.core.errors import IncompatibleError
from specctl.drafters.training_free import prompt_lookup
from specctl.models.hf import hf_probe
from specctl.models.hf.hf_lm import HfLM
from specctl.models.hf.hf_spec import head_scale, spec_of
from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.checkpoint import as_transformers
from specctl.runtime.target.target import Target

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/targets.md").read_text(encoding="utf-8")
READ_AHEAD = {"5.17.0": {"moshi"}}  # where transformers is given no mask, it makes none
SLICE = (
    *(
        "afmoe",
        "bart",
        "bart, saved as a decoder",
        "beam",
        "bert, not a decoder",
        "blenderbot-small",
        "bloom",
        "codegen",
    ),
    *(
        "deepseek_v3",
        "deepseek_v4",
        "doge",
        "exaone4",
        "falcon",
        "falcon, ALiBi",
        "gemma2, soft caps",
    ),
    *("gemma3n_text", "gemma4_text, shared layers", "glm4_moe_lite", "gpt2", "gpt_neo", "gpt_oss"),
    *(
        "gptj",
        "jamba",
        "llama4_text",
        "mamba",
        "mimo_v2_flash",
        "minicpm3",
        "moshi",
        "mpt",
        "mvp, saved as a decoder",
    ),
    *("olmo3", "openai-gpt", "opt", "opt, projected embedding", "pegasus", "phimoe", "roberta"),
    *(
        "qwen2, window",
        "qwen3_moe",
        "qwen3_next",
        "stablelm",
        "starcoder2",
        "whisper",
        "whisper, saved as a decoder",
        "xglm",
    ),
)
MakeModel = Callable[..., Any]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 5.0, 8.0],
    "factor": 4.0,
    "original_max_position_embeddings": 40,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied Llama": ("llama", {"tie_word_embeddings": True}),
    "Qwen2 with a window in every layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0},
    ),
    "Granite": ("granite", {"embedding_multiplier": 6.0, "logits_scaling": 0.25}),
    "Phi-3 with longrope": ("phi3", {"rope_parameters": LONG}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_answers_are_those_of_transformers(make_model: MakeModel, kind: str) -> None:
    model_type, fields = KINDS[kind]
    model = make_model(model_type, num_layers=2, **fields)
    prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10], [*range(20, 45)]]
    oracle = copy.deepcopy(model)
    target = Target.from_model(model)
    sampling = Sampling(temperature=0.0, max_new_tokens=18)  # beyond 40 positions
    drafter = prompt_lookup.FAMILY.build(prompt_lookup.FAMILY.options(), target.spec, None)
    for given in ({}, {"drafter": drafter}, {"batch": 3}):
        made = generate(target, prompts, sampling=sampling, **given)
        for prompt, output in zip(prompts, made.outputs, strict=True):
            most = len(output.token_ids)
            assert most == min(18, target.spec.max_positions - len(prompt)), kind
            wanted = oracle.generate(
                torch.tensor([prompt]), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
            assert list(output.token_ids) == wanted[0, len(prompt) :].tolist(), (kind, given)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("granite", {"logits_scaling": 4.0}),
        ("cohere2", {"logit_scale": 0.25}),
        ("hyperclovax", {"logits_scaling": 0.25}),
    ],
)
def test_a_borrowed_head_speaks_as_loudly_as_the_target(
    make_model: MakeModel, model_type: str, fields: dict[str, Any]
) -> None:
    """Drafters that share the head would be surer, or less sure, than the target by that factor."""
    lm = HfLM(make_model(model_type, num_layers=2, **fields))
    ids = torch.arange(9)[None]
    masks = lm.document_masks(torch.zeros_like(ids))
    with torch.no_grad():
        out = lm.dense(ids, torch.arange(9)[None], masks, (2,))
    product = out.taps[2] @ lm.borrowed().head_VD.T
    torch.testing.assert_close(product, out.logits_BTV, atol=1e-4, rtol=1e-4)


def test_a_width_that_divides_logits_is_no_scale_of_the_embedding() -> None:
    """Inkling's configuration calls the divisor `embedding_multiplier`, too."""
    if "inkling_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("an older transformers, without it")
    config = transformers.AutoConfig.for_model("inkling_text")
    assert config.embedding_multiplier == config.logits_mup_width_multiplier == 24.0
    assert head_scale(config) == pytest.approx(1 / 24)
    assert spec_of(config, ()).embed_scale == 1.0


@pytest.mark.parametrize("kind", ["Qwen2 with a window in every layer", "tied Llama"])
def test_the_baseline_is_the_model_as_it_was_published(make_model: MakeModel, kind: str) -> None:
    model_type, fields = KINDS[kind]
    model = make_model(model_type, num_layers=2, **fields)
    target = Target.from_model(model)
    assert isinstance(target.lm, FastLlama)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(as_transformers(target.lm)(ids).logits, model(ids).logits)


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    """benchmarks/architectures.py."""
    found = importlib.util.spec_from_file_location(
        "architectures", ROOT / "benchmarks/architectures.py"
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["architectures"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documented(matrix: ModuleType) -> Any:
    return matrix.read_table(PAGE)


@pytest.mark.parametrize("name", SLICE)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_does_what_the_document_says(
    matrix: ModuleType, documented: Any, name: str
) -> None:
    """Equal to transformers' `generate` (asserted inside), or refused with that reason."""
    if matrix.kind_of(name) not in matrix.names():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name in READ_AHEAD.get(transformers.__version__, ()):
        pytest.skip(f"transformers {transformers.__version__} lets {name} read later tokens")
    found, told = matrix.find(name), documented[name]
    is_other = found.verdict == "refused" != told.verdict
    if is_other and f"transformers {transformers.__version__}:" not in PAGE:
        assert "otherwise" in found.why  # an older transformers computes some of them wrongly
        return
    assert (found.verdict, found.taps) == (told.verdict, told.taps), found.why
    assert re.sub(r"[\d.]+%", "", found.why) == re.sub(r"[\d.]+%", "", told.why)


def test_the_document_has_a_row_for_every_architecture(matrix: ModuleType, documented: Any) -> None:
    if f"transformers {transformers.__version__}:" in PAGE:
        assert list(documented) == matrix.names()
    assert sum(each.verdict != "not tried" for each in documented.values()) >= 90


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt_neo", "mpt", "bart", "blenderbot-small"])
def test_a_wrong_mask_is_found_in_every_precision(
    matrix: ModuleType, name: str, dtype: torch.dtype
) -> None:
    model = matrix.tiny(name).to(dtype)
    with pytest.raises(IncompatibleError, match="a path of a tree gets other logits"):
        HfLM(model)
    assert {weight.dtype for weight in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["phimoe", "qwen3_moe", "gemma4_text", "deepseek_v3", "gpt_oss"])
def test_rounding_is_no_wrong_mask(matrix: ModuleType, name: str) -> None:
    """In bfloat16 these are up to 1.2 times the logits away from themselves: experts change."""
    model = matrix.tiny(name).to(torch.bfloat16)
    before = {key: (weight.data_ptr(), weight.dtype) for key, weight in model.named_parameters()}
    lm = HfLM(model)
    after = {key: (weight.data_ptr(), weight.dtype) for key, weight in model.named_parameters()}
    assert after == before
    assert lm.new_kv(1, 4).key_ZJLE[0].dtype == torch.bfloat16


def test_quantised_weights_are_tried_as_they_are(matrix: ModuleType) -> None:
    for name, is_right in (("gemma2", True), ("bart", False)):
        model = matrix.tiny(name).to(torch.bfloat16)
        model.config.quantization_config = {"quant_method": "none"}
        seen: list[torch.dtype] = []
        model.get_input_embeddings().register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(module.weight.dtype)
        )
        if is_right:
            HfLM(model)
        else:
            with pytest.raises(IncompatibleError, match="a path of a tree"):
                HfLM(model)
        assert set(seen) == {torch.bfloat16}


def test_a_kernel_that_wants_its_own_dtype_is_tried_in_it(make_model: MakeModel) -> None:
    model = make_model("gpt_neox", dtype=torch.bfloat16)

    def demand(module: Any, args: Any) -> None:
        assert args[0].dtype == torch.bfloat16, "a kernel of half precision"

    model.get_output_embeddings().register_forward_pre_hook(demand)
    assert HfLM(model).dtype == torch.bfloat16


def test_a_model_is_tried_with_four_short_forwards(make_model: MakeModel) -> None:
    model, sizes = make_model("mixtral", sliding_window=200), []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: sizes.append(args[0].numel())
    )
    assert HfLM(model).windows == (200,)
    assert model.config.sliding_window == 200
    assert len(sizes) == 4
    assert max(sizes) <= 56


def test_a_window_that_the_masks_ignore_is_found(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four tokens, as few as were once tried, lie within every window."""
    lm = HfLM(make_model("gemma2", sliding_window=200))
    narrow = hf_probe.ask_plainly(lm.module, ())
    monkeypatch.setattr(lm, "windows", (hf_probe.WINDOW,))
    with pytest.raises(IncompatibleError, match="a prompt longer than its sliding window"):
        hf_probe.check_rounds(lm, narrow)


def test_a_cache_keeps_what_each_layer_keeps(matrix: ModuleType) -> None:
    """Latent attention keeps one compressed head and its turned part (in older transformers all
    heads); shared layers nothing."""
    model = matrix.tiny("deepseek_v3")
    own = model(input_ids=torch.arange(5)[None], use_cache=True).past_key_values.layers[0]
    if own.keys.shape[1] == 1:
        assert (own.keys.shape[-1], own.values.shape[-1]) == (16, 8)
    latent = HfLM(model).new_kv(1, 5)
    assert latent.key_ZJLE[0].shape == own.keys.shape
    assert latent.value_ZJLE[0].shape == own.values.shape
    shared = [layer.size > 0 for layer in HfLM(matrix.tiny("gemma3n_text")).kv_layers]
    assert shared[:2] == [True, True]
    assert not any(shared[2:])  # older transformers leave such layers out
