"""TrunkState: how drafters on a `TrunkNet` serve.

A node less than `passes` tokens deep goes through the layers; a deeper one carries on what its
ancestor handed to the parallel heads, and costs an LM head only.
Letters: B rows, T true rows, M nodes, D width, O width of the layers' output, C carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from specctl.core.drafter import Space
from specctl.core.masks import chain_mask
from specctl.drafters.nets.blocks import Attending, attending
from specctl.drafters.nets.routed import RoutedHead, Router, read_head
from specctl.drafters.nets.trunk import TrunkNet
from specctl.drafters.states.feature_state import FeatureState, Fed
from specctl.drafters.states.tree_layout import Place
from specctl.models.kernels import Weight, can_pack, pack


class TrunkServing(Protocol):
    """What the state needs of its drafter (see `feature_drafter`)."""

    @property
    def net(self) -> TrunkNet: ...

    @property
    def router(self) -> Router | None: ...

    @property
    def tap(self) -> int: ...

    def embed(self, ids_X: Tensor) -> Tensor: ...

    def head_weight(self) -> Tensor: ...

    def version(self) -> int: ...


class TrunkState(FeatureState):
    """Memory of one engine. Of the nodes of a round it keeps, by call: what was mixed, what the
    layers made of it, what was handed to parallel heads, and how deep they stand."""

    def __init__(self, drafter: TrunkServing, space: Space) -> None:
        self.drafter, self.net = drafter, drafter.net
        self._mixed: list[Tensor] = []
        self._outs: list[Tensor] = []
        self._carries: list[Tensor] = []
        self._depths: list[Tensor] = []
        super().__init__(self.net.shape, len(self.net.layers), self.net.fc.weight, space)

    def weights_version(self) -> int:
        return self.drafter.version()

    def fuse_weights(self) -> None:
        weight, router = self.drafter.head_weight(), self.drafter.router
        self._head: Weight | RoutedHead
        if router is not None:
            self._head = RoutedHead.of(router, weight)
        else:
            self._head = pack(weight) if can_pack(weight) else weight.detach()

    def features(self, taps: Mapping[int, Tensor]) -> Tensor:
        return taps[self.drafter.tap].to(self.dtype)

    # -- true rows ------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, fed: Fed) -> None:
        self._true_rows(fed)

    def _true_rows(self, fed: Fed) -> tuple[Tensor, Tensor]:
        """What was mixed, and the layers' output, of every row."""
        x_BTD = self.net.mix(self.drafter.embed(fed.ids_BT), fed.state_BTD)
        mask = chain_mask(fed.start_B, fed.ids_BT.shape[1], self.kv.aim.span)
        return x_BTD, self.net.through(x_BTD, fed.turn_BT2E, self._attending(mask))

    def _attending(self, mask: Tensor | None) -> Callable[[int], Attending]:
        return lambda layer: attending(mask, self.kv, layer)

    @torch.no_grad()
    def newest(self, fed: Fed, kept_B: Tensor) -> Tensor:
        counts, (x_BTD, out_BTO) = fed.counts, self._true_rows(fed)
        if min(counts) == max(counts):
            x_B1D, out_B1O = x_BTD[:, -1:], out_BTO[:, -1:]
        else:
            row_B = torch.arange(len(counts), device=self.device)
            at_B = torch.tensor(counts, device=self.device) - 1
            x_B1D, out_B1O = x_BTD[row_B, at_B][:, None], out_BTO[row_B, at_B][:, None]
        if self.net.passes is not None:
            self._mixed, self._outs = [x_B1D], [out_B1O]
            self._carries = [self.net.handed(x_B1D, x_B1D, out_B1O)]  # for its shape only
            self._depths = [torch.zeros(len(counts), 1, dtype=torch.long, device=self.device)]
        return self._said(out_B1O)

    def _said(self, out_BMO: Tensor) -> Tensor:
        self._states.append(self.net.fed_back(out_BMO))
        return read_head(self.net.ready(out_BMO), self._head)

    # -- nodes ----------------------------------------------------------------------------------

    @torch.no_grad()
    def nodes(self, token_BM: Tensor, parent_BM: Tensor, place: Place) -> Tensor:
        state_BMD = self.of_parents(self._states, parent_BM, place)
        x_BMD = self.net.mix(self.drafter.embed(token_BM), state_BMD)
        passes = self.net.passes
        if passes is None:
            return self._said(self._pass(x_BMD, place))
        depth_BM = torch.cat(self._depths, dim=1).gather(1, parent_BM + 1) + 1
        depths = sorted(set(depth_BM.flatten().tolist()))  # heads are chosen by the host
        out_BMO = self.of_parents(self._outs, parent_BM, place)
        handed_BMC = self.net.handed(self.of_parents(self._mixed, parent_BM, place), x_BMD, out_BMO)
        carry_BMC = torch.where(
            (depth_BM <= passes)[:, :, None],
            handed_BMC,
            self.of_parents(self._carries, parent_BM, place),
        )
        if depths[0] < passes:  # else nothing will look at these entries of the cache
            out_BMO = self._pass(x_BMD, place)
        for stored, new in (
            (self._mixed, x_BMD),
            (self._outs, out_BMO),
            (self._carries, carry_BMC),
            (self._depths, depth_BM),
        ):
            stored.append(new)
        return self._by_depth(out_BMO, carry_BMC, depth_BM, depths)

    def _pass(self, x_BMD: Tensor, place: Place) -> Tensor:
        turn_BM2E = self._turn_P2E[place.position_BM]
        return self.net.through(x_BMD, turn_BM2E, self._attending(place.mask))

    def _by_depth(
        self, out_BMO: Tensor, carry_BMC: Tensor, depth_BM: Tensor, depths: list[int]
    ) -> Tensor:
        """[B, M, K]: each node's logits by the head of its depth, the last one serving the rest."""
        assert self.net.passes is not None
        logits_BMK = None if depths[0] >= self.net.passes else self._said(out_BMO)
        for index in range(self.net.num_parallel):
            here = [
                d for d in depths if min(d - self.net.passes, self.net.num_parallel - 1) == index
            ]
            if not here:
                continue
            there_BMD = self.net.parallel(index, carry_BMC)
            there_BMK = read_head(there_BMD, self._head)
            if logits_BMK is None:
                self._states.append(there_BMD)
                logits_BMK = there_BMK
            else:
                is_here_BM1 = (depth_BM >= here[0])[:, :, None]
                logits_BMK = torch.where(is_here_BM1, there_BMK, logits_BMK)
        assert logits_BMK is not None
        return logits_BMK
