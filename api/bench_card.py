"""A benchmark as a Markdown card: what was measured, on what, by which command, and all tables."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence

from specctl import __version__
from specctl.runtime.measure.bench_report import BenchReport

READING = (
    "tau: tokens a pass of the target brings, plain decoding 1. Speed-up: over plain decoding by "
    "specctl on the same target, in the same process, questions in turn. +-: one standard error "
    "over questions. Repetition: share of four-token sequences that occurred before in the same "
    "answer."
)


def bench_card(report: BenchReport, command: Sequence[str]) -> str:
    """The card as one text of Markdown."""
    what = ", ".join(report.suites) or "prompts"
    about = f"{report.target}" + (f", inflated to {report.inflated}" if report.inflated else "")
    machine = f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"
    parts = [
        f"# {about} on {what}",
        "",
        f"specctl {__version__}; {report.dtype} on {report.device}, {report.threads} threads; "
        f"{machine}.",
        "",
        "```sh",
        shlex.join(command),
        "```",
        "",
        report.table().markdown(),
        "",
        READING,
    ]
    for title, table in report.details().items():
        parts += ["", f"## {title}", "", table.markdown()]
    return "\n".join(parts) + "\n"
