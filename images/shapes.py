"""Rendered shapes with captions: a coloured circle, square or triangle on a ground of another
colour, and a sentence that says what is where.

A scene depends on its seed alone. PIL draws it, which the extra `images` brings.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from specctl.core.messages.installed import library

SIZE = 24  # pixels a side
COLOURS = {"red": "#d33", "green": "#3a3", "blue": "#33d", "yellow": "#cc2", "white": "#eee"}
SHAPES = ("circle", "square", "triangle")
PLACES = {"left": (0, 6), "right": (12, 6), "top": (6, 0), "bottom": (6, 12)}
SIZES = {"small": 6, "large": 11}
WORDS = frozenset({*COLOURS, *SHAPES, *PLACES, *SIZES})  # by which captions differ
QUESTION = "What is this?"
FORMS = (
    "The image shows a {size} {colour} {shape} at the {place}. It stands on a {ground} ground, and "
    "nothing else is there.",
    "There is a {shape} at the {place} of the image. It is {size} and {colour}, and the ground "
    "behind it is {ground}.",
    "At the {place} one can see a {colour} {shape}. The {shape} is {size}. The ground is {ground}.",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """An image (of PIL, RGB, SIZE x SIZE) and a caption of it."""

    image: Any
    caption: str


def scene(seed: int) -> Scene:
    """A shape, drawn and described."""
    image_of = library("PIL.Image", "drawing shapes", "images")
    drawing = library("PIL.ImageDraw", "drawing shapes", "images")
    rng = random.Random(seed)
    colour, ground = rng.sample(sorted(COLOURS), 2)
    shape, place = rng.choice(SHAPES), rng.choice(sorted(PLACES))
    size = rng.choice(("small", "large"))
    image = image_of.new("RGB", (SIZE, SIZE), COLOURS[ground])
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
    return Scene(image, said)


def named(text: str) -> set[str]:
    """The words of a text by which captions differ."""
    return set(text.replace(".", " ").replace(",", " ").split()) & WORDS
