"""Decoding on a CPU beside the engines people run: transformers, llama.cpp, OpenVINO GenAI.

The same float32 weights, prompts and lengths, greedy, one request at a time, all ways in turn for
every prompt; medians of tokens a second with their quartiles, prompt included. Engines live in
environments of their own below --out, made once. Of a way whose text is not ours, the share of
prompts that agree is shown: caches in half precision round otherwise.

    python benchmarks/peers_cpu.py --out runs/peers --draft runs/quickstart/package --threads 2
    python benchmarks/peers_cpu.py --draft runs/quickstart/package --dtype int8 --inflate 300m

`--dtype int8`: targets of 8 bits, ours and llama.cpp's Q8_0, which round otherwise, so that texts
part; int4: ours and Q4_0. `--inflate`: at the cost of a larger target. These are for llama.cpp
alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from environments import made

from specctl import Sampling, export, generate, load_drafter, load_target
from specctl.export.layouts.llama_cpp import model as llama_cpp
from specctl.export.layouts.llama_cpp.model import add_tensor
from specctl.export.layouts.llama_cpp.target import write_target as write_gguf
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target
from specctl.train.data.heldout import heldout_prompts

Way = Callable[[Sequence[int], int], tuple[float, list[int]]]
ENGINES = {
    "llama.cpp": ("answer_llama_cpp.py", ["xllamacpp"]),
    "OpenVINO": (
        "answer_openvino.py",
        ["torch==2.13.0", "openvino-genai", "optimum-intel[openvino]"],
    ),
}
HOSTS = Path(__file__).parent / "peer_hosts"


class Host:
    """An engine in its own process, one request at a time."""

    def __init__(self, python: str, script: str, **job: Any) -> None:
        words = [python, str(HOSTS / script), json.dumps(job)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=environment,
        )  # fmt: skip
        self._line()

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit(f"{self.process.args} ended with {self.process.wait()}")

    def __call__(self, prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        assert self.process.stdin is not None
        print(json.dumps({"prompt": list(prompt), "tokens": tokens}), file=self.process.stdin)
        self.process.stdin.flush()
        answer = self._line()
        return answer["seconds"], answer["ids"]


def ours(target: Target, drafter: Any, **how: Any) -> Way:
    def run(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        found = generate(target, [list(prompt)], drafter=drafter, sampling=sampling, **how)
        return time.perf_counter() - began, list(found.outputs[0].token_ids)

    return run


def theirs(model: Any, **settings: Any) -> Way:
    """transformers' generate."""

    def run(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
        ids = torch.tensor([list(prompt)])
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                min_new_tokens=tokens, max_new_tokens=tokens, **settings,
            )  # fmt: skip
        return time.perf_counter() - began, out[0, len(prompt) :].tolist()

    return run


def add_q8(writer: Any, name: str, tensor: torch.Tensor, kind: str, gguf: Any) -> None:
    """Matrices as Q8_0."""
    add_tensor(writer, name, tensor, "Q8_0", gguf)


def add_q4(writer: Any, name: str, tensor: torch.Tensor, kind: str, gguf: Any) -> None:
    """Matrices as Q4_0, but embedding and LM head as Q8_0, as ours has them."""
    is_head = name.startswith(("token_embd", "output."))
    add_tensor(writer, name, tensor, "Q8_0" if is_head else "Q4_0", gguf)


def beside_llama_cpp(args: argparse.Namespace, target: Target) -> dict[str, Way]:
    """A target that only llama.cpp is given in the same form; the draft in float32 there, as ours
    was loaded."""
    gguf, script = args.out / f"{args.inflate}-{args.dtype}.gguf", ENGINES["llama.cpp"][0]
    if not gguf.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        how = {"int8": add_q8, "int4": add_q4}.get(args.dtype, add_tensor)
        with patch.object(llama_cpp, "add_tensor", how):
            write_gguf(target, gguf)
    python = dict(pair.split("=", 1) for pair in args.python).get("llama.cpp")
    python = python or made(args.out / "environments" / script.removesuffix(".py"), ["xllamacpp"])
    job = {"model": str(gguf), "threads": args.threads, "length": args.length}
    found: dict[str, Way] = {
        "specctl, plain": ours(target, None),
        "specctl, prompt lookup": ours(target, "prompt-lookup"),
        "llama.cpp, plain": Host(python, script, **job),
        "llama.cpp, prompt lookup": Host(python, script, **job, lookup=True),
    }
    if args.draft:
        drafter, folder = load_drafter(args.draft, target), args.out / "draft-gguf"
        if not folder.exists():
            export(args.draft, "gguf", folder, target=load_target("tiny", dtype="float32"))
        found["specctl, draft model"] = ours(target, drafter, policy="chain", length=args.length)
        draft = str(next(folder.glob("*.gguf")))
        found["llama.cpp, draft model"] = Host(python, script, **job, draft=draft)
    return found


