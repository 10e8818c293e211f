"""A LoRA adapter given where a model is expected: its base, and the way to both. No torch."""

from __future__ import annotations

from pathlib import Path

from specctl.core.errors import FileError
from specctl.core.storage.model_folder import ADAPTER

UNKNOWN = "BASE"


class AdapterAlone(FileError):
    """The folder holds an adapter and no model. `load_target` and a draft's loader take it as the
    base with the adapter; whoever reads no more than a model's files shows this error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        super().__init__(
            "the folder holds a LoRA adapter, not a whole model",
            found=ADAPTER,
            expected="config.json and model.safetensors",
            do=f"name its base, and the adapter beside it: --target BASE --adapter {folder}",
            where=str(folder),
        )
