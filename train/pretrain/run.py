"""Pre-train a small Llama from nothing: THE loop behind the embedded target of `recipes/tiny`.

Muon (https://kellerjordan.github.io/posts/muon/) moves the hidden matrices, AdamW the embedding and
the norms; the learning rate warms up, stays, and falls linearly to zero over the last tokens.
Schedules count tokens, never seconds. A file OUT/DECAY starts the fall at once; SIGTERM saves,
and so does SIGHUP.
Shapes: B rows, S sequence, D width, V vocabulary, N = B * S.
"""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from specctl.core.errors import DivergedError
from specctl.train.pretrain.data import Ids, PretrainRows, prepare_data, rows_of_phase
from specctl.train.pretrain.files import (
    Journal,
    export_snapshot,
    load_checkpoint,
    save_checkpoint,
)
from specctl.train.pretrain.recipe import (
    PretrainProgress,
    PretrainRecipe,
    ReportRecipe,
    TrainRecipe,
    begin_decay_if_due,
    end_tokens,
    is_finished,
    learning_rate_factor,
    load_pretrain_recipe,
)
from specctl.train.stop import HANGUP, hangup, leave_terminal

FIRST_EXPORT_SECONDS = 240.0  # the first snapshot comes early, so that others can begin with it


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out loss in nats and the share of next tokens that the model ranks first."""

    loss: float
    accuracy: float
    tokens: int


@dataclass(slots=True)
class Meter:
    """Sums since the last log line; written by `pretrain` alone."""

    tokens: int
    since: float
    loss: float = 0.0
    count: int = 0


def build_model(recipe: PretrainRecipe, tokenizer: Any) -> Any:
    """A fresh Llama whose output projections are zero: every block starts as an identity."""
    config = LlamaConfig(
        **recipe.model,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.data.seed)
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def build_optimizers(model: nn.Module, recipe: TrainRecipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the (tied) embedding and the norms."""
    named = list(model.named_parameters())
    norms = [p for _, p in named if p.ndim == 1]
    embeddings = [p for name, p in named if p.ndim == 2 and "embed_tokens" in name]
    matrices = [p for name, p in named if p.ndim == 2 and "embed_tokens" not in name]
    assert len(norms) + len(embeddings) + len(matrices) == len(named)
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
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def next_token_loss(model: Any, rows_BS: Tensor, autocast: bool) -> Tensor:
    """Mean cross-entropy of the next token over rows of S + 1 ids."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        hidden_BSD = model.model(input_ids=rows_BS[:, :-1], use_cache=False).last_hidden_state
        logits_BSV = model.lm_head(hidden_BSD)
    return F.cross_entropy(logits_BSV.flatten(0, 1).float(), rows_BS[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Any, ids: Ids, seq_len: int, max_tokens: int) -> Evaluation:
    """Loss and accuracy in float32 on rows spread evenly at random over `ids`."""
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


@contextmanager
def stop_on_sigterm() -> Iterator[list[int]]:
    """A list that is no longer empty once SIGTERM has come, or the terminal was closed."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        del frame
        if number == HANGUP:
            leave_terminal()
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, *hangup())}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _log_step(
    journal: Journal, meter: Meter, progress: PretrainProgress, recipe: TrainRecipe, norm: Tensor
) -> None:
    now = time.monotonic()
    speed = (progress.tokens - meter.tokens) / (now - meter.since)
    journal.write(
        step=progress.step,
        tokens=progress.tokens,
        loss=meter.loss / meter.count,
        lr=learning_rate_factor(progress, recipe),
        norm=float(norm),
        tokens_per_second=round(speed),
        seconds=round(progress.seconds),
        eta_minutes=round((end_tokens(progress, recipe) - progress.tokens) / speed / 60, 1),
    )
    meter.tokens, meter.since, meter.loss, meter.count = progress.tokens, now, 0.0, 0


