"""What the scripts for a GPU share: cases measured one by one, kept as they come, within a time.

Every case is written to OUT/NAME.json as soon as it has figures; the same command goes on with
those that are missing or failed, and begins none that the time left is unlikely to suffice for.
NAME has "-dry" behind it in a dry run, which takes the same path on the CPU at a tiny size.
Exit codes: 0 all there, 8 a case failed, 75 the time was up before the last case.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from specctl.core.errors import Exit, SpecctlError
from specctl.core.spec import ModelSpec
from specctl.core.storage.files import write_json
from specctl.models.llama.fast_llama import FastLlama, LlamaModel, LlamaShape
from specctl.runtime.target.target import Target

Body = Callable[[], dict[str, Any]]
DRAFT_IDS = 32_000  # of the draft vocabulary
RESERVE = 1.3  # a case is begun if so many times its longest predecessor is left


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every script."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of all results")
    made.add_argument("--dry-run", action="store_true", help="on the CPU, at a tiny size")
    made.add_argument("--minutes", type=float, default=9.0, help="begin no case after them")
    made.add_argument("--only", default="", help="cases whose name contains this")
    made.add_argument("--part", default="1/1", help="K/N: every N-th case from the K-th on")
    made.add_argument("--json", action="store_true", help="print JSON only")
    return made


@dataclass
class Cases:
    """The cases of a script. One writer: the script that runs."""

    name: str
    args: argparse.Namespace
    device: torch.device = field(init=False)
    found: dict[str, Any] = field(init=False)
    waiting: list[str] = field(default_factory=list)
    longest: float = 0.0
    began: float = field(default_factory=time.monotonic)
    seen: int = 0

    def __post_init__(self) -> None:
        is_dry = self.args.dry_run
        if not is_dry and not torch.cuda.is_available():
            raise SystemExit("no CUDA device is here; --dry-run takes the same path on the CPU")
        self.device = torch.device("cpu" if is_dry else "cuda")
        about = {
            "device": "cpu" if is_dry else torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "dry_run": is_dry,
        }
        self.found = {**about, "cases": {}}
        if self.file.exists():
            before = json.loads(self.file.read_text())
            differs = [key for key, value in about.items() if before.get(key) != value]
            if differs:
                raise SystemExit(
                    f"{self.file} is of another {differs[0]} ({before.get(differs[0])}, here "
                    f"{about[differs[0]]}); give another --out"
                )
            self.found = before

    @property
    def file(self) -> Path:
        part = "" if self.args.part == "1/1" else f"-{self.args.part.replace('/', '-of-')}"
        return self.args.out / f"{self.name}{part}{'-dry' * self.args.dry_run}.json"

    @property
    def dry(self) -> bool:
        return bool(self.args.dry_run)

    def case(self, name: str, body: Body) -> None:
        """Measure it, unless that was done, is not asked for, or there is no time left."""
        known = self.found["cases"].get(name)
        if self.args.only not in name:
            return
        part, parts = map(int, self.args.part.split("/"))
        self.seen += 1
        if (self.seen - part) % parts or (known is not None and "error" not in known):
            return
        left = 60 * self.args.minutes - (time.monotonic() - self.began)
        if left < RESERVE * self.longest or left <= 0:
            self.waiting.append(name)
            return
        started = time.monotonic()
        try:
            figures = body()
        except Exception as error:  # whatever one case does, the others are measured
            told = error.text() if isinstance(error, SpecctlError) else str(error)
            figures = {"error": f"{type(error).__name__}: {told}"[:600]}
            self.say(traceback.format_exc())
        seconds = time.monotonic() - started
        self.longest = max(self.longest, seconds)
        self.found["cases"][name] = {**figures, "case_seconds": round(seconds, 2)}
        self.args.out.mkdir(parents=True, exist_ok=True)
        write_json(self.file, self.found)
        self.say(f"{name}: {json.dumps(figures)}")
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def say(self, text: str) -> None:
        """To the log, and where people look."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        with self.file.with_suffix(".log").open("a") as log:
            log.write(text + "\n")
        if not self.args.json:
            print(text, file=sys.stderr, flush=True)

    def finish(self) -> NoReturn:
        """Print what is known and leave."""
        if self.args.json:
            print(json.dumps(self.found))
        failed = [name for name, one in self.found["cases"].items() if "error" in one]
        if failed:
            print(f"failed: {', '.join(failed)}", file=sys.stderr)
        if self.waiting:
            print(f"not begun, run it again: {', '.join(self.waiting)}", file=sys.stderr)
            sys.exit(Exit.INTERRUPTED)
        sys.exit(Exit.GATE if failed else Exit.OK)


# -- time ---------------------------------------------------------------------------------------


def settle(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device, times: int, warm: int = 2) -> float:
    """Of one call, the mean of `times` behind one another, after `warm` that do not count."""
    for _ in range(warm):
        call()
    settle(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    settle(device)
    return (time.perf_counter() - began) / times


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a copy of `size` bytes reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * size / seconds(lambda: into.copy_(source), device, 10)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """Most bytes of tensors since `reset_peak`; None where nobody counts them."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# -- a target of any shape ----------------------------------------------------------------------

LLAMA_8B = LlamaShape(32, 4096, 128_256, 32, 8, 128, 14_336, 1e-5, 500_000.0, tied=False)
SMALL = LlamaShape(4, 32, 256, 4, 2, 8, 64, 1e-5, 10_000.0, tied=False)


class KnownText(FastLlama):
    """A target of random weights whose text is known beforehand, at its full cost: behind token t
    it says `after(t)`, because that logit is raised above all others."""

    def run(self, feed: Any, kv: Any) -> Any:
        out = super().run(feed, kv)
        if out.logits_BTV is not None:
            said = after(feed.asked(feed.ids_BT[..., None]), self.spec.vocab_size)
            out.logits_BTV.scatter_(-1, said, 1e4)
        return out


def after(token: Tensor, vocab_size: int) -> Tensor:
    """The token that `KnownText` says behind each; all of them are among the first DRAFT_IDS."""
    return (token * 5 + 7) % min(DRAFT_IDS, vocab_size)


@torch.no_grad()
def known_target(shape: LlamaShape, dtype: torch.dtype, device: torch.device) -> Target:
    """A target of that shape, made where it shall be."""
    with torch.device("meta"):
        module = LlamaModel(shape)
    module = module.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return Target("random", None, KnownText(module, spec_for(shape)), None, "", None, None, ())


def spec_for(shape: LlamaShape) -> ModelSpec:
    return ModelSpec(
        "llama",
        shape.num_layers,
        shape.hidden_size,
        shape.vocab_size,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.intermediate_size,
        shape.norm_eps,
        shape.rope_theta,
        131_072,
    )


def weight_bytes(module: nn.Module) -> int:
    """Of the weights that a token's forward reads: all but the embedding's rows."""
    return sum(
        p.numel() * p.itemsize for n, p in module.named_parameters() if "embed_tokens" not in n
    )
