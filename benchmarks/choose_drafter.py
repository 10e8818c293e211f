"""What holding a team costs a request that chooses one of its drafters (`serve`, `"draft": NAME`).

Prompts of a file (one JSON object with `prompt` or `messages` a line) are answered one by one, by
an engine that has one drafter and by one that has the team, where the request names that drafter;
and in batches in which every row names another. Both take turns on every prompt. Shown are tau,
tokens a second of the processor's time (other work on the machine counts little in it), prompts
included, and the ratio of both, with the standard error over prompts.

    python benchmarks/choose_drafter.py --target smollm2-135m --prompts specbench.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from specctl import load_target
from specctl.api.arguments.drafting import load_draft
from specctl.drafters.team import Team
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Completion, Request
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="prompt-lookup+token-recycling")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    target = load_target(options.target)
    rows = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()]
    step = max(1, len(rows) // options.limit)
    prompts = [_ids(target, row) for row in rows[::step][: options.limit]]
    sampling = Sampling(options.temperature, max_new_tokens=options.tokens, ignore_eos=True)
    team = load_draft(options.draft, target)
    assert isinstance(team.drafter, Team)
    names = team.drafter.names

    def engine(name: str, slots: int = 1) -> Engine:
        draft = load_draft(name, target)
        made = Engine(target, draft.drafter, draft.policy, "target-only", num_slots=slots)
        made.open(max(map(len, prompts)) + options.tokens)
        return made

    engines = {name: engine(name) for name in ("none", *names, options.draft)}
    ways: list[tuple[str, str, bool | str]] = [("none", "none", True)]
    for name in names:
        ways += [(name, name, True), (f"{name} of the team", options.draft, name)]
    found: dict[str, list[tuple[float, Completion]]] = {label: [] for label, _, _ in ways}
    for _, which, drafts in ways:  # the first round of an engine is slower
        run(engines[which], [Request(prompts[0], sampling, drafts=drafts)])
    for prompt in prompts:
        texts = set()
        for label, which, drafts in ways:
            seconds, [done] = run(engines[which], [Request(prompt, sampling, drafts=drafts)])
            found[label].append((seconds, done))
            texts.add(done.tokens)
        assert len(texts) == 1, "all texts are the target's"
    for label, _, _ in ways:
        print(f"{label}: {_line([done for _, done in found[label]], _total(found[label]))}")
    for name in names:
        pairs = zip(found[name], found[f"{name} of the team"], strict=True)
        ratios = [alone[0] / chosen[0] for alone, chosen in pairs]
        print(f"{name}, of the team over alone: {_mean(ratios)}")
    wide = engine(options.draft, len(names))
    for label, chosen in [(name, [name]) for name in names] + [("each another", names)]:
        rows = [
            Request(prompt, sampling, drafts=chosen[at % len(chosen)])
            for at, prompt in enumerate(prompts)
        ]
        run(wide, rows[:1])
        seconds, done = run(wide, rows)
        print(f"batch {len(names)}, {label}: {_line(done, seconds)}")


def _ids(target: Target, row: dict) -> tuple[int, ...]:
    if "messages" in row:
        return tuple(target.encode_chat(row["messages"][:1]))
    return tuple(target.encode(row["prompt"]))


def run(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[Completion]]:
    """Seconds of the processor, and the answers."""
    begun = time.process_time()
    done = engine.run(requests)
    return time.process_time() - begun, done


def _total(runs: Sequence[tuple[float, Completion]]) -> float:
    return sum(seconds for seconds, _ in runs)


def _line(done: Sequence[Completion], seconds: float) -> str:
    tokens, rounds = sum(len(c.tokens) for c in done), sum(c.stats.rounds for c in done)
    return f"tau {tokens / rounds:.2f}, {tokens / seconds:.1f} tokens/s"


def _mean(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} +- {error:.3f}"


if __name__ == "__main__":
    main()
