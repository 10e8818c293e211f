"""Drafters inside `generate` of transformers: as a callable (`drafted.py`), and as the folder that
`custom_generate=` takes by its path (`FOLDER`), for tools that pass on texts only."""

from pathlib import Path

FOLDER = str(Path(__file__).parent)
