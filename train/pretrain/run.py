"""Pretrain a small language model from nothing, as the embedded target of `recipes/tiny` was.

Muon (https://kellerjordan.github.io/posts/muon/) moves the hidden matrices, AdamW the embedding and
the norms; the learning rate warms up, stays, and falls linearly to zero over the last tokens. The
loop is that of every training (`train.loop`); here is what it works with. Schedules count tokens,
never seconds. A file OUT/DECAY starts the fall at once; a signal to stop saves first.

OUT/run.yaml     the recipe                  OUT/state   states to resume from
OUT/log.jsonl    what happened               OUT/export  the model, as transformers loads it
Shapes: B rows, S sequence, D width, V vocabulary, N = B * S.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import yaml
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.device.kept_memory import kept_memory
from specctl.core.drafter import Drafter, DraftState, Space
from specctl.core.errors import DivergedError, FileError, RecipeError
from specctl.core.storage.files import write_json
from specctl.recipes.schema import TrainPart
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.train.data.rows.supply import Order, Text
from specctl.train.loop import Job, TrainProgress, restore, save, train
from specctl.train.metrics.metrics import MetricsLog
from specctl.train.pretrain.data import Ids, PretrainData, PretrainRows, end_ids, prepare_data
from specctl.train.pretrain.kept_weights import check_weights
from specctl.train.pretrain.own_models import MASKED, check_plain, own_kind, own_model
from specctl.train.pretrain.pictures import prepare_pictures, save_codebook
from specctl.train.pretrain.recipe import (
    PretrainRecipe,
    TokenSchedule,
    TrainRecipe,
    load_pretrain_recipe,
)
from specctl.train.saving.checkpoint import Checkpoints, Snapshot
from specctl.train.saving.integrity import saved_steps
from specctl.train.saving.state import Optimizers
from specctl.train.step.optim import Gradient
from specctl.train.stop import Interrupted, Stop

STATE, LOG, EXPORT = "state", "log.jsonl", "export"
OLD_STATE = "checkpoint.safetensors"  # of runs that were begun before the loop was shared
FIRST_EXPORT_SECONDS = 240.0  # the first snapshot comes early, so that others can begin with it
NOT_A_LANGUAGE_MODEL = {
    "id2label", "label2id", "problem_type", "return_dict", "output_hidden_states",
    "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder", "_name_or_path",
}  # fmt: skip
OUTPUTS = (".o_proj", ".out_proj", ".down_proj")  # of attention, recurrent layers and MLPs
LOCAL_SETTINGS = {"is_local", "local_files_only", "backend"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss in nats and the share of next tokens that the model ranks first."""

    key: ClassVar[str] = "heldout_loss"
    loss: float
    accuracy: float
    tokens: int

    def beats(self, best: Mapping[str, Any]) -> bool:
        return bool(self.loss < best[self.key])

    def to_json(self) -> dict[str, Any]:
        return {
            self.key: self.loss,
            "heldout_accuracy": self.accuracy,
            "heldout_tokens": self.tokens,
        }

    log_line = to_json


# -- the model and what moves it ------------------------------------------------------------------


