"""What the target says of a row, kept on disk: taps and its distribution of the next token.

Per real token (padding is not kept): every tap that the drafter needs and, for a teacher, one of
  state    the target's last state, from which its head makes the logits again (a plain head only),
           with their log-normaliser and the most probable id for a drafter of few ids, which makes
           no other columns; thousands of numbers less per token than
  logits   all of them, for heads with something after the product;
  topk     the K largest logits, and the mass of the others, which is spread evenly over them.
Precision: fp32 keeps what was captured bit for bit; bf16; fp8 = float8_e4m3 with a scale per token.
Logits are stored minus their largest, where the distribution is dense and a float is finest.
Letters: N tokens, B rows, S width of a batch, D width, V vocabulary, K kept logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Needs
from specctl.drafters.losses.align import teacher_rows
from specctl.drafters.losses.head_losses import fitting_chunk
from specctl.drafters.losses.teacher import TeacherLogits
from specctl.recipes.schema import DataPart
from specctl.runtime.target.target import Target
from specctl.train.features.capture import has_plain_head, head_logits
from specctl.train.features.target_source import InProcess, TargetSource

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
KNOWN = ("log_z", "best")  # of a row's logits, kept as they are
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Form:
    """What is kept of a token, and how. `width` D, `vocab` V; `itemsize` bytes of a captured
    number; `has_log_z`: log-normaliser and most probable id beside the state."""

    taps: tuple[int, ...]
    teacher: str
    topk: int
    dtype: str
    width: int
    vocab: int
    itemsize: int
    has_log_z: bool = False

    @classmethod
    def of(cls, data: DataPart, target: Target, needs: Needs) -> Form:
        topk = data.teacher_topk if data.teacher_topk is not None else 0
        teacher = "none"
        if needs.teacher and 0 < topk < target.spec.vocab_size:
            teacher = "topk"
        elif needs.teacher:
            teacher = "state" if has_plain_head(target.lm) else "logits"
        return cls(
            needs.taps,
            teacher,
            topk if teacher == "topk" else 0,
            data.feature_dtype,
            target.spec.hidden_size,
            target.spec.vocab_size,
            target.dtype.itemsize,
            teacher == "state" and needs.teacher_log_z,
        )

    @property
    def bytes_per_token(self) -> int:
        """Of one token on disk, without the file's header."""
        each = {"fp32": self.itemsize, "bf16": min(2, self.itemsize), "fp8": 1}[self.dtype]
        scale = 4 if self.dtype == "fp8" else 0
        states = len(self.taps) + (self.teacher == "state")
        total = states * (each * self.width + scale) + 8 * self.has_log_z
        if self.teacher == "logits":
            total += each * self.vocab + scale
        if self.teacher == "topk":
            total += (each + 4) * self.topk + scale + 4
        return total


def read_target(
    target: Target, batch: TrainBatch, form: Form, source: TargetSource | None = None
) -> list[dict[str, Tensor]]:
    """Per row of the batch, what the target says of its real tokens, in full precision; by its
    own forward, else by `source`."""
    source = source if source is not None else InProcess(target)
    wanted = set(form.taps) | ({target.spec.num_layers} if form.teacher == "state" else set())
    needs = Needs(tuple(sorted(wanted)), teacher=form.teacher in ("logits", "topk"))
    found = source.read(batch, needs)
    known = dict[str, Tensor]()
    if form.has_log_z:
        of = _head_rows(target, found.taps[target.spec.num_layers])
        known = _known(with_log_z(of, teacher_rows(found)), batch.ids_BS.shape)
    rows: list[dict[str, Tensor]] = []
    for row, length in enumerate((batch.document_BS >= 0).sum(dim=1).tolist()):
        raw = {f"tap-{tap}": found.taps[tap][row, :length] for tap in form.taps}
        if form.teacher == "state":
            raw["state"] = found.taps[target.spec.num_layers][row, :length]
        raw |= {name: each_BS[row, :length] for name, each_BS in known.items()}
        if found.teacher_BSV is not None:
            raw["logits"] = found.teacher_BSV[row, :length]
        rows.append(raw)
    return rows


def with_log_z(rows: HeadRows, row_Q: Tensor) -> HeadRows:
    """With the log-normalisers and most probable ids of these rows at temperature 1: the whole
    vocabulary is read once."""
    chunk = fitting_chunk(rows.shape[1], rows.device)
    known = TeacherLogits.of(rows, row_Q, 1.0, chunk)
    return replace(rows, log_z_R=known.log_z_R, best_R=known.best_R)


