"""Rendered scenes with captions: a coloured circle, square or triangle, or a coloured digit of
images/digits.py, on a ground of another colour, and a sentence that says what is where.

A scene depends on its seed, on what may be shown and on the sides alone. PIL draws it, which the
extra `images` brings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specctl.core.messages.installed import library
from specctl.images.digits import CLASSES, render

SIZE = 24  # pixels a side, before a scene is stretched
COLOURS = {"red": "#d33", "green": "#3a3", "blue": "#33d", "yellow": "#cc2", "white": "#eee"}
SHAPES = ("circle", "square", "triangle")
DIGITS = tuple(map(str, range(CLASSES)))
PLACES = {"left": (0, 6), "right": (12, 6), "top": (6, 0), "bottom": (6, 12)}
SIZES = {"small": 6, "large": 11}
DIGIT_SIDE = 12  # pixels: strokes of a smaller one run into each other
WORDS = frozenset({*COLOURS, *SHAPES, *DIGITS, *PLACES, *SIZES})  # by which captions differ
QUESTION = "What is this?"
FORMS = (
    "The image shows a {size} {colour} {shape} at the {place}. It stands on a {ground} ground, and "
    "nothing else is there.",
    "There is a {shape} at the {place} of the image. It is {size} and {colour}, and the ground "
    "behind it is {ground}.",
    "At the {place} one can see a {colour} {shape}. The {shape} is {size}. The ground is {ground}.",
)
DIGIT_FORMS = (
    "The image shows a {colour} {digit} at the {place}. It stands on a {ground} ground, and "
    "nothing else is there.",
    "There is a {colour} {digit} at the {place} of the image. The ground behind it is {ground}.",
    "At the {place} one can see a {colour} digit. The digit is {digit}. The ground is {ground}.",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """An image (of PIL, RGB), a caption of it, and what it shows: shapes or digits."""

    image: Any
    caption: str
    what: str


def scene(seed: int, what: Sequence[str] = ("shapes",), sides: Sequence[int] = (SIZE,)) -> Scene:
    """A scene of that seed, drawn and described: a shape or a digit, in turn where both may be
    shown, stretched to a width and a height out of `sides` (pixels)."""
    shown, rng = what[seed % len(what)], random.Random(seed)
    image, caption = (_digit if shown == "digits" else _shape)(rng)
    stretched = random.Random(seed + 1)
    size = (stretched.choice(sides), stretched.choice(sides))
    return Scene(image.resize(size), caption, shown)


def _shape(rng: random.Random) -> tuple[Any, str]:
    """An image of SIZE x SIZE pixels with a shape, and its caption."""
    drawing = library("PIL.ImageDraw", "drawing shapes", "images")
    colour, ground = rng.sample(sorted(COLOURS), 2)
    shape, place = rng.choice(SHAPES), rng.choice(sorted(PLACES))
    size = rng.choice(("small", "large"))
    image = _ground(ground)
    draw, (x, y), wide = drawing.Draw(image), PLACES[place], SIZES[size]
    box = (x, y, x + wide, y + wide)
    if shape == "circle":
        draw.ellipse(box, fill=COLOURS[colour])
    elif shape == "square":
        draw.rectangle(box, fill=COLOURS[colour])
    else:
        corners = [(x, y + wide), (x + wide, y + wide), (x + wide // 2, y)]
        draw.polygon(corners, fill=COLOURS[colour])
    said = rng.choice(FORMS).format(
        size=size, colour=colour, shape=shape, place=place, ground=ground
    )
    return image, said


def _digit(rng: random.Random) -> tuple[Any, str]:
    """An image of SIZE x SIZE pixels with a digit, and its caption."""
    image_of = library("PIL.Image", "drawing digits", "images")
    colour, ground = rng.sample(sorted(COLOURS), 2)
    digit, place = rng.choice(DIGITS), rng.choice(sorted(PLACES))
    image = _ground(ground)
    strokes = render(int(digit), DIGIT_SIDE, np.random.default_rng(rng.getrandbits(32)))
    image.paste(COLOURS[colour], PLACES[place], image_of.fromarray(strokes))
    said = rng.choice(DIGIT_FORMS).format(digit=digit, colour=colour, place=place, ground=ground)
    return image, said


def _ground(colour: str) -> Any:
    image_of = library("PIL.Image", "drawing shapes", "images")
    return image_of.new("RGB", (SIZE, SIZE), COLOURS[colour])


def named(text: str) -> set[str]:
    """The words of a text by which captions differ."""
    return set(text.replace(".", " ").replace(",", " ").split()) & WORDS
