import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import pytest

from sharding_rules.pictures import WHOLE

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Box:
    """A box of the picture: its place, its lines on hovering, its texts, and the coloured pieces of its bars."""

    x: float
    y: float
    width: float
    height: float
    hint: list[str]
    texts: list[str]
    bars: list[list[tuple[str, float, float]]]  # colour, start and stop in parts of 1


def read(picture):
    """The drawing and its boxes."""
    (text,) = re.findall(r"<svg.*?</svg>", picture, re.DOTALL)
    svg = ElementTree.fromstring(text)
    boxes = []
    for group in svg.findall(f"{SVG}g"):
        x, y = map(float, re.findall(r"[\d.]+", group.get("transform")))
        frame, *rects = group.findall(f"{SVG}rect")
        bars = []
        for rect in rects:
            left, width, colour = float(rect.get("x")), float(rect.get("width")), rect.get("fill")
            if colour is None:
                whole = left, width
                bars.append([])
            else:
                bars[-1].append((colour, (left - whole[0]) / whole[1], (left + width - whole[0]) / whole[1]))
        size = float(frame.get("width")), float(frame.get("height"))
        hint = group.find(f"{SVG}title").text.splitlines()
        boxes.append(Box(x, y, *size, hint, [text.text for text in group.findall(f"{SVG}text")], bars))
    return svg, boxes


def picture(plan):
    return read(plan._repr_html_())


def test_the_picture_stands_before_the_tables_and_needs_nothing_else(tower):
    html = tower().plan({"data": 1, "model": 8})._repr_html_()
    assert html.index("<svg") < html.index("<table")
    assert not re.search(r"<script|<style|href|url\(|\bid=", html)
    svg, _ = read(html)
    assert svg.get("fill") == "currentColor"  # black on white and white on black
    assert svg.get("role") == "img"


def test_each_device_has_its_part_of_heads_columns_tokens_and_rows(tower):
    _, boxes = picture(tower(units=(1,) * 32).plan({"data": 1, "model": 8}))
    assert [box.texts[0] for box in boxes] == [f"device {i}" for i in range(8)]
    last = boxes[7]
    assert last.texts[1:] == [
        "heads", "15-19", "mlp", "3840-5119", "stem tokens", "4 of 4", "projector", "48-63", "rows", "16 of 32 items"
    ]  # fmt: skip
    assert last.hint[0] == "device 7 (data=0, model_batch=1, model=3)"
    assert "heads: 15-19 of 20" in last.hint
    for (bar,), span in zip(last.bars, [(0.75, 1)] * 4 + [(0.5, 1)], strict=True):
        assert bar[1:] == pytest.approx(span, abs=1e-3)


def test_equal_parts_have_equal_colours_and_others_do_not(tower):
    _, boxes = picture(tower().plan({"data": 1, "model": 8}))
    colours = [[bar[0][0] for bar in box.bars] for box in boxes]
    weights, rows = [of[:4] for of in colours], [of[4] for of in colours]
    assert weights[:4] == weights[4:]
    assert len({of[0] for of in weights}) == 4
    assert rows == [rows[0]] * 4 + [rows[4]] * 4
    assert rows[0] != rows[4]
    assert not set(rows) & {of[0] for of in weights}


def test_what_is_whole_on_each_device_is_grey(tower):
    _, boxes = picture(tower().plan({"data": 1, "model": 8}, strategy="data"))
    for box in boxes:
        assert [bar[0] for bar in box.bars[:4]] == [(WHOLE, 0, 1)] * 4
    assert len({box.bars[4][0][0] for box in boxes} - {WHOLE}) == 8
    _, boxes = picture(tower().plan({"data": 1, "model": 8}, strategy="replicate"))
    assert all(bar == [(WHOLE, 0, 1)] for box in boxes for bar in box.bars)


