"""The exact distribution of whole short texts, ends of text included, and a test of samples against
it.

For small vocabularies only: every text that the target can write within the sampling's limits is
listed with its probability, by cacheless forwards that share no code with the engine.
Letters: B rows, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specctl.runtime.proof.reference_checks import (
    MIN_EXPECTED,
    ChiSquare,
    chi_square,
    target_distribution,
)
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

Text = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExactDistribution:
    """The probability of every text; what is not listed cannot be written."""

    chance: Mapping[Text, float]

    @classmethod
    def of(cls, target: Target, prompt: Sequence[int], sampling: Sampling) -> ExactDistribution:
        """Texts end as the engine ends them: at an end of text, at the request's limit, or where
        the context is full. Stop strings are not modelled."""
        assert not sampling.stop, "stop strings are not modelled"
        longest = min(sampling.max_new_tokens, target.spec.max_positions - len(prompt))
        ends = set(sampling.stop_token_ids)
        ends |= set() if sampling.ignore_eos else set(target.eos_ids)
        done: dict[Text, float] = {}
        alive: dict[Text, float] = {(): 1.0}
        for size in range(1, longest + 1):
            distributions_BV = target_distribution(
                target, [[*prompt, *text] for text in alive], sampling
            )
            longer: dict[Text, float] = {}
            for (text, before), distribution_V in zip(
                alive.items(), distributions_BV.tolist(), strict=True
            ):
                for token, chance in enumerate(distribution_V):
                    if chance > 0:
                        kept = done if size == longest or token in ends else longer
                        kept[(*text, token)] = before * chance
            alive = longer
            if not alive:
                break
        return cls(done)

    def test(self, texts: Sequence[Text]) -> ChiSquare:
        """Pearson's test with rare texts in one cell; an impossible text is fatal."""
        counts, total = Counter(texts), len(texts)
        if any(text not in self.chance for text in counts):
            return ChiSquare(float("inf"), len(self.chance), 0.0, 1.0)
        observed, expected = [0], [0.0]
        for text, chance in self.chance.items():
            if chance * total < MIN_EXPECTED:
                observed[0] += counts[text]
                expected[0] += chance * total
            else:
                observed.append(counts[text])
                expected.append(chance * total)
        return chi_square(observed, expected)
