"""README's picture: one question, answered plainly and with a draft, replayed at its real pace.

    python benchmarks/decoding_picture.py --target SmolLM2-135M-Instruct.Q4_1.gguf \\
        --draft quantspec+prompt-lookup --out docs/images/decoding.svg

Greedily; both texts must be identical, or no picture is written. Times are of the second of two
runs, the reading of the question included; a token that was drafted and accepted is green, what the
target added itself is white. A viewer without animation shows both texts whole.
"""

from __future__ import annotations

import argparse
import html
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from specctl import generate, load_target
from specctl.api.arguments.drafting import LoadedDraft, load_draft
from specctl.core.messages.printable import counted
from specctl.runtime.target.target import Target

COLUMNS, ROWS = 46, 16
CHAR, LINE, LEFT, TOP = 8.4, 19, 18, 58  # pixels
PANEL, GAP = round(COLUMNS * CHAR) + 2 * LEFT, 16
HEIGHT = TOP + ROWS * LINE + 40
PAUSE = 3.0  # seconds that the finished picture stands before it starts again
QUESTION = "Where can you find DNA in the body?"  # of Spec-Bench
FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"
FRAME = 'fill="#0d1117" stroke="#30363d"'
PROMPT, GUESSED, OWN, DIM = "#8b949e", "#3fb950", "#e6edf3", "#8b949e"


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that appeared `at` seconds after the start, in a colour."""

    text: str
    at: float
    colour: str


def recorded(target: Target, draft: LoadedDraft, question: str, tokens: int) -> list[Piece]:
    """The pieces of one run, timed as they were committed."""
    rounds: list[tuple[float, tuple[int, ...], int]] = []

    def keep(_: int, new: tuple[int, ...], accepted: int) -> None:
        rounds.append((time.perf_counter(), new, accepted))

    for _ in range(2):  # the first one warms up
        rounds.clear()
        started = time.perf_counter()
        generate(target, question, draft, temperature=0.0, max_new_tokens=tokens, on_round=keep)
    pieces = [Piece(f"{question}\n\n", 0.0, PROMPT)]
    seen: list[int] = []
    shown = ""
    for at, new, accepted in rounds:
        for place, token in enumerate(new):
            if token in target.eos_ids:
                continue
            seen.append(token)
            text = target.decode(seen)
            colour = GUESSED if place < accepted else OWN
            pieces.append(Piece(text[len(shown) :], at - started, colour))
            shown = text
    return pieces


def laid_out(pieces: list[Piece]) -> list[tuple[int, int, Piece]]:
    """(column, row, piece) on a grid of COLUMNS x ROWS; lines break between words, rows are cut."""
    placed, row, column = [], 0, 0
    starts = broken("".join(piece.text for piece in pieces))
    at = 0
    for piece in pieces:
        run = ""
        for char in piece.text:
            if at in starts:
                placed.append((column - len(run), row, Piece(run, piece.at, piece.colour)))
                run, column, row = "", 0, row + 1
            run, column, at = run + char, column + 1, at + 1
        placed.append((column - len(run), row, Piece(run, piece.at, piece.colour)))
    return [(c, r, p) for c, r, p in placed if r < ROWS]


def broken(text: str) -> set[int]:
    """Where lines after the first begin: behind a line's end, and at words that do not fit."""
    starts, begin = set[int](), 0
    for line in text.splitlines(keepends=True):
        here, end = begin, begin + len(line)
        while end - here > COLUMNS and len(text[here:end].rstrip()) > COLUMNS:
            blank = text.rfind(" ", here, here + COLUMNS + 1)
            here = blank + 1 if blank > here else here + COLUMNS
            starts.add(here)
        begin = end
        starts.add(begin)
    return starts


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
    parser.add_argument("--target", required=True, help="a chat model")
    parser.add_argument("--draft", default="quantspec+prompt-lookup")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=110)
    parser.add_argument("--out", type=Path, default=Path("docs/images/decoding.svg"))
    args = parser.parse_args()
    target = load_target(args.target, dtype=args.dtype)
    runs = [
        recorded(target, load_draft(name, target), args.question, args.tokens)
        for name in ("none", args.draft)
    ]
    plain, drafted = runs
    if "".join(p.text for p in plain) != "".join(p.text for p in drafted):
        raise SystemExit("the texts differ: no picture of that")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{Path(args.target).name}, {args.dtype}"
    args.out.write_text(picture(plain, drafted, name, args.draft), encoding="utf-8")
    print(f"{args.out}: {rate(plain):.1f} tokens/s plain, {rate(drafted):.1f} with the draft")


def rate(pieces: list[Piece]) -> float:
    """Tokens a second of a run; the prompt is its first piece."""
    return (len(pieces) - 1) / pieces[-1].at


def picture(plain: list[Piece], drafted: list[Piece], target: str, draft: str) -> str:
    """Both runs side by side as one SVG."""
    cycle = plain[-1].at + PAUSE
    gain = f"{rate(drafted) / rate(plain):.1f}x faster"
    accepted = sum(piece.colour == GUESSED for piece in drafted)
    width = 2 * PANEL + GAP
    right = f"{rate(drafted):.0f} tokens/s; {accepted} of {len(drafted) - 1} guessed (green)"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="{FONT}" font-size="14" role="img">',
        f"<title>The same text twice, {gain} with {draft}: {target} on "
        f"{counted(torch.get_num_threads(), 'CPU core')}</title>",
        *panel(0, "plain decoding", plain, cycle, f"{rate(plain):.0f} tokens/s"),
        *panel(PANEL + GAP, f"{draft}: {gain}, same text", drafted, cycle, right),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
