"""Pre-training on a slice of text: it learns, resumes bit for bit and decays when told to."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from specctl.core.errors import FileError, RecipeError
from specctl.runtime.target.target import load_target
from specctl.train.data.sources.corpus import STDLIB, CorpusFile, collect
from specctl.train.pretrain.data import PretrainRows, prepare_data, taken_tokenizer
from specctl.train.pretrain.recipe import TokenSchedule, load_pretrain_recipe
from specctl.train.pretrain.run import (
    Evaluation,
    build_model,
    build_optimizers,
    config_from,
    export_snapshot,
    pretrain,
)

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-target.yaml"
STEP = 4 * 32


def small_recipe(path: Path, **train: Any) -> Path:
    raw = yaml.safe_load(RECIPE.read_text())
    raw["model"] |= {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "intermediate_size": 64,
    }
    raw["data"] |= {"tokenizer_bytes": 100_000, "limit_bytes": 100_000}
    raw["train"] |= {
        "seq_len": 32,
        "decay_seq_len": 64,
        "micro_batch": 4,
        "total_tokens": 20 * STEP,
        "decay_tokens": 5 * STEP,
        "warmup_tokens": 2 * STEP,
        "compile": False,
        "num_threads": 1,  # what other tests have: it stays set
        **train,
    }
    raw["report"] |= {
        "log_tokens": STEP,
        "eval_every_tokens": 10 * STEP,
        "eval_tokens": 1024,
        "final_eval_tokens": 1024,
    }
    path.write_text(yaml.safe_dump(raw))
    return path


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Iterator[None]:
    found: tuple[CorpusFile, ...] = collect((STDLIB,))[:150]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specctl.train.data.sources.corpus.collect", lambda: found)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Evaluation]:
    """A run that was not stopped, only looked at, and its last evaluation."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pretrain(small_recipe(folder / "recipe.yaml"), folder)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses_of(out: Path) -> list[float]:
    return [record["loss"] for record in records(out) if "loss" in record]


@contextmanager
def ignored_sigterm() -> Iterator[None]:
    """Keeps pytest alive when the evaluation after the run terminates once more."""
    previous = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, previous)


def test_loss_falls_and_the_export_loads(whole: tuple[Path, Evaluation]) -> None:
    out, final = whole
    losses = losses_of(out)
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.3
    assert final.loss < losses[0] - 0.3
    folder = out / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    ends = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert ends == ["<|eos|>", "<|end|>"], "a document, and a turn of the chat template"


HYBRID = {
    "model_type": "qwen3_5_text", "vocab_size": 6144, "hidden_size": 32, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "intermediate_size": 64,
}  # fmt: skip


def hybrid_recipe(path: Path, **model: Any) -> Path:
    raw = yaml.safe_load(small_recipe(path, decay_seq_len=32).read_text())
    raw["model"], raw["data"]["tokenizer"] = HYBRID | model, "tiny"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_another_architecture_learns_with_the_tokenizer_of_a_target(tmp_path: Path) -> None:
    final = pretrain(hybrid_recipe(tmp_path / "recipe.yaml"), tmp_path / "run")
    losses = losses_of(tmp_path / "run")
    assert final.loss < losses[0] - 0.3
    target = load_target(str(tmp_path / "run" / "export"))
    assert target.tokenizer_fingerprint == load_target("tiny").tokenizer_fingerprint
    assert target.lm.module.config.model_type == "qwen3_5_text"
    assert target.lm.state_bytes


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab_size": 512}, "too few words"),
        ({"model_type": "no-such"}, "makes no model of type no-such"),
        ({"model_type": "vit"}, "makes no model of type vit"),
        ({"layer_types": 3}, "makes no model of type qwen3_5_text"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused_first(
    model: dict[str, Any], message: str, tmp_path: Path
) -> None:
    recipe = hybrid_recipe(tmp_path / "recipe.yaml", **model)
    with pytest.raises(RecipeError, match=message):
        pretrain(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "train.bin").exists()


FORMS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "mamba2": {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
               "n_groups": 1, "state_size": 8},
    "gemma3_text": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMS)
