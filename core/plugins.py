"""Plug-ins: one module of a package per thing, found by the name of what it defines."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any


def plugins(package: str, path: Iterable[str], attribute: str) -> dict[str, Any]:
    """What the modules of `package` (its `__name__` and `__path__`) define as `attribute`, by its
    own `name`, in alphabetical order."""
    names = [info.name for info in pkgutil.iter_modules(path) if not info.ispkg]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    found = [getattr(module, attribute) for module in modules if hasattr(module, attribute)]
    return {plugin.name: plugin for plugin in sorted(found, key=lambda plugin: str(plugin.name))}
