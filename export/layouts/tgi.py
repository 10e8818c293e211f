"""Text-generation-inference: it is given the drafter, and finds the target by the drafter's
config.json (`base_model_name_or_path`)."""

from __future__ import annotations

import shlex

from specctl.export.formats import TARGET, ExportSource


def base_model(source: ExportSource) -> str:
    """What config.json names as the target: its repository, else a word that a path replaces."""
    return source.manifest.target.repo or TARGET


def command(folder: str, length: int) -> str:
    words = ["text-generation-launcher", "--model-id", folder, "--speculate", str(length)]
    return shlex.join(words)


def notes(source: ExportSource) -> tuple[str, ...]:
    """Said where the target has no repository that the engine could load."""
    if source.manifest.target.repo is not None:
        return ()
    return (
        "Text-generation-inference looks for the target at base_model_name_or_path in config.json, "
        f"which is {base_model(source)}: put the folder of your target there.",
    )
