"""Controllers: which configuration speculates in the next round, if any does."""

from __future__ import annotations

from specctl.core.plugins import Plugins, plugins
from specctl.runtime.controllers.base import Controller

CONTROLLERS: Plugins[type[Controller]] = plugins(__name__, "CONTROLLER", lambda entry: entry.make)
