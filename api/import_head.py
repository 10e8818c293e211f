"""import_head(): a published drafter as a package, proved by its engine's rules and measured."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.api.arguments.outputs import check_folder
from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.api.measured.measurement import Measurement
from specctl.core.drafter import Drafter
from specctl.core.messages.table import Table, Tabled
from specctl.export.imports import Imported, Measured, Report, import_published
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

AT_ONCE = 8


@dataclass(frozen=True, slots=True, repr=False)
class ImportResult(Tabled):
    """What was imported, and what it reaches beside the target on a few prompts."""

    out: Path
    report: Report

    @property
    def tau(self) -> float | None:
        return None if self.report.measured is None else self.report.measured.tau

    def table(self) -> Table:
        """What it is, what it reaches, what its card claims."""
        manifest, measured = self.report.manifest, self.report.measured
        vocabulary = manifest.vocabulary
        rows = [
            ("family", manifest.family),
            ("parameters", f"{manifest.parameters:,}"),
            ("vocabulary", f"{vocabulary.draft_size:,} of {vocabulary.target_size:,}"),
            ("drafts as", self.report.engine),
        ]
        if measured is not None:
            rows.append(("tau here", f"{measured.tau:.3f}"))
            rows += [(f"tau, {name}", f"{tau:.3f}") for name, tau in measured.readings.items()]
        rows += [("its README", line) for line in self.report.claims]
        return Table(("import", str(self.out)), rows, [f"note: {n}" for n in self.report.notes])

    def to_json(self) -> dict[str, Any]:
        manifest, measured = self.report.manifest, self.report.measured
        readings = {} if measured is None else dict(measured.readings)
        return {
            "out": str(self.out),
            "format": self.report.format,
            "engine": self.report.engine,
            "family": manifest.family,
            "sha256": manifest.digest,
            "tau": self.tau,
            "readings": readings,
            "claims": list(self.report.claims),
        }


@raises_user_errors
def import_head(
    folder: str | Path,
    out: str | Path,
    *,
    target: TargetLike = "tiny",
    prompts: int = 8,
    new_tokens: int = 48,
    family: str | None = None,
    progress: Progress = None,
    command: Sequence[str] = (),
) -> ImportResult:
    """Make a package of the published drafter in `folder`, which drafts what its own engine makes
    of the folder, or raise. tau is measured greedily on `prompts` held-out prompts and written into
    the package; 0 measures nothing. `family="uno"` reads an adapter of peft as UNO's."""
    out = Path(out)
    check_folder(out)
    model, reporter = target_or_own(target), as_reporter(progress)

    def measure(found: Imported, serve: Mapping[str, Any]) -> Measured:
        each = {"": found.drafter, **found.readings}
        ids = [prompt.ids for prompt in heldout_prompts(model, prompts)]
        taus: dict[str, Measurement] = {}
        with reporter.task("measure", len(each) * len(ids), "texts") as advance:
            for name, drafter in each.items():
                taus[name] = _measured(drafter, model, ids, serve, new_tokens)
                advance(len(ids), f"tau {taus[name].tau:.3f}")
        own = taus.pop("")
        return Measured(own.tau, own.record(model), {n: one.tau for n, one in taus.items()})

    can = prompts > 0 and model.can_run and model.tokenizer is not None
    report = import_published(
        folder, model, out, command=command, measure=measure if can else None, family=family
    )
    return ImportResult(out, report)


def _measured(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    serve: Mapping[str, Any],
    new_tokens: int,
) -> Measurement:
    """Greedily, as the package will be loaded: on the target's device and in its dtype."""
    served = copy.copy(drafter)
    served.module = copy.deepcopy(drafter.module)
    served.to(target.device, target.dtype)
    served.bind(target.borrowed())
    stats = generate(
        target,
        prompts,
        drafter=served,
        sampling=Sampling(max_new_tokens=new_tokens),
        policy=make_policy(serve),
        batch=AT_ONCE,
    ).stats
    return Measurement(
        stats.tau, stats.accepted_per_position, len(prompts), new_tokens, min(AT_ONCE, len(prompts))
    )
