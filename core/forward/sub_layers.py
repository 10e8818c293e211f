"""SubLayers: which attentions and which MLPs of a decoder-only model a forward runs.

A layer adds the output of its attention to the residual, then that of its MLP. A part that is left
out adds nothing, so the residual passes it as it is; a model that stops early is one whose upper
layers are all left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SubLayers:
    """Layer numbers, ascending, of the attentions and of the MLPs that run."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]

    @classmethod
    def span(cls, first: int, last: int) -> SubLayers:
        """Layers first .. last - 1, whole."""
        layers = tuple(range(first, last))
        return cls(layers, layers)

    @classmethod
    def without(
        cls, num_layers: int, attention: Iterable[int] = (), mlp: Iterable[int] = ()
    ) -> SubLayers:
        """All of `num_layers` layers but for these attentions and MLPs."""
        no_attention, no_mlp = set(attention), set(mlp)
        layers = range(num_layers)
        return cls(
            tuple(layer for layer in layers if layer not in no_attention),
            tuple(layer for layer in layers if layer not in no_mlp),
        )

    @classmethod
    def evenly(cls, num_layers: int, kept: int) -> SubLayers:
        """`kept` whole layers spread evenly, the first and the last among them (unified layer
        skipping, arXiv 2404.06954)."""
        kept = max(1, min(kept, num_layers))
        step = (num_layers - 1) / max(kept - 1, 1)
        layers = tuple(sorted({round(j * step) for j in range(kept)}))
        return cls(layers, layers)

    def skipped(self, num_layers: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The attentions and the MLPs of `num_layers` layers that do not run."""
        layers = range(num_layers)
        return (
            tuple(layer for layer in layers if layer not in self.attention),
            tuple(layer for layer in layers if layer not in self.mlp),
        )

    def share(self, num_layers: int) -> float:
        """Sub-layers that run, of all."""
        return (len(self.attention) + len(self.mlp)) / (2 * num_layers)


NOTHING = SubLayers((), ())
