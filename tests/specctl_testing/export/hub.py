"""A stand-in for the Hugging Face hub: repositories in memory, as far as an upload asks."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Repository:
    """One repository: its files, and a number for each commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0

    @property
    def sha(self) -> str:
        return f"{self.commits:040x}"


@dataclass
class Hub:
    """`repositories` by name; `blobs` of git-lfs by sha256. `refuses`: the status that commits get;
    `loses`: a file that a commit silently leaves out."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    refuses: int | None = None
    loses: str | None = None
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of one request."""
        path = path.partition("?")[0]
        self.requests.append(f"{method} {path}")
        if method == "PUT":
            self.blobs[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        lfs = re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path)
        if lfs:
            return 200, self._batch(json.loads(body))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+)/[^/]+)?(?:/.*)?", path)
        if not found or found[1] not in self.repositories:
            return 404, {"error": "Repository not found"}
        repository = self.repositories[found[1]]
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            mode = {True: "lfs", False: "regular"}
            kinds = [mode[f["path"].endswith(".safetensors")] for f in files]
            pairs = zip(files, kinds, strict=True)
            return 200, {
                "files": [
                    {"path": f["path"], "uploadMode": k, "shouldIgnore": False} for f, k in pairs
                ]
            }
        if found[2] == "commit":
            return self._commit(found[1], repository, body)
        if found[2] == "tree":
            return 200, [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in repository.files.items()
            ]
        siblings = [{"rfilename": name} for name in repository.files]
        about = {"id": found[1], "sha": repository.sha, "private": repository.private}
        return 200, {**about, "siblings": siblings, "tags": [], "downloads": 0}

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        owner = asked.get("organization") or "me"
        name = f"{owner}/{asked['name']}"
        url = {"url": f"{self.url}/{name}"}
        if name in self.repositories:
            return 409, {**url, "error": "You already created this model repo"}
        is_private = asked.get("private") or asked.get("visibility") == "private"
        self.repositories[name] = Repository(bool(is_private))
        return 200, url

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        objects = [
            {**one, "actions": {"upload": {"href": f"{self.url}/blob/{one['oid']}", "header": {}}}}
            for one in asked["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _commit(self, name: str, repository: Repository, body: bytes) -> tuple[int, Any]:
        if self.refuses is not None:
            return self.refuses, {"error": "refused"}
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        for line in lines:
            value = line["value"]
            if line["key"] == "file" and value["path"] != self.loses:
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[value["path"]] = self.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del repository.files[value["path"]]
        repository.commits += 1
        oid = repository.sha
        url = f"https://huggingface.co/{name}/commit/{oid}"  # the client reads no other host
        return 200, {"success": True, "commitOid": oid, "commitUrl": url}


@contextmanager
def hub() -> Iterator[Hub]:
    """A running hub; its address is `url`."""
    stand_in = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = (
                self._chunks() if self.headers.get("Transfer-Encoding") else self.rfile.read(size)
            )
            status, told = stand_in.answer(self.command, self.path, body)
            answer = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        do_GET = do_POST = do_PUT = _serve

        def log_message(self, *words: Any) -> None:
            del words

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