class Pretrained(Drafter):
    """The model as what the loop trains; it drafts nothing."""

    family = "pretrain"
    module: nn.Module
    _loss: Callable[..., Tensor]

    def __init__(self, model: Any, recipe: PretrainRecipe) -> None:
        self.module, self._autocast = model, recipe.train.autocast
        if (own := own_kind(recipe)) is not None:  # whose rows differ from batch to batch
            self._loss = partial(own.loss_sum, seed=recipe.data.seed)
            return
        is_compiled = recipe.train.compile
        self._loss = torch.compile(loss_sum, dynamic=False) if is_compiled else loss_sum

    def open(self, space: Space) -> DraftState:
        raise AssertionError("a model that is pretrained drafts nothing")

    def loss(self, batch: TrainBatch) -> LossOut:
        count = batch.loss_mask_BS.sum()
        return LossOut(self._loss(self.module, batch.ids_BS, self._autocast), count)

    def tensors(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.module.named_parameters()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        check_weights(self.module, tensors)
        for name, parameter in self.module.named_parameters():
            parameter.copy_(tensors[name])


def config_from(recipe: PretrainRecipe, **more: Any) -> Any:
    """transformers' configuration of the recipe's model; RecipeError where it makes none."""
    named = {"model_type": "llama", **recipe.model}
    try:
        config = AutoConfig.for_model(**named, tie_word_embeddings=True, **more)
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        found = "an architecture that is no causal language model"
    except Exception as error:  # its checks are foreign code: any type may come
        found = f"{type(error).__name__}: {str(error)[:200]}"
    raise RecipeError(
        f"'model' of the pretraining recipe makes no model of type {named['model_type']}",
        found=found,
        expected="model_type of a causal language model of transformers, and keys of its config",
        do="correct it; recipes/tiny-hybrid.yaml is one with a model_type",
    )


def check_model(recipe: PretrainRecipe) -> None:
    """Refuse a recipe whose `model` makes none."""
    own = own_kind(recipe)
    if recipe.diffusion is not None and own is not MASKED:
        kind = "causal model" if own is None else "model of pictures"
        raise RecipeError(
            f"'diffusion' of the pretraining recipe is ignored by a {kind}",
            found=f"model_type {recipe.model.get('model_type', 'llama')}",
            expected="model_type llada or Dream",
            do="leave out the section, or see recipes/tiny-diffusion.yaml",
        )
    if own is None:
        config_from(recipe)
        return
    own.check(recipe)
    check_plain(recipe)


def build_model(recipe: PretrainRecipe, tokenizer: Any) -> Any:
    """A fresh model whose output projections are zero: every block starts as an identity."""
    if (own := own_kind(recipe)) is not None:
        return own.build(recipe)
    config = config_from(
        recipe,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.data.seed)
        model = AutoModelForCausalLM.from_config(config)
    for name, part in model.named_modules():
        if name.endswith(OUTPUTS):
            nn.init.zeros_(part.weight)
    return model


def build_optimizers(model: Any, recipe: TrainRecipe) -> Optimizers:
    """Muon for the hidden matrices, AdamW for embeddings and head and for what is no matrix:
    norms, decays and convolutions. The `share` of a group is its full learning rate, by which the
    loop multiplies the schedule's factor."""
    parameters = list(model.parameters())
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding)]
    own = own_model(model)
    head = model.get_output_embeddings() if own is None else None
    heads = own.heads(model) if own is not None else [] if head is None else head.parameters()
    is_table = {id(p) for p in [*tables, *heads]}
    norms = [p for p in parameters if p.ndim != 2]
    embeddings = [p for p in parameters if p.ndim == 2 and id(p) in is_table]
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in is_table]
    assert embeddings, "a language model has an embedding"
    muon = torch.optim.Muon(
        matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay, momentum=0.95
    )
    groups = [
        {"params": embeddings, "lr": recipe.embedding_lr},
        {"params": norms, "lr": recipe.norm_lr},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["share"] = group["lr"]
    return {"muon": muon, "adamw": adam}


def loss_sum(model: Any, rows_BS: Tensor, autocast: bool) -> Tensor:
    """Summed cross-entropy of the next token over rows of S + 1 ids."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits_BSV = model(input_ids=rows_BS[:, :-1], use_cache=False).logits
    labels_N = rows_BS[:, 1:].flatten()
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_N, reduction="sum")


@torch.no_grad()
def evaluate(model: Any, ids: Ids, seq_len: int, max_tokens: int) -> Evaluation:
    """Loss and accuracy in float32 on rows spread evenly at random over `ids`."""
    if (own := own_model(model)) is not None:
        return Evaluation(*own.evaluate(model, ids, seq_len, max_tokens))
    rows = PretrainRows(ids, seq_len, seed=0)
    num_rows = min(rows.num_rows, math.ceil(max_tokens / seq_len))
    loss, hits, count = 0.0, 0, 0
    for first in range(0, num_rows, 8):
        rows_BS = rows.take(first, min(8, num_rows - first))
        logits_NV = model(rows_BS[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        labels_N = rows_BS[:, 1:].flatten()
        loss += float(F.cross_entropy(logits_NV, labels_N, reduction="sum"))
        hits += int((logits_NV.argmax(-1) == labels_N).sum())
        count += labels_N.numel()
    return Evaluation(loss / count, hits / count, count)


# -- what the loop reads and writes ---------------------------------------------------------------


class StreamPlaces(Order):
    """The places of the stream themselves: which rows lie there depends on the phase."""

    def __init__(self) -> None:
        super().__init__(num_rows=1, seed=0)

    def take(self, position: int, count: int) -> list[int]:
        return list(range(position, position + count))


class PhaseText(Text):
    """The rows before and during the decay, whose rows may be longer and fewer; the two orders are
    independent. A place counts rows of `seq_len`."""

    def __init__(
        self, data: PretrainData, recipe: PretrainRecipe, schedule: TokenSchedule, out: Path
    ) -> None:
        train, seed = recipe.train, recipe.data.seed
        self.stable = PretrainRows(data.train, train.seq_len, seed)
        self.decaying = PretrainRows(data.train, train.decay_seq_len, seed + 1)
        self.schedule, self.out = schedule, out

    def refresh(self, step: int, position: int) -> None:
        self.schedule.begin_decay_if_due(step, asked=(self.out / "DECAY").exists())

    def batch(self, rows: Sequence[int]) -> TrainBatch:
        phase = self.stable if self.schedule.decay_start is None else self.decaying
        short, long = self.stable.seq_len, phase.seq_len
        ids_BS = phase.take(rows[0] * short // long, len(rows) * short // long)
        predicted_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        predicted_BS[:, 0] = False
        document_BS = torch.zeros_like(ids_BS)
        document_BS[:, -1] = -1  # only predicted, never read
        return TrainBatch(
            ids_BS, predicted_BS, document_BS, torch.arange(long + 1).expand_as(ids_BS)
        )

    def tensors(self) -> dict[str, Tensor]:
        start = self.schedule.decay_start
        return {} if start is None else {"decay_start": torch.tensor(start)}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            self.schedule.decay_start = int(tensors["decay_start"])


class Journal(MetricsLog):
    """OUT/log.jsonl, with the tokens read and the minutes that are left."""

    measured: ClassVar[str] = Evaluation.key

    def __init__(self, path: Path, schedule: TokenSchedule, reporter: Reporter) -> None:
        super().__init__(path, warn=reporter.warn)
        self.schedule, self.seconds = schedule, 0.0

    def write(self, **values: Any) -> None:
        step, each = values.pop("step"), self.schedule.recipe.tokens_per_step
        self.seconds = values.pop("seconds", self.seconds)
        line: dict[str, Any] = {"step": step, "tokens": step * each, **values}
        left = self.schedule.steps - step
        if self.measured in values:
            line = {"state": "running" if left > 0 else "finished", **line}
        elif "tokens_per_second" in values:
            speed = values["tokens_per_second"]
            eta = round(left * each / speed / 60, 1)
            line |= {"tokens_per_second": round(speed), "eta_minutes": eta}
        line["seconds"] = round(self.seconds)
        shown = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in line.items()}
        super().write(**shown)


def config_of(model: Any) -> dict[str, Any]:
    """The config of an export: nothing that says no more than the default, old spellings beside
    the new ones, so that earlier transformers and other engines read the same values."""
    config: Any = model.config
    kept = {k: v for k, v in config.to_dict().items() if k not in NOT_A_LANGUAGE_MODEL}
    rope = getattr(config, "rope_parameters", None) or {}
    return {
        **kept,
        "architectures": [type(model).__name__],
        **({"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}),
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def export_snapshot(folder: Path, model: Any, tokenizer: Any) -> None:
    """A folder that AutoModelForCausalLM loads (another model: as its kind does): bf16 weights,
    config, tokenizer."""
    if (own := own_model(model)) is not None:
        own.export(folder, model, tokenizer)
        return
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()
    }
    unfinished = folder / "model.partial"
    save_file(weights, unfinished, metadata={"format": "pt"})
    write_json(folder / "config.json", config_of(model))
    model.generation_config.eos_token_id = end_ids(tokenizer)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    portable = {key: value for key, value in settings.items() if key not in LOCAL_SETTINGS}
    # the names that every version of transformers knows
    portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    portable["additional_special_tokens"] = portable.pop("extra_special_tokens", [])
    write_json(folder / "tokenizer_config.json", portable)
    unfinished.chmod(0o644)
    os.replace(unfinished, folder / "model.safetensors")


# -- the run --------------------------------------------------------------------------------------


def pretrain(
    recipe_path: Path, out: Path, resume: bool = False, reporter: Reporter | None = None
) -> Evaluation:
    """Train, log, save and export to OUT; returns the last held-out evaluation. A signal to stop is
    no error: what was trained until then is saved, exported and evaluated."""
    recipe, reporter = load_pretrain_recipe(recipe_path), reporter or SilentReporter()
    plan, report = recipe.train, recipe.report
    check_model(recipe)  # before the text is read
    torch.set_num_threads(plan.num_threads)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.yaml").write_text(yaml.safe_dump(recipe.model_dump(), sort_keys=False))
    data = (prepare_data if recipe.images is None else prepare_pictures)(recipe, out)
    model = build_model(recipe, data.tokenizer)
    schedule, stop = TokenSchedule(plan), Stop("run the same command again")
    seen: list[Evaluation] = []

    def measure() -> Evaluation:
        is_whole = progress.step >= schedule.steps
        num_tokens = report.final_eval_tokens if is_whole else report.eval_tokens
        seen.append(evaluate(model, data.heldout, plan.seq_len, num_tokens))
        return seen[-1]

    def export() -> None:
        export_snapshot(out / EXPORT, model, data.tokenizer)
        save_codebook(data, out / EXPORT)

    saving = Timer(report.save_every_seconds)
    exporting = Timer(report.export_every_seconds, FIRST_EXPORT_SECONDS)

    def between(progress: TrainProgress) -> None:
        saving.act_if_due(lambda: save(job, progress))
        exporting.act_if_due(export)

    job = _job(recipe, out, model, PhaseText(data, recipe, schedule, out), stop, reporter)
    job = replace(job, measure=measure, between=between)
    progress = _begin(job, resume)
    with stop.listening(), kept_memory(torch.device("cpu")):
        stop.is_deferred = True
        try:
            train(job, progress)
        except Interrupted:
            pass
        except DivergedError as error:
            do = "lower the learning rates in the recipe; the same command continues"
            raise DivergedError(error.what, found=error.found, do=do, where=error.where) from error
        export()
    if progress.step < schedule.steps:
        job.log.write(step=progress.step, state="stopped", **measure().log_line())
    elif not seen:  # it was finished before
        measure()
    return seen[-1]


class Timer:
    """Something that is due every so many seconds, the first time perhaps sooner."""

    def __init__(self, every: float, first: float | None = None) -> None:
        self.every = every
        self._due = time.monotonic() + min(every, every if first is None else first)

    def act_if_due(self, action: Callable[[], None]) -> None:
        if time.monotonic() >= self._due:
            action()
            self._due = time.monotonic() + self.every


def _job(
    recipe: PretrainRecipe, out: Path, model: Any, text: PhaseText, stop: Stop, reporter: Reporter
) -> Job:
    """What the loop works with, but for what is measured and what else is done between steps."""
    plan, each = recipe.train, recipe.train.tokens_per_step
    trained = Pretrained(model, recipe)
    settings = TrainPart(
        steps=text.schedule.steps,
        rows=plan.micro_batch,
        accumulate=plan.accumulate,
        clip=plan.clip,
        log_every=math.ceil(recipe.report.log_tokens / each),
        tau_every=math.ceil(recipe.report.eval_every_tokens / each),
        save_every=10**9,  # by the clock
        nan_patience=1,
    )
    return Job(
        drafter=trained,
        settings=settings,
        schedule=text.schedule,
        order=StreamPlaces(),
        batch=text.batch,
        measure=lambda: Evaluation(0.0, 0.0, 0),
        optimizers=build_optimizers(model, plan),
        gradient=Gradient(trained.trainable()),
        checkpoints=Checkpoints(out / STATE, reporter),
        log=Journal(out / LOG, text.schedule, reporter),
        stop=stop,
        reporter=reporter,
        out=out,
        draft_length=0,
        autocast=nullcontext,  # a part of the loss, which may be compiled
        text=text,
    )


def has_state(out: Path) -> bool:
    """Whether OUT holds a run that can be continued."""
    return (out / OLD_STATE).is_file() or bool(saved_steps(out / STATE))


def _begin(job: Job, resume: bool) -> TrainProgress:
    """Where the run stands: at its newest state, or at the beginning, earlier states removed."""
    if not resume:
        for step in job.checkpoints.steps():
            shutil.rmtree(job.checkpoints.path(step))
        job.log.rewind(-1, -1)
        return TrainProgress()
    if not has_state(job.out):
        raise FileError(
            f"no checkpoint in {job.out}", do="run without --resume, or name another --out"
        )
    return restore(job, job.checkpoints.newest() or _old_state(job))


def _old_state(job: Job) -> Snapshot:
    """The single file that earlier versions kept: weights, optimizer states by number, progress."""
    names = {parameter: name for name, parameter in job.drafter.trainable().items()}
    tensors: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "text": {}}
    kinds = list(job.optimizers)
    with safe_open(job.out / OLD_STATE, framework="pt") as file:
        for name in list(file.keys()):
            part, rest = name.split(".", 1)
            if part == "optimizer":
                index, number, key = rest.split(".")
                groups = job.optimizers[kinds[int(index)]].param_groups
                parameter = [p for group in groups for p in group["params"]][int(number)]
                rest = f"{kinds[int(index)]}/{names[parameter]}/{key}"
            tensors[part][rest] = file.get_tensor(name)
        stood = json.loads(file.metadata()["progress"])
    if stood["decay_start"] is not None:
        tensors["text"]["decay_start"] = torch.tensor(stood["decay_start"])
    step, settings = stood["step"], job.settings
    progress = TrainProgress(
        step, step * settings.rows * settings.accumulate, stood["tokens"], stood["seconds"]
    )
    scalars = {"progress": asdict(progress), "optimizer": {}}
    return Snapshot(step, tensors, {}, scalars)