def ways(args: argparse.Namespace, target: Target) -> dict[str, Way]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    base, threads, length = args.out, args.threads, args.length
    folder, gguf = base / "target", base / "target.gguf"
    if not gguf.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_target(target, folder)
        write_gguf(target, gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: dict[str, Way] = {
        "specctl, plain": ours(target, None),
        "specctl, prompt lookup": ours(target, "prompt-lookup"),
        "transformers, plain": theirs(model),
        "transformers, prompt lookup": theirs(model, prompt_lookup_num_tokens=length),
    }
    drafts: dict[str, dict[str, Any]] = {"plain": {}, "prompt lookup": {"lookup": True}}
    llama_draft = openvino_draft = None
    if args.draft:
        drafter = load_drafter(args.draft, target)
        found["specctl, draft model"] = ours(target, drafter, policy="chain", length=length)
        hf, llama = base / "draft-hf", base / "draft-gguf"
        if not hf.exists():
            export(args.draft, "hf", hf, target=target)
            export(args.draft, "gguf", llama, target=target)
        small = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
        small.generation_config.num_assistant_tokens = length
        small.generation_config.num_assistant_tokens_schedule = "constant"
        found["transformers, draft model"] = theirs(model, assistant_model=small)
        llama_draft, openvino_draft = str(next(llama.glob("*.gguf"))), str(hf)
        drafts["draft model"] = {}
    for engine, (script, packages) in ENGINES.items():
        if engine in args.without:
            continue
        python = dict(pair.split("=", 1) for pair in args.python).get(engine)
        python = python or made(base / "environments" / script.removesuffix(".py"), packages)
        file, draft = (
            (str(gguf), llama_draft) if engine == "llama.cpp" else (str(folder), openvino_draft)
        )
        for name, settings in drafts.items():
            given = {"draft": draft} if name == "draft model" else settings
            found[f"{engine}, {name}"] = Host(
                python, script, model=file, threads=threads, length=length, **given
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--draft", default=None, help="package of a small-lm drafter")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], help="ENGINE=ENV/bin/python")
    parser.add_argument("--without", action="append", default=[], help="an engine to leave out")
    dtypes = ("float32", "bfloat16", "int8", "int4")
    parser.add_argument("--dtype", default="float32", choices=dtypes)
    parser.add_argument("--inflate", default=None, help="300m")
    args = parser.parse_args()
    args.out = args.out.resolve()
    torch.set_num_threads(args.threads)
    target = load_target("tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = [list(prompt.ids) for prompt in heldout_prompts(target, args.prompts)]
    is_usual = args.dtype == "float32" and args.inflate is None
    found = ways(args, target) if is_usual else beside_llama_cpp(args, target)
    rates: dict[str, list[float]] = {name: [] for name in found}
    same: dict[str, int] = dict.fromkeys(found, 0)
    for repeat in range(args.repeats + 1):  # the first round warms up
        for prompt in prompts:
            texts = {}
            for name, way in found.items():
                seconds, texts[name] = way(prompt, args.tokens)
                if repeat:
                    rates[name].append(args.tokens / seconds)
            if repeat:
                for name, text in texts.items():
                    same[name] += text == texts["specctl, plain"]
    count = args.repeats * len(prompts)
    rows = []
    for name, speeds in rates.items():
        low, _, high = quantiles(speeds, n=4)
        rows.append({"way": name, "tokens_per_second": median(speeds), "quartiles": [low, high],
                     "same_text": same[name] / count})  # fmt: skip
    first = rows[0]["tokens_per_second"]
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, torch "
          f"{torch.__version__}, {len(prompts)} prompts x {args.tokens} tokens")  # fmt: skip
    for row in rows:
        low, high = row["quartiles"]
        rate = row["tokens_per_second"]
        print(f"{row['way']:30s} {rate:7.1f} tok/s  [{low:.0f}, {high:.0f}]  {rate / first:5.2f}x  "
              f"same text {row['same_text']:.0%}")  # fmt: skip
    (args.out / f"peers_cpu-{args.inflate}-{args.dtype}.json").write_text(
        json.dumps(rows, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
