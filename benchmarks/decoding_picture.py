"""README's picture: one prompt, decoded plainly and with a draft, replayed at its real pace.

    python benchmarks/decoding_picture.py --draft runs/quickstart/package --inflate 300m \\
        --out docs/images/decoding.svg

Both texts must be identical, or no picture is written. Times are of the second of two runs; a token
that the draft guessed and the target accepted is green, what the target added itself is white. A
viewer without animation shows both texts whole.
"""

from __future__ import annotations

import argparse
import html
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from specctl import Sampling, load_drafter, load_target
from specctl.core.drafter import Drafter
from specctl.core.printable import counted
from specctl.runtime.generate import generate
from specctl.runtime.target.target import Target

COLUMNS, ROWS = 46, 16
CHAR, LINE, LEFT, TOP = 8.4, 19, 18, 58  # pixels
PANEL, GAP = round(COLUMNS * CHAR) + 2 * LEFT, 16
HEIGHT = TOP + ROWS * LINE + 40
PAUSE = 3.0  # seconds that the finished picture stands before it starts again
PROMPT_TEXT = "class Stack:\n    def __init__(self):\n        "
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
FRAME = 'fill="#0d1117" stroke="#30363d"'
PROMPT, GUESSED, OWN, DIM = "#8b949e", "#3fb950", "#e6edf3", "#8b949e"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that appeared `at` seconds after the start, in a colour."""

    text: str
    at: float
    colour: str


def recorded(
    target: Target, drafter: Drafter | None, prompt: str, sampling: Sampling
) -> list[Piece]:
    """The pieces of one run, timed as they were committed. Under rule target-only a seed gives the
    same text with a draft and without."""
    told: list[tuple[float, tuple[int, ...]]] = []

    def keep(_: int, new: tuple[int, ...]) -> None:
        told.append((time.perf_counter(), new))

    for _ in range(2):  # the first one warms up
        told.clear()
        started = time.perf_counter()
        generate(
            target,
            [prompt],
            drafter=drafter,
            sampling=sampling,
            rule="target-only",
            on_tokens=keep,
        )
    pieces = [Piece(prompt, 0.0, PROMPT)]
    seen: list[int] = []
    shown = ""
    for at, new in told:
        for place, token in enumerate(new):
            seen.append(token)
            text = target.decode(seen)
            guessed = drafter is not None and place + 1 < len(new)
            pieces.append(Piece(text[len(shown) :], at - started, GUESSED if guessed else OWN))
            shown = text
    return pieces


def laid_out(pieces: list[Piece]) -> list[tuple[int, int, Piece]]:
    """(column, row, piece) on a grid of COLUMNS x ROWS; long lines break, the rest is cut."""
    placed, column, row = [], 0, 0
    for piece in pieces:
        for number, part in enumerate(piece.text.expandtabs(4).split("\n")):
            if number:
                column, row = 0, row + 1
            while part:
                if column == COLUMNS:
                    column, row = 0, row + 1
                fits, part = part[: COLUMNS - column], part[COLUMNS - column :]
                placed.append((column, row, Piece(fits, piece.at, piece.colour)))
                column += len(fits)
    return [(c, r, p) for c, r, p in placed if r < ROWS]


def appears(share: float, cycle: float) -> str:
    """Hidden until that share of every cycle of that many seconds."""
    if share <= 0:
        return ""
    return (
        f'<animate attributeName="opacity" calcMode="discrete" values="0;1" '
        f'keyTimes="0;{share:.4f}" dur="{cycle:.2f}s" repeatCount="indefinite"/>'
    )


def panel(left: int, title: str, pieces: list[Piece], cycle: float, foot: str) -> list[str]:
    """One terminal at x = `left`."""
    x = left + LEFT
    lines = [
        f'<rect x="{left}" width="{PANEL}" height="{HEIGHT}" rx="8" {FRAME}/>',
        f'<text x="{x}" y="30" fill="{OWN}" font-weight="bold">{html.escape(title)}</text>',
    ]
    for column, row, piece in laid_out(pieces):
        text = piece.text.strip()
        if not text:
            continue
        column += len(piece.text) - len(piece.text.lstrip())
        start = f'x="{x + column * CHAR:.1f}" y="{TOP + row * LINE}" fill="{piece.colour}"'
        width = f'textLength="{len(text) * CHAR:.1f}" lengthAdjust="spacingAndGlyphs"'
        shown = appears(piece.at / cycle, cycle)
        lines.append(f"<text {start} {width}>{html.escape(text)}{shown}</text>")
    lines.append(f'<text x="{x}" y="{HEIGHT - 16}" fill="{DIM}">{html.escape(foot)}</text>')
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--draft", default="runs/quickstart/package")
    parser.add_argument(
        "--inflate", default="300m", help="the target at this cost, with the same answers"
    )
    parser.add_argument("--prompt", default=PROMPT_TEXT)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--out", type=Path, default=Path("docs/images/decoding.svg"))
    args = parser.parse_args()
    grown = None if args.inflate == "none" else args.inflate
    target = load_target(args.target, dtype="float32", inflate=grown)
    drafter = load_drafter(args.draft, target).to(target.device, target.dtype)
    sampling = Sampling(temperature=args.temperature, seed=args.seed, max_new_tokens=args.tokens)
    plain = recorded(target, None, args.prompt, sampling)
    drafted = recorded(target, drafter, args.prompt, sampling)
    if "".join(p.text for p in plain) != "".join(p.text for p in drafted):
        raise SystemExit("the texts differ: no picture of that")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(picture(plain, drafted, grown or args.target), encoding="utf-8")
    print(f"{args.out}: {rate(plain):.1f} tokens/s plain, {rate(drafted):.1f} with the draft")


def rate(pieces: list[Piece]) -> float:
    """Tokens a second of a run; the prompt is its first piece."""
    return (len(pieces) - 1) / pieces[-1].at


def picture(plain: list[Piece], drafted: list[Piece], size: str) -> str:
    """Both runs side by side as one SVG."""
    cycle = plain[-1].at + PAUSE
    gain = f"{rate(drafted) / rate(plain):.1f}x faster"
    accepted = sum(piece.colour == GUESSED for piece in drafted)
    width = 2 * PANEL + GAP
    right = f"{rate(drafted):.0f} tokens/s; {accepted} of {len(drafted) - 1} guessed (green)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="{FONT}" font-size="14" role="img">',
        f"<title>The same text twice, {gain} with a draft: a target of {size} on "
        f"{counted(torch.get_num_threads(), 'CPU core')}</title>",
        *panel(0, "plain decoding", plain, cycle, f"{rate(plain):.0f} tokens/s"),
        *panel(PANEL + GAP, f"with a draft: {gain}, same text", drafted, cycle, right),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
