"""Several processes: what is launched is what Accelerate and torch understand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.run import get_args_parser

from specctl.cli.app.launch import configuration, launch_command

WORDS = ["train-draft", "--recipe", "eagle3", "--gpus", "4"]


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("parallel", "kind"), [("ddp", "MULTI_GPU"), ("fsdp", "FSDP")])
def test_accelerate_reads_the_shipped_configuration(parallel: str, kind: str) -> None:
    found = load_config_from_file(str(configuration(parallel)))
    assert str(found.distributed_type).endswith(kind)
    assert found.mixed_precision == "no"  # the loop's own autocast decides
    assert found.num_machines == 1


def test_a_sharded_launch_asks_accelerate_for_fsdp_of_version_two() -> None:
    command = launch_command(WORDS, 4, is_cpu=False, parallel="fsdp")
    assert command[1:3] == ["-m", "accelerate.commands.launch"]
    args = launch_command_parser().parse_args(command[3:])
    assert args.num_processes == 4
    assert (args.training_script, args.training_script_args) == ("specctl", WORDS)
    settings = load_config_from_file(args.config_file).fsdp_config
    for name, value in settings.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    args.use_fsdp, args.mixed_precision, args.dynamo_backend = True, "no", "no"
    env = prepare_multi_gpu_env(args)
    assert env["ACCELERATE_USE_FSDP"] == "true"
    assert str(env["FSDP_VERSION"]) == "2"


def test_cpu_processes_are_started_by_torch() -> None:
    command = launch_command(WORDS, 2, is_cpu=True)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    args = get_args_parser().parse_args(command[3:])
    assert (args.nproc_per_node, args.module) == ("2", True)
    assert args.training_script == "specctl"
    assert args.training_script_args == WORDS


WORKER = """
import signal, sys, time
from pathlib import Path
from specctl.cli.app.launch import watch_front

def stop(number, frame):
    half = Path(sys.argv[1], "half")
    half.write_text(signal.Signals(number).name)
    half.rename(half.with_name("stopped"))
    sys.exit(75)

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
watch_front()
Path(sys.argv[1], "works").touch()
time.sleep(60)
"""
FRONT = """
import sys
from specctl.cli.app import launch
launch.launch_command = lambda *given: [sys.executable, "-c", sys.argv[1], sys.argv[2]]
sys.exit(launch.relaunch([], 2, is_cpu=True))
"""


def until(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not come")


@pytest.mark.parametrize(
    ("number", "told", "code"),
    [
        (signal.SIGKILL, "SIGTERM", -signal.SIGKILL),
        (signal.SIGTERM, "SIGTERM", 75),
        (signal.SIGHUP, "SIGTERM", 75),
        (signal.SIGINT, "SIGINT", 75),
    ],
)
def test_whatever_ends_the_process_in_front_stops_those_behind_it(
    tmp_path: Path, number: signal.Signals, told: str, code: int
) -> None:
    source = Path(__file__).parents[2] / "src"
    front = subprocess.Popen(
        [sys.executable, "-c", FRONT, WORKER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(tmp_path / "works")
        front.send_signal(number)
        assert front.wait(30) == code
        until(tmp_path / "stopped")
    finally:
        front.kill()
        front.wait()
    assert (tmp_path / "stopped").read_text() == told
