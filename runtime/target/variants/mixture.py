"""Mixtures: targets whose law is made of p, the target's own, and q, that of a model beside it.

`--mix METHOD=MODEL`, the method's numbers after colons: `contrast:0.5:0.1=qwen2.5-0.5b`. Drafts for
a mixture are verified against the mixture's law, so drafted and plain decoding have one law; but it
is another than the target's, which every result says. With the numbers that `exact` gives it is the
target's own.

`contrast`: contrastive decoding (arXiv 2210.15097; with drafts of the weaker model 2311.08981):

    score(x) = (1 + beta) log p(x) - beta log q(x)   where p(x) >= alpha max p, else never

`average` and `product`: the arithmetic and the geometric mean of the two models, `switch`: one of
them by the entropy of the other (FS-GEN, arXiv 2406.12295, has all such collaborations of a large
and a small model as functions of their logits):

    p' = weight p + (1 - weight) q      log p' ~ weight log p + (1 - weight) log q
    p' = p where H(q) > threshold (in nats), else q

`entropy`, `reward` and `reward-budget` are no law of the next token: the models write in turns,
which is approximate (runtime/turns). A third model may judge the second one's steps:
`reward:0.7=MODEL,JUDGE`, or `reward-budget:0.8=MODEL,JUDGE`, where the threshold follows from what
a text may cost.

With `specpc`, `speckv` and `speckvpc` the model beside the target reads a long prompt first, and
says what of it the target keeps, which is approximate, too (runtime/kept_prompts).

Letters: T fed tokens, V target vocabulary; axes before them are of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specctl.core.errors import IncompatibleError, RecipeError

NEVER = -1e6  # log q from which a token is never said: divided by less, scores would be infinite


@dataclass(frozen=True, slots=True)
class MixingLaw:
    """A law of mixtures. `scores(log p, log q, numbers)`: log-scores, [..., T, V] as both are; None
    where it is none of the next token. `numbers`: name, default, least and largest value of each,
    of which those at `counts` are numbers of tokens; `exact`: the first of them with which the text
    is the target's own; `most`: models that it can name."""

    name: str
    summary: str
    paper: str
    scores: Callable[[Tensor, Tensor, tuple[float, ...]], Tensor] | None
    numbers: tuple[tuple[str, float, float, float], ...]
    exact: tuple[float, ...]
    most: int = 1
    counts: tuple[int, ...] = ()


def contrasted(log_p_TV: Tensor, log_q_TV: Tensor, numbers: tuple[float, ...]) -> Tensor:
    beta, alpha = numbers
    if beta == 0:  # 0 times the -inf of what q never says is no number
        scores_TV = log_p_TV
    else:
        scores_TV = (1 + beta) * log_p_TV - beta * log_q_TV.clamp(min=NEVER)
        scores_TV = scores_TV.masked_fill(log_p_TV == -torch.inf, -torch.inf)
    if alpha == 0:
        return scores_TV
    least_T1 = log_p_TV.amax(-1, keepdim=True) + math.log(alpha)
    return scores_TV.masked_fill(log_p_TV < least_T1, -torch.inf)


def averaged(log_p_TV: Tensor, log_q_TV: Tensor, numbers: tuple[float, ...]) -> Tensor:
    (weight,) = numbers
    if weight in (0, 1):
        return log_p_TV if weight else log_q_TV
    return torch.logaddexp(log_p_TV + math.log(weight), log_q_TV + math.log1p(-weight))


def multiplied(log_p_TV: Tensor, log_q_TV: Tensor, numbers: tuple[float, ...]) -> Tensor:
    (weight,) = numbers
    if weight in (0, 1):
        return log_p_TV if weight else log_q_TV
    return weight * log_p_TV + (1 - weight) * log_q_TV


def switched(log_p_TV: Tensor, log_q_TV: Tensor, numbers: tuple[float, ...]) -> Tensor:
    (threshold,) = numbers
    q_TV = log_q_TV.exp()
    entropy_T1 = -torch.where(q_TV > 0, q_TV * log_q_TV, 0.0).sum(-1, keepdim=True)
    return torch.where(entropy_T1 > threshold, log_p_TV, log_q_TV)


