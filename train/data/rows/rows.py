"""Prepared rows on disk: the manifest, and batches read where they lie.

OUT/data holds one safetensors file of rows and manifest.json, which names that file, its sha256 and
a digest of all that decided its content. The manifest is written last, and both are written whole,
so that half-written data are never read.

A run that goes on with more data keeps its rows and gets more of them (`growth.py`): the rows come
in parts. Those that are held out are of the first part and always the last in the file:

    first part, trained on | second part | third part | ... | first part, held out

Letters: B rows of a batch, R rows, S sequence, N documents, P prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.errors import FileError, IntegrityError
from specctl.core.forward.prompt_images import StoredImage, TextImages
from specctl.core.storage.files import digest_of, sha256_file, write_json
from specctl.train.data.rows.pack import PackedRows
from specctl.train.data.sources.defects import Defects
from specctl.train.saving.tensorfile import write_arrays

FORMAT = 1
MANIFEST = "manifest.json"
_ROWS = re.compile(r"rows-[0-9a-f]{12}\.safetensors")
WIDTH_STEP = 16  # batches are this much wide, or a multiple


@dataclass(frozen=True, slots=True)
class DataManifest:
    """What OUT/data holds. `writer` is "target", "source" or "both": who wrote the text to be
    predicted. `held`: rows that are held out, None where the maker did not say; `answered`: prompts
    that the target has answered; `parts`: digest and rows of each part, () for one part; `images`:
    sha256 of the file that says which images stand in them, None: none do."""

    format: int
    digest: str
    file: str
    sha256: str
    writer: str
    rows: int
    seq_len: int
    documents: int
    tokens: int
    loss_tokens: int
    fill: float
    domains: tuple[str, ...]
    left_out: tuple[str, ...]
    settings: dict[str, Any]
    held: int | None = None
    answered: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    images: str | None = None

    @property
    def identity(self) -> str:
        """Names the rows, where `digest` names what they were made by: rows that came in several
        parts are others than those that the same settings give at once."""
        if len(self.parts) < 2:
            return self.digest
        return digest_of({"parts": [digest for digest, _ in self.parts]})


class TokenData:
    """The rows of a data folder, read where they lie; safe to open from several processes.
    `sources`: where images lie now, by sha256, which have been moved since the rows were made."""

    def __init__(
        self, folder: Path, manifest: DataManifest, sources: Mapping[str, str] | None = None
    ) -> None:
        self.folder, self.manifest = folder, manifest
        with safe_open(folder / manifest.file, framework="pt") as file:
            self._arrays: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.images = {}
        if manifest.images is not None:
            self.images = _read_images(folder, manifest, sources or {})

    @property
    def num_rows(self) -> int:
        return self.manifest.rows

    @property
    def seq_len(self) -> int:
        return self.manifest.seq_len

    @property
    def digest(self) -> str:
        return self.manifest.identity

    def parts(self) -> list[tuple[str, list[int]]]:
        """Digest and row numbers of each part, in the order in which it was packed."""
        held, found, start = self.manifest.held or 0, list[tuple[str, list[int]]](), 0
        for number, (digest, count) in enumerate(
            self.manifest.parts or ((self.digest, self.num_rows),)
        ):
            end = start + count - (0 if number else held)
            last = [] if number else range(self.num_rows - held, self.num_rows)
            found.append((digest, [*range(start, end), *last]))
            start = end
        return found

    def prompts(self) -> frozenset[int] | None:
        """The keys (`growth.ids_key`) of all prompts in the rows; None where they were not kept."""
        keys = self._arrays.get("prompt_P")
        return None if keys is None else frozenset(keys.tolist())

    def packed(self) -> PackedRows:
        """All rows as they were packed."""
        ids, mask, document, position = (
            self._arrays[name].numpy()
            for name in ("ids_RS", "mask_RS", "document_RS", "position_RS")
        )
        domains = [self.manifest.domains[i] for i in self._arrays["domain_N"].tolist()]
        return PackedRows(ids, mask, document, position, domains, self.images)

    def batch(self, indices: Sequence[int], device: torch.device | None = None) -> TrainBatch:
        """Those rows, without taps and teacher (see `capture`), cut where all of them only pad."""
        row_B = torch.as_tensor(list(indices), dtype=torch.long)
        used_S = (self._arrays["document_RS"][row_B] >= 0).any(dim=0)
        width = min(self.seq_len, -(-int(used_S.sum()) // WIDTH_STEP) * WIDTH_STEP)
        names = ("ids_RS", "mask_RS", "document_RS", "position_RS")
        ids, mask, document, position = (self._arrays[name][row_B, :width] for name in names)
        return TrainBatch(
            ids.long().to(device),
            mask.bool().to(device),
            document.long().to(device),
            position.long().to(device),
            images=self._texts(document) if self.images else (),
        )

    def _texts(self, document_BS: Tensor) -> tuple[TextImages, ...]:
        """Where texts with images stand in these rows."""
        found = list[TextImages]()
        for row, document_S in enumerate(document_BS):
            start = 0
            for number, count in zip(*_runs(document_S), strict=True):
                images = self.images.get(number)
                if images:
                    found.append(TextImages(row, start, start + count, images))
                start += count
        return tuple(found)

    def lengths(self) -> list[int]:
        """Real tokens of each row."""
        found: list[int] = (self._arrays["document_RS"] >= 0).sum(dim=1).tolist()
        return found

    def answers(self) -> Iterator[tuple[Tensor, str]]:
        """Per document of the first part, the tokens that are to be predicted, and its domain. What
        is counted in them, such as the draft vocabulary, is then the same with more data."""
        domains, domain_N = self.manifest.domains, self._arrays["domain_N"]
        first_R = torch.tensor(self.parts()[0][1])
        for ids_S, mask_S, document_S in zip(
            *(self._arrays[name][first_R] for name in ("ids_RS", "mask_RS", "document_RS")),
            strict=True,
        ):
            keep_S = mask_S.bool()
            numbers_S = document_S[keep_S]
            for number in numbers_S.unique().tolist():
                yield ids_S[keep_S][numbers_S == number].long(), domains[int(domain_N[number])]

    @classmethod
    def open(cls, folder: Path) -> TokenData:
        """The data in a folder; IntegrityError if they are not as they were written."""
        manifest = read_manifest(folder)
        if manifest is None:
            raise FileError("no prepared data here", found=str(folder), do="run the training again")
        return cls(folder, manifest)


def _runs(document_S: Tensor) -> tuple[list[int], list[int]]:
    """The documents of a row, and how many positions each has."""
    number_N, count_N = torch.unique_consecutive(document_S, return_counts=True)
    return number_N.tolist(), count_N.tolist()


def _images_file(name: str) -> str:
    """Beside a file of rows, which says what images stand in them."""
    return name.replace("rows-", "images-").replace(".safetensors", ".json")


def _read_images(
    folder: Path, manifest: DataManifest, sources: Mapping[str, str]
) -> dict[int, tuple[StoredImage, ...]]:
    path = folder / _images_file(manifest.file)
    if not path.is_file() or sha256_file(path) != manifest.images:
        raise _damaged(path, "missing, or other bytes")
    listed = json.loads(path.read_text(encoding="utf-8"))
    return {
        int(number): tuple(
            StoredImage(sources.get(sha256, source), sha256, first, end)
            for source, sha256, first, end in each
        )
        for number, each in listed.items()
    }


def read_manifest(folder: Path) -> DataManifest | None:
    """The manifest of a data folder, its rows checked against their hash; None if there is none."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {"domains": tuple(fields["domains"]), "left_out": tuple(fields["left_out"])}
        fields["parts"] = tuple((digest, rows) for digest, rows in fields.get("parts", ()))
        manifest = DataManifest(**fields)
        found = sha256_file(folder / manifest.file)
    except (ValueError, KeyError, TypeError, OSError, SafetensorError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if found != manifest.sha256:
        raise _damaged(folder / manifest.file, f"sha256 {found[:12]}, not {manifest.sha256[:12]}")
    return manifest


def _damaged(path: Path, found: str) -> IntegrityError:
    return IntegrityError(
        "the prepared data are damaged",
        where=str(path),
        found=found,
        expected="the files as they were written",
        do=f"delete {path.parent}; the next run prepares the data again",
    )


def write_rows(
    folder: Path,
    rows: PackedRows,
    digest: str,
    settings: dict[str, Any],
    writer: str,
    defects: Defects,
    *,
    held: int | None = None,
    answered: int = 0,
    parts: Sequence[tuple[str, int]] = (),
    prompts: Iterable[int] | None = None,
) -> DataManifest:
    """Rows first, manifest last; rows of earlier settings are removed. `prompts`: their keys."""
    domains = tuple(sorted(set(rows.domain_N)))
    number = {name: i for i, name in enumerate(domains)}
    arrays = {
        "ids_RS": rows.ids_RS,
        "mask_RS": rows.mask_RS,
        "document_RS": rows.document_RS,
        "position_RS": rows.position_RS,
        "domain_N": np.array([number[name] for name in rows.domain_N], dtype=np.int32),
    }
    if prompts is not None:
        arrays["prompt_P"] = np.array(sorted(set(prompts)), dtype=np.int64)
    name = f"rows-{digest[:12]}.safetensors"
    sha256 = write_arrays(folder / name, arrays, {"digest": digest})
    images = None
    if rows.images:
        listed = {
            str(number): [[*astuple(i)] for i in each] for number, each in rows.images.items()
        }
        write_json(folder / _images_file(name), listed)
        images = sha256_file(folder / _images_file(name))
    R, S = rows.ids_RS.shape
    manifest = DataManifest(
        format=FORMAT,
        digest=digest,
        file=name,
        sha256=sha256,
        writer=writer,
        rows=R,
        seq_len=S,
        documents=len(rows.domain_N),
        tokens=int((rows.document_RS >= 0).sum()),
        loss_tokens=int(rows.mask_RS.sum()),
        fill=rows.fill,
        domains=domains,
        left_out=tuple(defects.lines()),
        settings=settings,
        held=held,
        answered=answered,
        parts=tuple(parts),
        images=images,
    )
    write_json(folder / MANIFEST, asdict(manifest))
    for old in folder.glob("rows-*.safetensors"):
        if old.name != name and _ROWS.fullmatch(old.name):
            old.unlink()
            (folder / _images_file(old.name)).unlink(missing_ok=True)
    return manifest
