"""A training job small enough to be killed hundreds of times: an own drafter on rows in memory.

Loaded by path (tests and benchmarks are no package). B rows, S sequence, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specctl.core.batch import LossOut, TrainBatch
from specctl.core.drafter import Drafter, DraftState, Needs, Space
from specctl.core.spec import ModelSpec
from specctl.core.storage.files import Disk
from specctl.recipes.schema import TrainPart
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.train.data.rows.supply import Order
from specctl.train.distributed.ranks import Ranks
from specctl.train.distributed.sharding import Sharded
from specctl.train.loop import Job
from specctl.train.metrics.metrics import MeasuredAcceptance, MetricsLog
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.state import seed_everything
from specctl.train.step.optim import Gradient, RecipeSchedule, build_optimizers
from specctl.train.stop import Stop

VOCAB, WIDTH, NUM_ROWS, SEQ_LEN = 24, 12, 10, 9
SPEC = ModelSpec("llama", 2, WIDTH, VOCAB, 2, 2, 6, 24, 1e-5, 1e4, 64)


class ToyNet(nn.Module):
    """Embedding, dropout (so that random state matters), a matrix, a norm, a head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        state_BSD = self.dropout(self.embed(ids_BS))
        return self.head(self.norm(state_BSD + torch.tanh(self.mix(state_BSD))))


class ToyDrafter(Drafter):
    family = "toy"
    module: ToyNet

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(None, SPEC)
        self.module = ToyNet(dropout)

    def needs(self) -> Needs:
        return Needs()

    def open(self, space: Space) -> DraftState:
        raise AssertionError("the toy never drafts")

    def loss(self, batch: TrainBatch) -> LossOut:
        logits_NV = self.module(batch.ids_BS[:, :-1])[batch.loss_mask_BS[:, 1:]]
        label_Q = batch.ids_BS[:, 1:][batch.loss_mask_BS[:, 1:]]
        count = torch.tensor(float(label_Q.numel()))
        hits = (logits_NV.argmax(-1) == label_Q).sum()
        total = F.cross_entropy(logits_NV, label_Q, reduction="sum")
        return LossOut(total, count, {"top1": (hits, count), "alpha": (hits, count)})


def rows(indices: Sequence[int]) -> TrainBatch:
    """Rows of a fixed random table; their numbers of supervised tokens differ."""
    source = torch.Generator().manual_seed(5)
    ids_RS = torch.randint(0, VOCAB, (NUM_ROWS, SEQ_LEN), generator=source)
    ids_RS[:, 1::2] = (ids_RS[:, 0::2][:, : SEQ_LEN // 2] + 1) % VOCAB
    length_R = torch.randint(3, SEQ_LEN + 1, (NUM_ROWS,), generator=source)
    at_S = torch.arange(SEQ_LEN)
    real_RS = at_S < length_R[:, None]
    index = torch.tensor(list(indices), dtype=torch.long)
    document_BS = torch.where(real_RS, 0, -1)[index]
    return TrainBatch(ids_RS[index], real_RS[index], document_BS, at_S.expand(len(index), SEQ_LEN))


def digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over names and bytes of tensors."""
    body = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        body.update(name.encode() + tensor.detach().contiguous().view(-1).numpy().tobytes())
    return body.hexdigest()


class Unflushed(Disk):
    """A disk that is quick because it flushes nothing; a kill of a process does not notice."""

    def fsync(self, descriptor: int) -> None:
        del descriptor


def measured(tau: float) -> MeasuredAcceptance:
    return MeasuredAcceptance(tau, 0.5, (0.5,), 1, 8, 0.0)


def make_job(
    out: Path,
    *,
    batch: Callable[[list[int]], TrainBatch] = rows,
    measure: Callable[[], MeasuredAcceptance] = lambda: measured(2.0),
    reporter: Reporter | None = None,
    disk: Disk | None = None,
    dropout: float = 0.3,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    fingerprint: dict[str, Any] | None = None,
    stop: Stop | None = None,
    is_sharded: bool = False,
    **settings: Any,
) -> Job:
    """A fresh job of 12 steps; keyword arguments change its settings."""
    ranks = ranks or Ranks()
    given = {"steps": 12, "rows": 4, "seq_len": SEQ_LEN, "save_every": 3, "tau_every": 100}
    part = TrainPart(**{**given, "log_every": 2, "learning_rate": 0.02, **settings})
    seed_everything(part.seed)
    drafter: Drafter = ToyDrafter(dropout).to(ranks.device, dtype)
    if is_sharded:
        drafter = Sharded(drafter, ranks)
    seed_everything(part.seed, ranks.rank)
    out.mkdir(parents=True, exist_ok=True)
    reporter, disk = reporter or SilentReporter(), disk or Unflushed()
    trainable = drafter.trainable()
    return Job(
        drafter=drafter,
        settings=part,
        schedule=RecipeSchedule(part),
        order=Order(NUM_ROWS, part.seed),
        batch=batch,
        measure=measure,
        optimizers=build_optimizers(trainable, part, frozenset({VOCAB})),
        gradient=Gradient(trainable, ranks),
        checkpoints=Checkpoints(
            out / "checkpoints", reporter, part.keep, ranks, disk or Unflushed()
        ),
        log=MetricsLog(out / "metrics.jsonl", ranks.is_main),
        stop=stop or Stop("specctl train-draft --out " + str(out)),
        reporter=reporter,
        out=out,
        draft_length=4,
        autocast=nullcontext,
        fingerprint=fingerprint or {},
        ranks=ranks,
    )