def _log_evaluation(
    journal: Journal, progress: PretrainProgress, seen: Evaluation, state: str
) -> None:
    journal.write(
        state=state,
        step=progress.step,
        tokens=progress.tokens,
        seconds=round(progress.seconds),
        heldout_loss=seen.loss,
        heldout_accuracy=seen.accuracy,
        heldout_tokens=seen.tokens,
    )


def _is_due(progress: PretrainProgress, recipe: TrainRecipe, report: ReportRecipe) -> bool:
    before = progress.tokens - recipe.tokens_per_step
    return progress.tokens // report.eval_every_tokens > before // report.eval_every_tokens


def pretrain(recipe_path: Path, out: Path, resume: bool = False) -> Evaluation:
    """Train, log, save and export to OUT; returns the last held-out evaluation."""
    recipe = load_pretrain_recipe(recipe_path)
    plan, report = recipe.train, recipe.report
    torch.set_num_threads(plan.num_threads)
    out.mkdir(parents=True, exist_ok=True)
    (out / "run.yaml").write_text(yaml.safe_dump(asdict(recipe), sort_keys=False))
    data = prepare_data(recipe, out)
    model = build_model(recipe, data.tokenizer)
    optimizers = build_optimizers(model, plan)
    progress = load_checkpoint(out, model, optimizers) if resume else PretrainProgress()
    rows = rows_of_phase(data, recipe, progress.decay_start is not None)
    loss_of = torch.compile(next_token_loss, dynamic=False) if plan.compile else next_token_loss
    journal = Journal(out / "log.jsonl")

    saved = now = time.monotonic()
    began = now - progress.seconds
    exported = now - max(0.0, report.export_every_seconds - FIRST_EXPORT_SECONDS)
    meter = Meter(progress.tokens, now)
    with stop_on_sigterm() as stopped:
        while not is_finished(progress, plan) and not stopped:
            if begin_decay_if_due(progress, plan, asked=(out / "DECAY").exists()):
                rows = rows_of_phase(data, recipe, is_decaying=True)
            num_rows = plan.micro_batch * plan.seq_len // rows.seq_len
            factor = learning_rate_factor(progress, plan)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak_lr"] * factor
            for part in range(plan.accumulate):
                first = (progress.step * plan.accumulate + part) * num_rows
                loss = loss_of(model, rows.take(first, num_rows), plan.autocast)
                torch.autograd.backward(loss / plan.accumulate)
                meter.loss += float(loss.detach())
                meter.count += 1
            norm = nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
            if not math.isfinite(float(norm)):
                raise DivergedError(
                    f"gradient norm {float(norm)} at step {progress.step}",
                    do=f"lower the learning rates and resume from {out}",
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress.step += 1
            progress.tokens += plan.tokens_per_step

            now = time.monotonic()
            progress.seconds = now - began
            if progress.tokens - meter.tokens >= report.log_tokens:
                _log_step(journal, meter, progress, plan, norm)
            if _is_due(progress, plan, report):
                seen = evaluate(model, data.heldout, plan.seq_len, report.eval_tokens)
                _log_evaluation(journal, progress, seen, "running")
            if now - saved >= report.save_every_seconds:
                save_checkpoint(out, model, optimizers, progress)
                saved = now
            if now - exported >= report.export_every_seconds:
                export_snapshot(out / "export", model, data.tokenizer)
                exported = now
        save_checkpoint(out, model, optimizers, progress)
        export_snapshot(out / "export", model, data.tokenizer)
    is_whole = is_finished(progress, plan)
    num_tokens = report.final_eval_tokens if is_whole else report.eval_tokens
    seen = evaluate(model, data.heldout, plan.seq_len, num_tokens)
    _log_evaluation(journal, progress, seen, "finished" if is_whole else "stopped")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Pre-train a small Llama from a recipe.")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/tiny-target.yaml"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    pretrain(options.recipe, options.out, options.resume)


if __name__ == "__main__":
    main()
