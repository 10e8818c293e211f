"""Trainings that take their steps in turn, so that all meet the same machine.

TURN=FILE:OWN:COUNT in the environment; FILE holds the number of whose turn it is. Without it nobody
waits.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path

LONGEST = 900.0  # seconds that a turn is waited for


@contextmanager
def turn():
    """Waits for the own turn, and hands it on."""
    given = os.environ.get("TURN")
    if not given:
        yield
        return
    name, own, count = given.rsplit(":", 2)
    path, since = Path(name), time.monotonic()
    while path.read_text() != own:
        if time.monotonic() - since > LONGEST:
            raise SystemExit("the other training is gone")
        time.sleep(0.001)
    yield
    written = path.with_suffix(f".{own}")
    written.write_text(str((int(own) + 1) % int(count)))
    written.replace(path)
