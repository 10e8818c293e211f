"""GRPO with a drafter that follows the policy: TRL trains, specctl writes the rollouts.

The embedded target learns to write lines of Python that parse: the reward is the share of a
completion's lines that are a statement, or the first line of one. Every rollout is drafted and
verified with the policy of that moment; every `--every` steps of the policy the drafter learns
`--follow` steps on the newest rollouts. At the end tau is measured on held-out prompts, with the
policy that came out: of the drafter of the beginning, of the one that has followed, and of a
control that has learned as many steps on rollouts of the policy of the beginning. Mean +- standard
error, differences paired over prompts.

    pip install trl==1.16.0
    python benchmarks/grpo.py --out runs/grpo

`Rollouts` is all that TRL needs. Without `--draft`, an `eagle3` drafter is trained first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import specctl
from specctl.train.data.prompts.heldout import embedded_prompts

KIND = "code"


@dataclass(slots=True)
class RolloutFunction:
    """What GRPOTrainer calls for completions. `follower` is a `specctl.follow_policy` beside the
    model that the trainer trains; it learns `steps` steps where the policy has made `every`."""

    follower: Any
    every: int
    steps: int
    followed_at: int = 0
    rollout_seconds: float = 0.0
    follow_seconds: float = 0.0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        if self.steps and step - self.followed_at >= self.every:
            self.follow_seconds += self.follower.follow(self.steps).seconds
            self.followed_at = step
        encode = self.follower.target.encode
        made = self.follower.rollouts([encode(prompt) for prompt in prompts])
        self.rollout_seconds += made.seconds
        print(f"step {step}: tau {made.stats.tau:.3f}", flush=True)
        return {
            "prompt_ids": [list(ids) for ids in made.prompt_ids],
            "completion_ids": [list(ids) for ids in made.ids],
            "logprobs": [list(values) for values in made.logprobs],
        }


def parses(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward of each completion, 0 to 1."""
    return [statements(completion) for completion in completions]


def statements(text: str) -> float:
    """The share of the lines, empty ones aside, that are a statement or begin one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sum(map(is_statement, lines)) / max(1, len(lines))


def is_statement(line: str) -> bool:
    for whole in (line, f"{line} pass", f"{line}\n  pass"):
        try:
            ast.parse(whole)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        return True
    return False


def policy_of(name: str) -> tuple[Any, Any]:
    """A model to train, in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(name)


def trained(
    model: Any, tokenizer: Any, prompts: Sequence[str], rollouts: RolloutFunction, given: Any
) -> list[dict[str, Any]]:
    """Train the policy by GRPO; what TRL logged."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(given.out / "trl"),
        max_steps=given.steps,
        learning_rate=given.learning_rate,
        per_device_train_batch_size=given.prompts_per_step * given.generations,
        num_generations=given.generations,
        max_completion_length=given.new_tokens,
        temperature=given.temperature,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=parses,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    return list(trainer.state.log_history)


def measured(target: Any, drafter: Any, prompts: Sequence[str], given: Any) -> list[float]:
    """Tau of each prompt, sampled as rollouts are."""
    found = [
        specctl.generate(
            target,
            target.encode(prompt),
            drafter,
            temperature=given.temperature,
            seed=given.seed + number,
            max_new_tokens=given.measured_tokens,
            adaptive=False,
        )
        for number, prompt in enumerate(prompts)
    ]
    return [one.stats.tau for one in found]


def mean(values: Sequence[float]) -> str:
    """With its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.fmean(values):.3f} +- {error:.3f}"


def first_drafter(given: Any) -> Path:
    """A drafter for the policy of the beginning."""
    if given.draft is not None:
        return Path(given.draft)
    settings = {"steps": given.draft_steps, "tau_every": given.draft_steps}
    run = specctl.train(
        given.target, "eagle3", out=given.out / "first", serve={"adaptive": False}, **settings
    )
    return run.package


