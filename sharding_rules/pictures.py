"""A picture of a plan: which device holds which part of the heads, the MLP's columns, rows and tokens.

Inline SVG without scripts or style sheets. Text and frames have the colour of the text around the picture, so it can be
read on a light page and on a dark one.
"""

import html
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sharding_rules.holdings import BatchShare, Holding, Share, holdings_of

if TYPE_CHECKING:
    from sharding_rules.plan import Plan

CAPTIONED = 16  # up to so many devices the boxes have words in them
SHOWN = 128  # beyond so many, one box stands for all devices that hold the same
KINDS_SHOWN = 64
LINE = 20  # height of a line of text between boxes
LETTER = 6.2  # about the width of one, to leave room
FONT = "font-family='system-ui, sans-serif' font-size='10' fill='currentColor'"
WHOLE = "#8a94a6"


@dataclass(frozen=True)
class _Bar:
    """An axis, and the piece that a device holds of it: from `start` to `stop` in parts of 1, from `zeros` on zeros."""

    label: str
    held: str
    start: float
    stop: float
    zeros: float
    colour: str
    of_batch: bool = False


@dataclass(frozen=True)
class _Box:
    """A device, or several that hold the same."""

    title: str
    short: str
    hint: str
    bars: tuple[_Bar, ...]


@dataclass(frozen=True)
class _Size:
    """Of a box, in pixels: its width and the space after it, a bar's height and the way to the next bar."""

    width: int
    gap: int
    bar: int
    step: int
    captions: bool
    columns: int

    def height(self, box: _Box) -> int:
        """Of a box with these bars; those of the batch stand apart."""
        return 22 + self.step * len(box.bars) + (3 if any(bar.of_batch for bar in box.bars) else 0)


LARGE = _Size(width=120, gap=8, bar=8, step=24, captions=True, columns=8)
SMALL = _Size(width=44, gap=6, bar=5, step=7, captions=False, columns=16)


def picture(plan: "Plan") -> str:
    """The devices of a plan as boxes, laid out as the mesh is, and a line on how to read them: HTML."""
    held, drawing = holdings_of(plan), _Drawing()
    if len(held) > SHOWN:
        _kinds(drawing, held)
    elif len(held) > CAPTIONED:
        _mesh(drawing, held, SMALL, left=drawing.enlarged(_box(held[0]), y=0))
    else:
        _mesh(drawing, held, LARGE)
    label = html.escape(f"What each device holds of {plan.encoder}", quote=True)
    return f"{drawing.svg(label)}<p style='font-size: 85%'>{_key(held)}</p>"


