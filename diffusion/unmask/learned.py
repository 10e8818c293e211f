"""Learn2PD (https://arxiv.org/abs/2509.25188): a small network says which guesses are final.

It reads the confidences of a block, those of decoded tokens as 1, and gives for every position the
probability that the guess is what the plain schedule would end with. Guesses above the threshold
stay, at least the most confident. It was trained on decodings of the model itself
(train/pretrain/token_filter.py), and lies beside the weights. With a threshold of 1 a pass keeps
one token, which is the plain schedule of one token a pass.
Letters: Q picked rows, W window, X any axes.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specctl.core.errors import FileError
from specctl.diffusion.canvas import CanvasGuess
from specctl.diffusion.unmask.base import BlockStep, Unmask, best_of

FILTER = "learn2pd.safetensors"


class TokenFilter(nn.Module):
    """Two layers over the confidences of a block of `block` positions."""

    def __init__(self, block: int, hidden: int) -> None:
        super().__init__()
        self.block = block
        self.inner, self.outer = nn.Linear(block, hidden), nn.Linear(hidden, block)

    def forward(self, confidence_XW: Tensor) -> Tensor:
        """Logits that each guess is final, [..., block]."""
        out: Tensor = self.outer(F.relu(self.inner(confidence_XW)))
        return out

    def save(self, folder: Path) -> None:
        """Write it beside the weights of its model."""
        tensors = {name: p.detach().contiguous() for name, p in self.named_parameters()}
        save_file(tensors, folder / FILTER)


def read_filter(folder: Path) -> TokenFilter:
    """The filter of a folder."""
    if not (folder / FILTER).is_file():
        raise FileError(
            "the folder holds no filter for learn2pd",
            where=str(folder),
            found=f"no {FILTER}",
            expected="a folder that specctl pretrain --recipe tiny-learn2pd wrote",
            do="train one, or take --set diffusion.unmask=threshold:0.9",
        )
    with safe_open(folder / FILTER, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    hidden, block = tensors["inner.weight"].shape
    model = TokenFilter(block, hidden)
    model.load_state_dict(tensors)
    return model.eval().requires_grad_(False)


def block_confidences(guess: CanvasGuess, first: int, last: int, block: int) -> Tensor:
    """[block]: the confidence of every masked position of [first, last), 1 for all others."""
    confidence_W = torch.ones(block)
    inside = guess.within(first, last)
    confidence_W[guess.place_Q[inside] - first] = guess.confidence_Q[inside].float()
    return confidence_W


class LearnedUnmask(Unmask):
    """What the filter takes for final."""

    mark = "learn2pd"

    def __init__(self, threshold: float, model: TokenFilter) -> None:
        self.threshold, self.model = threshold, model

    def keep(self, guess: CanvasGuess, step: BlockStep) -> Tensor:
        inside = guess.within(step.first, step.last)
        read_W = block_confidences(guess, step.first, step.last, self.model.block)
        final_W = torch.sigmoid(self.model(read_W)) > self.threshold
        place_Q = (guess.place_Q - step.first).clamp(0, self.model.block - 1)
        return best_of(guess.confidence_Q, inside, 1) | (inside & final_W[place_Q])
