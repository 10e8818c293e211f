"""Reload what was written: every tensor equal, and the same acceptance as before it was written.

A wrong tap, a lost scale or a shifted vocabulary map makes a drafter slow, not wrong, so nothing
else would notice. This gate does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specctl.core.drafter import Drafter, RoundSeconds
from specctl.core.errors import GateError, SpecctlError
from specctl.drafters import families
from specctl.export.package.folder import package_tensors
from specctl.export.package.load import load_package
from specctl.export.package.manifest import Manifest, check_files
from specctl.export.package.tensors import compare_tensors
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.measure.stats import add_counts, shares
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

STEADY = RoundSeconds(draft=0.1, verify=1.0, commit=0.0)  # of every round, as policies hear it


@dataclass(frozen=True, slots=True)
class DrafterAcceptance:
    """Acceptance of one drafter on one set of prompts."""

    tau: float
    alpha: tuple[float, ...]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was compared. `recorded_tau` is the manifest's, None if it holds none."""

    files: int
    tensors: int
    loaded: DrafterAcceptance | None
    before: DrafterAcceptance | None
    recorded_tau: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "files": self.files,
            "tensors": self.tensors,
            "tau_loaded": None if self.loaded is None else self.loaded.tau,
            "tau_before": None if self.before is None else self.before.tau,
            "tau_recorded": self.recorded_tau,
        }


def check_package(
    path: Path | str,
    target: Target,
    *,
    reference: Drafter | None = None,
    prompts: Sequence[Sequence[int]] = (),
    new_tokens: int = 32,
    temperature: float = 0.0,
    tolerance: float = 0.02,
    against_recorded: bool = False,
    allow: Sequence[str] = (),
) -> CheckReport:
    """Reload a package and compare it with the drafter it was written from.

    With `reference`, every tensor must be equal; with `prompts` too, tau must agree within the
    relative `tolerance`. `against_recorded` compares tau with the manifest's (give the prompts,
    lengths and temperature of that measurement). Raises GateError.
    """
    manifest = check_files(path)
    drafter = load_package(Path(path), target, allow)
    loaded = before = None
    if prompts:
        loaded = measure(target, drafter, manifest, prompts, new_tokens, temperature)
    num_tensors = len(package_tensors(drafter))
    if reference is not None:
        num_tensors = compare_tensors(
            _as_loaded(package_tensors(reference), target), package_tensors(drafter)
        )
        if prompts:
            twin = _served(reference, target)
            before = measure(target, twin, manifest, prompts, new_tokens, temperature)
    recorded = manifest.acceptance.tau if manifest.acceptance is not None else None
    if loaded is not None and before is not None:
        agree("the drafter in memory", before.tau, loaded.tau, tolerance)
    if loaded is not None and recorded is not None and against_recorded:
        agree("the manifest", recorded, loaded.tau, tolerance)
    return CheckReport(len(manifest.files), num_tensors, loaded, before, recorded)


def _as_loaded(tensors: Mapping[str, Tensor], target: Target) -> dict[str, Tensor]:
    """Tensors in the dtype that loading for this target gives them."""
    return {n: t.to(target.dtype) if t.is_floating_point() else t for n, t in tensors.items()}


def _served(drafter: Drafter, target: Target) -> Drafter:
    """A copy in the dtype that loading gives, so that rounding does not pass for damage; the model
    of a GGUF file is read in one way."""
    if drafter.file is not None:
        return drafter
    return copy.deepcopy(drafter).to(target.device, target.dtype)


def agree(origin: str, expected: float, found: float, tolerance: float) -> None:
    if abs(found - expected) > tolerance * expected:
        raise GateError(
            "acceptance after loading differs from acceptance before",
            found=f"tau {found:.4f} after loading",
            expected=f"tau {expected:.4f} from {origin}, within {100 * tolerance:g} %",
            do="do not ship this package; export it again and report it if it differs again",
        )


def measure(
    target: Target,
    drafter: Drafter,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    temperature: float,
) -> DrafterAcceptance:
    """Decode every prompt with a drafter as the manifest's serve settings say. Policies that follow
    the clock (ProPD) hear that all rounds take as long, so that equal drafters draft alike."""
    if not all(prompts):
        raise SpecctlError("a check prompt is empty", do="give prompts of at least one token")
    serve = dict(manifest.serve) or {"policy": families()[drafter.family].policies[0]}
    rule = str(serve.get("rule", "auto"))
    slots = min(8, len(prompts))
    engine = Engine(
        target, drafter, make_policy(serve), rule, num_slots=slots, assumed_seconds=STEADY
    )
    requests = [
        Request(tuple(ids), Sampling(temperature=temperature, seed=i, max_new_tokens=new_tokens))
        for i, ids in enumerate(prompts)
    ]
    done = engine.run(requests)
    rounds = sum(c.stats.rounds for c in done)
    counts = (
        add_counts(c.stats.accepted_at for c in done),
        add_counts(c.stats.tested_at for c in done),
    )
    return DrafterAcceptance(
        sum(c.stats.tokens for c in done) / rounds,
        shares(*counts),
        tuple(c.tokens for c in done),
    )
