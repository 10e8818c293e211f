"""ExitStates: what a drafter that runs the target's own first layers leaves for the verification.

Letters: B rows, D hidden width, M new nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExitStates:
    """Residuals [B, M, D] in front of layer `layer` at the root and the nodes of a chain behind it
    that were read while drafting. The keys and values of the layers below lie in the target's
    cache, where a forward of root and nodes would write them."""

    layer: int
    residual_BMD: Tensor
