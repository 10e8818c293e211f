"""Rendered digits: pictures of 0 to 9 drawn from strokes, each one a little different.

A digit is a few polylines in the unit square. Its points are moved at random, turned, sheared,
scaled and shifted, and a pixel is as bright as the stroke covers it. A picture depends on the seed
and on its number alone.
Letters: B rows, L positions, Q picked rows, X any axes.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Pixels = npt.NDArray[np.uint8]
CLASSES = 10


def _arc(x: float, y: float, wide: float, high: float, first: float, last: float) -> Floats:
    """Points of an ellipse's arc; angles in turns, clockwise from the right."""
    angle = 2 * math.pi * np.linspace(first, last, 13)
    return np.stack([x + wide * np.cos(angle), y + high * np.sin(angle)], 1)


def _line(*points: tuple[float, float]) -> Floats:
    return np.array(points)


STROKES: tuple[tuple[Floats, ...], ...] = (
    (_arc(0.5, 0.5, 0.28, 0.42, 0, 1),),
    (_line((0.32, 0.27), (0.53, 0.08), (0.53, 0.92)),),
    (np.concatenate([_arc(0.5, 0.32, 0.26, 0.24, 0.5, 1.12), _line((0.23, 0.92), (0.79, 0.92))]),),
    (_arc(0.47, 0.29, 0.25, 0.21, 0.55, 1.25), _arc(0.47, 0.71, 0.28, 0.21, 0.75, 1.45)),
    (_line((0.6, 0.92), (0.6, 0.08), (0.2, 0.65), (0.8, 0.65)),),
    (_line((0.75, 0.08), (0.3, 0.08), (0.27, 0.48)), _arc(0.47, 0.66, 0.28, 0.26, 0.6, 1.4)),
    (_line((0.66, 0.08), (0.27, 0.6)), _arc(0.5, 0.67, 0.25, 0.25, 0, 1)),
    (_line((0.2, 0.1), (0.8, 0.1), (0.42, 0.92)),),
    (_arc(0.5, 0.28, 0.21, 0.2, 0, 1), _arc(0.5, 0.7, 0.25, 0.22, 0, 1)),
    (_arc(0.5, 0.33, 0.25, 0.25, 0, 1), _line((0.74, 0.38), (0.36, 0.92))),
)


def render(digit: int, size: int, random: np.random.Generator) -> Pixels:
    """uint8 [size, size]: one picture of that digit, strokes bright on black."""
    turn, shear = random.normal(0, 0.12), random.normal(0, 0.12)
    scale_X = random.uniform(0.68, 0.86, 2)
    shift_X = random.uniform(-0.07, 0.07, 2)
    half = random.uniform(0.035, 0.07)
    cos, sin = math.cos(turn), math.sin(turn)
    turned = np.array([[cos, -sin], [sin, cos]]) @ np.array([[1, shear], [0, 1]])
    centre = (np.arange(size) + 0.5) / size
    pixel_LX = np.stack(np.meshgrid(centre, centre), -1).reshape(-1, 2)
    near_L = np.full(size * size, np.inf)
    for stroke in STROKES[digit]:
        point_QX = stroke - 0.5 + random.normal(0, 0.008, stroke.shape)
        point_QX = (point_QX * scale_X) @ turned.T + 0.5 + shift_X
        near_L = np.minimum(near_L, _distance(pixel_LX, point_QX[:-1], point_QX[1:]))
    bright_L = ((half - near_L) * size + 0.5).clip(0, 1)
    return (255 * bright_L).round().astype(np.uint8).reshape(size, size)


def _distance(pixel_LX: Floats, from_QX: Floats, to_QX: Floats) -> Floats:
    """[L]: of each pixel to the nearest of Q segments."""
    along_QX = to_QX - from_QX
    square_Q = (along_QX**2).sum(1).clip(min=1e-12)
    there_LQX = pixel_LX[:, None] - from_QX
    part_LQ = ((there_LQX * along_QX).sum(-1) / square_Q).clip(0, 1)
    gap_LQ = np.linalg.norm(there_LQX - part_LQ[..., None] * along_QX, axis=-1)
    return gap_LQ.min(1)  # type: ignore[no-any-return]


def digits(count: int, size: int, seed: int) -> tuple[Pixels, npt.NDArray[np.int64]]:
    """uint8 [count, size, size] and the digits [count] that they show, in random order."""
    random = np.random.default_rng(seed)
    shown_B = random.integers(0, CLASSES, count)
    return np.stack([render(int(digit), size, random) for digit in shown_B]), shown_B
