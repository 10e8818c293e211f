"""Folders of LoRA adapters as peft writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch


def write_adapter(model: Any, folder: Path, seed: int = 0, size: float = 0.1, **fields: Any) -> Any:
    """The folder that peft writes for random factors, and peft's wrapped model."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], **fields}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**settings))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn_like(parameter))
    wrapped.save_pretrained(folder)
    return wrapped.eval()
