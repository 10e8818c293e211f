"""What approximate ways to decode cost in answers that are right: functions and sums.

Prompts are functions with examples in their docstrings (HumanEval as chats); the examples that
stand in the prompt are run against what was answered, in a Python of their own with a time limit.
With `--answers`, they are questions of mathematics with one number each (a part of Spec-Bench's,
benchmarks/answers), and the last number of an answer is compared, or that of its last \\boxed{}.
Of every way: how many answers are right, with the standard error of that share, how many are right
that are wrong by the lossless way and the other way round, with the difference and its error over
the same prompts, tokens a round, and processor seconds an answer. A way is `lossless`, a law of two
models or one by which they write in turns (`--mix`; `reward:0.8=beside,beside` where the model
beside the target judges its own steps), or a relaxed rule. That model drafts chains wherever any
drafts. All ways answer a prompt before the next one; with `--found` every answer is kept as a line
of JSON, and those that stand there are not written again.

    python benchmarks/task_accuracy.py --target qwen2.5-coder-1.5b --beside qwen2.5-coder-0.5b \\
        --prompts humaneval.jsonl --ways lossless contrast:0.5:0.1 entropy:1 reflect:0.3
    python benchmarks/task_accuracy.py ... --prompts specbench.jsonl --tokens 300 \\
        --answers benchmarks/answers/spec_bench_math.json --found math.jsonl
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from time import process_time

from mixtures import Pair, drafted, options

from specctl.runtime.generate import Generated, generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
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
NUMBER = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))")

Write = Callable[[list[int], Sampling], Generated]
Check = Callable[[str], bool]


def digest(question: str) -> str:
    """What names a question in a file of answers."""
    return sha256(question.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Found:
    """One answer of one way."""

    question: str
    way: str
    is_right: bool
    tau: float
    seconds: float
    tokens: int
    ended: str
    by_target: float | None  # of the tokens, where models write in turns


def prompt_ids(target: Target, question: str) -> list[int]:
    """The question as a user's turn."""
    return list(target.encode_chat([{"role": "user", "content": question}]))


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


def number_in(answer: str) -> float | None:
    """The last number of an answer, or of its last box: `$1,000.00`, `**5** hours`."""
    boxes = re.findall(r"\\boxed\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", answer)
    text = re.sub(r"\^\{?\d+\}?", "", boxes[-1] if boxes else answer)  # of square and cubic units
    found = NUMBER.findall(re.sub(r"\{,\}|\\,(?=\d)", ",", text))
    return float(found[-1].replace(",", "")) if found else None


def says(wanted: float, answer: str) -> bool:
    """Whether the number of an answer is that one."""
    number = number_in(answer)
    return number is not None and abs(number - wanted) < 1e-5


def writer(way: str, pair: Pair) -> Write:
    """What answers by that way."""
    own, drafter = pair.own, pair.drafter
    if way == "lossless":
        return lambda ids, how: drafted(own, ids, how, drafter)
    if (rule := way.split(":")[0]) in RULES:
        length = 8 if rule == "reflect" else 5
        return lambda ids, how: drafted(own, ids, how, drafter, length, rule=way)
    law = parse(way if "=" in way else f"{way}=beside")
    whole = pair.by(law)
    if law.is_in_turns:
        return lambda ids, how: generate(whole, [ids], sampling=how)
    return lambda ids, how: drafted(whole, ids, how, drafter)


def functions(target: Target, questions: Sequence[str], longest: int) -> dict[str, Check]:
    """The checks of the functions with examples whose prompts are short, by question."""
    given = (text for text in questions if ">>>" in text)
    short = [text for text in given if len(prompt_ids(target, text)) <= longest]
    return {text: partial(passes, text) for text in short}


def sums(questions: Sequence[str], answers: Mapping[str, Mapping[str, float]]) -> dict[str, Check]:
    """The checks of the questions that have an answer, by question."""
    known = [text for text in questions if digest(text) in answers]
    return {text: partial(says, answers[digest(text)]["answer"]) for text in known}


def answered(way: str, write: Write, own: Target, text: str, how: Sampling, check: Check) -> Found:
    """One answer, and whether it is right."""
    ids = prompt_ids(own, text)
    began = process_time()
    made = write(ids, how)
    seconds = round(process_time() - began, 2)
    (out,), turns = made.outputs, made.stats.turns
    is_right, share = check(own.decode(out.token_ids)), None if turns is None else turns.share
    ended = out.finish_reason
    return Found(
        digest(text), way, is_right, made.stats.tau, seconds, len(out.token_ids), ended, share
    )


def table(ways: Sequence[str], found: Sequence[Found]) -> str:
    """Of the prompts that every way has answered."""
    by_way = {way: {one.question: one for one in found if one.way == way} for way in ways}
    whole = set.intersection(*(set(ones) for ones in by_way.values()))
    lines = [
        "| way | right | otherwise than lossless | difference | tau | an answer |",
        "|---|---|---|---|---|---|",
    ]
    for way, ones in by_way.items():
        mine = [ones[question] for question in sorted(whole)]
        right = [one.is_right for one in mine]
        others = [by_way[ways[0]][one.question].is_right for one in mine]
        share, count = fmean(right), len(right)
        error = (share * (1 - share) / count) ** 0.5
        apart = [int(a) - int(b) for a, b in zip(right, others, strict=True)]
        spread = stdev(apart) / count**0.5 if count > 1 else 0.0
        cells = (
            f"{sum(right)} of {count} ({share:.2f} +- {error:.2f})",
            f"{apart.count(1)} right, {apart.count(-1)} wrong",
            f"{fmean(apart):+.2f} +- {spread:.2f}",
            f"{fmean(one.tau for one in mine):.2f}",
            f"{fmean(one.seconds for one in mine):.1f} s",
        )
        lines.append(f"| `{way}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__, tokens=200)
    parser.add_argument("--answers", type=Path, help="numbers by question")
    parser.add_argument("--longest", type=int, default=130, help="tokens of a function's prompt")
    parser.add_argument("--ways", nargs="+", required=True, help="compared with the first")
    parser.add_argument("--found", type=Path, help="where answers are kept")
    words = parser.parse_args()
    pair = Pair.load(words.target, words.beside)
    own = pair.own
    lines = map(json.loads, words.prompts.read_text(encoding="utf-8").splitlines())
    questions = [line["messages"][0]["content"] for line in lines]
    if words.answers is None:
        checks = functions(own, questions, words.longest)
    else:
        checks = sums(questions, json.loads(words.answers.read_text(encoding="utf-8")))
    given = list(checks)[:: max(1, len(checks) // words.count)][: words.count]
    found = list[Found]()
    if words.found is not None and words.found.exists():
        kept = words.found.read_text(encoding="utf-8").splitlines()
        found = [Found(**json.loads(line)) for line in kept]
    known = {(one.question, one.way) for one in found}
    ways = {way: writer(way, pair) for way in words.ways}
    sampling = Sampling(0.0, max_new_tokens=words.tokens)
    for text in given:
        for way, write in ways.items():
            if (digest(text), way) in known:
                continue
            one = answered(way, write, own, text, sampling, checks[text])
            found.append(one)
            print(json.dumps(asdict(one)), file=sys.stderr, flush=True)
            if words.found is not None:
                with words.found.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    names = {digest(text) for text in given}
    print(table(words.ways, [one for one in found if one.question in names]))


if __name__ == "__main__":
    main()
