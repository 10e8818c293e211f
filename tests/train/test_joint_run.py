"""A run in which the target learns, too: what it leaves, what it says, what it refuses."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specctl.core.batch import TrainBatch
from specctl.core.errors import IncompatibleError, RecipeError, SpecctlError
from specctl.export.package.folder import load_drafter, save_package
from specctl.recipes.load import load_recipe
from specctl.recipes.low_rank import JointPart
from specctl.recipes.schema import DataPart
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target, load_target
from specctl.train.joint.check import check_joint, check_stages, check_target
from specctl.train.joint.joint import JointModel
from specctl.train.joint.joint_target import held_out, measured_change, save_joint_target
from specctl.train.planning.plan import plan
from specctl_testing.train import small_runs as small
from specctl_testing.train.joint_cases import AT_ONCE, VOCAB, logits, make, perturb, rows

# Rows of which none is held out, as those of the built-in corpus.
NO_ROWS: Any = SimpleNamespace(num_rows=0, manifest=SimpleNamespace(held=0))


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=2, vocab=VOCAB)
    return found


@pytest.fixture
def settle(
    make_model: Callable[..., Any], marked_tokenizer: Any, tmp_path: Path
) -> Callable[..., tuple[Target, JointModel, Target, Tensor]]:
    """original, joint, OUT/target read back, logits of the run's target with its additions."""

    def make_it(kind: str = "llama", **fields: Any) -> tuple[Target, JointModel, Target, Tensor]:
        size = len(marked_tokenizer)
        ends = marked_tokenizer.convert_tokens_to_ids(["<|end|>"])
        model = make_model(kind, num_layers=2, vocab=size, eos_token_id=ends, **fields)
        target = Target.from_model(model, marked_tokenizer, name="chatty")
        check_target(target)
        joint = JointModel(make(target), target, AT_ONCE)
        perturb(joint)
        wanted = logits(joint.target, rows(vocab=size))
        texts = held_out(DataPart(), 64, target, NO_ROWS)
        return target, joint, save_joint_target(joint, target, texts, tmp_path), wanted

    return make_it


