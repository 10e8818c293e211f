"""DFlash2 in the speculators format: DFlash's layout (see `dflash`), the convolutions of the layers
and the selector. It chooses among all of the target's ids, by the target's own LM head.
"""

from __future__ import annotations

from specctl.drafters.blocks.dflash2 import DFlash2
from specctl.export.formats import ExportSource
from specctl.export.layouts.blocks import refuse_part
from specctl.export.layouts.engines import refuse_scaled_head
from specctl.export.layouts.sglang.dflash2 import keys_of
from specctl.export.layouts.speculators import dflash
from specctl.export.layouts.speculators.layout import SpeculatorsFolder, SpeculatorsLayout


def write(source: ExportSource) -> SpeculatorsFolder:
    drafter = source.drafter
    assert isinstance(drafter, DFlash2)
    refuse_part(source, "vLLM's DFlash2")
    refuse_scaled_head(source, "vLLM")
    own = {"sample_from_anchor": False, **keys_of(drafter)}
    return dflash.written(source, "dflash2", "DFlash2DraftModel", own)


LAYOUT = SpeculatorsLayout(write, dflash.check, "dflash", dflash.length)
