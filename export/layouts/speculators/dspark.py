"""DSpark in the speculators format: DFlash's layout (see `dflash`), the correction for the token
before as `markov_head` and the confidence head. Slot 0, the anchor, speaks.
"""

from __future__ import annotations

from pathlib import Path

from specctl.drafters.blocks.dspark import DSpark
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import check_confidence, mask_row
from specctl.export.layouts.speculators import dflash
from specctl.export.layouts.speculators.layout import SpeculatorsFolder, SpeculatorsLayout
from specctl.export.readers.trial import Trial


def write(source: ExportSource) -> SpeculatorsFolder:
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


def check(source: ExportSource, folder: Path) -> None:
    """The block's tokens as for DFlash, and how sure of each of them it is."""
    dflash.check(source, folder)
    trial = Trial.of(source, dflash.length(source) - 1, without=mask_row(source))
    check_confidence(source, dflash.read(source, folder).confidences(trial), trial)


LAYOUT = SpeculatorsLayout(write, check, "dspark", dflash.length)
