"""Models as GGUF files for llama.cpp, and a reference reader that follows llama.cpp's own rules.

`model.py` and `vocab.py` write; `reader.py` and `tokens.py` read back what was written and know
nothing of the writers but the file.
"""

from __future__ import annotations

from typing import Any

from specctl.core.errors import SpecctlError
from specctl.core.installed import pip_install


def library() -> Any:
    """The `gguf` package, or an error with the command that installs it."""
    try:
        import gguf
    except ImportError as error:
        raise SpecctlError(
            "GGUF files need the library gguf",
            found="it is not installed",
            expected="the optional dependency gguf",
            do=pip_install("gguf"),
        ) from error
    return gguf
