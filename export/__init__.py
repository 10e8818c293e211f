"""Packages, exports to engines, imports of published drafters.

`specctl.export(package, to, out)` exports: the package can be called (specctl.CallableRoom).
"""

import sys

from specctl import CallableRoom

sys.modules[__name__].__class__ = CallableRoom
