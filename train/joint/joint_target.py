"""What joint training leaves behind: OUT/target, and how far it is from the target that came.

Measured on held-out text, the same for every run: KL(p || p') per token between the original's
distribution and the changed one's, how often both would say the same token, the perplexity of
either. Generation with the drafter is lossless with respect to OUT/target, and only to that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.errors import GateError
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.variants.target_change import TargetChange
from specctl.train.assemble import measuring_rows
from specctl.train.data.prompts.heldout import heldout_prompts
from specctl.train.data.rows.rows import TokenData
from specctl.train.features.capture import capture
from specctl.train.joint.joint import TEACHER, JointModel, original_distribution, target_loss
from specctl.train.metrics.metrics import MetricsLog, read_log
from specctl.train.step.lora import merge, save_adapter

FOLDER, CONFIG, ADAPTER = "target", "config.json", "target-adapter"
TEXTS, ROWS_AT_ONCE = 64, 8  # measured on; read at a time


def save_joint_target(
    joint: JointModel, original: Target, texts: Sequence[TrainBatch], out: Path
) -> Target:
    """Write OUT/target and read it back: the target that the drafter is for, with what changed, as
    measured on the texts."""
    folder = out / FOLDER
    save_adapter(joint.target.lm.module, out / ADAPTER, joint.part, original.name)
    _write(joint.target, folder)
    dtype = str(original.dtype).removeprefix("torch.")
    found = load_target(str(folder), dtype=dtype, device=str(original.device))
    if found.tokenizer_fingerprint != original.tokenizer_fingerprint:
        raise GateError(
            "the tokenizer of the changed target is not the original's",
            found=str(found.tokenizer_fingerprint),
            expected=str(original.tokenizer_fingerprint),
            do="report this with the tokenizer's class",
            where=str(folder),
        )
    change = measured_change(original, found, texts)
    (folder / "README.md").write_text(_card(original, change), encoding="utf-8")
    return replace(found, changed=change)


def _write(changed: Target, folder: Path) -> None:
    """The additions merged. In an older folder of this run every file is replaced, the
    configuration last, so that a mixture cannot be loaded; what else lies there stays."""
    merge(changed.lm.module)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_target(changed, partial)
    if not folder.exists():
        os.replace(partial, folder)
        return
    (folder / CONFIG).unlink(missing_ok=True)
    for path in sorted(partial.iterdir(), key=lambda path: (path.name == CONFIG, path.name)):
        os.replace(path, folder / path.name)
    partial.rmdir()


def held_out(part: DataPart, seq_len: int, target: Target, data: TokenData) -> list[TrainBatch]:
    """Text that no step has read: rows kept back, or the built-in corpus' held-out prompts, of
    which `seq_len` tokens are read."""
    rows = list(measuring_rows(part, data))[:TEXTS]
    if rows:
        batches = [
            data.batch(rows[i : i + ROWS_AT_ONCE]) for i in range(0, len(rows), ROWS_AT_ONCE)
        ]
        return [replace(b, loss_mask_BS=b.document_BS >= 0) for b in batches]
    texts = [prompt.ids[:seq_len] for prompt in heldout_prompts(target, TEXTS)]
    return [_padded(texts[i : i + ROWS_AT_ONCE]) for i in range(0, len(texts), ROWS_AT_ONCE)]


def _padded(texts: Sequence[Sequence[int]]) -> TrainBatch:
    """Texts of any length as rows of which everything but the first token is to be predicted."""
    length = max(map(len, texts))
    ids_BS = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts])
    position_BS = torch.arange(length).expand(len(texts), length)
    is_text_BS = position_BS < torch.tensor([len(text) for text in texts])[:, None]
    return TrainBatch(ids_BS, is_text_BS, is_text_BS.long() - 1, position_BS)


def measured_change(
    original: Target, changed: Target, batches: Sequence[TrainBatch]
) -> TargetChange:
    """How far two models over the same tokens are apart on these texts."""
    needs = replace(TEACHER, taps=(original.spec.num_layers,))
    apart, before, after = list[LossOut](), list[LossOut](), list[LossOut]()
    with torch.no_grad():
        for batch in batches:
            ours, theirs = capture(changed, batch, needs), capture(original, batch, needs)
            apart.append(target_loss(changed, ours, original_distribution(original, batch)))
            after.append(target_loss(changed, ours, None))
            before.append(target_loss(original, theirs, None))
    tokens = sum(float(out.count) for out in apart)
    agreed = sum(float(out.metrics["target_agreement"][0]) for out in apart)
    return TargetChange(
        name=original.name,
        fingerprint=original.fingerprint,
        kl=_mean(apart),
        agreement=agreed / tokens,
        perplexity_before=float(torch.tensor(_mean(before)).exp()),
        perplexity=float(torch.tensor(_mean(after)).exp()),
        tokens=round(tokens),
    )


def _mean(parts: Sequence[LossOut]) -> float:
    return sum(float(out.sum) for out in parts) / sum(float(out.count) for out in parts)


def say_change(changed: Target, folder: Path, reporter: Reporter) -> None:
    """Say that generation is no longer the original's, and by how much."""
    assert changed.changed is not None
    reporter.warn(f"THE TARGET WAS CHANGED: the drafter is for {folder}, not for the original")
    reporter.say(changed.changed.text())


def log_change(changed: Target, log: MetricsLog, step: int) -> None:
    """One line of metrics.jsonl, also when a finished run is asked for again."""
    assert changed.changed is not None
    known = log.path.exists() and any("perplexity" in line for line in read_log(log.path))
    if not known:
        fields = asdict(changed.changed)
        of = {f"original_{key}": fields.pop(key) for key in ("name", "fingerprint")}
        log.write(step=step, **of, **fields)


def _card(original: Target, change: TargetChange) -> str:
    return (
        f"# {Path(original.name).name}, changed\n\n"
        "Trained together with a drafter by specctl: low-rank additions to its hidden matrices are "
        "merged into its weights. It is **another model** than the one it was made from. "
        "Speculative generation with that drafter follows this model's distribution exactly, not "
        f"the original's.\n\n{change.text()}\n\n"
        "The licence of the original model binds these weights.\n"
    )
