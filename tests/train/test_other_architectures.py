"""Draft models of another architecture: packed rows, resumes, packages, exports, plans."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from specctl.api.arguments.initial_shape import following_init
from specctl.api.generate import generate
from specctl.api.train import train
from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError, IntegrityError, RecipeError
from specctl.drafters.lm.small_lm import SmallLm, SmallLmOptions
from specctl.export.formats import export
from specctl.export.package.folder import load_drafter
from specctl.export.package.load import load_package
from specctl.export.package.manifest import MANIFEST, read_manifest
from specctl.models.hf import read_only
from specctl.models.hf.from_config import architecture_of
from specctl.models.recurrent.state_lm import StateLM
from specctl.recipes.load import load_recipe
from specctl.runtime.target.target import Target
from specctl.train.planning.plan import plan
from specctl.train.stop import Interrupted
from specctl_testing.hybrids import LINEAR, tiny_hybrid
from specctl_testing.models import build_model
from specctl_testing.train import small_runs as runs

VOCABULARY = 6144  # of the embedded tokenizer
DELTA = {
    **LINEAR, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 1, "intermediate_size": 24, "tie_word_embeddings": True,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "no type": {"hidden_size": 16},
    "an unknown type": {"model_type": "qwen9"},
    "no language model": {"model_type": "vit"},
    "a misspelled size": {**DELTA, "hiden_size": 16},
    "sizes that do not fit": {**DELTA, "layer_types": ["linear_attention"]},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return runs.random_target(seed=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.words(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """A transformers folder over the target's ids: a short convolution and attention, tied."""
    folder = tmp_path_factory.mktemp("hybrid")
    layers = {"layer_types": ["conv", "full_attention"], "num_layers": 2}
    model = build_model("lfm2", vocab=VOCABULARY, **layers, tie_word_embeddings=True)
    model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@cache
def drafter(kind: str) -> SmallLm:
    """With the weights of a random hybrid, whose target has its ids."""
    model = tiny_hybrid(kind)
    spec = replace(runs.random_target(seed=0).spec, vocab_size=model.config.vocab_size)
    made = SmallLm(SmallLmOptions(loss="ce", architecture=architecture_of(model)), spec)
    made.load_tensors(SmallLm.from_lm(StateLM(model), spec).tensors())
    return made


