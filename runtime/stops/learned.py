"""Stop rules that are trained: their small networks, and the file that holds one.

A file is safetensors; its metadata name the rule and the drafter states that the network reads.
Letters: B rows, D hidden width, F figures, R flat rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from specctl.core.drafter import RoundView, StepState
from specctl.core.errors import FileError, IncompatibleError, RecipeError
from specctl.runtime.stops.base import DraftStep, StopRule

HIDDEN = 64


class Residual(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_RD: Tensor) -> Tensor:
        return x_RD + F.silu(self.linear(x_RD))


def residual_net(num_inputs: int, num_blocks: int) -> nn.Module:
    """Inputs brought to width 64, residual blocks with weights of their own, one output."""
    blocks = [Residual(HIDDEN) for _ in range(num_blocks)]
    norm = nn.LayerNorm(num_inputs, elementwise_affine=False)
    return nn.Sequential(norm, nn.Linear(num_inputs, HIDDEN), *blocks, nn.Linear(HIDDEN, 1))


def num_features(net: nn.Module) -> int:
    """How many figures such a network reads."""
    return next(m for m in net.modules() if isinstance(m, nn.Linear)).in_features


@dataclass(slots=True)
class LearnedStop(StopRule, ABC):
    """A rule with a network. `net` is None until weights are given. What it is trained on: the
    features at a step speak of the token drafted `lag` steps before; a rule of `lengths` reads
    what is known before the drafter's first pass (else the first step) and predicts how many tokens
    are accepted. A `soft` rule learns
    from the chance min(1, p / q) of every drafted token, others from what became of those that were
    tested. Rejected tokens weigh `rejected`, a
    length that is predicted too short weighs `too_short` per token."""

    name: ClassVar[str] = ""
    lag: ClassVar[int] = 0
    lengths: ClassVar[bool] = False
    soft: ClassVar[bool] = False
    rejected: ClassVar[float] = 1.0
    too_short: ClassVar[float] = 1.0
    net: nn.Module | None = field(default=None, repr=False)

    @abstractmethod
    def features(self, step: DraftStep) -> Tensor:
        """[B, F] float32: what the network reads at that step."""

    def before(self, view: RoundView, state: StepState) -> Tensor | None:
        """[B, F] float32: what a rule of `lengths` reads before the drafter's first pass; None: it
        reads the first step."""
        return None

    @classmethod
    @abstractmethod
    def new_net(cls, num_inputs: int) -> nn.Module:
        """A fresh network for so many features."""

    def output_B(self, step: DraftStep) -> Tensor:
        """What the network says at that step."""
        return self.said_B(self.features(step))

    def said_B(self, features_BF: Tensor) -> Tensor:
        """What the network says of those features."""
        if self.net is None:
            raise RecipeError(
                f"stop rule {self.name} has no weights",
                where="serve.stop_file",
                expected="a file written by train-stop",
                do=f"specctl train-stop --draft PACKAGE --stop-rule {self.name} --out FILE",
            )
        wanted = num_features(self.net)
        if wanted != features_BF.shape[1]:
            raise IncompatibleError(
                f"the weights of stop rule {self.name} are of another drafter",
                found=f"{features_BF.shape[1]} features",
                expected=str(wanted),
                do="train the rule for this drafter with specctl train-stop",
            )
        with torch.no_grad():
            out: Tensor = self.net.to(features_BF.device)(features_BF)[:, 0]
        return out

    def loaded(self, tensors: Mapping[str, Tensor]) -> Self:
        """This rule with those weights."""
        first = next(t for n, t in tensors.items() if n.endswith("weight"))
        net = self.new_net(first.shape[1])
        try:
            net.load_state_dict(dict(tensors))
        except RuntimeError as error:
            raise FileError(
                f"the weights are not those of stop rule {self.name}",
                found=str(error).splitlines()[0][:200],
                expected=f"the tensors of a {self.name} network",
                do="give the file that specctl train-stop wrote",
            ) from error
        self.net = net.eval()
        return self


@dataclass(slots=True)
class StateReader(LearnedStop):
    """A rule whose network reads the drafter's state."""

    @classmethod
    def new_net(cls, num_inputs: int) -> nn.Module:
        return residual_net(num_inputs, num_blocks=3)

    def features(self, step: DraftStep) -> Tensor:
        return step.state.hidden().float()


def write_stop(path: Path, name: str, net: nn.Module, about: Mapping[str, str]) -> None:
    """One file with the network of a rule."""
    tensors = {key: t.contiguous() for key, t in net.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={**about, "rule": name})


def read_stop(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The rule's name and its tensors."""
    try:
        with safe_open(path, framework="pt") as opened:
            name = (opened.metadata() or {}).get("rule", "")
            return name, {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise FileError(
            "the weights of the stop rule cannot be read",
            where=str(path),
            found=str(error)[:200],
            expected="a safetensors file written by specctl train-stop",
            do="correct the path, or train the rule again",
        ) from error