def test_embeddings_have_their_rate_and_exports_load_whatever_they_are_called(
    kind: str, tmp_path: Path
) -> None:
    path = hybrid_recipe(tmp_path / "recipe.yaml")
    raw = yaml.safe_load(path.read_text())
    raw["model"] = {"model_type": kind, "vocab_size": 6144, "max_position_embeddings": 64}
    path.write_text(yaml.safe_dump(raw | {"model": raw["model"] | FORMS[kind]}))
    recipe = load_pretrain_recipe(path)
    tokenizer = taken_tokenizer(recipe)
    model = build_model(recipe, tokenizer)
    optimizers = build_optimizers(model, recipe.train)
    tables = {id(p) for p in optimizers["adamw"].param_groups[0]["params"]}
    assert id(model.get_input_embeddings().weight) in tables
    assert id(model.get_output_embeddings().weight) in tables
    muon = [p for group in optimizers["muon"].param_groups for p in group["params"]]
    assert muon
    assert not tables & {id(p) for p in muon}
    export_snapshot(tmp_path / "export", model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.bfloat16)
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name).to(torch.bfloat16)), name


def test_a_tokenizer_that_was_not_made_here_is_refused(tmp_path: Path) -> None:
    path = hybrid_recipe(tmp_path / "recipe.yaml")
    raw = yaml.safe_load(path.read_text())
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), eos_token="<end>")
    other.save_pretrained(tmp_path / "other")
    raw["data"]["tokenizer"] = str(tmp_path / "other")
    path.write_text(yaml.safe_dump(raw))
    with pytest.raises(RecipeError, match="cannot be taken for pretraining"):
        taken_tokenizer(load_pretrain_recipe(path))


def test_ids_of_another_tokenizer_are_not_learned(tmp_path: Path) -> None:
    out = tmp_path / "run"
    pretrain(small_recipe(tmp_path / "own.yaml"), out)
    kept = (out / "train.bin").read_bytes()
    with pytest.raises(FileError, match="holds ids of another tokenizer"):
        prepare_data(load_pretrain_recipe(hybrid_recipe(tmp_path / "recipe.yaml")), out)
    assert (out / "train.bin").read_bytes() == kept


def test_the_recipe_of_the_hybrid_is_whole() -> None:
    recipe = load_pretrain_recipe(RECIPE.with_name("tiny-hybrid.yaml"))
    kinds = config_from(recipe).layer_types
    assert kinds.count("linear_attention") == 3 * kinds.count("full_attention")


def test_a_terminated_run_resumes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: tuple[Path, Evaluation]
) -> None:
    recipe = small_recipe(tmp_path / "recipe.yaml")

    def evaluate_and_terminate(*args: Any) -> Evaluation:
        os.kill(os.getpid(), signal.SIGTERM)
        return Evaluation(0.0, 0.0, 0)

    with monkeypatch.context() as patch:
        patch.setattr("specctl.train.pretrain.run.evaluate", evaluate_and_terminate)
        with ignored_sigterm():
            pretrain(recipe, tmp_path / "cut")
    assert records(tmp_path / "cut")[-1]["state"] == "stopped"
    assert records(tmp_path / "cut")[-1]["step"] == 11, "the step in hand is finished"
    pretrain(recipe, tmp_path / "cut", resume=True)
    assert losses_of(tmp_path / "cut") == losses_of(whole[0])
    export = "export/model.safetensors"
    assert (tmp_path / "cut" / export).read_bytes() == (whole[0] / export).read_bytes()


def test_a_decay_file_starts_the_decay_at_once(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "DECAY").touch()
    pretrain(small_recipe(tmp_path / "recipe.yaml"), out)
    last = records(out)[-1]
    assert last["state"] == "finished"
    assert last["step"] == 5


