"""Run the same command in several processes: Accelerate's launcher on GPUs, torch's on the CPU
(Accelerate starts several CPU processes only through MPI). The configurations that Accelerate is
given lie in recipes/accelerate, one per way of `train.parallel`.

The process in front is the one that the user, the terminal and the scheduler know. It hands on the
signals that it gets, each once, and holds a file locked while it lives: should it die without a
word, the kernel drops that lock, and every process notices and stops as for SIGTERM, state saved.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

from specctl.core.errors import Exit, ResourceError, one_of_two, unknown
from specctl.train.stop import HANGUP, hangup, leave_terminal

EXIT_FILE = "SPECCTL_EXIT_FILE"  # where the first process leaves its exit code for the one in front
FRONT = "front"  # beside it, the file that the process in front holds locked


def is_launched() -> bool:
    """True inside a process that a launcher started."""
    return "LOCAL_RANK" in os.environ


def launch_command(
    arguments: Sequence[str], processes: int, is_cpu: bool, parallel: str = "ddp"
) -> list[str]:
    """The command line that runs `specctl ARGUMENTS` in so many processes on this machine."""
    count, port = str(processes), str(_free_port())
    if is_cpu:
        launcher = ["torch.distributed.run", "--nproc-per-node", count, "--master-port", port]
    else:
        launcher = ["accelerate.commands.launch", "--config_file", str(configuration(parallel))]
        launcher += ["--num_processes", count, "--num_machines", "1", "--main_process_port", port]
    return [sys.executable, "-m", *launcher, "-m", "specctl", *arguments]


def configuration(parallel: str) -> Path:
    """The shipped Accelerate configuration for a way of `train.parallel`."""
    return Path(str(resources.files("specctl.recipes"))) / "accelerate" / f"{parallel}.yaml"


def _free_port() -> int:
    """A port at which the processes can meet; free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def relaunch(arguments: Sequence[str], processes: int, is_cpu: bool, parallel: str = "ddp") -> int:
    """Run this very command again in `processes` processes; returns the first one's exit code.

    SIGINT, SIGTERM and SIGHUP are handed on, and this process waits for the others to end. They
    are in a session of their own: the keys of the terminal reach this one alone.
    """
    with tempfile.TemporaryDirectory(prefix="specctl-") as folder:
        exit_file = Path(folder) / "exit"
        with exit_file.with_name(FRONT).open("w") as front:
            fcntl.flock(front, fcntl.LOCK_EX)
            command = launch_command(arguments, processes, is_cpu, parallel)
            environment = _environment(exit_file, processes, is_cpu)
            with subprocess.Popen(command, env=environment, start_new_session=True) as process:
                _hand_on(process)
                code = process.wait()
        return int(exit_file.read_text()) if exit_file.is_file() else code or int(Exit.OK)


def _hand_on(process: subprocess.Popen[bytes]) -> None:
    """From now on the signals that stop this process stop the others. Of hang-ups the first
    alone, as SIGTERM: those of a shell and of its terminal arrive together."""
    hangups: list[int] = []

    def hand_on(number: int, frame: object) -> None:
        if number != HANGUP:
            process.send_signal(number)
        elif not hangups:
            hangups.append(number)
            leave_terminal()
            process.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, *hangup()):
        signal.signal(number, hand_on)


def watch_front() -> None:
    """Stop this process, as SIGTERM does, once the one in front has gone; to be called by each that
    it launched. A launcher of the user's own is not watched."""
    exit_file = os.environ.get(EXIT_FILE)
    if exit_file:
        front = Path(exit_file).with_name(FRONT)
        threading.Thread(target=_stop_without, args=(front,), daemon=True).start()


def _stop_without(front: Path) -> None:
    """Sleep until the lock of that file is granted, or the file is gone, and stop this process."""
    try:
        with front.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _environment(exit_file: Path, processes: int, is_cpu: bool) -> Mapping[str, str]:
    """Threads are shared out, so that CPU processes do not fight for the cores."""
    environment = {**os.environ, EXIT_FILE: str(exit_file)}
    if is_cpu:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        environment["ACCELERATE_USE_CPU"] = "true"
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    return environment


def leave_exit_code(code: int) -> None:
    """Called by every process at its end: a launcher would turn any failure into exit code 1."""
    path = os.environ.get(EXIT_FILE)
    if path and os.environ.get("RANK") == "0":
        Path(path).write_text(str(code))


def check_gpus(wanted: int, flag: str = "--gpus") -> None:
    """Refuse more GPUs than there are."""
    import torch

    found = torch.cuda.device_count()
    if wanted > found:
        raise ResourceError(
            f"{wanted} GPU{'s were' if wanted != 1 else ' was'} asked for",
            where=flag,
            found=f"{found} GPU{'s' if found != 1 else ''}",
            expected=f"at least {wanted}",
            do=f"--gpus {found}" if found else f"leave {flag} out, or --processes 2 for CPU ones",
        )


def use_device(device: str, gpus: int) -> None:
    """Have Accelerate train on that device; to be called before torch is imported."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise unknown("device", device, ("auto", "cpu", "cuda", "cuda:1"), "--device")
    if device == "auto":
        return
    if gpus > 1 and device != "cuda":
        raise one_of_two(
            "one device and several GPUs were asked for",
            f"--device {device} --gpus {gpus}",
            f"leave out --device {device}",
        )
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return
    number = device.partition(":")[2]
    if number and not is_launched():
        check_gpus(int(number) + 1, f"--device {device}")
        os.environ["ACCELERATE_TORCH_DEVICE"] = device
    else:
        check_gpus(1, f"--device {device}")
