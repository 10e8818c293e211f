"""`specctl doctor`: is this machine ready, and what to do about what is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

import specctl
from specctl.api.measured.machine import usable_cores
from specctl.cli.app.console import Console
from specctl.core.errors import Exit
from specctl.core.messages.installed import distribution_name, foreign_distributions, pip_install
from specctl.core.messages.printable import counted
from specctl.core.messages.sizes import GB, size_text
from specctl.core.plugins import PLACES, plugins
from specctl.core.storage.hub_access import forbidden_by, way_online
from specctl.models.native.library import BUILDING, is_to_be_built

GREEN, YELLOW, RED = "ok", "note", "fix"
NEEDED = ("transformers", "accelerate", "tokenizers", "safetensors", "numpy", "pydantic", "pyyaml")
OPTIONAL = {  # what it is for, and the extra that brings it
    "datasets": ("parquet files and hub data sets", "data"),
    "matplotlib": ("plots", "plots"),
    "peft": ("targets with LoRA adapters", "lora"),
    "tensorboard": ("training curves in TensorBoard", "tracking"),
}
HERE = Path(specctl.__file__).parent


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding: `state` is ok, note (works, but) or fix (does not work)."""

    name: str
    state: str
    found: str
    do: str = ""


def doctor(
    console: Console,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not import torch (no device check).")
    ] = False,
) -> None:
    """Check Python, libraries, device, methods, memory, disk, cache and the hub token.

    Only the presence of the token is shown. Exit code 6 if something must be fixed.

    Example:

      specctl doctor --json
    """
    checks = _checked(console, quick)
    worst = max((check.state for check in checks), key=(GREEN, YELLOW, RED).index)
    rows = [(c.name, c.state, c.found, c.do) for c in checks]
    console.table(("check", "state", "found", "do"), rows)
    result = {
        "state": {GREEN: "green", YELLOW: "yellow", RED: "red"}[worst],
        "checks": [asdict(check) for check in checks],
    }
    to_fix = [check.do for check in checks if check.state == RED]
    console.done(result, next=to_fix or ["specctl quickstart"], ok=worst != RED)
    if worst == RED:
        raise typer.Exit(int(Exit.RESOURCES))


def _checked(console: Console, quick: bool) -> list[Finding]:
    """Every finding; what takes seconds is said before."""
    console.say("checking Python, libraries and this machine")
    checks = [*_python(), *_packages(), *_namesakes()]
    if is_to_be_built():
        console.say(BUILDING)
    checks += [*_machine(), *_folders(), *_hub()]
    if not quick:
        console.say("loading torch to see the device, and every method (--quick leaves that out)")
        checks += [*_device(), *_methods()]
    return checks


def _methods() -> Iterator[Finding]:
    """Each method whose module does not import; all others work without it."""
    count = 0
    for package, attribute in PLACES.items():
        known = plugins(package, attribute)
        broken = known.broken()
        count += len(known) - len(broken)
        for error in broken:
            yield Finding(
                "method", YELLOW, f"{error.what}: {error.found} ({error.where})", error.do
            )
    yield Finding("methods", GREEN, f"{count} load")


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    ready = sys.version_info >= (3, 11)
    do = "" if ready else "install Python 3.11 or newer and make a new environment"
    yield Finding("python", GREEN if ready else RED, version, do)


def _packages() -> Iterator[Finding]:
    for name in ("torch", *NEEDED):
        try:
            yield Finding(name, GREEN, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, RED, "not installed", f"pip install {name}")
    for name, (why, extra) in OPTIONAL.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, YELLOW, "not installed", f"only for {why}: {pip_install(extra)}")


def _namesakes() -> Iterator[Finding]:
    """Another project of the same name: its command and its files take the place of ours."""
    ours = distribution_name()
    for dist in foreign_distributions():
        files = [Path(str(dist.locate_file(file))) for file in dist.files or ()]
        among = sum(file.is_relative_to(HERE) for file in files)
        found = f"{dist.name} {dist.version} is another project with a command `specctl`"
        found += f"; {among} of its files lie among ours" if among else ""
        do = f"pip uninstall {dist.name}, then install {ours} again (its folder: pip install -e .)"
        yield Finding("specctl", RED, found, do)


def _machine() -> Iterator[Finding]:
    yield Finding("cpu", GREEN, f"{counted(usable_cores(), 'core')}, {_vector_units()}")
    yield _step()
    free = _free_memory()
    if free is not None:
        low = free < 2 * GB
        do = "close other programs, or use small targets" if low else ""
        yield Finding("memory", YELLOW if low else GREEN, f"{size_text(free)} free", do)


def _step() -> Finding:
    """The compiled step, built here if it is not yet."""
    from specctl.models.native.library import library, no_int8

    step = library()
    if not step.missing:
        why = no_int8()
        bits = "drafters are read in 8 bits" if why is None else f"8 bits are no gain: {why}"
        return Finding("compiled step", GREEN, f"built for this processor; {bits}")
    do = f"{step.do}: " if step.do else ""
    do += "with it, decoding on a CPU is 1.5 to 2.7x faster"
    return Finding("compiled step", YELLOW, step.missing, do)


def _vector_units() -> str:
    """The instruction sets that matter here, as far as the system names them."""
    try:
        flags = set(
            Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split()
        )
    except (OSError, IndexError):
        return platform.machine()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    found = [name for name in wanted if name in flags]
    return ", ".join(found) if found else platform.machine()


def _free_memory() -> int | None:
    """Bytes that a new program can use, within the limit of the container if there is one."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def _folders() -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    for name, folder in (("working folder", Path.cwd()), ("model cache", home)):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        if not _is_writable(existing):
            do = f"chmod u+w {existing}, or set HF_HOME / change to another folder"
            yield Finding(name, RED, f"{existing} is not writable", do)
            continue
        free = shutil.disk_usage(existing).free
        low = free < 5 * GB
        do = "free some disk space before training" if low else ""
        yield Finding(name, YELLOW if low else GREEN, f"{folder}: {size_text(free)} free", do)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _hub() -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    token = Path(os.environ.get("HF_TOKEN_PATH", home / "token"))
    has_token = bool(os.environ.get("HF_TOKEN")) or token.is_file()
    forbidden = forbidden_by()
    found = "a token is set" if has_token else "no token"
    do = "" if has_token else "only for gated models: hf auth login"
    if forbidden:
        found, do = f"{found}, offline: {', '.join(forbidden)}", way_online(forbidden)
    yield Finding("hub", GREEN if has_token and not forbidden else YELLOW, found, do)


def _device() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:  # a broken build fails in many ways
        yield Finding(
            "device", RED, f"torch does not load: {error}", "reinstall: pip install torch"
        )
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(index)
            name = torch.cuda.get_device_name(index)
            found = f"{name}, {size_text(free)} of {size_text(total)} free"
            yield Finding(f"cuda:{index}", GREEN, found)
        return
    from specctl.runtime.target.placement.device import idle_cuda

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    found = f"no GPU (torch is {built}), {counted(torch.get_num_threads(), 'CPU thread')}"
    do = idle_cuda()
    if do is None and torch.version.cuda is not None:
        do = "if there is none, a CPU build of torch is smaller: see docs/getting-started.md"
        yield Finding("device", YELLOW, found, do)
        return
    yield Finding("device", RED if do else GREEN, found, do or "")
