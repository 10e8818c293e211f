"""DSpark in the speculators format: DFlash's layout (see `dflash`), the correction for the token
before as `markov_head` and the confidence head. Slot 0, the anchor, speaks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specctl.drafters.dspark import DSpark
from specctl.drafters.parts.base import Drafter
from specctl.export.engines import gate
from specctl.export.formats import Source
from specctl.export.readers.trial import TOLERANCE, Trial, spoken, twin
from specctl.export.speculators import dflash
from specctl.export.speculators.layout import Layout, Written
from specctl.export.speculators.p_eagle import mask_token


def write(source: Source) -> Written:
    drafter = source.drafter
    assert isinstance(drafter, DSpark)
    own = {
        "sample_from_anchor": True,
        "markov_rank": drafter.options.rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return dflash.written(source, "dspark", "DSparkDraftModel", own)


def confidences(drafter: Drafter, trial: Trial) -> Tensor:
    """[N + 1]: what the drafter thinks of each place, as it serves."""
    with torch.no_grad():
        return torch.stack([state.confidence()[0] for state, _ in spoken(drafter, trial)])


def check(source: Source, folder: Path) -> None:
    """The block's tokens as for DFlash, and how sure of each of them it is."""
    dflash.check(source, folder)
    trial = Trial.of(source, dflash.length(source) - 1, without=mask_token(source))
    theirs_N = dflash.read(source, folder).confidences(trial)
    if theirs_N is None:
        raise gate("no confidence head", "the drafter's own")
    error = float((theirs_N - confidences(twin(source, source.drafter), trial)).abs().max())
    if not error <= TOLERANCE:
        raise gate(f"confidences differ by {error:.1e}", f"at most {TOLERANCE:g}")


LAYOUT = Layout(write, check, "dspark", dflash.length)
