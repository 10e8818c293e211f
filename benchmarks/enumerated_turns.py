"""The curve of models that write in turns, where every text is enumerated: cost against distance.

24 times two random models of five tokens, with a distribution behind every last token; the small
one's logits are the target's and noise. All 625 texts of four tokens are enumerated, with all that
may have written them: a turn by entropy may change behind each token, and a step that `reward`
judges is one token, so that its score is the probability which the target gives it. Of every law:
the share of the tokens that the target writes, and the total variation between the law's whole
texts and the target's; means +- standard errors over pairs. What decides who writes is the code
that decides it in a run.

    python benchmarks/enumerated_turns.py
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev

import torch
from torch import Tensor

from specctl.runtime.target.variants.mixture import parse
from specctl.runtime.turns.entropy import EntropyGate
from specctl.runtime.turns.reward import Threshold
from specctl.runtime.turns.reward_budget import ShareThreshold

LAWS = (
    "entropy:-1:1:1", "entropy:0.5:1:1", "entropy:1:1:1", "entropy:1.5:1:1", "entropy:3:1:1",
    "reward:1.1", "reward:0.5", "reward:0.2", "reward:0.05", "reward:0",
    "reward-budget:0.9:1:0.3:0.1", "reward-budget:0.7:1:0.3:0.1", "reward-budget:0.5:1:0.3:0.1",
    "reward-budget:0.4:1:0.3:0.1",
)  # fmt: skip
PAIRS, TOKENS, LENGTH = 24, 5, 4

# What a decision depends on: entropies of the written tokens, or scores of the judged steps.
History = tuple[float, ...]
# its probability, the token, the history behind it, whether the target writes it
Outcome = tuple[float, int, History, bool]
Step = Callable[[History, int], Iterator[Outcome]]


@dataclass(frozen=True, slots=True)
class Toy:
    """[last token, token] of the target and of the small model."""

    target_VV: list[list[float]]
    small_VV: list[list[float]]

    @classmethod
    def drawn(cls, generator: torch.Generator, noise: float) -> Toy:
        logits_VV = 2.5 * torch.randn(TOKENS, TOKENS, generator=generator)
        other_VV = logits_VV + noise * torch.randn(TOKENS, TOKENS, generator=generator)
        return cls(logits_VV.softmax(-1).tolist(), other_VV.softmax(-1).tolist())


def entropy(toy: Toy, threshold: float, window: int, dwell: int) -> Step:
    """Steps of `entropy`."""
    models = (toy.small_VV, toy.target_VV)
    bits = [
        [-sum(p * torch.tensor(p).log2().item() for p in p_V) for p_V in model] for model in models
    ]

    @cache
    def is_large(history: History) -> bool:
        gate = EntropyGate(threshold, window, dwell)
        for one in history:
            gate.changes(one)
        return gate.is_large

    def step(history: History, last: int) -> Iterator[Outcome]:
        large = is_large(history)
        for token, p in enumerate(models[large][last]):
            yield p, token, (*history, bits[large][last]), large

    return step


def reward(toy: Toy, threshold: Callable[[], Threshold], depends: bool) -> Step:
    """Steps of `reward`, judged by the target. `depends`: what is dropped depends on the scores of
    earlier steps."""

    @cache
    def drops(history: History) -> bool:
        """Whether the last of these scores was too low."""
        of_text = threshold()
        return [of_text.drops(score) for score in history][-1]

    def step(history: History, last: int) -> Iterator[Outcome]:
        for draft, q in enumerate(toy.small_VV[last]):
            scores = (*history, toy.target_VV[last][draft])
            after = scores if depends else ()
            if not drops(scores):
                yield q, draft, after, False
                continue
            for token, p in enumerate(toy.target_VV[last]):
                yield q * p, token, after, True

    return step


def step_of(toy: Toy, law: str) -> Step:
    """What that law does behind a text."""
    name, numbers = law.split(":")[0], parse(f"{law}=small").numbers
    if name == "entropy":
        return entropy(toy, numbers[0], int(numbers[1]), int(numbers[2]))
    if name == "reward":
        return reward(toy, lambda: Threshold(numbers[0]), depends=False)
    share = max(0.0, numbers[0] - numbers[2] - numbers[3])
    return reward(toy, lambda: ShareThreshold(share, []), depends=True)


def enumerated(step: Step) -> tuple[Tensor, float]:
    """[V ** T]: the probability of every text, and the share of its tokens by the target."""
    states, by_target = {((0,), ()): 1.0}, 0.0
    for _ in range(LENGTH):
        following: dict[tuple[tuple[int, ...], History], float] = defaultdict(float)
        for (text, history), weight in states.items():
            for p, token, after, is_target in step(history, text[-1]):
                following[(*text, token), after] += weight * p
                by_target += weight * p * is_target
        states = following
    probability = torch.zeros([TOKENS] * LENGTH, dtype=torch.float64)
    for (text, _), weight in states.items():
        probability[text[1:]] += weight
    return probability.flatten(), by_target / LENGTH


def cell(values: list[float]) -> str:
    return f"{fmean(values):.3f} +- {stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--noise", type=float, default=1.5, help="of the small model, in nats")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    words = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    toys = [Toy.drawn(generator, words.noise) for _ in range(words.pairs)]
    own = [enumerated(entropy(toy, -1.0, 1, 1))[0] for toy in toys]
    print("| law | share of the target | total variation of the texts |\n|---|---|---|")
    for law in LAWS:
        found = [enumerated(step_of(toy, law)) for toy in toys]
        pairs = zip(found, own, strict=True)
        apart = [float((one - p).abs().sum() / 2) for (one, _), p in pairs]
        print(f"| `{law}` | {cell([share for _, share in found])} | {cell(apart)} |", flush=True)


if __name__ == "__main__":
    main()
