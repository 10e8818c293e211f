"""Architectures that transformers does not have and that are here: made known to it when a
configuration of one is met, since importing a model takes time that others need not spend."""

from __future__ import annotations

from importlib import import_module

ADDED = {"mimo": "specctl.models.hf.mimo"}  # by model type: what makes it known


def make_known(model_type: object) -> None:
    """Lets transformers' `Auto` classes build that architecture, if it is one of ours."""
    if isinstance(model_type, str) and model_type in ADDED:
        import_module(ADDED[model_type])