def test_zeros_are_drawn_apart_and_named(tower):
    html = tower().plan({"data": 1, "model": 8}, strategy="attention=pad")._repr_html_()
    _, boxes = read(html)
    assert [len(box.bars[0]) for box in boxes] == [1] * 6 + [2, 1]
    assert [box.texts[2] for box in boxes[5:]] == ["15-17", "18-19 + 1 zero", "3 zeros"]
    heads, zeros = boxes[6].bars[0]
    assert heads[1:] == pytest.approx((18 / 24, 20 / 24), abs=1e-3)
    assert zeros[1:] == pytest.approx((20 / 24, 21 / 24), abs=1e-3)
    assert "In outline: zeros appended." in html
    assert "In outline" not in tower().plan({"data": 1, "model": 8})._repr_html_()


def test_spread_tokens_and_empty_parts_of_the_batch_are_shown(tower):
    _, boxes = picture(tower(units=(64, 8, 8)).plan({"data": 2, "model": 4}, strategy="tensor"))
    assert boxes[0].texts[-4:] == ["rows", "1 of 3 items", "tokens", "1/2 of 1 item"]
    _, boxes = picture(tower(units=(64,)).plan({"data": 1, "model": 8}, strategy="data", layout="rows"))
    assert [len(box.bars[-1]) for box in boxes] == [1] + [0] * 7


@pytest.mark.parametrize(
    ("mesh", "lines"),
    [
        ({"data": 1, "model": 1}, [1]),
        ({"data": 1, "model": 3}, [3]),
        ({"data": 2, "model": 4}, [4, 4]),
        ({"data": 4, "model": 2}, [8]),
        ({"data": 1, "model": 16}, [8, 8]),
        ({"data": 8, "model": 8}, [8] * 8),
        ({"data": 16, "model": 4}, [16] * 4),
        ({"data": 4, "model": 32}, [16] * 8),
        ({"data": 3, "model": 7}, [7] * 3),
        ({"data": 4, "pod": 8, "model": 2}, [16] * 4),
    ],
)
def test_devices_lie_as_in_the_mesh_side_by_side_and_inside_the_picture(tower, mesh, lines):
    svg, boxes = picture(tower(heads=16).plan(mesh, strategy="replicate"))
    devices = boxes if len(boxes) <= 16 else boxes[1:]  # the first is one of them enlarged
    assert [len(list(line)) for _, line in itertools.groupby(devices, key=lambda box: box.y)] == lines
    assert [box.hint[0].split()[1] for box in devices] == [f"{i}" for i in range(len(devices))]
    width, height = map(float, svg.get("viewBox").split()[2:])
    for box in boxes:
        assert box.x + box.width <= width <= 1100
        assert box.y + box.height <= height
    for one, other in itertools.combinations(boxes, 2):
        apart = abs(one.x - other.x) >= max(one.width, other.width) or one.x + one.width <= other.x
        assert apart or one.y + one.height <= other.y or other.y + other.height <= one.y


def test_of_very_many_devices_each_different_part_is_shown_once_with_its_count(tower):
    svg, boxes = picture(tower(heads=16, units=(1,) * 128).plan({"data": 64, "model": 8}, strategy="tensor"))
    assert len(boxes) == 8 + 1 + 64
    assert [box.texts[0] for box in boxes[:8]] == ["on 64 devices"] * 8
    assert [box.texts[2] for box in boxes[:8]] == [f"{2 * i}-{2 * i + 1}" for i in range(8)]
    assert [box.texts for box in boxes[9:]] == [["\N{MULTIPLICATION SIGN} 8"]] * 64
    headings = [text.text for text in svg.findall(f"{SVG}text")]
    assert headings == ["8 different parts of the weights", "64 different parts of the batch", "enlarged:"]
    svg, boxes = picture(tower(units=(1,) * 1024).plan({"data": 512, "model": 1}, strategy="data"))
    assert len(boxes) == 1 + 1 + 64
    assert "512 different parts of the batch, the first 64 of them" in [text.text for text in svg.findall(f"{SVG}text")]


def test_names_are_escaped(tower):
    html = tower(name="<b>'&").plan({"data": 1, "model": 8})._repr_html_()
    assert read(html)[0].get("aria-label") == "What each device holds of <b>'&"
    assert "<b>" not in html
