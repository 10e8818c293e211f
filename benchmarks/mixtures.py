"""What a law of two models costs in acceptance, and how far it is from the target's.

Greedily and drawn at temperature 1, chains that the model beside the target drafts, over numbers
that lead away from the law's exact ones: tau against the same law, and along the text that the
mixture wrote the mean total variation between its distribution and the target's, and the
perplexity of that text under the target. Standard errors are over prompts.

    python benchmarks/mixtures.py --target qwen2.5-coder-1.5b --beside qwen2.5-coder-0.5b \\
        --prompts humaneval.jsonl --count 12
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import torch

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import mixed
from specctl.runtime.target.variants.mixture import parse

LAWS = ("contrast:0:0", "contrast:0:0.1", "contrast:0.2:0.1", "contrast:0.5:0.1", "contrast:1:0.1",
        "average:0.9", "average:0.5", "product:0.5", "switch:0.5", "switch:2")  # fmt: skip


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
        policy = make_policy({"policy": "chain", "length": 5})
        made = generate(whole, [prompt], drafter=drafter, policy=policy, sampling=sampling)
        text, at = made.outputs[0].token_ids, slice(len(prompt) - 1, -1)
        both = [log_probs(one, [*prompt, *text])[at] for one in (own, whole)]
        taus.append(made.stats.tau)
        distances.append(float((both[0].exp() - both[1].exp()).abs().sum(-1).mean() / 2))
        costs.append(-float(both[0].gather(1, torch.tensor(text)[:, None]).mean()))
    return taus, distances, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--beside", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--laws", nargs="*", default=LAWS)
    words = parser.parse_args()
    torch.set_num_threads(1)
    own, beside = load_target(words.target), load_target(words.beside)
    drafter = load_drafter(words.beside, own)
    lines = words.prompts.read_text(encoding="utf-8").splitlines()
    lines = lines[:: max(1, len(lines) // words.count)][: words.count]
    prompts = [own.encode_chat(json.loads(line)["messages"]) for line in lines]
    print("| law | T | tau | distance | log-loss under the target |")
    print("|---|---|---|---|---|")
    for law in words.laws:
        whole = mixed(own, beside, parse(f"{law}={words.beside}"))
        for t in (0.0, 1.0):
            columns = measured(whole, own, drafter, prompts, t, words.tokens)
            cells = [f"{fmean(c):.3f} +- {stdev(c) / len(c) ** 0.5:.3f}" for c in columns]
            print(f"| `{law}` | {t:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
