"""prove_export(): an export in the engine that it was written for, beside our own runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.targets import TargetLike, target_or_own
from specctl.api.failures import raises_user_errors
from specctl.api.generate import generate
from specctl.core.errors import SpecctlError
from specctl.core.forward.masks import document_mask
from specctl.core.language_model import Masks
from specctl.core.messages.table import Table, Tabled
from specctl.drafters import family
from specctl.export.engines import Answers, EngineJob, ServingEngine
from specctl.export.engines.process import chosen_engine, own_python
from specctl.export.package.folder import write_served
from specctl.export.package.manifest import check_files, package_in
from specctl.recipes.published import path_named
from specctl.recipes.targets import resolve
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.folders.hub import with_file
from specctl.runtime.target.target import Target
from specctl.train.data.prompts.heldout import heldout_prompts

NEAR, LEAST = 0.15, 0.01  # the accepted share there: of that here, and absolute
TIE = 1e-3  # logits that are this close are one to engines that add in another order


@dataclass(frozen=True, slots=True, repr=False)
class EngineProof(Tabled):
    """What an engine answered. `plain` and `drafts` are how many texts of the engine, without and
    with the export, are those of our target; `ties` counts those that part only where the two
    logits are as good as equal."""

    engine: str
    version: str
    prompts: int
    new_tokens: int
    length: int
    plain: int
    drafts: int
    ties: int
    there: Answers
    here: Answers
    faults: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.faults

    def table(self) -> Table:
        rows = [
            ("engine", f"{self.engine} ({self.version})"),
            ("texts, plain", f"{self.plain} of {self.prompts} as ours"),
            ("texts, drafted", f"{self.drafts} of {self.prompts} as ours, {self.ties} at ties"),
            ("accepted there", f"{self.there.share:.3f} of {self.there.drafted:,} drafted"),
            ("accepted here", f"{self.here.share:.3f} of {self.here.drafted:,} drafted"),
            ("tau there, here", f"{self.there.tau:.3f}, {self.here.tau:.3f}"),
        ]
        return Table(("proof", "found"), rows, list(self.faults))

    def to_json(self) -> dict[str, Any]:
        fields = {"engine": self.engine, "version": self.version, "passed": self.passed}
        fields |= {"prompts": self.prompts, "new_tokens": self.new_tokens, "length": self.length}
        fields |= {"identical_plain": self.plain, "identical_drafted": self.drafts}
        sides = {"there": _figures(self.there), "here": _figures(self.here)}
        return {**fields, "ties": self.ties, **sides, "faults": list(self.faults)}


def _figures(answers: Answers) -> dict[str, Any]:
    counted = {k: v for k, v in asdict(answers).items() if k not in ("ids", "version", "misread")}
    return counted | {"share": round(answers.share, 4), "tau": round(answers.tau, 4)}


@raises_user_errors
def prove_export(
    package: str | Path,
    exported: str | Path,
    *,
    engine: str | None = None,
    python: str | None = None,
    target: TargetLike = None,
    prompts: int = 16,
    new_tokens: int = 48,
    progress: Progress = None,
) -> EngineProof:
    """Have an engine serve the folder `exported` of `package` and compare with our own runtime:
    greedy texts in float32, plain and drafted, and the share of drafted tokens that is accepted.
    `python` is one that has the engine (else this one). What was found goes into the export's card.
    """
    folder = Path(exported)
    manifest = check_files(folder)
    python = python or own_python()
    found = chosen_engine(engine, manifest.format, python)
    model = target_or_own(target, package_in(path_named(package)), dtype="float32")
    ids = [prompt.ids for prompt in heldout_prompts(model, prompts)]
    length = manifest.serve.get("length")
    length = length if isinstance(length, int) and length > 0 else 3
    reporter = as_reporter(progress)
    with (
        tempfile.TemporaryDirectory() as scratch,
        reporter.task("prove", 4 * len(ids), "texts") as advance,
    ):
        job = EngineJob(
            model, _place(model), folder.absolute(), manifest, ids, new_tokens, length,
            python, Path(scratch),
        )  # fmt: skip
        sides = []
        for drafts, way in ((False, "plain"), (True, "drafted")):
            sides.append(found.answer(job, drafts))
            advance(len(ids), f"{found.name}, {way}")
        ours = []
        for drafts, way in ((False, "plain"), (True, "drafted")):
            ours.append(_ours(job, Path(package), drafts))
            advance(len(ids), f"specctl, {way}")
    proof = _judged(found, job, (sides[0], sides[1]), (ours[0], ours[1]))
    if proof.passed:
        write_served(folder, found.name, _said(proof))
    return proof


def _place(target: Target) -> str:
    try:
        resolved = with_file(resolve(target.name, target.revision), offline=True)
    except SpecctlError as error:
        raise SpecctlError(
            "an engine reads its target from a folder or the hub",
            found=f"{target.name}, which is a model in memory",
            expected="a target with a place",
            do="save it, and give its folder as target",
        ) from error
    return resolved.place


def _ours(job: EngineJob, package: Path, drafts: bool) -> Answers:
    """Our plain or drafted answers, a chain of the same length in every round."""
    sampling = Sampling(max_new_tokens=job.new_tokens, ignore_eos=True)
    how: dict[str, Any] = {}
    if drafts:  # costs that were measured here before must not choose the length
        how = {"drafter": package, "policy": _policy(job), "adaptive": False}
    made = generate(job.target, job.prompts, sampling=sampling, **how)
    stats, ids = made.stats, tuple(tuple(out.token_ids) for out in made.outputs)
    return Answers(ids, stats.drafted, stats.accepted, stats.rounds)


def _policy(job: EngineJob) -> Any:
    """Engines verify chains, also of heads for which we would draft a tree."""
    kind = "chain" if "chain" in family(job.manifest.family).policies else "direct"
    return make_policy({"policy": kind, "length": job.length})


def _judged(
    engine: ServingEngine,
    job: EngineJob,
    theirs: tuple[Answers, Answers],
    ours: tuple[Answers, Answers],
) -> EngineProof:
    faults, same, ties = [], [], 0
    for way, side in zip(("plain", "drafted"), theirs, strict=True):
        equal = 0
        for at, (one, two) in enumerate(zip(side.ids, ours[0].ids, strict=True)):
            if one == two:
                equal += 1
            elif len(one) == len(two) and _is_tie(job.target, job.prompts[at], one, two):
                ties += 1
            else:
                faults.append(f"prompt {at}: {engine.name}, {way}, answers otherwise than specctl")
        same.append(equal)
    faults += [f"{engine.name} reads {text!a} as other tokens" for text in theirs[0].misread]
    there, here = theirs[1], ours[1]
    if not there.drafted or not there.accepted:
        faults.append(f"{engine.name} accepted no drafted token")
    elif abs(there.share - here.share) > max(LEAST, NEAR * here.share):
        faults.append(f"accepted share {there.share:.3f} there, {here.share:.3f} here")
    return EngineProof(
        engine=engine.name,
        version=there.version,
        prompts=len(job.prompts),
        new_tokens=job.new_tokens,
        length=job.length,
        plain=same[0],
        drafts=same[1],
        ties=ties,
        there=there,
        here=here,
        faults=tuple(faults),
    )


@torch.inference_mode()
def _is_tie(target: Target, prompt: Sequence[int], one: Sequence[int], two: Sequence[int]) -> bool:
    """Whether the two tokens at which the texts part have logits that are as good as equal."""
    at = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    ids_1S = torch.tensor([[*prompt, *one[:at]]], device=target.device)
    masks = Masks(document_mask(torch.zeros_like(ids_1S)))
    position_1S = torch.arange(ids_1S.shape[1], device=target.device)[None]
    logits = target.lm.dense(ids_1S, position_1S, masks).logits_BTV
    assert logits is not None
    return abs(float(logits[0, -1, one[at]] - logits[0, -1, two[at]])) <= TIE


def _said(proof: EngineProof) -> str:
    """The line of the card."""
    ties = f" ({proof.ties} part where two logits tie)" if proof.ties else ""
    return (
        f"{proof.version}, {proof.drafts} of {proof.prompts} greedy texts of {proof.new_tokens} "
        f"tokens in float32 are those of specctl{ties}; of the drafted tokens, {proof.length} a "
        f"round, {proof.there.share:.3f} were accepted there and {proof.here.share:.3f} by specctl."
    )