_FS_GEN = "https://arxiv.org/abs/2406.12295"
LAWS: Mapping[str, MixingLaw] = {
    law.name: law
    for law in (
        MixingLaw(
            "contrast",
            "what the target finds probable and the other does not (contrastive decoding)",
            "https://arxiv.org/abs/2311.08981",
            contrasted,
            (("beta", 0.5, 0.0, 100.0), ("alpha", 0.1, 0.0, 1.0)),
            (0.0, 0.0),
        ),
        MixingLaw(
            "average",
            "the mean of both probabilities",
            _FS_GEN,
            averaged,
            (("weight", 0.5, 0.0, 1.0),),
            (1.0,),
        ),
        MixingLaw(
            "product",
            "the weighted geometric mean of both",
            _FS_GEN,
            multiplied,
            (("weight", 0.5, 0.0, 1.0),),
            (1.0,),
        ),
        MixingLaw(
            "switch",
            "the target where the other is unsure, else the other",
            _FS_GEN,
            switched,
            (("threshold", 1.0, -1.0, 100.0),),
            (-1.0,),
        ),
    )
}
LONGEST_TURN = 1e6  # tokens
TURNS: Mapping[str, MixingLaw] = {
    law.name: law
    for law in (
        MixingLaw(
            "entropy",
            "the target while the mean entropy is above the threshold, else the other",
            "https://arxiv.org/abs/2502.06833",
            None,
            (
                ("threshold", 1.0, -1.0, 100.0),
                ("window", 5, 1, LONGEST_TURN),
                ("dwell", 10, 1, LONGEST_TURN),
            ),
            (-1.0,),
            counts=(1, 2),
        ),
        MixingLaw(
            "reward",
            "steps of the other that a judge scores at least delta, else the target's",
            "https://arxiv.org/abs/2501.19324",
            None,
            (("delta", 0.7, -1.0, 2.0), ("longest", 128, 1, LONGEST_TURN)),
            (2.0,),
            most=2,
            counts=(1,),
        ),
        MixingLaw(
            "reward-budget",
            "as many of the worst steps by the target as a budget of its cost allows",
            "https://arxiv.org/abs/2501.19324",
            None,
            (
                ("budget", 0.8, 0.0, 1.0),
                ("longest", 32, 1, LONGEST_TURN),
                ("small", 0.0, 0.0, 100.0),
                ("judge", 0.0, 0.0, 100.0),
            ),
            (1.0,),
            most=2,
            counts=(1,),
        ),
    )
}
LONGEST_PROMPT = 1e6  # tokens
_DRAFT_BASED = "https://arxiv.org/abs/2506.08373"
KEPT: Mapping[str, MixingLaw] = {
    law.name: law
    for law in (
        MixingLaw(
            "specpc",
            "of a long prompt the tokens that the other's attention finds important (SpecPC)",
            _DRAFT_BASED,
            None,
            (("keep", 1024, 128, LONGEST_PROMPT), ("depth", 1.0, 0.01, 1.0)),
            (LONGEST_PROMPT,),
            counts=(0,),
        ),
        MixingLaw(
            "speckv",
            "of a long prompt the keys and values that an answer drafted by the other looks at",
            _DRAFT_BASED,
            None,
            (("keep", 512, 64, LONGEST_PROMPT), ("lookahead", 64, 0, LONGEST_PROMPT)),
            (LONGEST_PROMPT,),
            counts=(0, 1),
        ),
        MixingLaw(
            "speckvpc",
            "of a long prompt the important tokens, and of these the keys looked at (SpecKV-PC)",
            _DRAFT_BASED,
            None,
            (
                ("keep", 512, 64, LONGEST_PROMPT),
                ("prompt", 2048, 128, LONGEST_PROMPT),
                ("lookahead", 64, 0, LONGEST_PROMPT),
            ),
            (LONGEST_PROMPT, LONGEST_PROMPT),
            counts=(0, 1, 2),
        ),
    )
}
_KNOWN = {**LAWS, **TURNS, **KEPT}