def test_out_target_written_again_keeps_what_a_user_put_there(settle: Any, tmp_path: Path) -> None:
    settle()
    names = ("model.gguf", ".git/HEAD", "notes/a.txt")
    for name in names:
        (tmp_path / "target" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "target" / name).write_text(name)
    _, _, found, _ = settle()
    assert [(tmp_path / "target" / name).read_text() for name in names] == list(names)
    assert found.fingerprint == load_target(str(tmp_path / "target"), dtype="float32").fingerprint
    assert not (tmp_path / "target.partial").exists()


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"dtype": torch.bfloat16}),
        ("gemma2", {}),
    ],
)
def test_out_target_is_the_runs_target_with_its_additions(
    settle: Any, kind: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    target, joint, found, wanted = settle(kind, **fields)
    batch = rows(vocab=target.spec.vocab_size)
    assert torch.equal(logits(found, batch), wanted)
    assert torch.equal(logits(joint.target, batch), wanted), "merged in memory"
    assert not torch.equal(logits(target, batch), wanted)
    assert found.fingerprint != target.fingerprint
    assert (found.eos_ids, found.dtype) == (target.eos_ids, target.dtype)
    assert found.template_digest == target.template_digest
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        dtype=target.dtype,
        attn_implementation="eager",  # transformers 5.17's sdpa leaves out gemma2's soft cap
    ).eval()
    with torch.no_grad():
        far = (theirs(batch.ids_BS).logits - wanted).abs().max() / wanted.abs().max()
    assert float(far) < (1e-5 if target.dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_additions_to_the_target_are_an_adapter_that_peft_reads(
    settle: Any, tmp_path: Path, kind: str
) -> None:
    peft = pytest.importorskip("peft")
    original, _, changed, wanted = settle(kind)
    write_target(original, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    read = peft.PeftModel.from_pretrained(base, tmp_path / "target-adapter").eval()
    size = original.spec.vocab_size
    with torch.no_grad():
        theirs = logits(Target.from_model(read.merge_and_unload()), rows(vocab=size))
    torch.testing.assert_close(theirs, wanted, atol=1e-5, rtol=1e-5)
    again = load_target(str(tmp_path), dtype="float32", adapters=[str(tmp_path / "target-adapter")])
    torch.testing.assert_close(logits(again, rows(vocab=size)), wanted, atol=1e-5, rtol=1e-5)
    assert again.base_fingerprint == original.fingerprint
    assert again.fingerprint not in (original.fingerprint, changed.fingerprint)
    if kind == "gemma2":
        with pytest.raises(IncompatibleError, match="cannot learn"):
            check_target(again)


def test_the_package_is_for_the_changed_target_and_says_so(settle: Any, tmp_path: Path) -> None:
    original, joint, changed, _ = settle()
    with joint.whole() as drafter:
        manifest = save_package(
            drafter,
            changed,
            tmp_path / "package",
            serve={},
            recipe_digest="",
            acceptance=None,
            command=(),
        )
    assert manifest.target.fingerprint == changed.fingerprint
    assert manifest.target.changed is not None
    assert manifest.target.changed.fingerprint == original.fingerprint
    assert manifest.target.changed.kl > 0
    for card in (tmp_path / "package" / "README.md", tmp_path / "target" / "README.md"):
        assert "KL" in card.read_text()
        assert "changed" in card.read_text()
    load_drafter(tmp_path / "package", load_target(str(tmp_path / "target"), dtype="float32"))
    with pytest.raises(IncompatibleError, match="target"):
        load_drafter(tmp_path / "package", original)


def test_change_is_measured_on_text_of_any_length(settle: Any) -> None:
    """Padding counts for nothing: the figures are those of the texts one by one."""
    original, _, changed, _ = settle()
    texts = held_out(DataPart(), 24, original, NO_ROWS)[:1]
    alone = [
        replace(b, **{f: getattr(b, f)[i : i + 1, :n] for f in FIELDS})
        for b in texts
        for i, n in enumerate((b.document_BS >= 0).sum(-1).tolist())
    ]
    together, apart = (measured_change(original, changed, t) for t in (texts, alone))
    assert together.tokens == apart.tokens
    assert together.kl == pytest.approx(apart.kl, rel=1e-4)
    assert together.perplexity == pytest.approx(apart.perplexity, rel=1e-4)
    same = measured_change(original, original, texts)
    assert (same.kl, same.agreement) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert same.perplexity == same.perplexity_before == pytest.approx(together.perplexity_before)


FIELDS = ("ids_BS", "loss_mask_BS", "document_BS", "position_BS")
SMALL = {
    "drafter__options": "{num_heads: 2}",
    "train__steps": 6,
    "train__joint__rank": 2,
    "train__tau_every": 3,
}


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = small.words(tmp_path)
    recipe = small.small_recipe("medusa-2", text, **SMALL)
    whole = small.run(recipe, tmp_path / "whole", small.random_target(0))
    target, parts = small.random_target(0), tmp_path / "parts"
    loss, calls = JointModel.loss, [0]

    def stopping(joint: JointModel, batch: TrainBatch) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(joint, batch)

    with monkeypatch.context() as patched:
        patched.setattr(JointModel, "loss", stopping)
        with pytest.raises(SpecctlError, match="is saved"):
            small.run(recipe, parts, target)
    assert not (parts / "target").exists()
    again = small.run(recipe, parts, target)
    assert any("continuing from step" in line for line in again.said)
    assert again.digest == whole.digest
    first, second = (
        load_file(f / "target" / "model.safetensors") for f in (tmp_path / "whole", parts)
    )
    assert small.digest(first) == small.digest(second)
    assert whole.result.target == tmp_path / "whole" / "target"
    assert any("changed from" in line for line in whole.said)
    assert '"agreement"' in (parts / "metrics.jsonl").read_text()


def test_a_run_in_which_only_the_drafter_learned_leaves_the_target_as_it_was(
    tmp_path: Path,
) -> None:
    recipe = small.small_recipe(
        "medusa-2", small.words(tmp_path), **SMALL, train__joint__warmup=1.0
    )
    target = small.random_target(0)
    small.run(recipe, tmp_path / "out", target)
    found = load_target(str(tmp_path / "out" / "target"), dtype="float32")
    assert found.fingerprint == target.fingerprint
    ours, theirs = (dict(t.lm.module.named_parameters()) for t in (found, target))
    assert small.digest(ours) == small.digest(theirs)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("data.features", "offline"),
        ("data.on_policy", "0.5"),
        ("train.parallel", "fsdp"),
        ("train.lora", "{rank: 2}"),
        ("train.select", "highest"),
        ("target.inflate", "100m"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(where: str, value: str) -> None:
    recipe = load_recipe("medusa-2", sets=[f"{where}={value}"])
    with pytest.raises(RecipeError, match=f"does not go with {where}") as refused:
        plan(recipe)
    assert f"--set {where}=" in str(refused.value)


def test_a_drafter_that_cannot_learn_beside_its_target_is_refused(target: Target) -> None:
    for name, why in (("distill", "reads no states"), ("eesd", "runs layers of the target")):
        with pytest.raises(RecipeError, match=why):
            plan(load_recipe(name, sets=["train.joint={rank: 2}"]))
    recipe = load_recipe("medusa-2")
    check_joint(recipe.data, recipe.train, recipe.target, make(target))


def test_only_the_last_stage_may_change_the_target() -> None:
    heads, joint = (load_recipe(name).train.joint for name in ("medusa", "medusa-2"))
    check_stages([heads, joint])
    with pytest.raises(RecipeError, match="original again"):
        check_stages([joint, heads])


def test_a_target_that_cannot_learn_is_refused_by_name(
    target: Target, chat_target: Target, make_target: Any
) -> None:
    check_target(chat_target)
    with pytest.raises(IncompatibleError, match="random cannot learn"):
        check_target(target)
    with pytest.raises(IncompatibleError, match="inflated"):
        check_target(replace(chat_target, inflated="100m"))
    quantised = make_target(num_layers=2, vocab=VOCAB)
    layer = quantised.lm.module.model.layers[0].mlp.up_proj
    del layer.weight
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(IncompatibleError, match="quantised"):
        check_target(quantised)


def test_a_plan_counts_what_is_added_to_the_target() -> None:
    speed = {"flops_per_second": 1e9}
    alone, together = (
        plan(load_recipe("medusa-2", sets=["target.dtype=bfloat16", *sets]), **speed)
        for sets in (["train.joint=null"], [])
    )
    target = load_target("tiny", dtype="float32")
    joint = JointModel(make(target), target, JointPart())
    assert together.added == sum(joint.trainable()[name].numel() for name in joint.slow())
    assert alone.added == 0
    assert together.trainable == alone.trainable
    assert together.memory_bytes > alone.memory_bytes + 16 * together.added
    assert together.disk["changed target"] == 2 * together.target_parameters
    assert together.seconds_range[0] > alone.seconds_range[0]
