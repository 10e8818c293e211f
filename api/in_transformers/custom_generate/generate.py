"""What `model.generate(custom_generate=FOLDER, draft=..., trust_remote_code=True)` of transformers
runs: a copy of this file, which it imports from a folder of its own."""

from __future__ import annotations

from typing import Any

from specctl.api.in_transformers.drafted import generate_drafted


def generate(model: Any, **arguments: Any) -> Any:
    return generate_drafted(model, **arguments)
