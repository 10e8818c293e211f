"""The flags of a server that say what it takes on and who may use it; torch comes late."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specctl.cli.app.console import Console
from specctl.cli.options.flags import panel
from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.server.auth import Door, Keys
    from specctl.server.requests.limits import Limits

load_option, access_option = panel("Load"), panel("Access")


@dataclass(frozen=True, slots=True)
class LimitFlags:
    """What the server takes on."""

    max_batch: Annotated[
        int, load_option("--max-batch", min=1, max=1024, help="Requests decoded at once.")
    ] = 8
    max_queue: Annotated[
        int, load_option("--max-queue", min=0, help="Requests that may wait; more get 429.")
    ] = 64
    queue_timeout: Annotated[
        float, load_option("--queue-timeout", min=0.1, help="Maximum wait, in seconds.")
    ] = 60.0
    max_len: Annotated[
        int | None,
        load_option(
            "--max-len",
            min=2,
            help="Maximum tokens of prompt and answer; else the context, at most 4,096.",
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None, load_option("--max-new-tokens", min=1, help="Maximum tokens of an answer.")
    ] = None
    memory: Annotated[
        float | None,
        load_option(
            "--memory",
            min=0.001,
            help="GiB for caches; else half of the free memory.",
            show_default=False,
        ),
    ] = None
    drain: Annotated[
        float,
        load_option(
            "--drain", min=0.0, help="Seconds for running answers to finish after SIGTERM."
        ),
    ] = 30.0
    control_tokens: Annotated[
        bool,
        access_option(
            "--control-tokens/--no-control-tokens",
            help="Whether prompts of /v1/completions may hold the target's control tokens.",
        ),
    ] = True

    def limits(self) -> Limits:
        from specctl.server.requests.limits import Limits

        return Limits(
            max_batch=self.max_batch,
            max_queue=self.max_queue,
            queue_timeout=self.queue_timeout,
            max_len=self.max_len,
            max_new_tokens=self.max_new_tokens,
            memory=None if self.memory is None else int(self.memory * (1 << 30)),
            drain=self.drain,
            control_tokens=self.control_tokens,
        )


@dataclass(frozen=True, slots=True)
class AccessFlags:
    """Who may ask, and where."""

    host: Annotated[str, access_option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        access_option("--port", min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        access_option(
            "--api-key-file",
            help="One key per line. Or comma-separated in SPECCTL_API_KEYS.",
        ),
    ] = None
    insecure_no_auth: Annotated[
        bool, access_option("--insecure-no-auth", help="Serve other machines without keys.")
    ] = False
    admin_key_file: Annotated[
        Path | None,
        access_option(
            "--admin-key-file",
            help="One key per line, for /v1/drafter alone, which puts another drafter of "
            "--drafter-folder in place. Or in SPECCTL_ADMIN_KEYS.",
        ),
    ] = None
    drafter_folder: Annotated[
        Path | None,
        access_option("--drafter-folder", help="Folder of the packages that may be served."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        access_option(
            "--allow-host",
            metavar="NAME",
            help="A host name under which a proxy forwards requests to loopback (repeatable).",
        ),
    ] = None

    def door(self, console: Console) -> Door:
        """Keys and host names; refuses to serve other machines without keys."""
        from specctl.server.auth import Door, is_loopback, read_keys

        keys, warning = read_keys(self.api_key_file, os.environ)
        if warning is not None:
            console.warn(warning)
        is_local = is_loopback(self.host)
        if not is_local and not keys.digests:
            if not self.insecure_no_auth:
                raise SpecctlError(
                    "other machines would be served without an API key",
                    where="--host",
                    found=f"{self.host}, which is not this machine alone, and no keys",
                    expected="--api-key-file or SPECCTL_API_KEYS",
                    do="python -c 'import secrets; print(secrets.token_urlsafe(32))' > keys.txt, "
                    "then --api-key-file keys.txt; or --insecure-no-auth in a network you trust",
                )
            console.warn("anybody who reaches this address is served: --insecure-no-auth")
        names = tuple(name.lower() for name in self.allow_host or ())
        return Door(keys, names if is_local or names else None, admin=self._admin(console))

    def _admin(self, console: Console) -> Keys:
        """The keys that may exchange the drafter; they and the folder go together."""
        from specctl.server.auth import ADMIN_VARIABLE, VARIABLE, Keys, read_keys

        words = os.environ.get(ADMIN_VARIABLE, "")
        has_key = self.admin_key_file is not None or bool(words.strip())
        if has_key if self.drafter_folder is None else not has_key:
            if self.admin_key_file is None and self.drafter_folder is None:
                return Keys()  # the variable is there for another server
            given = "--drafter-folder" if self.admin_key_file is None else "--admin-key-file"
            raise SpecctlError(
                "an admin key and a folder of drafters go together",
                where="the command line",
                found=f"{given} alone",
                expected=f"--admin-key-file FILE (or {ADMIN_VARIABLE}) and --drafter-folder DIR",
                do="give both, or none",
            )
        if self.drafter_folder is None:
            return Keys()
        if not self.drafter_folder.is_dir():
            raise SpecctlError(
                "the folder of drafters cannot be read",
                where="--drafter-folder",
                found=f"no folder {self.drafter_folder}",
                expected="a folder that holds packages",
                do="mkdir it, or give another",
            )
        keys, warning = read_keys(self.admin_key_file, {VARIABLE: words}, "--admin-key-file")
        if warning is not None:
            console.warn(warning)
        return keys