def control(package: Path, prompts: Sequence[str], given: Any) -> Any:
    """A drafter that learned as much, on rollouts of a policy that does not move."""
    model, tokenizer = policy_of(given.target)
    follower = beside(model, tokenizer, package, given)
    encode = follower.target.encode
    for step in range(given.steps):
        if given.follow and step and step % given.every == 0:
            follower.follow(given.follow)
        first = step * given.prompts_per_step
        some = [prompts[(first + i) % len(prompts)] for i in range(given.prompts_per_step)]
        follower.rollouts([encode(text) for text in some for _ in range(given.generations)])
    return follower.drafter


def beside(model: Any, tokenizer: Any, package: Path, given: Any) -> Any:
    return specctl.follow_policy(
        model,
        specctl.load_drafter(package),
        tokenizer=tokenizer,
        sampling=specctl.Sampling(
            temperature=given.temperature, max_new_tokens=given.new_tokens, seed=given.seed
        ),
        learning_rate=given.follow_rate,
        rows=given.rows,
        keep=given.keep,
        batch=given.batch,
        seed=given.seed,
    )


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"))
    parser.add_argument("--target", default="recipes/tiny", help="a folder of transformers")
    parser.add_argument("--draft", help="a package for it; one is trained if it is left out")
    parser.add_argument("--draft-steps", type=int, default=160)
    parser.add_argument("--steps", type=int, default=20, help="of the policy")
    parser.add_argument("--every", type=int, default=2, help="steps of the policy")
    parser.add_argument("--follow", type=int, default=6, help="steps of the drafter; 0: frozen")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--follow-rate", type=float, default=2e-3)
    parser.add_argument("--keep", type=int, default=64, help="rollouts to learn from")
    parser.add_argument("--rows", type=int, default=4, help="of a step of the drafter")
    parser.add_argument("--prompts-per-step", type=int, default=2)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--measured", type=int, default=32, help="held-out prompts")
    parser.add_argument("--measured-tokens", type=int, default=40)
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All of it; tau by drafter, and where the time went."""
    given.out.mkdir(parents=True, exist_ok=True)
    lines = map(json.loads, embedded_prompts().read_text().splitlines())
    texts = [line["text"] for line in lines if line["domain"] == KIND]
    held, prompts = texts[: given.measured], texts[given.measured :]
    package = first_drafter(given)
    model, tokenizer = policy_of(given.target)
    follower = beside(model, tokenizer, package, given)
    tau: dict[str, list[float]] = {}

    def measure(name: str, target: Any, drafter: Any) -> None:
        tau[name] = measured(target, drafter, held, given)
        print(f"{name}: tau {mean(tau[name])}", flush=True)

    measure("before", follower.target, follower.drafter)
    rollouts = RolloutFunction(follower, given.every, given.follow)
    began = time.perf_counter()
    log = trained(model, tokenizer, prompts, rollouts, given)
    seconds = time.perf_counter() - began
    after, old = follower.target, specctl.load_drafter(package)
    measure("frozen", after, old)
    measure("following", after, follower.drafter)
    if not given.no_control:
        measure("control", after, control(package, prompts, given))
    shares = {"rollouts": rollouts.rollout_seconds, "following": rollouts.follow_seconds}
    rewards = [line["reward"] for line in log if "reward" in line]
    result = {"tau": tau, "seconds": seconds, **shares, "rewards": rewards}
    (given.out / "result.json").write_text(json.dumps(result) + "\n")
    return result


def show(result: dict[str, Any]) -> None:
    tau, seconds, rewards = result["tau"], result["seconds"], result["rewards"]
    few = max(1, len(rewards) // 4)
    first, last = statistics.fmean(rewards[:few]), statistics.fmean(rewards[-few:])
    print(f"reward of the first and the last quarter of the steps: {first:.3f}, {last:.3f}")
    print("| drafter | policy | tau | minus the frozen one |")
    print("|---|---|---|---|")
    for name, values in tau.items():
        pairs = zip(values, tau["frozen"], strict=True)
        gain = "" if name in ("before", "frozen") else mean([one - base for one, base in pairs])
        print(f"| {name} | {'before' if name == 'before' else 'after'} | {mean(values)} | {gain} |")
    shares = [f"{name} {result[name] / seconds:.0%}" for name in ("rollouts", "following")]
    print(f"{seconds:.0f} s, {', '.join(shares)}")


if __name__ == "__main__":
    show(run(options().parse_args()))
