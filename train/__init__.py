"""Training: a recipe becomes a run, a run a drafter. `loop.py` is a batch's journey.

`specctl.train(target, recipe, out=...)` trains: the package can be called (specctl.CallableRoom).
"""

import sys

from specctl import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
