"""MiMo-7B, which transformers does not have: Qwen2's model under another name. Its authors' code
subclasses Qwen2 and adds modules for multi-token prediction, which no forward of the model calls;
they are left out here, as transformers leaves out those of other architectures.

Importing this makes the `Auto` classes of transformers know it (see `added_kinds`).
"""

from __future__ import annotations

from typing import ClassVar

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Model,
)


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """Of a checkpoint; `num_nextn_predict_layers` says how many modules lie beside the layers."""

    model_type = "mimo"


class MiMoModel(Qwen2Model):  # type: ignore[misc]
    """Without the LM head."""

    config_class = MiMoConfig


class MiMoForCausalLM(Qwen2ForCausalLM):  # type: ignore[misc]
    """With the LM head."""

    config_class = MiMoConfig
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^model\.mtp_layers\."]


def register() -> None:
    """Once a process, unless an installed transformers has the architecture itself."""
    if MiMoConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(MiMoConfig.model_type, MiMoConfig)
        AutoModel.register(MiMoConfig, MiMoModel)
        AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)


register()