def test_schedule_warms_up_stays_and_falls_to_zero() -> None:
    recipe = load_pretrain_recipe(RECIPE).train
    schedule, each = TokenSchedule(recipe), recipe.tokens_per_step
    planned, steps = math.ceil((recipe.total_tokens - recipe.decay_tokens) / each), schedule.steps
    assert 0.0 < schedule.rate(0) < 0.1
    schedule.begin_decay_if_due(planned - 1, asked=False)
    assert schedule.decay_start is None
    assert schedule.rate(planned - 1) == 1.0
    schedule.begin_decay_if_due(planned, asked=False)
    schedule.begin_decay_if_due(planned + 1, asked=True)
    assert schedule.decay_start == planned * each
    assert schedule.steps == steps, "the end was known before the decay began"
    assert schedule.rate((planned + steps) // 2) == pytest.approx(0.5, abs=0.01)
    assert 0.0 < schedule.rate(steps - 1) < 0.01
    assert schedule.rate(steps) == 0.0


def test_rows_visit_everything_once_an_epoch(tmp_path: Path) -> None:
    data = prepare_data(load_pretrain_recipe(small_recipe(tmp_path / "recipe.yaml")), tmp_path)
    rows = PretrainRows(data.train, 32, seed=3)
    first = rows.take(0, rows.num_rows)
    assert len({tuple(row) for row in first.tolist()}) >= 0.95 * rows.num_rows
    assert not torch.equal(first, rows.take(rows.num_rows, rows.num_rows))
    assert torch.equal(first[5:9], PretrainRows(data.train, 32, seed=3).take(5, 4))


def test_the_shipped_recipe_builds_seven_million_parameters(tmp_path: Path) -> None:
    data = prepare_data(load_pretrain_recipe(small_recipe(tmp_path / "recipe.yaml")), tmp_path)
    model = build_model(load_pretrain_recipe(RECIPE), data.tokenizer)
    assert 6_900_000 < sum(p.numel() for p in model.parameters()) < 7_200_000


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"train.matrx_lr.*matrix_lr"):
        load_pretrain_recipe(small_recipe(tmp_path / "recipe.yaml", matrx_lr=0.1))


def test_rows_that_do_not_divide_a_batch_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="decay_seq_len"):
        load_pretrain_recipe(small_recipe(tmp_path / "recipe.yaml", decay_seq_len=48))


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no checkpoint"):
        pretrain(small_recipe(tmp_path / "recipe.yaml"), tmp_path / "run", resume=True)


def test_a_state_of_an_earlier_version_is_continued(tmp_path: Path) -> None:
    """Then a run kept one file; here it is written from the state that one keeps now."""
    recipe = small_recipe(tmp_path / "recipe.yaml", total_tokens=10 * STEP, decay_tokens=6 * STEP)
    pretrain(recipe, tmp_path / "whole")
    state = next(tmp_path.glob("whole/state/step*10"))
    model, optimizer = (load_file(state / f"{n}.safetensors") for n in ("model", "optimizer"))
    plan = load_pretrain_recipe(recipe)
    built = build_model(plan, prepare_data(plan, tmp_path / "whole").tokenizer)
    name_of = {parameter: name for name, parameter in built.named_parameters()}
    numbers = [
        [name_of[p] for group in optimizer.param_groups for p in group["params"]]
        for optimizer in build_optimizers(built, plan.train).values()
    ]
    tensors = {f"model.{name}": tensor for name, tensor in model.items()}
    for full_name, tensor in optimizer.items():
        kind, name, key = full_name.split("/")
        index = ("muon", "adamw").index(kind)
        tensors[f"optimizer.{index}.{numbers[index].index(name)}.{key}"] = tensor
    stood = {"step": 10, "tokens": 10 * STEP, "decay_start": 4 * STEP, "seconds": 1.0}
    (tmp_path / "old").mkdir()
    metadata = {"progress": json.dumps(stood)}
    save_file(tensors, tmp_path / "old" / "checkpoint.safetensors", metadata)
    pretrain(recipe, tmp_path / "old", resume=True)
    resumed = load_file(next(tmp_path.glob("old/state/step*10")) / "optimizer.safetensors")
    assert resumed.keys() == optimizer.keys()
    assert all(torch.equal(resumed[name], optimizer[name]) for name in optimizer)
    export = "export/model.safetensors"
    assert (tmp_path / "old" / export).read_bytes() == (tmp_path / "whole" / export).read_bytes()
