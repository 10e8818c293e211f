"""A target spread over the processes by tensor parallelism, read for rows that differ by process.

A forward of it is one of all processes, on the same tokens. While a drafter is trained each process
has rows of its own; so the processes take turns: the rows of the first are read by all, then those
of the second, and each keeps what was read of its own. All ask equally often, whatever the rows.
Letters: B rows, S sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Borrowed, Feed, LanguageModel, LmOut, Masks
from specctl.models.hf.hf_lm import HfLM
from specctl.recipes.schema import DataPart, TargetPart, TrainPart
from specctl.runtime.target.target import Target
from specctl.train.distributed.ranks import Ranks


class InStepLM(LanguageModel):
    """The model of all processes as that of each. It reads documents, and cannot be run: decoding
    is one process's work."""

    can_run = False
    reason = "its matrices are spread over the processes (target.tensor_parallel)"

    def __init__(self, inner: HfLM, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.spec, self.module = inner.spec, inner.module
        self._borrowed: Borrowed | None = None

    @property
    def has_plain_head(self) -> bool:
        """As the model that is spread."""
        return self.inner.has_plain_head

    def document_masks(self, document_BS: Tensor) -> Masks:
        """The numbers of the documents; every process makes the masks of the rows at hand."""
        return Masks(document_BS)

    def run(self, feed: Feed, kv: SlotKV | None) -> LmOut:
        if kv is not None or feed.parts is not None or feed.residual_BTD is not None:
            raise self._refusal()
        mine: LmOut | None = None
        for rank, (rows, places) in enumerate(self._shapes(feed.ids_BT)):
            given = [feed.ids_BT, feed.position_BT, feed.masks.full]
            if rank != self.ranks.rank:
                given = [each.new_empty(rows, places) for each in given]
            for each in given:
                dist.broadcast(each.contiguous(), src=rank)
            ids_BS, position_BS, document_BS = given
            masks = self.inner.document_masks(document_BS)
            read = replace(feed, ids_BT=ids_BS, position_BT=position_BS, masks=masks)
            out = self.inner.run(read, None)
            mine = out if rank == self.ranks.rank else mine
        assert mine is not None, "each process has its turn"
        return mine

    def _shapes(self, ids_BS: Tensor) -> list[list[int]]:
        """Rows and places of every process's batch."""
        own = torch.tensor(ids_BS.shape, device=ids_BS.device)
        found = [torch.empty_like(own) for _ in range(self.ranks.size)]
        dist.all_gather(found, own)
        return [each.tolist() for each in found]

    def borrowed(self) -> Borrowed:
        """Whole on every process; the layers are not lent."""
        if self._borrowed is None:
            self._borrowed = replace(self.inner.borrowed(), lm=None)
        return self._borrowed

    def new_kv(self, num_slots: int, max_len: int) -> SlotKV:
        raise self._refusal()

    def _refusal(self) -> IncompatibleError:
        return IncompatibleError(
            "the target is spread over the processes, which only read documents together",
            found="something that decodes, or runs some of its layers",
            expected="training on documents that are there",
            do="let a server that has the target write them: specctl regenerate --endpoint URL",
        )


def in_step(part: TargetPart, target: Target, ranks: Ranks) -> Target:
    """The same target, read in turns where it is spread over the processes."""
    if not part.tensor_parallel:
        return target
    assert isinstance(target.lm, HfLM), "what is spread is transformers' own module"
    return replace(target, lm=InStepLM(target.lm, ranks))


def check_spread(part: TargetPart, data: DataPart, train: TrainPart, processes: int) -> None:
    """Refuse a way of spreading the target that so many processes cannot take."""
    others = {
        "train.parallel: fsdp": train.parallel == "fsdp",
        "train.joint": train.joint is not None,
        "train.shard_target: true": train.shard_target,
        "data.features: offline": data.features == "offline",
        f"data.target_source: {data.target_source}": data.target_source != "inprocess",
    }
    if part.tensor_parallel and processes == 1:
        raise RecipeError(
            "a target is spread over processes, and there is one",
            where="target.tensor_parallel",
            found="true, one process",
            expected="one process for each GPU",
            do="--gpus 2 (or torchrun), or --set target.device_map=auto --set "
            "target.tensor_parallel=false",
        )
    if part.tensor_parallel:
        found = [name for name, is_set in others.items() if is_set]
    elif part.device_map is not None:
        found = [name for name in list(others)[1:3] if others[name]]
        if processes > 1 and part.device_map != "cpu-offload":
            found.append(f"{processes} processes, each of which would take every GPU")
    else:
        return
    if found:
        name = "tensor_parallel" if part.tensor_parallel else "device_map"
        raise RecipeError(
            f"a target that is spread by target.{name} cannot be combined with that",
            where=f"target.{name}",
            found=found[0],
            expected="drafters trained by DDP on states that this process reads"
            if part.tensor_parallel
            else "one process, or device_map: cpu-offload",
            do=f"leave out {found[0].split(':')[0]}"
            if "processes" not in found[0]
            else "--set target.device_map=null --set target.tensor_parallel=true, or one process",
        )
