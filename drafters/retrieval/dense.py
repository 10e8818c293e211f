"""Dense retrieval: places whose target states resemble a state (DReSD, arXiv 2502.15572).

States are standardised per dimension, reduced by PCA and set to unit length; neighbours are found
by cosine, in an approximate index (HNSW, library usearch, extra `dense`) or exactly. Letters: N
places, D target width, C reduced width, K neighbours.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from specctl.core.errors import ResourceError
from specctl.core.installed import pip_install

KINDS = ("hnsw", "exact")
MIN_SCALE = 1e-6


@dataclass(frozen=True, slots=True)
class Projection:
    """mean_D and basis_DC (the scaling by dimension is inside it); states -> unit vectors."""

    mean_D: Tensor
    basis_DC: Tensor

    @classmethod
    def fit(cls, state_ND: Tensor, dims: int) -> Projection:
        """Standardisation and the `dims` strongest principal directions of these states."""
        state_ND = state_ND.float()
        mean_D = state_ND.mean(0)
        scale_D = (state_ND - mean_D).square().mean(0).sqrt().clamp(min=MIN_SCALE)
        scaled_ND = (state_ND - mean_D) / scale_D
        values_D, vectors_DD = torch.linalg.eigh(scaled_ND.T @ scaled_ND)
        best_C = values_D.argsort(descending=True)[: min(dims, len(values_D))]
        return cls(mean_D, vectors_DD[:, best_C] / scale_D[:, None])

    def __call__(self, state_ND: Tensor) -> Tensor:
        """[N, C] float32, each of length one."""
        return F.normalize((state_ND.float() - self.mean_D) @ self.basis_DC, dim=-1)

    def tensors(self) -> dict[str, Tensor]:
        return {"mean": self.mean_D, "basis": self.basis_DC.contiguous()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Projection:
        return cls(tensors["mean"].float(), tensors["basis"].float())


class DenseIndex:
    """Unit vectors and the places they stand for. Read only."""

    def __init__(self, key_NC: Tensor, place_N: npt.NDArray[np.int64], kind: str) -> None:
        self.key_NC, self.place_N = key_NC.float(), place_N
        self._graph = _graph(self.key_NC) if kind == "hnsw" else None

    def nearest(self, query_C: Tensor, count: int) -> list[int]:
        """Places of the `count` most similar keys, the most similar first."""
        count = min(count, len(self.place_N))
        if self._graph is not None:
            found = self._graph.search(query_C.float().numpy(), count, threads=1).keys
            return [int(place) for place in self.place_N[np.asarray(found, dtype=np.int64)]]
        best_K = (self.key_NC @ query_C.float()).topk(count).indices
        return [int(place) for place in self.place_N[best_K.numpy()]]


def _graph(key_NC: Tensor) -> Any:
    """An HNSW graph over the keys; one thread, so that equal stores make equal graphs."""
    try:
        library: Any = importlib.import_module("usearch.index")
    except ImportError as error:
        raise ResourceError(
            "approximate search over states needs the library usearch",
            found=str(error),
            expected="the extra dense",
            do=f"{pip_install('dense')}, or set drafter.options.index=exact (slow for "
            "large stores)",
        ) from error
    graph = library.Index(ndim=key_NC.shape[1], metric="cos", dtype="f32")
    graph.add(np.arange(len(key_NC)), key_NC.numpy(), threads=1)
    return graph
