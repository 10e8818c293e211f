"""Reference readers: what an engine would make of a written folder, by the engine's own rules and
from nothing but the folder's files. `check` of a format compares them with the drafter."""