def gradients(made: SmallLm, batches: list[TrainBatch]) -> tuple[Tensor, dict[str, Tensor]]:
    made.module.zero_grad()
    loss = torch.stack([made.loss(batch).sum for batch in batches]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {
        n: p.grad.clone() for n, p in made.trainable().items() if p.grad is not None
    }


def packed(rows: list[list[list[int]]]) -> TrainBatch:
    """Rows of documents, one behind another."""
    ids = torch.tensor([[i for document in row for i in document] for row in rows])
    number = [[n for n, document in enumerate(row) for _ in document] for row in rows]
    place = [[at for document in row for at in range(len(document))] for row in rows]
    mask = torch.ones_like(ids, dtype=torch.bool)
    return TrainBatch(ids, mask, torch.tensor(number), torch.tensor(place))


LESS_USUAL = [pytest.param(kind, marks=pytest.mark.proof) for kind in ("jamba", "nemotron_h")]


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", *LESS_USUAL])
def test_packed_documents_are_learnt_as_if_each_stood_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, generator = drafter(kind), torch.Generator().manual_seed(1)
    documents = [torch.randint(200, (n,), generator=generator).tolist() for n in (9, 15, 14, 10)]
    rows = packed([documents[:2], documents[2:]])
    loss, found = gradients(made, [rows])
    alone, wanted = gradients(made, [packed([[document]]) for document in documents])
    assert loss == pytest.approx(float(alone), rel=1e-5)
    size = max(float(grad.abs().max()) for grad in wanted.values())
    assert wanted.keys() == found.keys() == made.trainable().keys()
    assert all((found[n] - grad).abs().max() < 1e-4 * size for n, grad in wanted.items())
    with monkeypatch.context() as patch:  # a state that ran on would be seen
        whole = [read_only.Stretch(0, 0, 24), read_only.Stretch(1, 0, 24)]
        patch.setattr(read_only, "_stretches", lambda document_BS: whole)
        leaking, moved = gradients(made, [rows])
    assert abs(leaking - alone) > 1e-3 * alone
    assert any((moved[n] - grad).abs().max() > 1e-2 * size for n, grad in wanted.items())


def test_a_cast_keeps_ties_and_the_frequencies_of_positions() -> None:
    made = SmallLm(SmallLmOptions(architecture=DELTA), runs.random_target(seed=0).spec)
    rotary = made.module.model.rotary_emb  # type: ignore[union-attr]
    before = rotary.inv_freq.clone()  # type: ignore[union-attr, operator]
    made.to(torch.device("cpu"), torch.bfloat16)
    assert torch.equal(rotary.inv_freq, before)  # type: ignore[union-attr, arg-type]
    assert made.lm.dtype == torch.bfloat16
    assert "lm_head.weight" not in made.tensors()
    made.load_tensors({name: tensor + 1 for name, tensor in made.tensors().items()})
    head: Any = made.module.lm_head
    assert torch.equal(head.weight, made.tensors()["model.embed_tokens.weight"])


@pytest.mark.proof
def test_a_stopped_run_of_a_hybrid_that_writes_its_own_text_resumes_bit_for_bit(
    target: Target, text: Path, tmp_path: Path
) -> None:
    shape = json.dumps({"architecture": DELTA})
    sets = {"data__on_policy": 0.5, "data__on_policy_every": 2, "drafter__options": shape}
    recipe = runs.small_recipe("distill", text, **sets, train__steps=4, data__new_tokens=8)
    whole = runs.run(recipe, tmp_path / "whole", target)
    with pytest.raises(Interrupted), runs.stopped_before(target, step=3):
        runs.run(recipe, tmp_path / "cut", target)
    again = runs.run(recipe, tmp_path / "cut", target)
    assert "continuing from step 3" in again.said
    assert again.digest == whole.digest != ""


def test_a_folder_is_trained_on_packaged_drafts_and_goes_back_to_transformers(
    hybrid: Path, target: Target, text: Path, tmp_path: Path
) -> None:
    recipe = load_recipe("distill", sets=[
        f"{k}={v}" for k, v in {**runs.SMALL, "drafter.init": hybrid, "data.source": text,
        "data.format": "text", "train.steps": 2}.items() if not k.startswith(("drafter.o", "voc"))
    ])  # fmt: skip
    assert recipe.drafter.options["layers"] == 2
    assert recipe.vocab.size is not None
    made = train(target, recipe, out=tmp_path / "run")
    manifest = read_manifest(made.package)
    assert manifest.family == "small-lm"
    assert manifest.options["architecture"]["model_type"] == "lfm2"
    drafts = load_drafter(made.package, target)
    whole = AutoModelForCausalLM.from_pretrained(hybrid)
    moved = [n for n, p in whole.named_parameters() if not torch.equal(p, drafts.tensors()[n])]
    assert moved == list(drafts.tensors()), "all weights begin there, and learn"
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    drafted, plain = (
        generate(target, "def main(", drafter=draft, **sampling) for draft in (made.package, None)
    )
    assert drafted.texts == plain.texts
    export(made.package, "hf", tmp_path / "hf", target)
    ids = torch.randint(VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(0))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
    ours = drafts.module.eval()(ids, use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    for name in ("gguf", "onnx", "openvino"):
        with pytest.raises(IncompatibleError, match="Llama-shaped drafts alone"):
            export(made.package, name, tmp_path / name, target)
    refuse_changed(made.package, target)


def refuse_changed(package: Path, target: Target) -> None:
    """A configuration in a package runs no code and takes no more memory than the weights."""
    kept = json.loads((package / MANIFEST).read_text())
    changes: list[dict[str, Any]] = [
        {"auto_map": {"AutoModel": "x.py"}}, {"num_hidden_layers": 10**6},
        {"intermediate_size": 10**7}, {"num_hidden_layers": 500, "layer_types": ["conv"] * 500},
    ]  # fmt: skip
    for change in changes:
        body = {k: v for k, v in kept.items() if k != "digest"}
        architecture = {**kept["options"]["architecture"], **change}
        body["options"] = {**kept["options"], "architecture": architecture}
        seal = hashlib.sha256(_spelled(body)).hexdigest()
        (package / MANIFEST).write_bytes(_spelled({**body, "digest": seal}))
        with pytest.raises(IntegrityError):
            load_package(package, target)


def _spelled(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def test_a_plan_has_the_shape_of_the_folder_and_what_was_chosen_beside_it_is_refused(
    hybrid: Path, tmp_path: Path, make_model: Any
) -> None:
    recipe = following_init(load_recipe("distill", sets=[f"drafter.init={hybrid}"]))
    parameters = AutoModelForCausalLM.from_pretrained(hybrid).num_parameters()
    assert plan(recipe, flops_per_second=1e10).parameters == parameters
    assert following_init(recipe) is recipe, "as it is read again from run.yaml"
    assert recipe.drafter.options.keys() == {"architecture"}
    assert recipe.origin["drafter.options.architecture.hidden_size"] == "drafter.init"
    make_model(num_layers=2).save_pretrained(tmp_path)
    llama = load_recipe("distill", sets=[f"drafter.init={tmp_path}"])
    assert following_init(llama) is llama
    for chosen, said in (("drafter.options.layers=1", "says every size"), ("vocab.size=9", "part")):
        both = load_recipe("distill", sets=[f"drafter.init={hybrid}", chosen])
        with pytest.raises(RecipeError, match=said):
            plan(following_init(both), flops_per_second=1e10)
    twice = load_recipe("distill-hybrid", sets=[
        f"drafter.init={hybrid}", "drafter.options.architecture.hidden_size=32"])  # fmt: skip
    with pytest.raises(RecipeError, match="given twice"):
        following_init(twice)


@pytest.mark.parametrize("case", OTHERS)
def test_an_architecture_that_makes_no_draft_is_refused(case: str, target: Target) -> None:
    with pytest.raises(RecipeError) as caught, torch.device("meta"):
        SmallLm(SmallLmOptions(architecture=OTHERS[case]), target.spec)
    assert caught.value.where == "drafter.options.architecture"
