"""The models that a server names: its target, and the adapters that requests choose."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from specctl.server.engine_thread.contract import Serving
from specctl.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class ServedModels:
    """`name`: what the target is called; `started`: seconds of the clock."""

    service: Serving
    name: str
    started: int

    @property
    def names(self) -> tuple[str, ...]:
        """The target, then its adapters."""
        adapters = self.service.target.row_adapters
        return (self.name, *(() if adapters is None else adapters.factors))

    def check(self, name: str | None) -> None:
        """ApiError for a name that is none of them; None is the target."""
        if name is not None and name not in self.names:
            served = " and ".join(ascii(each) for each in self.names)
            verb = "is" if len(self.names) == 1 else "are"
            message = f"the model {name!a} is not served here; {served} {verb}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter of that name, None for the target; ApiError for neither."""
        self.check(name)
        return None if name == self.name else name

    def about(self, name: str) -> dict[str, Any]:
        """A model as OpenAI's API describes one, and the drafters that a request may choose."""
        about = {"id": name, "object": "model", "created": self.started}
        has_template = self.service.target.template_digest is not None
        of = {} if name == self.name else {"parent": self.name}
        ours = {"chat_template": has_template, "drafters": list(self.service.status().drafters)}
        return {**about, "owned_by": "specctl", **ours, **of}

    def about_for_anthropic(self, name: str) -> dict[str, Any]:
        """A model as Anthropic's API describes one."""
        started = datetime.fromtimestamp(self.started, UTC).isoformat().replace("+00:00", "Z")
        context, most = self.service.status().context, self.service.limits.max_new_tokens
        about = {"type": "model", "id": name, "display_name": name}
        sizes = {"max_input_tokens": context, "max_tokens": min(context, most or context)}
        return {**about, "created_at": started, "lifecycle": "active", **sizes}

    def page(self, after: str | None, before: str | None, limit: int) -> dict[str, Any]:
        """A page of Anthropic's list: the first models behind `after`, else the last ones before
        `before`. Behind and before a name that is not served there are none."""
        names = list(self.names)
        if before is not None:
            names = names[: names.index(before)] if before in names else []
        if after is not None:
            names = names[names.index(after) + 1 :] if after in names else []
        shown = names[-limit:] if before is not None and after is None else names[:limit]
        return {
            "data": [self.about_for_anthropic(name) for name in shown],
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
            "has_more": len(shown) < len(names),
        }
