"""vLLM's hidden-state connector on a CPU: it asks for pinned memory and for CUDA's events.

For `benchmarks/endpoint.py --states`, loaded by vLLM (`kv_connector_module_path`). Copies are done
when they return here; nothing else of the connector is changed.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import (
    example_hidden_states_connector as theirs,
)


class _Done:
    """A stream or an event of work that is done."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words: True


class _Cuda:
    Event = Stream = _Done

    def stream(self, stream: _Done) -> Any:
        return nullcontext(stream)


class _HostTorch:
    """torch without CUDA's parts."""

    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, other: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.empty_like(other, **{**options, "pin_memory": False})


theirs.torch = _HostTorch()


class CpuStatesConnector(theirs.ExampleHiddenStatesConnector):
    """Theirs."""
