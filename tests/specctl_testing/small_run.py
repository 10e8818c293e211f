"""Settings with which the embedded target trains a drafter in seconds."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "steps": 2,
    "rows": 2,
    "seq_len": 32,
    "tau_every": 2,
    "tau_prompts": 1,
    "tau_tokens": 4,
    "data": {"prompts": 6, "prompt_tokens": 8, "new_tokens": 8, "text_tokens": 0},
    "serve": {"length": 2},
}
