"""Proof T6: any damage to any file of the newest checkpoint is seen, and the one before is used.

    PYTHONPATH=src python benchmarks/proof_damage.py --flips 60

Every file of a real run's checkpoint (of one process, and of two) is truncated, emptied, deleted,
lengthened, and has single bits flipped at random places; besides, the folder is emptied, renamed
to another step, and the pointer `latest` broken. Proved if each time the damage is found, the
reason is said, the previous checkpoint is loaded bit for bit, the damaged one is moved aside, and
the run continued from there ends where the undamaged run ends. When all are damaged, the run is
refused.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from proof_common import (
    Check,
    checked,
    load_toy,
    parser,
    report,
    run_ranks,
    small_recipe,
    small_target,
    state_digest,
    write_text,
)

from specctl.core.errors import IntegrityError
from specctl.runtime.measure.reporter import SilentReporter
from specctl.train.distributed.ranks import Ranks
from specctl.train.loop import TrainProgress, train
from specctl.train.run import train_draft
from specctl.train.saving.checkpoint import Checkpoints
from specctl.train.saving.integrity import step_name

OLD, NEW = 6, 8  # steps of the checkpoint before and of the newest one
Harm = Callable[[Path], None]


def truncate(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def flip(path: Path, chance: random.Random) -> None:
    body = bytearray(path.read_bytes())
    body[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
    path.write_bytes(body)


def harms(chance: random.Random, flips: int) -> dict[str, Harm]:
    """Name -> what is done to a file."""
    made: dict[str, Harm] = {
        "truncate": partial(truncate, share=0.5),
        "empty": partial(truncate, share=0.0),
        "delete": Path.unlink,
        "lengthen": grow,
    }
    return made | {f"flip {i}": partial(flip, chance=chance) for i in range(flips)}


def judge(folder: Path, expected: str, where: str) -> str | None:
    """What is wrong with how a damaged folder of checkpoints is taken up."""
    saved = Checkpoints(folder, SilentReporter())
    found = saved.newest()
    if found is None or found.step != OLD:
        return f"{where}: {found and found.step} was loaded"
    if state_digest(found) != expected:
        return f"{where}: the previous state is another"
    if len(saved.reporter.warnings) != 1 or step_name(NEW) not in saved.reporter.warnings[0]:
        return f"{where}: said {saved.reporter.warnings}"
    return None if NEW not in saved.steps() else f"{where}: not moved aside"


def damage_each(checkpoints: Path, chance: random.Random, flips: int) -> list[str | None]:
    """Every file of the newest checkpoint with every harm, each on a copy."""
    expected = state_digest(Checkpoints(checkpoints, SilentReporter()).load(OLD))
    found: list[str | None] = []
    for name in sorted(p.name for p in (checkpoints / step_name(NEW)).iterdir()):
        for how, harm in harms(chance, flips).items():
            copy = checkpoints.with_name("copy")
            shutil.copytree(checkpoints, copy, symlinks=True)
            harm(copy / step_name(NEW) / name)
            found.append(judge(copy, expected, f"{name}, {how}"))
            shutil.rmtree(copy)
    return found


def damage_folders(checkpoints: Path) -> list[str | None]:
    """Harm to whole folders and to the pointer."""
    expected = state_digest(Checkpoints(checkpoints, SilentReporter()).load(OLD))
    newest = step_name(NEW)

    def emptied(copy: Path) -> str | None:
        for path in (copy / newest).iterdir():
            path.unlink()
        return judge(copy, expected, "emptied folder")

    def renamed(copy: Path) -> str | None:
        (copy / newest).rename(copy / step_name(NEW + 1))
        found = Checkpoints(copy, SilentReporter()).newest()
        return None if found is not None and found.step == OLD else "renamed folder was loaded"

    def unpointed(copy: Path) -> str | None:
        (copy / "latest").unlink()
        (copy / "latest").symlink_to("step999999")
        found = Checkpoints(copy, SilentReporter()).newest()
        return None if found is not None and found.step == NEW else "the pointer was believed"

    def all_of_them(copy: Path) -> str | None:
        for path in copy.glob("step*/state.json"):
            path.unlink()
        try:
            Checkpoints(copy, SilentReporter()).newest()
        except IntegrityError as error:
            return None if newest in error.found else f"says {error.found}"
        return "a run without a whole checkpoint started over"

    found: list[str | None] = []
    for harm in (emptied, renamed, unpointed, all_of_them):
        copy = checkpoints.with_name("copy")
        shutil.copytree(checkpoints, copy, symlinks=True)
        found.append(harm(copy))
        shutil.rmtree(copy)
    return found


def continued(out: Path, run: Callable[[Path], None], chance: random.Random) -> list[str | None]:
    """A run whose newest checkpoint is damaged ends in the same state as before the damage."""
    final = Checkpoints(out / "checkpoints", SilentReporter()).load(NEW)
    names = sorted(p.name for p in (out / "checkpoints" / step_name(NEW)).iterdir())
    found: list[str | None] = []
    for name in names:
        copy = out.with_name("continued")
        shutil.copytree(out, copy, symlinks=True)
        flip(copy / "checkpoints" / step_name(NEW) / name, chance)
        run(copy)
        again = Checkpoints(copy / "checkpoints", SilentReporter()).load(NEW)
        is_same = state_digest(again) == state_digest(final)
        found.append(None if is_same else f"{name}: the run ended in another state")
        shutil.rmtree(copy)
    return found


def pair(ranks: Ranks, out: Path) -> None:
    """A toy run of two processes."""
    toy = load_toy()
    train(toy.make_job(out, ranks=ranks, steps=NEW, save_every=2, keep=9), TrainProgress())


def prove(flips: int, kind: str = "eagle3", seed: int = 0, *, pairs: bool = True) -> list[Check]:
    """All harms to a run of that kind, and to one of two processes."""
    torch.set_num_threads(1)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, target = write_text(folder / "text.txt"), small_target()
        recipe = small_recipe(
            kind, text, train__steps=NEW, train__keep=9, train__save_every=2, train__tau_every=2
        )

        def run(out: Path) -> None:
            train_draft(recipe, out, target=target)

        out = folder / "run"
        run(out)
        checks = [
            checked(f"{kind}: file x harm", damage_each(out / "checkpoints", chance, flips), 15),
            checked(f"{kind}: folders, pointer, all", damage_folders(out / "checkpoints"), 4),
            checked(f"{kind}: continued to the same end", continued(out, run, chance), 5),
        ]
        if pairs:
            two = folder / "two"
            codes = run_ranks(2, partial(pair, out=two), folder / "ranks", 120)
            assert codes == [0, 0], codes
            found = damage_each(two / "checkpoints", chance, flips)
            checks.append(checked("two processes: file x harm", found, 18))
        return checks


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--flips", type=int, default=20, help="flipped bits per file")
    options.add_argument("--kind", default="eagle3")
    given = options.parse_args()
    report(prove(given.flips, given.kind, given.seed), given.json)


if __name__ == "__main__":
    main()
