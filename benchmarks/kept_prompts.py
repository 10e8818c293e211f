"""What is won and lost where the target keeps a part of long prompts (`--mix specpc` and `speckv`).

Prompts are made as by `long_context.py`. Of every word: processor seconds to the first token,
milliseconds a token behind it, and along plain decoding's answer its loss (nats a token) behind
what is kept over that behind the whole prompt, and the mean total variation between what is said
behind either; means +- standard errors over prompts. With
`--needles` so many other prompts, of `--needle-texts` texts, hide a number in a sentence, and are
counted where the answer says it. `newest:KEEP` keeps the first 64 tokens and the newest ones.
`--drafts` draft in chains for the whole prompt, which plain decoding has read for them: tokens a
round, and seconds of their own reading before the first token. A line stands as soon as a prompt
is measured; the table of all comes last.

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
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from time import process_time

import torch
from long_context import ORDER, prompts

from specctl import load_target
from specctl.api.arguments.drafting import load_draft
from specctl.core.kv_cache import SlotKV
from specctl.core.language_model import Feed, LanguageModel
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request, Row
from specctl.runtime.kept_prompts import KeptPrompts, make_kept_prompts
from specctl.runtime.kept_prompts.spec_kv import SpecKV
from specctl.runtime.kept_prompts.spec_pc import SpecPC
from specctl.runtime.policies.chain import Chain
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


class Once:
    """Prompts as a model chose them, of each one once: what is scored behind them is not chosen
    anew."""

    def __init__(self, engine: SpecPC) -> None:
        self.chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.choose, engine.shortened = engine.shortened, self

    def __call__(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        if tokens not in self.chosen:
            self.chosen[tokens] = self.choose(tokens)
        return self.chosen[tokens]


def writer(word: str, target: Target, beside: Target) -> Engine | KeptPrompts:
    """What answers by that word."""
    if word == "plain":
        return Engine(target)
    named = word.replace("newest", "specpc")
    found = make_kept_prompts(in_turns(target, [beside], parse(f"{named}=m")), None, None, "auto")
    if word.startswith("newest"):
        found.__class__ = Newest
    if isinstance(found, SpecPC):
        Once(found)
    return found


def drafting(name: str, plain: Engine, length: int, most: int) -> Engine:
    """Drafts for the target behind the prompts that `plain` has read."""
    folder, *options = name.split(":")
    drafter = load_draft(folder, plain.target, draft_options=options).drafter
    engine = Engine(plain.target, drafter, Chain(length=length))
    assert not engine.reader.taps, f"{name} reads states of the target at every token of a prompt"
    engine.open(most)
    engine.reader._kv, engine.scheduler.prefixes = plain.reader.kv, plain.scheduler.prefixes
    return engine


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written greedily, seconds to its first token and for each behind it, and tokens a
    round."""

    text: tuple[int, ...]
    first: float
    each: float
    tau: float


def answered(engine: Engine | KeptPrompts, prompt: Sequence[int], new_tokens: int) -> Answer:
    marks, began = list[float](), process_time()

    def mark(row: Row, new: tuple[int, ...]) -> None:
        marks.extend([process_time()] * len(new))

    sampling = Sampling(max_new_tokens=new_tokens)
    done = engine.run([Request(tuple(prompt), sampling, conversation="measured")], mark)[0]
    later = len(marks) - marks.count(marks[0])
    each = (marks[-1] - marks[0]) / max(1, later)
    tau = len(done.tokens) / max(1, done.stats.rounds)
    return Answer(done.tokens, marks[0] - began, each, tau)


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
    """The same behind what the target keeps of the prompt that this engine has just answered."""
    tokens, lm = tuple(prompt), target.lm
    if isinstance(engine, SpecKV):  # its cache holds that, in front of the answer
        tokens, lm = tokens[-engine.keep - 1 :], engine.lm
    if isinstance(engine, SpecPC):
        tokens = engine.shortened(tokens)
    inner = engine if isinstance(engine, Engine) else engine.engine
    return law(lm, inner.reader.kv, tokens[-1], text, len(tokens) - 1)


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
    parser.add_argument("--skip", type=int, default=0, help="of these prompts, the first ones")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--needles", type=int, default=0)
    parser.add_argument("--needle-texts", type=int, default=2)
    parser.add_argument("--drafts", nargs="+", default=[], help="FOLDER[:OPTION=VALUE...]")
    parser.add_argument("--length", type=int, default=4, help="of drafted chains")
    words = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(words.target)
    beside = target if words.beside is None else load_target(words.beside)
    given = prompts(target, words.prompts, "summarization", words.texts, words.count)
    given = given[words.skip :]
    hidden = needles(target, words.prompts, words.needle_texts, words.needles)
    longest = max(map(len, [*given, *(prompt for prompt, _ in hidden)])) + words.tokens
    most = min(longest, target.spec.max_positions)
    plain = Engine(target)
    plain.open(most + words.length)
    engines: dict[str, Engine | KeptPrompts] = {"plain": plain}
    engines |= {word: writer(word, target, beside) for word in words.words}
    names = [*engines]
    engines |= {name: drafting(name, plain, words.length, most) for name in words.drafts}
    first, each, lost, apart, tau = ({name: list[float]() for name in engines} for _ in range(5))
    said = {name: list[bool]() for name in engines}
    for prompt in given:
        own, own_TV = Answer((), 0.0, 0.0, 1.0), torch.empty(0)
        for name, engine in engines.items():
            answer = answered(engine, prompt, words.tokens)
            own = answer if name == "plain" else own
            figures = f"{answer.first:.2f} s, {1000 * answer.each:.1f} ms, tau {answer.tau:.2f}"
            first[name].append(answer.first)
            each[name].append(1000 * answer.each)
            tau[name].append(answer.tau)
            if name in names:
                law_TV = law_behind(target, engine, prompt, own.text)
                own_TV = law_TV if name == "plain" else own_TV
                at_T1 = torch.tensor(own.text)[:, None]
                before = 0.0 if name == "plain" else float(own_TV.gather(1, at_T1).mean())
                lost[name].append(before - float(law_TV.gather(1, at_T1).mean()))
                apart[name].append(float((law_TV.exp() - own_TV.exp()).abs().sum(-1).mean() / 2))
                figures += f", loss {lost[name][-1]:.3f}, distance {apart[name][-1]:.3f}"
            elif answer.text != own.text:
                figures += ", another text than plain"
            print(f"{len(prompt)} tokens, {name}: {figures}", file=sys.stderr, flush=True)
    for prompt, number in hidden:
        for name, engine in engines.items():
            answer = answered(engine, prompt, 24)
            text = target.decode(answer.text)
            said[name].append(number in text)
            figures = f"{number} {text!r}, tau {answer.tau:.2f}"
            print(f"{len(prompt)} tokens, {name}: {figures}", file=sys.stderr, flush=True)
    titles = (
        "s to the first token | ms a token | tokens a round | loss of plain's answer | distance"
    )
    print(f"| word | {titles} | needles |\n|---|---|---|---|---|---|---|")
    for name in engines:
        found = f"{sum(said[name])} of {len(said[name])}"
        cells = [cell(first[name], 1), cell(each[name], 1), cell(tau[name], 2)]
        cells += [cell(lost[name], 3), cell(apart[name], 3)]
        print(f"| `{name}` | {' | '.join(cells)} | {found} |", flush=True)


if __name__ == "__main__":
    main()
