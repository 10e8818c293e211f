"""Quality against passes of a masked diffusion model: every way of decoding on the same prompts.

    python benchmarks/diffusion.py runs/tiny-diffusion/export
    python benchmarks/diffusion.py runs/tiny-dparallel/export --reference runs/tiny-diffusion/export

Quality is the loss of the written text under the causal model `tiny`, in nats a token, given the
prompt: the model that wrote it is not its judge. Shown is the difference to the plain schedule of
one token a pass on the same prompts and seeds. `agree` is the share of tokens that stand where the
plain schedule has the same one, `same` counts the texts that are its text, token by token. `passes`
and `positions` (what is computed) are per token. Errors are standard errors over prompts.

`--reference` takes the plain schedule of another model: that from which this one was distilled.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from specctl.core.errors import RecipeError
from specctl.core.messages.table import Table
from specctl.diffusion.engine import denoise, verification_of
from specctl.diffusion.folder import DiffusionTarget, load_diffusion
from specctl.diffusion.settings import DenoiseSettings
from specctl.diffusion.unmask.learned import FILTER
from specctl.recipes.targets import resolve
from specctl.runtime.measure.stats import repetition_rate

WAYS = (
    "steps=8", "steps=4", "steps=2",
    "unmask=threshold:0.9", "unmask=threshold:0.7", "unmask=threshold:0.5",
    "ahead=1", "ahead=2", "ahead=4",
    "unmask=entropy:0.5", "unmask=explore:0.7:1", "unmask=explore:0.5:0", "unmask=explore:0.5:1",
    "reuse=dkv:2", "reuse=dkv:8", "reuse=window:8:8:2", "reuse=window:8:8:8",
)  # fmt: skip

OF_FILTER = ("unmask=learn2pd:0.9", "unmask=learn2pd:0.7", "unmask=learn2pd:0.5")


@dataclass(frozen=True, slots=True)
class Written:
    """One text: its loss under the judge in nats a token, and what it took."""

    ids: tuple[int, ...]
    loss: float
    passes: int
    positions: int


def settings_of(way: str, block: int) -> DenoiseSettings:
    """`name=value` as settings; "plain" has none."""
    if way == "plain":
        return DenoiseSettings(block=block)
    name, _, value = way.partition("=")
    return DenoiseSettings(block=block, **{name: int(value) if value.isdigit() else value})


@torch.inference_mode()
def loss_of(judge: Any, prompt: Sequence[int], ids: Sequence[int]) -> float:
    logits_LV = judge(torch.tensor([[*prompt, *ids]])).logits[0]
    of_answer = logits_LV[len(prompt) - 1 : -1].float()
    return float(F.cross_entropy(of_answer, torch.tensor(list(ids))))


def write_all(
    target: DiffusionTarget, judge: Any, prompts: Sequence[list[int]], way: str, given: Any
) -> list[Written]:
    settings, texts = settings_of(way, given.block), list[Written]()
    for seed in range(given.seeds):
        for index, prompt in enumerate(prompts):
            made = denoise(
                target,
                prompt,
                settings,
                max_new_tokens=given.tokens,
                temperature=given.temperature,
                seed=1000 * seed + index,
                ignore_eos=True,
            )
            ids = tuple(token for token in made.token_ids if token < judge.config.vocab_size)
            loss = loss_of(judge, prompt, ids)
            texts.append(Written(made.token_ids, loss, made.passes, made.positions))
    return texts


def over_prompts(values: Sequence[float], prompts: int) -> tuple[float, float]:
    """Mean, and its standard error over prompts: texts of one prompt are no two observations."""
    means = [statistics.fmean(values[index::prompts]) for index in range(prompts)]
    return statistics.fmean(means), statistics.stdev(means) / prompts**0.5


def agreement(one: Written, other: Written) -> float:
    return statistics.fmean(a == b for a, b in zip(one.ids, other.ids, strict=True))


def figures(way: str, texts: Sequence[Written], plain: Sequence[Written], given: Any) -> list[Any]:
    pairs, tokens = list(zip(texts, plain, strict=True)), sum(len(text.ids) for text in texts)
    more, more_error = over_prompts([a.loss - b.loss for a, b in pairs], given.prompts)
    agree, agree_error = over_prompts([agreement(a, b) for a, b in pairs], given.prompts)
    passes, error = over_prompts([t.passes / len(t.ids) for t in texts], given.prompts)
    return [
        way,
        verification_of(settings_of(way, given.block)),
        f"{passes:.3f} ± {error:.3f}",
        f"{sum(t.positions for t in texts) / tokens:.1f}",
        f"{statistics.fmean(t.loss for t in texts):.3f}",
        f"{more:+.3f} ± {more_error:.3f}",
        f"{repetition_rate([t.ids for t in texts]):.3f}",
        f"{agree:.3f} ± {agree_error:.3f}",
        f"{sum(a.ids == b.ids for a, b in pairs)}/{len(texts)}",
    ]


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("target", type=Path)
    words.add_argument("--reference", type=Path)
    words.add_argument("--ways", nargs="*", default=WAYS)
    words.add_argument("--prompts", type=int, default=12)
    words.add_argument("--prompt-tokens", type=int, default=32)
    words.add_argument("--tokens", type=int, default=32)
    words.add_argument("--block", type=int, default=16)
    words.add_argument("--seeds", type=int, default=2)
    words.add_argument("--temperature", type=float, default=0.8)
    given = words.parse_args()
    target, tiny = load_diffusion(given.target), resolve("tiny").path
    if tiny is None:
        raise RecipeError(
            "the embedded target is not here", expected="the alias tiny", do="install"
        )
    judge = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    lines = (tiny / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    if not 2 <= given.prompts <= len(lines):  # errors are over prompts
        words.error(f"--prompts: from 2 to {len(lines)}, found {given.prompts}")
    texts = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // given.prompts)]]
    prompts = [target.encode(t)[: given.prompt_tokens] for t in texts[: given.prompts]]
    if (given.target / FILTER).is_file():
        given.ways = [*given.ways, *OF_FILTER] if given.ways is WAYS else given.ways
    other = target if given.reference is None else load_diffusion(given.reference)
    plain, rows = write_all(other, judge, prompts, "plain", given), list[list[Any]]()
    for way in ("plain", *given.ways):
        is_known = way == "plain" and other is target
        found = plain if is_known else write_all(target, judge, prompts, way, given)
        rows.append(figures(way, found, plain, given))
        print(*rows[-1], sep=" | ", flush=True)
    columns = (
        "way",
        "text is",
        "passes",
        "positions",
        "nats",
        "more than plain",
        "repetition",
        "agree",
        "same",
    )
    print(Table(columns, rows).markdown())


if __name__ == "__main__":
    main()
