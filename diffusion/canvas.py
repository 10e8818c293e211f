"""Canvas: the text of one request while it is denoised, and what a pass guesses of it.

Letters: L positions, Q picked rows, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(slots=True)
class Canvas:
    """Prompt and answer as ids; `start` is where the answer begins. The noise of a position depends
    on the seed and the position alone, so that the same seed gives the same text however its steps
    are grouped into passes. One writer: the loop that denoises it."""

    ids_L: Tensor
    start: int
    mask_id: int
    noise_QV: Tensor | None  # Gumbel noise by position of the answer; None: greedy

    @classmethod
    def of(
        cls, prompt: Sequence[int], length: int, mask_id: int, vocab: int, seed: int | None
    ) -> Canvas:
        """The prompt and `length` masked positions. `seed` None: greedy."""
        noise = None
        if seed is not None:
            random = torch.Generator().manual_seed(seed)
            uniform = torch.rand(length, vocab, generator=random, dtype=torch.float64)
            noise = -torch.log(-torch.log(uniform.clamp(1e-300, 1 - 1e-16)))
        ids = torch.tensor([*prompt, *[mask_id] * length])
        return cls(ids, len(prompt), mask_id, noise)

    @property
    def length(self) -> int:
        return len(self.ids_L)

    def masked(self, first: int, last: int) -> Tensor:
        """Masked positions in [first, last), ascending."""
        return first + (self.ids_L[first:last] == self.mask_id).nonzero()[:, 0]

    def with_tokens(self, place_Q: Tensor, token_Q: Tensor) -> Canvas:
        """A copy in which these positions hold these tokens."""
        ids = self.ids_L.clone()
        ids[place_Q] = token_Q
        return Canvas(ids, self.start, self.mask_id, self.noise_QV)


@dataclass(frozen=True)
class CanvasGuess:
    """What a pass predicts of masked positions: the token of each, drawn or the likeliest."""

    place_Q: Tensor
    token_Q: Tensor
    logits_QV: Tensor

    @classmethod
    def drawn(
        cls, canvas: Canvas, place_Q: Tensor, logits_QV: Tensor, temperature: float
    ) -> CanvasGuess:
        """The tokens by the canvas's noise at that temperature."""
        if canvas.noise_QV is None or temperature == 0:
            return cls(place_Q, logits_QV.argmax(-1), logits_QV)
        noise_QV = canvas.noise_QV[place_Q - canvas.start]
        return cls(place_Q, (logits_QV.double() / temperature + noise_QV).argmax(-1), logits_QV)

    @cached_property
    def log_prob_QV(self) -> Tensor:
        """Of the model itself, whatever the temperature at which tokens are drawn."""
        return self.logits_QV.log_softmax(-1)

    @cached_property
    def confidence_Q(self) -> Tensor:
        """The model's probability of each guessed token, as in LLaDA's low-confidence remasking."""
        return self.log_prob_QV.gather(1, self.token_Q[:, None])[:, 0].exp()

    @cached_property
    def entropy_Q(self) -> Tensor:
        """Of the model's distribution at each position, in nats."""
        log = self.log_prob_QV
        return -(log.exp() * log.clamp(min=-1e30)).sum(-1)

    def within(self, first: int, last: int) -> Tensor:
        """bool [Q]: the places in [first, last)."""
        return (self.place_Q >= first) & (self.place_Q < last)
