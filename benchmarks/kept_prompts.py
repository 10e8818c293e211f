"""What is won and lost where the target keeps a part of long prompts (`--mix specpc` and `speckv`).

Prompts are made as by `long_context.py`. Of every word: processor seconds to the first token,
milliseconds a token behind it, and along plain decoding's answer its loss (nats a token) behind
what is kept over that behind the whole prompt, and the mean total variation between what is said
behind either; means +- standard errors over prompts. With
`--needles` so many other prompts, of `--needle-texts` texts, hide a number in a sentence, and are
counted where the answer says it. `newest:KEEP` keeps the first 64 tokens and the newest ones. A
line stands as soon as a prompt is measured; the table of all comes last.

    python benchmarks/kept_prompts.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --prompts specbench.jsonl --words specpc:1024:0.4 speckv:256:32
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from time import process_time

import torch
from long_context import ORDER, prompts

from specctl import load_target
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.prefill import prefill
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.kept_prompts import KeptPrompts, make_kept_prompts
from specctl.runtime.kept_prompts.spec_kv import SpecKV
from specctl.runtime.kept_prompts.spec_pc import SpecPC
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import in_turns
from specctl.runtime.target.variants.mixture import parse

BEGINNING = 64
NEEDLE = "The secret number of the harbour is {}. Remember it."
QUESTION = "What is the secret number of the harbour? Answer with the number."


class Newest(SpecPC):
    """Keeps the beginning and the newest tokens."""

    def shortened(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if len(tokens) <= self.keep:
            return tokens
        return tokens[:BEGINNING] + tokens[BEGINNING - self.keep :]


def writer(word: str, target: Target, beside: Target) -> Engine | KeptPrompts:
    """What answers by that word."""
    if word == "plain":
        return Engine(target)
    named = word.replace("newest", "specpc")
    found = make_kept_prompts(in_turns(target, [beside], parse(f"{named}=m")), None, None, "auto")
    if word.startswith("newest"):
        found.__class__ = Newest
    return found


def answered(
    engine: Engine | KeptPrompts, prompt: Sequence[int], new_tokens: int
) -> tuple[tuple[int, ...], float, float]:
    """The greedy answer, seconds to its first token, and seconds a token behind it."""
    marks, began = list[float](), process_time()

    def mark(row: Row, new: tuple[int, ...]) -> None:
        marks.append(process_time())

    request = Request(tuple(prompt), Sampling(max_new_tokens=new_tokens))
    text = engine.run([request], mark)[0].tokens
    return text, marks[0] - began, (marks[-1] - marks[0]) / max(1, len(marks) - 1)


def law(lm: LanguageModel, kv: SlotKV, root: int, text: Sequence[int], at: int) -> torch.Tensor:
    """[T, V] log-probabilities at every token of that text, behind a root that stands there."""
    fed, start_B = [root, *text[:-1]], torch.tensor([at])
    kv.begin((0,), torch.tensor([0]), start_B, len(fed), at + len(fed), at)
    masks = lm.chain_masks(start_B, len(fed), at + len(fed))
    position_BT = torch.arange(at, at + len(fed))[None]
    with torch.inference_mode():
        out = lm.run(Feed(torch.tensor([fed]), position_BT, masks), kv)
    assert out.logits_BTV is not None
    return out.logits_BTV[0].float().log_softmax(-1)


def law_behind(
    target: Target, engine: Engine | KeptPrompts, prompt: Sequence[int], text: Sequence[int]
) -> torch.Tensor:
    """The same behind what the target keeps of a prompt."""
    tokens = tuple(prompt)
    if isinstance(engine, SpecKV):
        engine.engine.open(len(prompt) + len(text) + 8)
        request = Request(tokens, Sampling(max_new_tokens=len(text)))
        tokens = engine.kept(0, request).tokens
        return law(engine.lm, engine.engine.reader.kv, tokens[-1], text, len(tokens) - 1)
    if isinstance(engine, SpecPC):
        tokens = engine.shortened(tokens)
    kv = target.new_kv(1, len(tokens) + len(text))
    with torch.inference_mode():
        prefill(target, kv, Row.of(0, 0, Request(tokens)))
    return law(target.lm, kv, tokens[-1], text, len(tokens) - 1)


def needles(target: Target, path: Path, texts: int, count: int) -> list[tuple[list[int], str]]:
    """Prompts of so many articles, with a number in a sentence of its own between two of them, and
    the number."""
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    given = [
        line["messages"][0]["content"] for line in lines if line["category"] == "summarization"
    ]
    choice, found = random.Random(1), []
    for at in range(count):
        group = [text.removeprefix(ORDER) for text in given[at * texts : (at + 1) * texts]]
        number = str(choice.randrange(1000, 9999))
        sentences = group[texts // 2].split(". ")
        sentences.insert(choice.randrange(len(sentences)), NEEDLE.format(number).removesuffix("."))
        group[texts // 2] = ". ".join(sentences)
        content = "\n\n".join((*group, QUESTION))
        found.append((target.encode_chat([{"role": "user", "content": content}]), number))
    return found


def cell(values: Sequence[float], digits: int) -> str:
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return f"{fmean(values):.{digits}f} +- {error:.{digits}f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--beside", help="The model that chooses; else the target itself.")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--words", nargs="+", required=True)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--needles", type=int, default=0)
    parser.add_argument("--needle-texts", type=int, default=2)
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    beside = target if words.beside is None else load_target(words.beside)
    given = prompts(target, words.prompts, "summarization", words.texts, words.count)
    hidden = needles(target, words.prompts, words.needle_texts, words.needles)
    names = ["plain", *words.words]
    engines = {name: writer(name, target, beside) for name in names}
    first, each, lost, apart = ({name: list[float]() for name in names} for _ in range(4))
    said = {name: list[bool]() for name in names}
    for prompt in given:
        answer, own_TV = (), torch.empty(0)
        for name, engine in engines.items():
            text, seconds, step = answered(engine, prompt, words.tokens)
            answer = text if name == "plain" else answer
            law_TV = law_behind(target, engine, prompt, answer)
            own_TV = law_TV if name == "plain" else own_TV
            at_T1 = torch.tensor(answer)[:, None]
            before = 0.0 if name == "plain" else float(own_TV.gather(1, at_T1).mean())
            lost[name].append(before - float(law_TV.gather(1, at_T1).mean()))
            apart[name].append(float((law_TV.exp() - own_TV.exp()).abs().sum(-1).mean() / 2))
            first[name].append(seconds)
            each[name].append(1000 * step)
            figures = f"{seconds:.2f} s, {1000 * step:.1f} ms, loss {lost[name][-1]:.3f}"
            figures += f", distance {apart[name][-1]:.3f}"
            print(f"{len(prompt)} tokens, {name}: {figures}", file=sys.stderr, flush=True)
    for prompt, number in hidden:
        for name, engine in engines.items():
            text = target.decode(answered(engine, prompt, 24)[0])
            said[name].append(number in text)
            print(f"{len(prompt)} tokens, {name}: {number} {text!r}", file=sys.stderr, flush=True)
    titles = "s to the first token | ms a token | loss of plain's answer | distance | needles"
    print(f"| word | {titles} |\n|---|---|---|---|---|---|")
    for name in names:
        found = f"{sum(said[name])} of {len(said[name])}"
        cells = [cell(first[name], 1), cell(each[name], 1), cell(lost[name], 3)]
        cells.append(cell(apart[name], 3))
        print(f"| `{name}` | {' | '.join(cells)} | {found} |", flush=True)


if __name__ == "__main__":
    main()
