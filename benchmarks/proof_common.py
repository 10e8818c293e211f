"""What the proofs of training share: a random target, small runs of it, children, a report."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specctl.cli.app.console import Console
from specctl.core.errors import Exit, SpecctlError
from specctl.recipes.load import load_recipe
from specctl.recipes.schema import Recipe
from specctl.runtime.target.target import Target
from specctl.train.distributed.ranks import Ranks
from specctl.train.metrics.metrics import read_log
from specctl.train.saving.checkpoint import Snapshot

LETTERS = "abcdefghijklmnopqrstuvwxyz ()=:\n"
SETS = (
    "data.prompts=32", "data.new_tokens=12", "data.prompt_tokens=6", "data.regenerate=false",
    "data.format=text", "data.text_tokens=0", "train.steps=1000000", "train.rows=2",
    "train.seq_len=16", "train.save_every=1", "train.tau_every=7", "train.tau_prompts=1",
    "train.tau_tokens=4", "train.log_every=1", "train.schedule=linear", "train.learning_rate=1e-3",
    "vocab.size=null",
)  # fmt: skip
SMALL_LM = (
    "drafter.init=null", "drafter.options.layers=1", "drafter.options.width=16",
    "drafter.options.heads=2",
)  # fmt: skip

# Kind of run -> its recipe and what makes it that kind; every kind is one call of `train_draft`.
KINDS = {
    "small-lm": ("distill", (*SMALL_LM, "drafter.options.loss=ce")),
    "eagle3": ("eagle3", ("vocab.size=24",)),
    "medusa": ("medusa", ()),
    "distill": ("distill", (*SMALL_LM, "drafter.options.loss=kl", "data.regenerate=true")),
    "prune": ("prune", ()),
    "on-policy": ("distill", (*SMALL_LM, "data.on_policy=0.5", "data.on_policy_every=3")),
    "offline": ("eagle3", ("vocab.size=24", "data.features=offline")),
}


@dataclass(frozen=True, slots=True)
class Check:
    """What was tried how often, and what went wrong. Fewer than `need` cases prove nothing."""

    what: str
    cases: int
    failed: int
    need: int = 1
    found: str = ""

    @property
    def ok(self) -> bool:
        return self.failed == 0 and self.cases >= self.need


def checked(what: str, failures: Sequence[str | None], need: int = 1) -> Check:
    """A check from one entry per case: None, or what was wrong."""
    wrong = [text for text in failures if text is not None]
    return Check(what, len(failures), len(wrong), need, "; ".join(wrong[:3]))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every proof."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="print JSON only")
    return made


def report(checks: Sequence[Check], as_json: bool) -> NoReturn:
    """Print what was checked and leave with 0, or 8 if anything failed."""
    passed = bool(checks) and all(check.ok for check in checks)
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks], "passed": passed}))
    else:
        rows = [(c.what, c.cases, c.failed, "ok" if c.ok else "FAILED") for c in checks]
        Console().table(("checked", "cases", "failed", "verdict"), rows)
        for check in checks:
            if not check.ok:
                print(f"FAILED {check.what}: {check.found or f'only {check.cases} cases'}")
    sys.exit(Exit.OK if passed else Exit.GATE)


def small_target(seed: int = 0, positions: int = 64) -> Target:
    """A random model of 32 letters."""
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(LETTERS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=32, max_position_embeddings=positions,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=" ")
    return Target.from_model(LlamaForCausalLM(config), fast)


def write_text(path: Path, seed: int = 0) -> Path:
    """Random lines to train on."""
    chance = random.Random(seed)
    lines = ["".join(chance.choices(LETTERS[:26], k=24)) for _ in range(60)]
    path.write_text("\n\n".join(lines))
    return path


def small_recipe(kind: str, text: Path, **sets: object) -> Recipe:
    """A tiny run of that kind; `train__steps=5` sets train.steps."""
    name, own = KINDS[kind]
    given = [f"{key.replace('__', '.')}={value}" for key, value in sets.items()]
    return load_recipe(name, sets=[*SETS, *own, f"data.source={text}", *given])


def state_digest(snapshot: Snapshot) -> str:
    """sha256 over everything that decides how the run goes on. (Which checkpoint is the best so far
    does not: a run that was asked to stop saves first and measures when it goes on.)"""
    body = hashlib.sha256()
    parts = {**snapshot.tensors, "own": snapshot.own}
    for part, tensors in sorted(parts.items()):
        for name, tensor in sorted(tensors.items()):
            body.update(f"{part}/{name}".encode())
            body.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    progress = snapshot.scalars["progress"]
    body.update(f"{progress['step']} {progress['position']} {progress['tokens']}".encode())
    return body.hexdigest()


def logged(out: Path, until: int | None = None) -> list[dict[str, Any]]:
    """The figures of a run's log up to a step, without what a clock measured. What is measured at
    the last step is left out: a stop may come before it."""
    lines = read_log(out / "metrics.jsonl")
    if until is not None:
        lines = [m for m in lines if m["step"] < until + ("tau" not in m)]
    timed = ("seconds", "tokens_per_second")
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def start_child(body: Callable[[], object], trace: Path) -> int:
    """Fork; the child runs `body` and leaves with the exit code of what it raised. An unexpected
    exception is written to `trace`. Returns the process id."""
    child = os.fork()
    if child:
        return child
    code = 0
    try:
        body()
    except SpecctlError as error:
        code = int(error.exit)
        trace.write_text(error.text())
    except BaseException:
        code = int(Exit.BUG)
        trace.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The exit code of a child; negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_ranks(size: int, body: Callable[[Ranks], object], folder: Path, limit: float) -> list[int]:
    """Run `body` in so many processes that know each other; returns their exit codes. Processes
    that take longer than `limit` seconds hang: they are killed, and their code says so."""
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)

    def member(rank: int) -> None:
        signal.alarm(int(limit))
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        body(Ranks.current(torch.device("cpu")))
        dist.destroy_process_group()

    def started(rank: int) -> int:
        return start_child(lambda: member(rank), folder / f"rank{rank}.trace")

    return [wait(child) for child in [started(rank) for rank in range(size)]]


def load_toy() -> ModuleType:
    """tests/specctl_testing/train/toy.py: a training job small enough for thousands of runs."""
    if "specctl_toy" in sys.modules:
        return sys.modules["specctl_toy"]
    path = Path(__file__).parents[1] / "tests" / "specctl_testing" / "train" / "toy.py"
    spec = importlib.util.spec_from_file_location("specctl_toy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["specctl_toy"] = module
    spec.loader.exec_module(module)
    return module
