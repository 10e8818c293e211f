"""Rehearse a run: its own command in a process of its own, small, for `specctl plan --rehearse`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.recipes.schema import Recipe
    from specctl.train.planning.rehearsal import Rehearsal


def rehearse(recipe: Recipe) -> Rehearsal:
    """Run the recipe small and say what it took. Nothing of it is left behind."""
    import yaml

    from specctl.train.planning.rehearsal import read_rehearsal, small

    with tempfile.TemporaryDirectory(prefix="specctl-rehearsal-") as folder:
        given, out = Path(folder) / "recipe.yaml", Path(folder) / "run"
        given.write_text(yaml.safe_dump(small(recipe).to_json()))
        began = time.time()
        command = [
            sys.executable,
            "-m",
            "specctl.cli.commands.rehearse",
            str(given),
            str(out),
            str(began),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise SpecctlError(
                "the rehearsal failed, and so would the run",
                found=last[:300],
                do=f"leave --rehearse out for an estimate, or try: specctl train-draft --recipe "
                f"{recipe.name} --set train.steps=5",
            )
        return read_rehearsal(out / "rehearsal.json")


def main() -> None:
    """In the process of its own: RECIPE.yaml, OUT, seconds since the epoch when it was started."""
    from specctl.api.train import train_and_package
    from specctl.cli.app.memory import peak_memory
    from specctl.recipes.load import load_recipe
    from specctl.train.planning.rehearsal import Stopwatch, summary
    from specctl.train.saving.store import write_json

    given, out, began = sys.argv[1:]
    recipe, watch = load_recipe(given), Stopwatch()
    train_and_package(watch, recipe, Path(out), command=sys.argv)
    gpu = peak_memory().get("gpu", 0)
    found = summary(recipe, Path(out), watch, time.time() - float(began), gpu)
    write_json(Path(out) / "rehearsal.json", asdict(found))


if __name__ == "__main__":
    main()
