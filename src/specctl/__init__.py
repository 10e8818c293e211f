"""specctl: train, prove, measure and package draft models for speculative decoding.

The public Python API is imported lazily, so that `import specctl` stays cheap:

    run = specctl.train("tiny", "quickstart", out="runs/demo", steps=40)
    result = specctl.generate("tiny", "def main(", drafter=run.package, max_new_tokens=64)
    print(result.text, result.stats.tau)
"""

from __future__ import annotations

import importlib
import inspect
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specctl.api.bench import bench
    from specctl.api.denoise import denoise
    from specctl.api.derive import derive_recipe
    from specctl.api.arguments.drafting import load_drafter
    from specctl.api.export import export
    from specctl.api.generate import generate
    from specctl.api.in_transformers.drafted import custom_generate
    from specctl.api.policy import follow_policy
    from specctl.api.prune import prune
    from specctl.api.arguments.targets import load_target
    from specctl.api.train import distill, train
    from specctl.api.verify import verify
    from specctl.api.vocab_trim import vocab_trim
    from specctl.core.errors import SpecctlError
    from specctl.runtime.outline.answer import Outlining
    from specctl.runtime.sampling.sampling import Sampling

__version__ = "0.1.0"

# Large tensors in pages of 2 MB, where Linux gives these to who asks: what reads every weight for
# every token finds them faster. Read by torch when it first reserves memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

_HOMES = {
    "bench": "specctl.api.bench",
    "custom_generate": "specctl.api.in_transformers.drafted",
    "denoise": "specctl.api.denoise",
    "derive_recipe": "specctl.api.derive",
    "distill": "specctl.api.train",
    "export": "specctl.api.export",
    "follow_policy": "specctl.api.policy",
    "generate": "specctl.api.generate",
    "load_drafter": "specctl.api.arguments.drafting",
    "load_target": "specctl.api.arguments.targets",
    "Outlining": "specctl.runtime.outline.answer",
    "prune": "specctl.api.prune",
    "Sampling": "specctl.runtime.sampling.sampling",
    "SpecctlError": "specctl.core.errors",
    "train": "specctl.api.train",
    "verify": "specctl.api.verify",
    "vocab_trim": "specctl.api.vocab_trim",
}

__all__ = [
    "Outlining",
    "Sampling",
    "SpecctlError",
    "__version__",
    "bench",
    "custom_generate",
    "denoise",
    "derive_recipe",
    "distill",
    "export",
    "follow_policy",
    "generate",
    "load_drafter",
    "load_target",
    "prune",
    "train",
    "verify",
    "vocab_trim",
]


class CallableRoom(ModuleType):
    """A room that is a function as well: `specctl.train` and `specctl.export` are packages, and once
    something imports `specctl.train.loop`, Python sets the attribute `specctl.train` to the package.
    So the package itself can be called, whatever was imported first. Their `__init__.py` set this
    class; the function is the one of the same name in api/."""

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function()(*given, **named)

    def _function(self) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOMES[name]), name)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specctl' has no attribute {name!r}")
    if name in ("train", "export"):
        return importlib.import_module(f"specctl.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
