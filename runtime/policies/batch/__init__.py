"""Batch policies: how long every row of a batch drafts in a round. One file per policy."""

from __future__ import annotations

from specctl.runtime.policies.batch.base import Batching, RowView

__all__ = ["Batching", "RowView"]
