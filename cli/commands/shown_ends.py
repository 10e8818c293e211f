"""The ends of a model's texts as `specctl show` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specctl.runtime.target.templates.ends import EndsOfText


def end_rows(ends: EndsOfText | None) -> list[tuple[str, object]]:
    """Each end of text with where it comes from, and which of them ends what."""
    if ends is None:
        return [("ends of text", "known when its files are in the cache")]
    spelled = {end.token_id: end.token or "no token" for end in ends.each}
    turn = "nothing in its chat template" if ends.of_turn is None else spelled[ends.of_turn]
    rows: list[tuple[str, object]] = [
        ("ends of text", "; ".join(end.text() for end in ends.each) or "none"),
        ("an answer ends with", turn),
    ]
    if ends.of_document is not None:
        rows.append(("a document ends with", spelled[ends.of_document]))
    if ends.left_out:
        rows.append(("ends nothing", "; ".join(one.text() for one in ends.left_out)))
    return rows
