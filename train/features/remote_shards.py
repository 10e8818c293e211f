"""Shards at a URL, in any store that fsspec knows (s3://, gs://, hf://), with a cache here.

The store holds URL/KEY/shard-00007.safetensors and .json as a folder would, the manifest last, so
that a killed writer leaves no shard. A shard is fetched when a row of it is first needed, by the
threads that read ahead; its hash is checked on the way, and it stays in the cache, the folder
OUT/features/KEY, until others need the room: `data.features_gb`, else what is free on the disk.
Losing the cache costs nothing but fetching. Several processes may share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from safetensors import safe_open
from torch import Tensor

from specctl.core.errors import NetworkError, RecipeError
from specctl.core.storage.files import Disk, FileEntry, naming, write_file
from specctl.train.features.shards import SCHEMA, ShardLayout, Shards, entry_of, kept_shards, packed

Found = TypeVar("Found")
# What serves a protocol, where that is not part of fsspec or already a dependency.
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs",
            "abfs": "adlfs", "oci": "ocifs", "oss": "ossfs"}  # fmt: skip
TRIES, PAUSE = 4, 0.5  # of a call to the store, and seconds before the second, doubled each time
FREE_SHARE = 0.9  # of the free disk that a cache without a limit may take
OPENINGS = 3  # another process may drop a file between its fetching and its opening


def is_url(place: str) -> bool:
    """Whether a place of features is no folder of this machine."""
    return "://" in place and not place.startswith(("file://", "local://"))


class ObjectStore:
    """Whole objects below a URL. Credentials are fsspec's: environment or its configuration."""

    def __init__(self, url: str) -> None:
        import fsspec

        self.url, protocol = url, url.partition("://")[0]
        try:
            self._system, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            package = PACKAGES.get(protocol)
            raise RecipeError(
                f"nothing here reads {protocol}://",
                where="data.features_at",
                found=str(error)[:200],
                expected="a folder, or a URL of a store that fsspec knows",
                do=f"pip install {package}" if package else "correct the URL",
            ) from error

    def sizes(self, folder: str) -> dict[str, int]:
        """Name -> bytes of what lies in a folder; empty if there is none."""
        found = self._retried(
            lambda: self._system.ls(self._path(folder), detail=True, refresh=True)
        )
        return {str(one["name"]).rsplit("/", 1)[-1]: int(one["size"] or 0) for one in found or ()}

    def get(self, name: str) -> bytes | None:
        """None if it is not there."""
        found: bytes | None = self._retried(lambda: self._system.cat_file(self._path(name)))
        return found

    def put(self, name: str, body: bytes) -> None:
        path = self._path(name)
        self._retried(lambda: self._system.makedirs(path.rsplit("/", 1)[0], exist_ok=True))
        self._retried(lambda: self._system.pipe_file(path, body))

    def drop(self, name: str) -> None:
        self._retried(lambda: self._system.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _retried(self, call: Callable[[], Found]) -> Found | None:
        """What the store answers, after several tries; None for what is not there. Stores raise
        errors of their own libraries."""
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE * 2 ** (number - 1))
            try:
                return call()
            except FileNotFoundError:
                return None
            except Exception as error:
                last = error
        raise NetworkError(
            "the store of features cannot be reached",
            where=self.url,
            found=f"{type(last).__name__}: {last}"[:300],
            expected="an answer within several tries",
            do="check the URL, the network and the credentials; the same command goes on",
        ) from last


class RemoteShards(Shards):
    """The shards of one key at a store. `folder` is their cache; `cap` its bytes, None: as many as
    the disk has free."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        layout: ShardLayout,
        disk: Disk | None = None,
        cap: int | None = None,
    ) -> None:
        super().__init__(folder, layout, disk)
        self.store, self.cap = store, cap
        self._room = Lock()
        self._listed: dict[str, int] | None = None

    def write(self, shard: int, tokens: Mapping[str, Tensor], lengths: list[int]) -> int:
        body = packed(tokens, lengths)
        entry = FileEntry(len(body), hashlib.sha256(body).hexdigest())
        about = {"schema": SCHEMA, "bytes": entry.bytes, "sha256": entry.sha256}
        manifest = json.dumps(about).encode()
        self.store.put(self._name(self.file(shard)), body)
        self.store.put(self._name(self.manifest(shard)), manifest)
        self._cache(shard, body, manifest)
        self._absent.discard(shard)
        self._whole.add(shard)
        self._listed = None
        return entry.bytes

    def is_there(self, shard: int) -> bool:
        """Whether the store has it, by one listing of the folder."""
        if self._listed is None:
            self._listed = self.store.sizes(self.folder.name)
        return self.file(shard).name in self._listed and self.manifest(shard).name in self._listed

    def _name(self, path: Path) -> str:
        return f"{self.folder.name}/{path.name}"

    def _is_whole(self, shard: int) -> bool:
        """Whether it is in the cache, fetched if it was not."""
        return super()._is_whole(shard) or self._fetch(shard)

    def _open_file(self, shard: int) -> Any:
        for _ in range(OPENINGS):
            try:
                return safe_open(self.file(shard), framework="pt")
            except FileNotFoundError:
                if not self._fetch(shard):
                    break
        return None

    def _fetch(self, shard: int) -> bool:
        """Bring a shard into the cache; False if the store has none. One that is damaged there is
        dropped there, so that the next start writes it again."""
        manifest = self.store.get(self._name(self.manifest(shard)))
        wanted = None if manifest is None else entry_of(manifest)
        if manifest is None or wanted is None:
            return False
        body = self.store.get(self._name(self.file(shard)))
        if body is None or FileEntry(len(body), hashlib.sha256(body).hexdigest()) != wanted:
            self.store.drop(self._name(self.manifest(shard)))
            return False
        self._cache(shard, body, manifest)
        self._whole.add(shard)
        return True

    def _cache(self, shard: int, body: bytes, manifest: bytes) -> None:
        with naming(self.file(shard), len(body), "the cache of features"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._room:
                self._drop_for(len(body))
            self._placed(self.file(shard), body)
            self._placed(self.manifest(shard), manifest)

    def _placed(self, path: Path, body: bytes) -> None:
        """Put a whole file there; other processes may do the same at the same time."""
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        beside.unlink(missing_ok=True)
        write_file(self.disk, beside, iter([memoryview(body)]))
        self.disk.replace(beside, path)

    def _drop_for(self, wanted: int) -> None:
        """Drop the least recently used shards of the cache until that many bytes have room."""
        shards = kept_shards(self.folder.parent)
        used = sum(shard.bytes for shard in shards)
        cap = self.cap
        if cap is None:
            cap = used + int(FREE_SHARE * self.disk.free(self.folder))
        for shard in shards:
            if used + wanted <= cap:
                return
            shard.drop()
            used -= shard.bytes
