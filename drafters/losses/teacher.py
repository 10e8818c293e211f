"""The target's distributions as a loss asks for them: log p at the draft's ids, and the most
probable id.
Letters: C candidates, D hidden width, K draft vocabulary, Q picked rows, R flat rows, V target
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specctl.core.batch import HeadRows
from specctl.models.native.kl import TargetRows, is_compiled_for, is_read, log_z_and_best


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """`log_p_QK` over the draft ids, not renormalised there; `best_Q` most probable target ids."""

    log_p_QK: Tensor
    best_Q: Tensor


@dataclass(frozen=True, slots=True)
class TeacherLogits:
    """The target's distributions at one temperature. Where several losses ask for the same rows,
    their log-normalisers and most probable ids are read once beforehand (`of`); a single loss reads
    each row when it needs it. Rows that `of` was not given hold zeros. `logits_RK`: those of the
    draft ids alone, once `over` has picked them."""

    logits_RV: Tensor | HeadRows
    temperature: float = 1.0
    log_z_R: Tensor | None = None
    best_R: Tensor | None = None
    logits_RK: Tensor | HeadRows | None = None

    @classmethod
    def known(cls, logits_RV: Tensor | HeadRows, temperature: float) -> TeacherLogits:
        """With what was kept of the rows beside their states."""
        if isinstance(logits_RV, Tensor) or temperature != 1.0:
            return cls(logits_RV, temperature)
        return cls(logits_RV, temperature, logits_RV.log_z_R, logits_RV.best_R)

    @classmethod
    @torch.no_grad()
    def of(
        cls, logits_RV: Tensor | HeadRows, row_Q: Tensor, temperature: float, chunk: int
    ) -> TeacherLogits:
        """Reads the whole vocabulary once per row of `row_Q`, `chunk` rows at a time, where that is
        not known."""
        teacher = cls.known(logits_RV, temperature)
        if teacher.log_z_R is not None:
            return teacher
        best_R = torch.zeros(len(logits_RV), dtype=torch.long, device=logits_RV.device)
        log_z_R: Tensor | None = None
        for rows in torch.split(row_Q, chunk):
            log_z_Q, best_R[rows] = teacher._whole(rows)
            if log_z_R is None:
                log_z_R = log_z_Q.new_zeros(len(logits_RV))
            log_z_R[rows] = log_z_Q
        return cls(logits_RV, temperature, log_z_R, best_R)

    def over(self, ids_K: Tensor) -> TeacherLogits:
        """This teacher for distributions at these draft ids: what is already known of the whole
        vocabulary need not be computed again."""
        if self.log_z_R is None or self.logits_RK is not None:
            return self
        whole = self.logits_RV
        picked = whole[:, ids_K] if isinstance(whole, Tensor) else whole.over(ids_K)
        return replace(self, logits_RK=picked)

    @torch.no_grad()
    def made(self, ids_K: Tensor, row_Q: Tensor, chunk: int) -> TeacherLogits:
        """This teacher with its rows over these draft ids made once, for several losses."""
        assert isinstance(self.logits_RV, HeadRows)
        few, out_RK = self.logits_RV.over(ids_K), None
        for rows in torch.split(row_Q, chunk):
            made_QK = few[rows]
            if out_RK is None:
                out_RK = made_QK.new_zeros(len(few), len(ids_K))
            out_RK[rows] = made_QK
        return replace(self, logits_RK=out_RK)

    @property
    def source(self) -> Tensor:
        """What the scores are, or are computed from."""
        return self.logits_RV if isinstance(self.logits_RV, Tensor) else self.logits_RV.state_RD

    def rows(self, row_Q: Tensor, ids_K: Tensor | None) -> TargetRows:
        """Raw scores of rows in float32 or better, copied only where they must be, and what is
        known of them; ids_K as in `distribution`."""
        scores = self.logits_RV if self.logits_RK is None else self.logits_RK
        ids_K = ids_K if self.logits_RK is None else None
        known = [None if x is None else x[row_Q] for x in (self.log_z_R, self.best_R)]
        if not is_read(scores):
            scores, row_Q = wide(scores[row_Q]), torch.arange(len(row_Q), device=row_Q.device)
        assert isinstance(scores, Tensor)
        return TargetRows(scores, row_Q, self.temperature, ids_K, *known)

    @torch.no_grad()
    def distribution(self, row_Q: Tensor, ids_K: Tensor | None) -> TeacherRows:
        """The distribution of rows at the draft ids (None = all)."""
        if self.log_z_R is None or self.best_R is None:
            scores_QV = self._scores(row_Q)
            log_z_Q, best_Q = scores_QV.logsumexp(-1), _best(scores_QV)
            scores_QK = scores_QV if ids_K is None else scores_QV[:, ids_K]
        else:
            log_z_Q, best_Q = self.log_z_R[row_Q], self.best_R[row_Q]
            scores_QK = self._scores(row_Q, ids_K)
        return TeacherRows(scores_QK.sub_(log_z_Q[:, None]), best_Q)

    @torch.no_grad()
    def at(self, row_Q: Tensor, ids_QC: Tensor) -> Tensor:
        """[Q, C]: log p of a few target ids in each of these rows."""
        whole = self.logits_RV
        few = (
            whole[row_Q[:, None], ids_QC] if isinstance(whole, Tensor) else whole.at(row_Q, ids_QC)
        )
        few_QC = wide(few) / self.temperature
        log_z_Q = self._whole(row_Q)[0] if self.log_z_R is None else self.log_z_R[row_Q]
        return few_QC - log_z_Q[:, None]

    def best(self, row_Q: Tensor) -> Tensor:
        """[Q]: the most probable target ids of these rows."""
        return self._whole(row_Q)[1] if self.best_R is None else self.best_R[row_Q]

    def _whole(self, row_Q: Tensor) -> tuple[Tensor, Tensor]:
        """[Q]: log-normalisers and most probable ids."""
        is_compiled = is_compiled_for(self.source)
        found = log_z_and_best(self.rows(row_Q, None)) if is_compiled else None
        if found is not None:
            return found
        scores_QV = self._scores(row_Q)
        return scores_QV.logsumexp(-1), _best(scores_QV)

    def _scores(self, row_Q: Tensor, ids_K: Tensor | None = None) -> Tensor:
        """A copy of raw logits, in float32 or better, over the temperature."""
        if ids_K is None:
            picked = self.logits_RV[row_Q]
        elif self.logits_RK is not None:
            picked = self.logits_RK[row_Q]
        elif isinstance(self.logits_RV, Tensor):
            picked = self.logits_RV[row_Q[:, None], ids_K]
        else:
            picked = self.logits_RV[row_Q][:, ids_K]
        picked = wide(picked)
        return picked if self.temperature == 1.0 else picked / self.temperature


def _best(scores_QV: Tensor) -> Tensor:
    """[Q]: the most probable ids; on a CPU `argmax` takes 1.7 times as long."""
    return scores_QV.max(-1).indices


def wide(logits: Tensor) -> Tensor:
    """Float32, unless it is float64 already."""
    return logits if logits.dtype == torch.float64 else logits.float()