def _mesh(drawing: "_Drawing", held: Sequence[Holding], size: _Size, *, left: float = 0) -> None:
    """Side by side the devices along the last mesh axis; the others' below, or side by side too where that is short."""
    axes = [axis for axis, last in held[-1].coordinates.items() if last]  # those longer than 1
    inner = held[-1].coordinates[axes[-1]] + 1 if axes else 1
    blocks = [held[i : i + inner] for i in range(0, len(held), inner)]
    places = [", ".join(f"{axis}={block[0].coordinates[axis]}" for axis in axes[:-1]) for block in blocks]
    block_width = max(inner * (size.width + size.gap), LETTER * max(map(len, places))) + 2 * size.gap
    short = len(blocks) > 1 and 4 * inner <= size.columns
    abreast = int((size.columns + 2) * (size.width + size.gap) // block_width) if short else 1
    if axes:
        drawing.text(f"{'from left to right' if abreast == 1 else 'in each'}: {axes[-1]}=0...{inner - 1}", x=left, y=0)
    margin = LETTER * max(map(len, places)) + 8 if abreast == 1 and len(blocks) > 1 else 0
    y = float(LINE if axes else 0)
    for i in range(0, len(blocks), abreast):
        x, top = left, y + LINE * (abreast > 1)
        for block, place in zip(blocks[i : i + abreast], places[i : i + abreast], strict=True):
            drawing.text(place, x=x, y=y)
            below = drawing.boxes([_box(holding) for holding in block], size, x=x + margin, y=top)
            x += block_width
        y = below


def _kinds(drawing: "_Drawing", held: Sequence[Holding]) -> None:
    """A box for each different part of the weights, and one for each of the batch."""
    for what, bars in (
        ("weights", [tuple(map(_bar, holding.shares)) for holding in held]),
        ("batch", [_batch_bars(holding.batch) for holding in held]),
    ):
        kinds = [_counted(*kind) for kind in Counter(bars).items()]
        more = f", the first {KINDS_SHOWN} of them" if len(kinds) > KINDS_SHOWN else ""
        drawing.text(f"{len(kinds)} different part{'s' * (len(kinds) > 1)} of the {what}{more}")
        y, large = drawing.bottom, len(kinds) <= CAPTIONED
        x = 0 if large else drawing.enlarged(kinds[0], y=y)
        drawing.boxes(kinds[:KINDS_SHOWN], LARGE if large else SMALL, x=x, y=y)


class _Drawing:
    """SVG that grows downwards."""

    def __init__(self) -> None:
        self.right, self.bottom = 0.0, 0.0
        self._parts: list[str] = []

    def text(self, text: str, *, x: float = 0, y: float | None = None) -> None:
        """A line of text: below all that is there, or at a place."""
        y = self.bottom if y is None else y
        if text:
            self._parts.append(f"<text x='{x:g}' y='{y + 13:g}'>{html.escape(text)}</text>")
            self._grow(x + LETTER * len(text), y + LINE)

    def boxes(self, boxes: Sequence[_Box], size: _Size, *, x: float, y: float) -> float:
        """Boxes from left to right, in as many lines as they need; returns where they end."""
        width, height = size.width + size.gap, size.height(boxes[0]) + size.gap
        for i, box in enumerate(boxes):
            left, top = x + i % size.columns * width, y + i // size.columns * height
            self._parts.append(_draw(box, size, left, top))
            self._grow(left + size.width, top + height)
        return y + -(-len(boxes) // size.columns) * height

    def enlarged(self, box: _Box, *, y: float) -> float:
        """One box that says what the bars of small ones mean; returns where there is room to the right of it."""
        self.text("enlarged:", y=y)
        self.boxes([box], LARGE, x=0, y=y + LINE)
        return LARGE.width + 3 * LARGE.gap

    def svg(self, label: str) -> str:
        """All of it; scaled down where the page is narrower."""
        width, height = math.ceil(self.right), math.ceil(self.bottom)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' role='img' aria-label='{label}' {FONT} width='{width}' "
            f"viewBox='0 0 {width} {height}' style='max-width: 100%; height: auto'>{''.join(self._parts)}</svg>"
        )

    def _grow(self, right: float, bottom: float) -> None:
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)


def _draw(box: _Box, size: _Size, x: float, y: float) -> str:
    inside, height = size.width - 12, size.height(box)
    title = box.title if size.captions else box.short
    parts = [
        f"<g transform='translate({x:g},{y:g})'><title>{html.escape(box.hint)}</title>",
        f"<rect x='.5' y='.5' width='{size.width - 1}' height='{height - 1}' rx='4' fill='none' "
        "stroke='currentColor' stroke-opacity='.35' pointer-events='all'/>",
        f"<text x='6' y='13' font-weight='600'>{html.escape(title)}</text>",
    ]
    top = 18
    for before, bar in zip((None, *box.bars), box.bars, strict=False):
        top += 3 if bar.of_batch and before and not before.of_batch else 0  # the batch stands apart
        if size.captions:
            parts.append(f"<text x='6' y='{top + 10}' fill-opacity='.7'>{html.escape(bar.label)}</text>")
            parts.append(f"<text x='{6 + inside}' y='{top + 10}' text-anchor='end'>{html.escape(bar.held)}</text>")
        parts += _draw_bar(bar, 6, top + (size.step - size.bar - 3) * size.captions, inside, size.bar)
        top += size.step
    return "".join([*parts, "</g>"])


