"""What approximate ways to decode cost in answers that are right: functions whose examples pass.

Prompts are functions with examples in their docstrings (HumanEval as chats); the examples that
stand in the prompt are run against what was answered, in a Python of their own with a time limit.
Of every way: how many of the functions pass, with the standard error of that share, how many do
not pass that pass with the lossless way or the other way round, tokens a round, and processor
seconds an answer. A way is `lossless`, a law of two models or one by which they write in turns
(`--mix`), or a relaxed rule. The model beside the target drafts chains wherever anything drafts.

    python benchmarks/task_accuracy.py --target qwen2.5-coder-1.5b --beside qwen2.5-coder-0.5b \\
        --prompts humaneval.jsonl --ways lossless contrast:0.5:0.1 entropy:1 reflect:0.3
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import process_time

import torch

from specctl import load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.runtime.generate import Generated, generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.runtime.target.variants.mixed import in_turns, mixed
from specctl.runtime.target.variants.mixture import parse

SECONDS = 10  # for all examples of a function
RULES = ("reflect", "fly", "typical")
CHECK = """
import ast, doctest, json, sys
question, answer = json.load(open("given.json"))
names = {}
exec(answer, names)
functions = [one for one in ast.walk(ast.parse(question)) if isinstance(one, ast.FunctionDef)]
examples = "\\n\\n".join(ast.get_docstring(one) or "" for one in functions)
test = doctest.DocTestParser().get_doctest(examples, names, "examples", None, 0)
ran = doctest.DocTestRunner(verbose=False).run(test, out=lambda text: None)
sys.exit(bool(ran.failed) or not ran.attempted)
"""

Write = Callable[[list[int], Sampling], Generated]


def code_in(text: str) -> str:
    """The first block of code of an answer; the whole where it has none."""
    found = re.search(r"```(?:python)?\n(.*?)(?:```|$)", text, re.DOTALL)
    return found[1] if found else text


def passes(question: str, answer: str) -> bool:
    """Whether all examples of the question give what they say with the answered code."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "given.json").write_text(json.dumps([code_in(question), code_in(answer)]))
        try:
            words = [sys.executable, "-I", "-c", CHECK]
            ran = subprocess.run(words, cwd=folder, timeout=SECONDS, capture_output=True)
        except subprocess.TimeoutExpired:
            return False
    return ran.returncode == 0


def writer(way: str, own: Target, beside: Target, drafter: Drafter) -> Write:
    """What answers by that way."""
    chain = make_policy({"policy": "chain", "length": 8 if way.startswith("reflect") else 5})
    if way == "lossless":
        return lambda ids, how: generate(own, [ids], drafter=drafter, policy=chain, sampling=how)
    if way.split(":")[0] in RULES:
        drafted = {"drafter": drafter, "policy": chain, "rule": way}
        return lambda ids, how: generate(own, [ids], sampling=how, **drafted)
    law = parse(f"{way}=beside")
    if law.is_in_turns:
        whole = in_turns(own, [beside], law)
        return lambda ids, how: generate(whole, [ids], sampling=how)
    whole = mixed(own, beside, law)
    return lambda ids, how: generate(whole, [ids], drafter=drafter, policy=chain, sampling=how)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", required=True)
    parser.add_argument("--beside", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--longest", type=int, default=130, help="tokens of a prompt")
    parser.add_argument("--ways", nargs="+", required=True)
    words = parser.parse_args()
    torch.set_num_threads(1)
    own, beside = load_target(words.target), load_target(words.beside)
    drafter = load_drafter(words.beside, own)
    lines = map(json.loads, words.prompts.read_text(encoding="utf-8").splitlines())
    questions = [line["messages"][0]["content"] for line in lines]
    short = []
    for text in (text for text in questions if ">>>" in text):
        ids = own.encode_chat([{"role": "user", "content": text}])
        short += [(text, ids)] if len(ids) <= words.longest else []
    given = short[:: max(1, len(short) // words.count)][: words.count]
    sampling, right = Sampling(0.0, max_new_tokens=words.tokens), dict[str, list[bool]]()
    print("| way | examples pass | otherwise than lossless | tau | s an answer |")
    print("|---|---|---|---|---|", flush=True)
    for way in words.ways:
        write, found, taus, seconds = writer(way, own, beside, drafter), list[bool](), [], []
        for number, (text, ids) in enumerate(given):
            began = process_time()
            made = write(ids, sampling)
            seconds.append(process_time() - began)
            taus.append(made.stats.tau)
            found.append(passes(text, own.decode(made.outputs[0].token_ids)))
            print(f"{way} {number}: {found[-1]} {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
        right[way] = found
        share, others = fmean(found), right.get("lossless", found)
        error = (share * (1 - share) / len(found)) ** 0.5
        apart = sum(a != b for a, b in zip(found, others, strict=True))
        cells = f"{sum(found)} of {len(found)} ({share:.2f} +- {error:.2f}) | {apart}"
        print(f"| `{way}` | {cells} | {fmean(taus):.2f} | {fmean(seconds):.1f} |", flush=True)


if __name__ == "__main__":
    main()
