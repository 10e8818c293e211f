"""A benchmark as a Markdown card: what was measured, on what, by which command, and all tables."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from specctl.core.messages.printable import counted
from specctl.runtime.measure.bench_report import BenchReport

READING = (
    "tau: tokens a pass of the target brings, plain decoding 1. Speed-up: over plain decoding by "
    "specctl on the same target, in the same process, questions in turn. +-: one standard error "
    "over questions. Repetition: share of four-token sequences that occurred before in the same "
    "answer."
)


def bench_card(report: BenchReport, made: Mapping[str, Any]) -> str:
    """The card as one text of Markdown; `made` as `made_by` says it."""
    what = ", ".join(report.suites) or "prompts"
    about = f"{report.target}" + (f", inflated to {report.inflated}" if report.inflated else "")
    on = made["machine"]
    machine = (
        f"{on['chip']}, {counted(on['cores'], 'core')}, "
        f"{on['system']}, Python {on['python']}, "
        f"torch {on['torch']}"
    )
    parts = [
        f"# {about} on {what}",
        "",
        f"{made['date']}, specctl {on['specctl']}; {report.dtype} on {report.device}, "
        f"{counted(report.threads, 'thread')}; {machine}.",
        "",
        "```sh",
        shlex.join(made["command"]),
        "```",
        "",
        report.table().markdown(),
        "",
        READING,
    ]
    for title, table in report.details().items():
        parts += ["", f"## {title}", "", table.markdown()]
    return "\n".join(parts) + "\n"
