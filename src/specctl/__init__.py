"""specctl: train, prove, measure and package draft models for speculative decoding.

The public Python API is imported lazily, so that `import specctl` stays cheap:

    target = specctl.load_target("tiny")
    drafter = specctl.load_drafter("runs/demo/package", target)
    result = specctl.generate(target, ["def main("], drafter=drafter, sampling=specctl.Sampling())
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.export.package.folder import load_drafter
    from specctl.runtime.generate import generate
    from specctl.runtime.proof.prove import verify
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import load_target

__version__ = "0.1.0"

_HOMES = {
    "load_target": "specctl.runtime.target.target",
    "load_drafter": "specctl.export.package.folder",
    "generate": "specctl.runtime.generate",
    "Sampling": "specctl.runtime.sampling.sampling",
    "verify": "specctl.runtime.proof.prove",
}

__all__ = ["Sampling", "__version__", "generate", "load_drafter", "load_target", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specctl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