def _draw_bar(bar: _Bar, x: int, y: int, width: int, height: int) -> Iterator[str]:
    """The whole axis, faint; on it what is held, and of that the zeros in outline."""

    def rect(start: float, stop: float, look: str) -> str:
        # a part of a long axis is still a pixel and a half wide
        length = max(width * (stop - start), 1.5)
        left = x + min(width * start, width - length)
        return f"<rect x='{left:.4g}' y='{y}' width='{length:.4g}' height='{height}' {look}/>"

    yield rect(0, 1, "fill-opacity='.13'")
    if bar.zeros > bar.start:
        yield rect(bar.start, bar.zeros, f"fill='{bar.colour}'")
    if bar.stop > bar.zeros:
        outline = f"fill-opacity='.25' stroke='{bar.colour}' stroke-width='.8'"
        yield rect(bar.zeros, bar.stop, f"fill='{bar.colour}' {outline}")


def _box(holding: Holding) -> _Box:
    bars = (*map(_bar, holding.shares), *_batch_bars(holding.batch))
    hint = "\n".join(map(str, (holding.name, *holding.shares, holding.batch)))
    return _Box(f"device {holding.device}", f"{holding.device}", hint, bars)


def _counted(bars: tuple[_Bar, ...], count: int) -> _Box:
    title = f"on {count} device{'s' * (count > 1)}"
    hint = "\n".join([title, *(f"{bar.label}: {bar.held}" for bar in bars)])
    return _Box(title, f"\N{MULTIPLICATION SIGN} {count}", hint, bars)


def _bar(share: Share) -> _Bar:
    colour = _colour(share.part, share.parts)
    if share.size is None or share.start is None or share.stop is None:
        start, stop = share.part / share.parts, (share.part + 1) / share.parts
        return _Bar(share.label, share.held.removeprefix("part "), start, stop, stop, colour)
    whole = share.parts * (share.stop - share.start)
    zeros = share.stop - share.zeros
    held = share.held if share.parts > 1 else f"all {share.size}"
    return _Bar(share.label, held, share.start / whole, share.stop / whole, zeros / whole, colour)


def _batch_bars(share: BatchShare) -> tuple[_Bar, ...]:
    start, stop = share.part / share.parts, (share.part + 1) / share.parts
    colour = _colour(share.part, share.parts, lightness=0.6, turn=0.5 / share.parts)
    rows, tokens = [], []
    if share.whole or not share.spread:
        end = stop if share.whole else start
        rows = [_Bar("rows", share.rows, start, end, end, colour, of_batch=True)]
    if share.spread:
        tokens = [_Bar("tokens", share.tokens, start, stop, stop, colour, of_batch=True)]
    return (*rows, *tokens)


def _key(held: Sequence[Holding]) -> str:
    """How to read it."""
    parts = [*(share.parts for share in held[0].shares), held[0].batch.parts]
    where_needed = {
        "Grey: all of it, as on the others.": 1 in parts and len(held) > 1,
        "In outline: zeros appended.": any(share.zeros for holding in held for share in holding.shares),
        "Rows: the items or windows that it has whole.": any(holding.batch.whole for holding in held),
        "Tokens: its part of those that are spread.": held[0].batch.spread,
    }
    always = "A bar is all there is of an axis; in colour, what the device holds of it. Equal colours are equal parts."
    return " ".join([always, *(sentence for sentence, needed in where_needed.items() if needed)])


def _colour(part: int, parts: int, *, lightness: float = 0.78, turn: float = 0) -> str:
    """Equally light colours around the wheel, neighbours a little apart in lightness; grey where there is one part.

    Source: Oklab, https://bottosson.github.io/posts/oklab (Oklch to linear sRGB).
    """
    if parts == 1:
        return WHOLE
    hue, chroma = 2 * math.pi * (part / parts + turn + 0.7), 0.13
    lightness -= 0.06 * (part % 2)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    levels = (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055 for x in linear)
    return "#" + "".join(f"{round(255 * min(max(level, 0.0), 1.0)):02x}" for level in levels)