def _known(rows: HeadRows, shape: torch.Size) -> dict[str, Tensor]:
    assert rows.log_z_R is not None
    assert rows.best_R is not None
    return {"log_z": rows.log_z_R.float().view(shape), "best": rows.best_R.int().view(shape)}


def _head_rows(target: Target, state_BSD: Tensor) -> HeadRows:
    head = target.borrowed()
    return HeadRows(state_BSD.flatten(0, 1), head.head_VD, head.head_bias_V)


def encode(raw: Tensors, form: Form) -> dict[str, Tensor]:
    """What is stored of tokens [N, ...]."""
    stored: dict[str, Tensor] = {}
    for name, values in raw.items():
        if name == "logits" and form.teacher == "topk":
            stored |= _kept_logits(values.float(), form)
        elif name == "logits" and form.dtype != "fp32":
            shifted = values.float() - values.float().amax(-1, keepdim=True)
            stored |= _packed(name, shifted, form.dtype)
        elif name in KNOWN:
            stored[name] = values
        else:
            stored |= _packed(name, values, form.dtype)
    return {name: values.cpu().contiguous() for name, values in stored.items()}


def _kept_logits(logits_NV: Tensor, form: Form) -> dict[str, Tensor]:
    shifted_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    value_NK, index_NK = shifted_NV.topk(form.topk, dim=-1)
    rest_N = shifted_NV.scatter(-1, index_NK, -math.inf).logsumexp(-1)
    kept = {"index": index_NK.to(torch.int32), "rest": rest_N}
    return kept | _packed("logits", value_NK, form.dtype)


def _packed(name: str, values: Tensor, dtype: str) -> dict[str, Tensor]:
    if dtype == "fp32":
        return {name: values}
    if dtype == "bf16":
        return {name: values.to(torch.bfloat16)}
    scale_N1 = values.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    small = (values.float() / scale_N1).to(FP8)
    return {name: small.view(torch.uint8), f"{name}/scale": scale_N1[:, 0]}


def decode(stored: Tensors, form: Form) -> dict[str, Tensor]:
    """What `encode` was given, as far as it was kept; logits always over the whole vocabulary."""
    raw: dict[str, Tensor] = {}
    for name, values in stored.items():
        if name in ("index", "rest") or name.endswith("/scale"):
            continue
        if f"{name}/scale" in stored:
            values = values.view(FP8).float() * stored[f"{name}/scale"][:, None]
        raw[name] = values
    if form.teacher == "topk":
        other_N1 = stored["rest"][:, None] - math.log(form.vocab - form.topk)
        full_NV = other_N1.repeat(1, form.vocab)
        raw["logits"] = full_NV.scatter_(-1, stored["index"].long(), raw["logits"].float())
    return raw


def with_features(
    target: Target, batch: TrainBatch, rows: Sequence[Tensors], needs: Needs, form: Form
) -> TrainBatch:
    """The batch with what was kept of its rows, in the target's dtype and on its device: what
    `capture` would have given it."""
    dtypes = {"log_z": torch.float32, "best": torch.int64}
    laid = {
        name: _laid(batch, [row[name] for row in rows], target, dtypes.get(name, target.dtype))
        for name in rows[0]
    }
    taps = {tap: laid[f"tap-{tap}"] for tap in form.taps}
    made = replace(batch, taps=taps, teacher_BSV=laid.get("logits"))
    if form.teacher != "state":
        return made
    if needs.teacher_rows:
        by_rows = _head_rows(target, laid["state"])
        if form.has_log_z:
            known = laid["log_z"].flatten(), laid["best"].flatten()
            by_rows = replace(by_rows, log_z_R=known[0], best_R=known[1])
        return replace(made, teacher_rows=by_rows)
    return replace(made, teacher_BSV=head_logits(target.lm, laid["state"]))


def _laid(batch: TrainBatch, rows: Sequence[Tensor], target: Target, dtype: torch.dtype) -> Tensor:
    """[B, S, ...]: the tokens of each row at its beginning, zeros on padding."""
    shape = (*batch.ids_BS.shape, *rows[0].shape[1:])
    laid = torch.zeros(shape, dtype=dtype, device=target.device)
    for place, values in zip(laid, rows, strict=True):
        place[: len(values)] = values.to(device=laid.device, dtype=laid.dtype)
    return laid
