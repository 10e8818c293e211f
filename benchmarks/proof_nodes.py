"""Proof T12: many processes are the run of one, and a node that is lost costs no step.

    PYTHONPATH=src python benchmarks/proof_nodes.py --kills 3

Sizes: 4 and 8 processes (gloo), drafter and target spread over them (`train.parallel=fsdp`,
`train.shard_target=true`) and whole (`ddp`), also with several processes to a row
(`train.sequence_parallel`), in float32, lose what one process loses. Nodes: two
torchrun agents of two processes each, as on two machines, train with all of it spread. One of them
is killed with SIGKILL at a random step, with its processes, and started again: the second, while
the first waits for it, and the first, who holds the meeting point, so that both begin anew. The run
goes on from its last checkpoint each time, and ends in the state of the run that nobody disturbed,
bit for bit, with every step logged once.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from proof_common import (
    Check,
    checked,
    logged,
    parser,
    report,
    small_recipe,
    small_target,
    state_digest,
    write_text,
)

import specctl
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.integrity import saved_steps

TOLERANCE = 2e-6  # relative; float32 sums in another order
STEPS = {"sizes": 12, "nodes": 80}
LAST = 60  # step at which a node is killed for the last time, at most
SPREAD = {"train__parallel": "fsdp", "train__shard_target": "true"}
WAYS: dict[str, dict[str, str]] = {
    "fsdp, target spread": SPREAD,
    "ddp": {},
    "ddp, four to a row": {"train__sequence_parallel": "4"},
    "fsdp, two to a row": {"train__parallel": "fsdp", "train__sequence_parallel": "2"},
}
LIMIT = 300.0  # seconds in which a run must have gone on
# Without it a new agent never hears where to meet: the one that stayed says so in its first round.
OWN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SAID = re.compile(r"continuing from step ([\d,]+)")


class Notes(SilentReporter):
    """Appends to a file what is said of continuing."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def say(self, text: str) -> None:
        if SAID.search(text):
            with self.path.open("a") as file:
                file.write(text + "\n")


def train(out: Path, text: Path, part: str, way: str) -> None:
    """What every process does."""
    torch.set_num_threads(1)
    fields = {
        "train__rows": 8, "train__steps": STEPS[part], "train__precision": '"no"',
        "train__tau_every": 1000,
    }  # fmt: skip
    recipe = small_recipe("eagle3", text, **fields, **WAYS.get(way, {}))
    train_draft(recipe, out, target=small_target(), reporter=Notes(out.with_suffix(".notes")))


