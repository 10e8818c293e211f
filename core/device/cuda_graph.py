"""CUDA graphs: what a call does on the GPU, recorded once and started as a whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Found = TypeVar("Found")
RECORDING = threading.Lock()  # a target and the drafter beside it never record at once


class CudaGraph(Generic[Found]):
    """`call` as a graph. Its inputs are the tensors it closes over, refilled between calls; what it
    returns is overwritten by the next. It runs twice before: whatever is made lazily is there then,
    and workspaces are made by a run on a side stream. The call is kept with its graph, which reads
    the memory of every tensor that it closes over."""

    def __init__(self, call: Callable[[], Found], device: torch.device) -> None:
        self.call, self.device = call, device
        with RECORDING, torch.cuda.device(device):
            call()
            side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                call()
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            # Another thread may use the GPU meanwhile (a drafter beside its target).
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):
                self._found = call()

    def __call__(self) -> Found:
        with torch.cuda.device(self.device):
            self._graph.replay()
        return self._found
