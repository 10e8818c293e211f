"""Controllers: which configuration speculates in the next round, if any does."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.core.plugins import plugins
from specctl.runtime.controllers.base import Controller

CONTROLLERS: Mapping[str, type[Controller]] = {
    name: entry.make for name, entry in plugins(__name__, "CONTROLLER").items()
}
