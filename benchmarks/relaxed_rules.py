"""The curve of the relaxed rules: tokens a round against the distance from the target.

First on toys whose every outcome is enumerated: the total variation of the first token of a round
from the target's, and tokens a round, over random distributions and drafts; rule `reflect` has a
second reading there which says what it has read more readily by AGAIN nats. Then, with a target and
a trained drafter of it, greedily on prompts of a file (one JSON object with `messages` a line):
tau, the perplexity of the written text under the target (from the log-probabilities that the target
itself gives while it verifies), and how many texts are those of the lossless rule. Standard errors
are jackknife errors over prompts.

    python benchmarks/relaxed_rules.py
    python benchmarks/relaxed_rules.py --target SmolLM2-135M-Instruct.Q4_1.gguf \
        --draft runs/eagle3 --prompts specbench.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from agent_traces import jackknife
from torch import Tensor

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.core.tree import NodeKind, chain_tree
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.reflection import fused
from specctl.runtime.engine.request import Request
from specctl.runtime.policies.chain import Chain
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.verify.relaxed import relaxation

RULES = (
    "fly:2", "fly:0.8", "fly:0.3", "fly:0.3:3", "fly:0.3:1",
    "typical:2:1e6", "typical:0.5:1", "typical:0.3:0.55", "typical:0.09:0.3",
)  # fmt: skip
REFLECTED = ("reflect:0", "reflect:0.1", "reflect:0.3", "reflect:0.7", "reflect:1")
TOYS, TOKENS, DRAFTED = 24, 5, 4
AGAIN = 3.0  # nats by which a drafted token is likelier in a second reading of the draft

Row = tuple[int, int, float, int]  # tokens, rounds, sum of log-probabilities, counted tokens


def toy(rule: str, p_TV: Tensor, draft: Sequence[int]) -> tuple[float, Tensor]:
    """Tokens a round, and the distribution of the first one, over all draws of the target."""
    relaxed = relaxation(rule)
    assert relaxed is not None
    if relaxed.rule.reads_again:
        again_TV = p_TV.log()
        again_TV[torch.arange(len(draft)), list(draft)] += AGAIN
        p_TV = fused(p_TV.log(), again_TV, relaxed.values[0]).softmax(-1)
    every_BT = torch.tensor(list(itertools.product(range(TOKENS), repeat=len(p_TV))))
    weight_B = p_TV[torch.arange(len(p_TV)), every_BT].prod(1)
    token_BN = torch.tensor([list(draft)]).expand(len(every_BT), -1)
    tree = chain_tree(token_BN, torch.ones_like(token_BN).bool(), NodeKind.POINT)
    scores_BTV = p_TV.log().expand(len(every_BT), -1, -1)
    count_B = relaxed.verdict(tree, every_BT, scores_BTV).num_accepted_B
    first_B = torch.where(count_B > 0, token_BN[:, 0], every_BT[:, 0])
    first_V = torch.zeros(TOKENS).index_add_(0, first_B, weight_B)
    return float((weight_B * (count_B + 1)).sum()), first_V


def toys() -> None:
    """Chains of four drafts, drawn from the target's own distributions sharpened, as a drafter's
    best guesses are."""
    generator = torch.Generator().manual_seed(0)
    print("| rule | tokens a round | total variation of the first token |")
    cases = []
    for _ in range(TOYS):
        p_TV = (2.5 * torch.randn(DRAFTED + 1, TOKENS, generator=generator)).softmax(-1)
        draft = torch.multinomial(p_TV[:-1] ** 2, 1, generator=generator)[:, 0].tolist()
        cases.append((p_TV, draft))
    for rule in RULES + REFLECTED:
        found = [toy(rule, *case) for case in cases]
        apart = [
            float((first_V - p_TV[0]).abs().sum() / 2)
            for (_, first_V), (p_TV, _) in zip(found, cases, strict=True)
        ]
        tokens = sum(tau for tau, _ in found) / TOYS
        print(f"| `{rule}` | {tokens:.3f} | {sum(apart) / TOYS:.4f} |", flush=True)


def written(
    target: Target, drafter: Drafter, rule: str, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[Row], list[tuple[int, ...]]]:
    """Each prompt continued greedily, with the target's log-probabilities of what was written."""
    engine = Engine(target, drafter, Chain(length=8), rule)
    sampling, rows, texts = Sampling(max_new_tokens=new_tokens), list[Row](), []
    engine.open(max(map(len, prompts)) + new_tokens)
    for index, prompt in enumerate(prompts):
        engine.submit(index, Request(tuple(prompt), sampling, logprobs=0))
        total, text, rounds = 0.0, list[int](), 0
        while engine.is_busy:
            for emission in engine.step():
                assert emission.logprobs is not None
                total += sum(one.logprob for one in emission.logprobs)
                text.extend(emission.tokens)
                rounds = emission.row.stats.rounds
        rows.append((len(text), rounds, total, len(text)))
        texts.append(tuple(text))
    return rows, texts


def perplexity(rows: Sequence[Row]) -> float:
    return math.exp(-sum(row[2] for row in rows) / sum(row[3] for row in rows))


def tau(rows: Sequence[Row]) -> float:
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--longest", type=int, default=900, help="Leave out longer prompts.")
    parser.add_argument("--rules", nargs="*", default=RULES)
    parser.add_argument("--allow", nargs="*", default=[])
    words = parser.parse_args()
    torch.set_num_threads(1)
    toys()
    if words.target is None:
        return
    target = load_target(words.target)
    drafter = load_drafter(words.draft, target, allow=words.allow)
    lines = words.prompts.read_text(encoding="utf-8").splitlines()
    lines = lines[:: max(1, len(lines) // words.count)][: words.count]
    prompts = [target.encode_chat(json.loads(line)["messages"]) for line in lines]
    prompts = [prompt for prompt in prompts if len(prompt) < words.longest]
    exact: list[tuple[int, ...]] = []
    print(f"{len(prompts)} prompts\n| rule | tau | perplexity | lossless texts |")
    for rule in words.rules:
        rows, texts = written(target, drafter, rule, prompts, words.tokens)
        exact = exact or texts
        cells = [
            f"{v:.2f} ± {e:.2f}" for v, e in (jackknife(rows, tau), jackknife(rows, perplexity))
        ]
        same = sum(a == b for a, b in zip(texts, exact, strict=True))
        print(f"| `{rule}` | {' | '.join(cells)} | {same} of {len(texts)} |", flush=True)


if __name__ == "__main__":
    main()
