"""Small line plots as inline SVG: axes, ticks at round numbers, lines or dots, a legend, tooltips by <title>."""

import math
from collections.abc import Sequence
from html import escape

import msgspec

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#7b5ea7", "#b08900")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Points in the order they are joined. names: one tooltip per point; dots are drawn where they are given."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    names: Sequence[str] = ()
    joined: bool = True


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A dashed vertical or horizontal line with a word, such as a bound."""

    label: str
    x: float | None = None
    y: float | None = None


def plot(title: str, x_label: str, y_label: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """One figure. Axes start at 0 and hold every point and mark."""
    x_top = _top([*(v for line in lines for v in line.x), *(m.x for m in marks if m.x is not None)])
    y_top = _top([*(v for line in lines for v in line.y), *(m.y for m in marks if m.y is not None)])
    parts = [
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}">'
    ]
    parts += _axes(x_label, y_label, x_top, y_top)
    for number, line in enumerate(lines):
        parts += _line(line, COLOURS[number % len(COLOURS)], x_top, y_top)
    parts += [_mark(mark, x_top, y_top) for mark in marks]
    if len(lines) > 1:
        parts += [_legend(number, line.label) for number, line in enumerate(lines)]
    return "".join([*parts, "</svg></figure>"])


def ticks(top: float) -> list[float]:
    """0 to at least `top` in four to eight steps of 1, 2 or 5 times a power of ten."""
    raw = top / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    count = math.ceil(top / step - 1e-9)
    return [step * index for index in range(count + 1)]


def _top(values: Sequence[float]) -> float:
    highest = max((value for value in values if math.isfinite(value)), default=0.0)
    return ticks(highest if highest > 0 else 1.0)[-1]


def _x(value: float, top: float) -> float:
    return LEFT + value / top * (WIDTH - LEFT - RIGHT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)


def _axes(x_label: str, y_label: str, x_top: float, y_top: float) -> list[str]:
    parts = []
    for value in ticks(y_top):
        y = _y(value, y_top)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(x_top):
        x = _x(value, x_top)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{value:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
    upright = (HEIGHT - BOTTOM + TOP) / 2
    parts.append(
        f'<text transform="translate(14 {upright:.0f}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    return parts


def _line(line: Line, colour: str, x_top: float, y_top: float) -> list[str]:
    points = [(_x(x, x_top), _y(y, y_top)) for x, y in zip(line.x, line.y, strict=True)]
    parts = []
    if line.joined:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>')
    for (x, y), name in zip(points, line.names, strict=False):
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(name)}</title></circle>')
    return parts


def _mark(mark: Mark, x_top: float, y_top: float) -> str:
    if mark.x is not None:
        x = _x(mark.x, x_top)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
        at, anchor = (x + 4, "start") if x < WIDTH / 2 else (x - 4, "end")
        word = f'<text x="{at:.1f}" y="{TOP + 10}" text-anchor="{anchor}">{escape(mark.label)}</text>'
        return f'<line class="mark" {ends}/>{word}'
    y = _y(mark.y or 0.0, y_top)
    ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line class="mark" {ends}/><text x="{LEFT + 6}" y="{y - 4:.1f}">{escape(mark.label)}</text>'


def _legend(number: int, label: str) -> str:
    y = HEIGHT - BOTTOM - 14 - 16 * number
    x = WIDTH - RIGHT - 130
    square = f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{COLOURS[number % len(COLOURS)]}"/>'
    return f'{square}<text x="{x + 16}" y="{y + 1}">{escape(label)}</text>'
