"""What a law of two models costs in acceptance, and how far it is from the target's.

Greedily and drawn at temperature 1, chains that the model beside the target drafts, over numbers
that lead away from the law's exact ones: tau against the same law, and along the text that the
mixture wrote the mean total variation between its distribution and the target's, and the
perplexity of that text under the target. Of laws by which the models write in turns: the share of
tokens by the target, the perplexity, and the processor time behind the first token over that of the
target alone. Standard errors are over prompts.

    python benchmarks/mixtures.py --target qwen2.5-coder-1.5b --beside qwen2.5-coder-0.5b \\
        --prompts humaneval.jsonl --count 12
    python benchmarks/mixtures.py ... --laws entropy:1 reward:0.7 --temperatures 0
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from time import process_time
from typing import Any

import torch

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.generate import Generated, generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import in_turns, mixed
from specctl.runtime.target.variants.mixture import Mixture, parse
from specctl.runtime.turns.reward import Judge

LAWS = ("contrast:0:0", "contrast:0:0.1", "contrast:0.2:0.1", "contrast:0.5:0.1", "contrast:1:0.1",
        "average:0.9", "average:0.5", "product:0.5", "switch:0.5", "switch:2")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, the model beside it, and the same as a drafter of chains."""

    own: Target
    beside: Target
    drafter: Drafter

    def by(self, law: Mixture) -> Target:
        """What writes by that law; costs of a budget that it does not give are measured now, so
        that they are the same for all texts."""
        if not law.is_in_turns:
            return mixed(self.own, self.beside, law)
        whole = in_turns(self.own, [self.beside] * len(law.models), law)
        if law.law != "reward-budget" or law.numbers[0] == 1 or all(law.numbers[2:]):
            return whole
        turns = generate(whole, [[0]], sampling=Sampling(max_new_tokens=1)).stats.turns
        assert turns is not None
        assert turns.spending is not None
        print(f"{law}: {turns.spending.again}", file=sys.stderr, flush=True)
        return self.by(parse(f"{turns.spending.again}={law.model}"))

    @classmethod
    def load(cls, target: str, beside: str) -> Pair:
        """Both, on one thread."""
        torch.set_num_threads(1)
        own = load_target(target)
        return cls(own, load_target(beside), load_drafter(beside, own))


def options(about: str | None, tokens: int) -> argparse.ArgumentParser:
    """The flags of a benchmark of two models, with that limit of an answer."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--beside", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=tokens)
    return parser


def drafted(
    whole: Target, ids: Sequence[int], how: Sampling, drafter: Drafter, length: int = 5, **more: Any
) -> Generated:
    """What is written with drafted chains of that length."""
    policy = make_policy({"policy": "chain", "length": length})
    return generate(whole, [ids], drafter=drafter, policy=policy, sampling=how, **more)


def log_probs(target: Target, ids: Sequence[int]) -> torch.Tensor:
    ids_1S = torch.tensor([list(ids)])
    masks = target.lm.document_masks(torch.zeros_like(ids_1S))
    with torch.inference_mode():
        out = target.lm.dense(ids_1S, torch.arange(len(ids))[None], masks)
    assert out.logits_BTV is not None
    return out.logits_BTV[0].float().log_softmax(-1)


def measured(
    whole: Target, own: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], t: float, n: int
) -> tuple[list[float], list[float], list[float]]:
    """Tau, distance and the text's log-probability a token under the target, by prompt."""
    taus, distances, costs = [], [], []
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=t, max_new_tokens=n, seed=seed)
        made = drafted(whole, prompt, sampling, drafter)
        text, at = made.outputs[0].token_ids, slice(len(prompt) - 1, -1)
        both = [log_probs(one, [*prompt, *text])[at] for one in (own, whole)]
        taus.append(made.stats.tau)
        distances.append(float((both[0].exp() - both[1].exp()).abs().sum(-1).mean() / 2))
        costs.append(-float(both[0].gather(1, torch.tensor(text)[:, None]).mean()))
    return taus, distances, costs


def timed(target: Target, prompt: Sequence[int], sampling: Sampling) -> tuple[Generated, float]:
    """What is written, and its processor seconds from the first token on, the reading of the prompt
    by whoever writes later included."""
    began: list[float] = []
    made = generate(
        target, [prompt], sampling=sampling, on_tokens=lambda *_: began.append(process_time())
    )
    return made, process_time() - began[0]


def measured_turns(
    wholes: Sequence[Target], own: Target, prompts: Sequence[Sequence[int]], t: float, n: int
) -> list[tuple[list[float], list[float], list[float]]]:
    """Of every target: share by the large model, processor time over that of plain decoding, and
    the text's log-loss a token under the large model, by prompt."""
    found: list[tuple[list[float], list[float], list[float]]] = [([], [], []) for _ in wholes]
    judge = Judge(own)
    judge.open(max(map(len, prompts)) + n)
    for seed, prompt in enumerate(prompts):
        sampling = Sampling(temperature=t, max_new_tokens=n, seed=seed)
        _, plain = timed(own, prompt, sampling)
        for whole, (shares, seconds, losses) in zip(wholes, found, strict=True):
            made, spent = timed(whole, prompt, sampling)
            assert made.stats.turns is not None
            shares.append(made.stats.turns.share)
            seconds.append(spent / plain)
            losses.append(-math.log(judge.score(prompt, made.outputs[0].token_ids)))
            said = f"{shares[-1]:.3f} {seconds[-1]:.3f} {losses[-1]:.3f}"
            print(f"prompt {seed}: {whole.mixture} {said}", file=sys.stderr, flush=True)
    return found


def table(laws: Sequence[str], titles: str) -> None:
    """The head of a table, where it has rows."""
    if laws:
        print(
            f"| law | T | {titles} | log-loss under the target |\n|---|---|---|---|---|", flush=True
        )


def cells(columns: Sequence[Sequence[float]]) -> str:
    """The mean of each column, and its standard error."""
    return " | ".join(f"{fmean(c):.3f} +- {stdev(c) / len(c) ** 0.5:.3f}" for c in columns)


def row(law: str, t: float, columns: Sequence[Sequence[float]]) -> None:
    print(f"| `{law}` | {t:g} | {cells(columns)} |", flush=True)


def main() -> None:
    parser = options(__doc__, tokens=64)
    parser.add_argument("--longest", type=int, help="Leave out prompts of more tokens.")
    parser.add_argument("--laws", nargs="*", default=LAWS)
    parser.add_argument("--temperatures", nargs="*", type=float, default=(0.0, 1.0))
    words = parser.parse_args()
    pair = Pair.load(words.target, words.beside)
    own = pair.own
    lines = words.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [own.encode_chat(json.loads(line)["messages"]) for line in lines]
    prompts = [one for one in prompts if words.longest is None or len(one) <= words.longest]
    prompts = prompts[:: max(1, len(prompts) // words.count)][: words.count]
    laws = [parse(f"{law}={words.beside}") for law in words.laws]
    table([one.law for one in laws if not one.is_in_turns], "tau | distance")
    for one in (law for law in laws if not law.is_in_turns):
        for t in words.temperatures:
            row(
                one.law_text, t, measured(pair.by(one), own, pair.drafter, prompts, t, words.tokens)
            )
    table([one.law for one in laws if one.is_in_turns], "target's share | time over plain")
    turns = [pair.by(one) for one in laws if one.is_in_turns]
    for t in words.temperatures if turns else ():
        found = measured_turns(turns, own, prompts, t, words.tokens)
        for whole, columns in zip(turns, found, strict=True):
            row(whole.mixture.law_text, t, columns)


if __name__ == "__main__":
    main()
