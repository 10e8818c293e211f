"""Tiny random targets in several files, trained for through each TargetSource, and exported.

    python benchmarks/target_sources.py                     # a table
    python benchmarks/target_sources.py llama deepseek_v3   # of some architectures
    python benchmarks/target_sources.py --write docs/multi-gpu.md

Each target is written by transformers in several safetensors files with an index. `train-draft`
trains eagle3 for it three times: with the target in this process, on states of an engine, and on
files of states. The engine is a fake one: transformers' own model behind an HTTP server that
answers as vLLM does and writes states as its connector writes them; the files are copies of what it
wrote. With the last two, loading a target or any model of transformers ends the run, and the
tensors that are read whole are counted. Losses must be those of the first run within 1e-5 before
any weight has moved. Every drafter is exported for vLLM and SGLang, and each export is read by the
mirror of that engine's reader, whose logits must be the drafter's. Exit code 8 if anything failed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import specctl.train.run
from specctl.cli.app.console import Console
from specctl.cli.main import main as program
from specctl.drafters import family
from specctl.export.formats import sglang, speculators  # whose readers are listened to
from specctl.export.readers import trial
from specctl.runtime.target.served import StoredWeights, load_served
from specctl.train.features.target_source import layers_for
from specctl.train.metrics.log import read_log
from specctl_testing.train.sharded_targets import KINDS, write_sharded
from specctl_testing.train.state_engine import state_engine

SOURCES = ("inprocess", "endpoint", "files")
FORMATS = ("speculators", "sglang")
SETS = (
    "target.dtype=float32", "data.format=text", "data.regenerate=false", "data.text_tokens=0",
    "data.limit_tokens=900", "train.steps=3", "train.rows=2", "train.seq_len=48",
    "train.log_every=1", "train.save_every=3", "train.tau_every=3", "train.tau_prompts=2",
    "train.tau_tokens=4", "vocab.size=512", "drafter.options={intermediate: 64}",
)  # fmt: skip
MOST_APART = 1e-5
SCALED = "target that scales its embeddings"  # which no format of SGLang's can say
MARKS = "<!-- made by benchmarks/target_sources.py -->", "<!-- end -->"


class Failed(Exception):
    """What was found instead."""


def command(*words: object) -> dict[str, Any]:
    """What a command of the program answers in JSON."""
    out, err = io.StringIO(), io.StringIO()
    code = program([*map(str, words), "--json"], Console(out, err))
    if code != 0:
        raise Failed(f"specctl {words[0]} ended with {code}: {err.getvalue()[-2000:]}")
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def trained(folder: Path, text: Path, out: Path, **sets: object) -> list[float]:
    """The losses of `specctl train-draft`."""
    pairs = [*SETS, *(f"data.{name}={value}" for name, value in sets.items())]
    words = [word for pair in pairs for word in ("--set", pair)]
    where = ("--recipe", "eagle3", "--target", folder, "--data", text, "--out", out)
    command("train-draft", *where, *words)
    return [line["loss"] for line in read_log(out / "metrics.jsonl") if "loss" in line]


@contextmanager
def without_the_target() -> Iterator[list[str]]:
    """Nothing may load the target; the tensors of it that are read whole."""
    read: list[str] = []
    whole = StoredWeights.whole

    def noted(self: StoredWeights, name: str, *how: Any) -> Any:
        read.append(name)
        return whole(self, name, *how)

    def refuse(*given: Any, **how: Any) -> None:
        raise Failed("the trainer loads the target")

    with (
        patch.object(specctl.train.run, "load_target", refuse),
        patch.object(PreTrainedModel, "from_pretrained", refuse),
        patch.object(StoredWeights, "whole", noted),
    ):
        yield read


def exported(folder: Path, out: Path) -> tuple[float, str]:
    """The largest error of the engines' readers over all formats, as a share of the logits; which
    formats cannot hold it, by their own words."""
    refused: list[str] = []
    errors: list[float] = []
    compare = trial.compare

    def noted(*given: Any) -> float:
        errors.append(compare(*given))
        return errors[-1]

    assert {sglang.FORMAT.name, speculators.FORMAT.name} == set(FORMATS)
    modules = [m for n, m in sys.modules.items() if n.startswith("specctl.export")]
    holders = [m for m in modules if getattr(m, "compare", None) is compare]
    for format in FORMATS:
        for holder in holders:
            holder.compare = noted  # type: ignore[attr-defined]
        try:
            command("export", "--draft", folder, "--to", format, "--out", out / format)
        except Failed as error:
            if SCALED not in str(error):
                raise
            refused.append(f"; {format} refuses a scaled embedding")
        finally:
            for holder in holders:
                holder.compare = compare  # type: ignore[attr-defined]
    if len(errors) + len(refused) != len(FORMATS):
        raise Failed(f"{len(errors)} exports of {len(FORMATS)} were read back")
    return max(errors), "".join(refused)


def tried(kind: str, place: Path) -> str:
    """The row of a target."""
    folder, states, files = place / "target", place / "states", place / "files"
    model, text = write_sharded(kind, folder), place / "words.txt"
    text.write_text("\n".join(f"def name_{i}(value):\n    return value" for i in range(80)))
    build = family("eagle3")
    needs = build.build(build.options(), load_served(str(folder)).lm.spec, None).needs()
    losses, read = {"inprocess": trained(folder, text, place / "run-inprocess")}, {}
    served = load_served(str(folder))
    layers = layers_for(served, needs)
    with state_engine(model, served.tokenizer, states, layers, keep=files) as engine:
        outside = {"endpoint": engine.url, "files": files}
        for source, where in outside.items():
            how = {"target_source": source, "states": where}
            with without_the_target() as read[source]:
                losses[source] = trained(folder, text, place / f"run-{source}", **how)
    apart = max(abs(losses[source][0] - losses["inprocess"][0]) for source in SOURCES)
    if not apart <= MOST_APART:
        raise Failed(f"first losses of {kind} differ: {losses}")
    later = max(abs(a - b) for s in SOURCES for a, b in zip(losses[s], losses["inprocess"]))  # noqa: B905
    tensors = {tuple(sorted(set(names))) for names in read.values()}
    if len(tensors) != 1 or len(tensors.copy().pop()) != 3:
        raise Failed(f"other tensors than embedding, norm and head were read: {tensors}")
    found = [exported(place / f"run-{source}", place / f"{source}-out") for source in SOURCES]
    error, refused = max(found)
    count = len([*folder.glob("model-*.safetensors")])
    return (
        f"| {kind} | {KINDS[kind][0]} | {count} | {losses['inprocess'][0]:.4f} | {apart:.0e} | "
        f"{later:.0e} | {error:.0e}{refused} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--write", type=Path, help="put the table into this page")
    given = parser.parse_args()
    rows = [
        "| target | | files | first loss | apart by source | of 3 losses | exports, error |",
        "|---|---|---|---|---|---|---|",
    ]
    failed = False
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as place:
            try:
                rows.append(tried(kind, Path(place)))
            except Failed as error:
                rows.append(f"| {kind} | FAILED: {error} |")
                failed = True
        print(rows[-1], flush=True)
    if given.write is not None and not failed:
        page = given.write.read_text()
        before, rest = page.split(MARKS[0] + "\n", 1)
        _, after = rest.split(MARKS[1], 1)
        given.write.write_text("\n".join([before + MARKS[0], *rows, MARKS[1]]) + after)
    return 8 if failed else 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    sys.exit(main())
