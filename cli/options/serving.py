"""What a server takes on and who may use it: flags and settings; torch comes late."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specctl.cli.app.console import Console
from specctl.cli.app.settings import Setting
from specctl.cli.options.flags import panel
from specctl.core.errors import SpecctlError, one_of_two
from specctl.core.messages.sizes import GB

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
        int,
        Setting(
            "limits.max_queue", "Requests that may wait; more get 429.", was="--max-queue", min=0
        ),
    ] = 64
    queue_timeout: Annotated[
        float,
        Setting(
            "limits.queue_timeout", "Maximum wait, in seconds.", was="--queue-timeout", min=0.1
        ),
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
        int | None,
        Setting(
            "limits.max_new_tokens", "Maximum tokens of an answer.", was="--max-new-tokens", min=1
        ),
    ] = None
    memory: Annotated[
        float | None,
        Setting(
            "limits.memory",
            "GB for caches; else half of the free memory.",
            was="--memory",
            min=0.001,
        ),
    ] = None
    drain: Annotated[
        float,
        Setting(
            "limits.drain",
            "Seconds for running answers to finish after SIGTERM.",
            was="--drain",
            min=0,
        ),
    ] = 30.0
    control_tokens: Annotated[
        bool,
        Setting(
            "api.control_tokens",
            "Whether prompts of /v1/completions may hold the target's control tokens.",
            was="--control-tokens/--no-control-tokens",
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
            memory=None if self.memory is None else int(self.memory * GB),
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
        bool,
        Setting(
            "access.insecure_no_auth",
            "Serve other machines without keys.",
            was="--insecure-no-auth",
        ),
    ] = False
    admin_key_file: Annotated[
        Path | None,
        Setting(
            "access.admin_key_file",
            "One key per line, for /v1/drafter alone, which puts another drafter of "
            "access.drafter_folder in place. Or in SPECCTL_ADMIN_KEYS.",
            was="--admin-key-file",
        ),
    ] = None
    drafter_folder: Annotated[
        Path | None,
        Setting(
            "access.drafter_folder",
            "Folder of the packages that may be served.",
            was="--drafter-folder",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        Setting(
            "access.allow_host",
            "A host name under which a proxy forwards requests to loopback (repeatable).",
            was="--allow-host",
            metavar="NAME",
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
                    "then --api-key-file keys.txt; or, in a network you trust, "
                    "--set access.insecure_no_auth=true",
                )
            console.warn("anybody who reaches this address is served: access.insecure_no_auth")
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
            is_folder = self.admin_key_file is None
            given = "access.drafter_folder" if is_folder else "access.admin_key_file"
            raise SpecctlError(
                "an admin key and a folder of drafters go together",
                where="the command line",
                found=f"{given} alone",
                expected=f"access.admin_key_file (or {ADMIN_VARIABLE}) and access.drafter_folder",
                do="--set access.admin_key_file=FILE --set access.drafter_folder=DIR, or none",
            )
        if self.drafter_folder is None:
            return Keys()
        if not self.drafter_folder.is_dir():
            raise SpecctlError(
                "the folder of drafters cannot be read",
                where="--set access.drafter_folder",
                found=f"no folder {self.drafter_folder}",
                expected="a folder that holds packages",
                do="mkdir it, or give another",
            )
        keys, warning = read_keys(self.admin_key_file, {VARIABLE: words}, "access.admin_key_file")
        if warning is not None:
            console.warn(warning)
        return keys


def adapter_folders(words: Sequence[str], taken: str) -> dict[str, str]:
    """NAME -> FOLDER of words NAME=FOLDER; `taken`: what the target itself is called."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not (name and equals and folder):
            raise SpecctlError(
                "an adapter for requests has a name and a folder",
                where="api.adapters",
                found=ascii(word)[:160],
                expected="NAME=FOLDER, or NAME=FOLDER@WEIGHT",
                do="--set api.adapters=support=runs/lora",
            )
        if name in found or name == taken:
            raise one_of_two(
                "two models of the server have one name",
                f"{name} twice",
                f"give the adapter in {folder} another name",
            )
        found[name] = folder
    return found
