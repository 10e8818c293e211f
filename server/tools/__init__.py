"""Tool calls: how models of a kind write them, read as they stream. One file per format."""

from __future__ import annotations

from specctl.core.plugins import Plugins, plugins
from specctl.server.tools.base import ToolFormat

TOOL_FORMATS: Plugins[ToolFormat] = plugins(__name__, "TOOL_FORMAT")

__all__ = ["TOOL_FORMATS", "ToolFormat"]