def environment() -> dict[str, str]:
    source = str(Path(specctl.__path__[0]).parent)
    more = {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", OWN: "1"}
    return os.environ | more


def words(out: Path, text: Path, part: str, way: str) -> list[str]:
    return [__file__, "--child", str(out), str(text), part, way]


def launch(count: int, child: list[str]) -> None:
    """So many processes of one machine, to their end."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if count > 1 else []), *child],
        env=environment(), capture_output=True, timeout=4 * LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in logged(out) if "loss" in line]


def apart(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference; infinite if there are not as many."""
    if len(found) != len(wanted) or not wanted:
        return float("inf")
    return max(abs(f - w) / abs(w) for f, w in zip(found, wanted, strict=True))


def prove_sizes(folder: Path, text: Path, sizes: tuple[int, ...]) -> list[Check]:
    """Runs of several processes against that of one."""
    launch(1, words(folder / "one", text, "sizes", ""))
    wanted, found = losses(folder / "one"), list[Check]()
    for way in WAYS:
        for size in sizes:
            out = folder / f"{way.replace(', ', '-').replace(' ', '-')}-{size}"
            launch(size, words(out, text, "sizes", way))
            off = apart(losses(out), wanted)
            wrong = None if off < TOLERANCE else f"a loss differs by {off:.2g}"
            what = f"{size} processes, {way}: {len(wanted)} losses of one within {off:.1e}"
            found.append(checked(what, [wrong]))
    return found


# -- two nodes ----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Two agents of two processes each. One writer: the proof."""

    def __init__(self, out: Path, child: list[str]) -> None:
        self.out, self.child = out, child
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.meet()

    def meet(self) -> None:
        """Both begin at a new meeting point."""
        self.port = free_port()
        for node in (0, 1):
            self.start(node)

    def start(self, node: int) -> None:
        given = [
            "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-id=proof",
            f"--rdzv-endpoint=127.0.0.1:{self.port}", "--max-restarts=20",
            f"--rdzv-conf=is_host={int(node == 0)},keep_alive_interval=1,keep_alive_max_attempt=3",
        ]  # fmt: skip
        with self.out.with_suffix(f".node{node}").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *given, *self.child],
                env=environment(), stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def lose(self, node: int) -> None:
        """The machine is gone: the agent and its processes at once."""
        agent = self.agents[node]
        workers = children(agent.pid)
        for pid in (agent.pid, *workers):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        agent.wait()

    def newest(self) -> int:
        steps = saved_steps(self.out / "checkpoints")
        return steps[-1] if steps else 0

    def reach(self, step: int) -> str | None:
        """Wait for a checkpoint of that step or the end; None, or what was wrong."""
        end = time.monotonic() + LIMIT
        while self.newest() < step:
            if time.monotonic() > end:
                return f"step {step} was not reached in {LIMIT:.0f} s, the last is {self.newest()}"
            if all(agent.poll() is not None for agent in self.agents.values()):
                return f"both agents ended at {self.newest()}, before step {step}"
            time.sleep(0.01)
        return None

    def end(self) -> list[int]:
        """Exit codes of both agents; what hangs is killed."""
        codes = []
        for node, agent in self.agents.items():
            try:
                codes.append(agent.wait(LIMIT))
            except subprocess.TimeoutExpired:
                self.lose(node)
                codes.append(-9)
        return codes


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = list[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found + [below for child in found for below in children(child)]


def final(out: Path) -> str:
    return state_digest(Checkpoints(out / "checkpoints", SilentReporter()).load(STEPS["nodes"]))


def prove_nodes(folder: Path, text: Path, kills: int, seed: int) -> list[Check]:
    """Kill a node so many times, the second and the first in turn."""
    chance, steps, way = random.Random(seed), STEPS["nodes"], "fsdp, target spread"
    whole = Nodes(folder / "whole", words(folder / "whole", text, "nodes", way))
    codes = whole.end()
    assert codes == [0, 0], f"{codes}: {logs(whole)}"
    nodes = Nodes(folder / "lost", words(folder / "lost", text, "nodes", way))
    late, stuck = list[int](), list[str | None]()
    share = LAST // max(1, kills)
    for number in range(kills):
        stuck.append(nodes.reach(1 + number * share + chance.randrange(share)))
        time.sleep(chance.uniform(0.0, 0.2))
        lost = (number + 1) % 2
        nodes.lose(lost)
        late.append(nodes.newest())
        if lost == 1:
            nodes.start(1)
        else:
            nodes.lose(1)
            nodes.meet()
    codes = nodes.end()
    notes = folder / "lost.notes"
    said = SAID.findall(notes.read_text()) if notes.exists() else []
    resumed = [int(word.replace(",", "")) for word in said]
    began = [
        None if step >= before else f"went on at {step}, {before} was saved"
        for step, before in zip(resumed, late, strict=False)
    ]
    numbers = [line["step"] for line in logged(nodes.out) if "loss" in line]
    same = final(nodes.out) == final(whole.out) if codes == [0, 0] else False
    lines = logged(nodes.out) == logged(whole.out)
    wrong = None if codes == [0, 0] else f"exit codes {codes}: {logs(nodes)}"
    once = None if numbers == list(range(1, steps + 1)) and lines else f"steps {numbers[:80]}"
    return [
        checked("nodes: the run came as far as it was to be killed", stuck, kills),
        checked("nodes: the run goes on at its last checkpoint", began, kills),
        checked("nodes: both agents end well", [wrong]),
        checked("nodes: every step logged once, as undisturbed", [once]),
        checked("nodes: the state of the undisturbed run", [None if same else "another"]),
    ]


def logs(nodes: Nodes) -> str:
    """The ends of what the agents said."""
    return " | ".join(nodes.out.with_suffix(f".node{n}").read_text()[-1500:] for n in (0, 1))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", default="4,8", help="numbers of processes")
    options.add_argument("--kills", type=int, default=4)
    options.add_argument("--child", nargs=4, default=None, help="inner: OUT TEXT PART WAY")
    given = options.parse_args()
    if given.child is not None:
        train(Path(given.child[0]), Path(given.child[1]), *given.child[2:])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = write_text(folder / "text.txt", given.seed)
        sizes = tuple(int(word) for word in given.sizes.split(",") if word)
        found = prove_sizes(folder, text, sizes) if sizes else []
        if given.kills:
            found += prove_nodes(folder, text, given.kills, given.seed)
    report(found, given.json)


if __name__ == "__main__":
    main()