@dataclass(frozen=True, slots=True)
class Mixture:
    """A law with its numbers, and the model beside the target, or two with a comma between."""

    law: str
    numbers: tuple[float, ...]
    model: str

    def __str__(self) -> str:
        return f"{self.law_text}={self.model}"

    @property
    def law_text(self) -> str:
        """The law with its numbers."""
        return ":".join([self.law, *(f"{number:g}" for number in self.numbers)])

    @property
    def models(self) -> tuple[str, ...]:
        """The models beside the target."""
        return tuple(self.model.split(",")) if self.is_in_turns else (self.model,)

    @property
    def is_in_turns(self) -> bool:
        """Whether the models write in turns, which is approximate."""
        return self.law in TURNS

    @property
    def keeps_part(self) -> bool:
        """Whether the target keeps a part of long prompts, which is approximate."""
        return self.law in KEPT

    @property
    def is_approximate(self) -> bool:
        """Whether it is no law of the next token, against which drafts could be verified."""
        return self.is_in_turns or self.keeps_part

    @property
    def one_by_one(self) -> str | None:
        """What answers one prompt at a time; None where several rows go on together."""
        if self.is_in_turns:
            return "models that write in turns serve"
        return f"{self.law} keeps keys of" if self.law in ("speckv", "speckvpc") else None

    def warning(self, target: str) -> str:
        """What a user should know of everything that this mixture writes."""
        exact = _KNOWN[self.law].exact
        if self.numbers[: len(exact)] == exact:
            return f"with these numbers {self} is {target} alone"
        if self.is_in_turns:
            return (
                f"{self.law_text} is approximate: {target} and {self.models[0]} write answers in "
                f"turns, which are not those of {target} alone"
            )
        if self.keeps_part:
            return (
                f"{self.law_text} is approximate: of longer prompts {target} keeps what "
                f"{self.model} chooses"
            )
        return (
            f"answers are those of {self.law_text} over {target} and {self.model}, not of {target} "
            "alone; drafting changes nothing of them"
        )

    def mixing(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The law as a function of both models' log-probabilities."""
        scores, numbers = LAWS[self.law].scores, self.numbers
        assert scores is not None, f"{self.law} has scores"
        return lambda log_p_TV, log_q_TV: scores(log_p_TV, log_q_TV, numbers)


def parse(word: str) -> Mixture:
    """`METHOD[:NUMBER...]=MODEL`; RecipeError for anything else."""
    law, _, model = word.partition("=")
    name, *given = law.split(":")
    if name not in _KNOWN or not model:
        raise RecipeError(
            "this names no mixture of two models",
            where="--mix",
            found=ascii(word)[:120],
            expected=f"METHOD=MODEL, with a method of {', '.join(_KNOWN)}",
            do="write --mix contrast:0.5:0.1=MODEL",
        )
    known = _KNOWN[name].numbers
    if name not in LAWS:
        _check_models(name, model)
    try:
        numbers = [float(number) for number in given]
        if len(numbers) > len(known):
            raise ValueError
        numbers += [float(default) for _, default, _, _ in known[len(numbers) :]]
        bounds = zip(numbers, known, strict=True)
        if not all(least <= number <= most for number, (_, _, least, most) in bounds):
            raise ValueError
        if not all(numbers[at].is_integer() for at in _KNOWN[name].counts):
            raise ValueError
    except ValueError as error:
        expected = (f"{each} ({least:g} to {most:g})" for each, _, least, most in known)
        raise RecipeError(
            f"{name} has other numbers",
            where="--mix",
            found=ascii(law)[:120],
            expected=":".join([name, *expected]),
            do=f"write --mix {':'.join([name, *(f'{d:g}' for _, d, _, _ in known)])}={model}",
        ) from error
    return Mixture(name, tuple(numbers), model)


def _check_models(law: str, models: str) -> None:
    """Refuse more models than the law has, and names that are empty."""
    names = models.split(",")
    most = _KNOWN[law].most
    if all(names) and len(names) <= most:
        return
    raise RecipeError(
        f"{law} has another number of models",
        where="--mix",
        found=ascii(models)[:120],
        expected="MODEL" if most == 1 else "MODEL, or MODEL,JUDGE",
        do=f"write --mix {law}=MODEL",
    )


def alone(mixture: Mixture) -> IncompatibleError:
    """The error of whatever decodes with one model where another should write, too, or choose."""
    what = "prompts that are kept in part" if mixture.keeps_part else "models that write in turns"
    return IncompatibleError(
        f"{what} cannot be used here",
        where="--mix",
        found=mixture.law_text,
        expected="specctl generate or bench, or one of " + ", ".join(LAWS),
        do="leave out --mix",
    )
