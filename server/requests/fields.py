"""What the fields of all requests are made of: bounded texts, counts, tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from specctl.server.requests.limits import Limits


class Few(BeforeValidator):
    """Refuses a list or an object with more than so many entries before it looks at one."""

    def __init__(self, most: int) -> None:
        def check(value: Any) -> Any:
            if isinstance(value, list | dict) and len(value) > most:
                about = {"most": most, "found": len(value)}
                raise PydanticCustomError("too_long", "at most {most} entries, not {found}", about)
            return value

        super().__init__(check)


CAPS = Limits()  # the widest that any server allows
TEXT = 1 << 20
Word = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=TEXT)]
Draft = Annotated[
    bool | Word | None,
    Field(
        description="false: decode plainly, without the drafter. A name: of the drafters that this "
        "server holds that one alone drafts."
    ),
]
Stop = Annotated[str, Field(max_length=CAPS.max_stop_chars)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenName = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Nothing = Annotated[list[Any], Field(max_length=0), Few(0)]
TokenList = Annotated[list[Token], Field(min_length=1, max_length=TEXT, fail_fast=True)]
Unused = Annotated[Any, Field(description="Accepted and not used.")]
Ignored = Annotated[
    Any, Field(description="Accepted, ignored, and named in the header X-Specctl-Ignored.")
]


def typed(kind: type) -> Callable[[Any], Any]:
    """Refuses what only equals the one value that is allowed, as true equals 1."""

    def check(value: Any) -> Any:
        if value is not None and type(value) is not kind:
            raise ValueError(f"not {kind.__name__}")
        return value

    return check


def one_or_many(value: Any) -> str:
    return "many" if isinstance(value, list) else "one"


def one_of(*names: str) -> Callable[[Any], Any]:
    """Of these fields at most one is given."""

    def check(body: Any) -> Any:
        given = [name for name in names if getattr(body, name) is not None]
        if len(given) > 1:
            raise ValueError("give either " + " or ".join(given))
        return body

    return check


class Strict(BaseModel):
    """No guessing: a number is not a string. Unknown fields are kept until `take_unread` names
    them."""

    model_config = ConfigDict(extra="allow", strict=True)
