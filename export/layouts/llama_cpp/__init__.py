"""Models as GGUF files for llama.cpp, and a reference reader that follows llama.cpp's own rules.

`model.py` and `vocab.py` write; `reader.py` and `tokens.py` read back what was written and know
nothing of the writers but the file.
"""

from __future__ import annotations

from typing import Any

from specctl.core.messages import installed


def library() -> Any:
    """The `gguf` package, or an error with the command that installs it."""
    return installed.library("gguf", "a GGUF file", "gguf")
