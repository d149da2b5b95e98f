"""`peak_bar`: the peak of one run as a bar, stacked by category, against the limit."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from memlab._util.checks import checked
from memlab._util.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    INK,
    LIMIT,
    POINTS,
    STACK,
    Canvas,
    Size,
    box_points,
    category_names,
    data_axes,
    inches,
    new_figure,
    origin,
    placeholder,
    shorten,
    text_width,
    write,
)
from memlab.result import Outcome, StepResult, format_percent
from memlab.search.holdings import BY_PARAMETER, Group, group, patterns
from memlab.trace import Category, Holding

# The peak map: the peak by category and module, as a treemap. It is public as
# `plots.peak_map`.
#
# Areas are bytes. Each category is a region, and each place in the model is a tile in it;
# repeated blocks are one tile ("h.*.mlp"). The layout is the squarified treemap of Bruls,
# Huizing and van Wijk (2000). Places too small for a tile are "other"; tiles too small for
# a name are named below the map.

MOST_TILES = 9  # for each category
SPLIT_ABOVE = 0.03  # of the peak: a larger tile is split into the modules within it
LEAST_TILE = 0.006  # of the peak: smaller tiles are merged into "other"
HEADER, LINE_HEIGHT, GAP = 16.0, 12.0, 1.6  # points
SMALL = 8.0  # font size within tiles
BOLD = 1.12  # width of bold text over that of plain text, at most

Box = tuple[float, float, float, float]  # left, bottom, width, height in points


@dataclass(slots=True, eq=False)
class _Node:
    """A place in the model, all the places within it, and what they hold together."""

    name: str
    nbytes: int = 0
    within: dict[str, "_Node"] = field(default_factory=dict)

    def add(self, parts: Sequence[str], nbytes: int) -> None:
        self.nbytes += nbytes
        if parts:
            name = f"{self.name}.{parts[0]}".lstrip(".")
            self.within.setdefault(parts[0], _Node(name)).add(parts[1:], nbytes)

    def parts(self) -> list["_Node"]:
        """Return the places within, and what the place holds itself as one of its own name."""
        own = self.nbytes - sum(node.nbytes for node in self.within.values())
        return [*self.within.values(), *([_Node(self.name, own)] if own else [])]


@checked(size=inches)
def peak_map(
    result: StepResult, *, limit_bytes: int | None = None, size: Size = (9.0, 4.6)
) -> Figure:
    """Return what holds the peak as nested areas: categories, and in them the places of the model.

    Args:
        result: without a breakdown of its peak, its message is shown instead; without holdings the
            categories alone are.
        limit_bytes: named beside the peak; by default the limit that the result ran under.
        size: in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> result = memlab.recorded(workload, memlab.StepConfig(batch_size=4), "amd-epyc")
    >>> memlab.plots.peak_map(result, size=(9, 4)).get_size_inches()
    array([9., 4.])
    """
    peak, by_category = result.peak_allocated_bytes, result.peak_by_category
    if not peak or by_category is None:
        return placeholder(result.message, size=size)

    figure = new_figure(size)
    overlay = Canvas(figure)
    width, height = overlay.width, overlay.height
    _write_title(overlay, result, peak, limit_bytes or result.memory_limit_bytes)
    sizes = {c: by_category.get(c, 0) for c in STACK if by_category.get(c, 0)}
    ranked = sorted(sizes, key=lambda category: -sizes[category])
    boxes = squarified([sizes[c] for c in ranked], (6.0, 20.0, width - 12, height - 40))
    unnamed, pattern_of = [], patterns(result.peak_holdings)
    names = category_names(result)

    for category, box in zip(ranked, boxes, strict=True):
        held = [holding for holding in result.peak_holdings if holding.category is category]
        tiles = _tiles(held, pattern_of, peak)
        named = CATEGORY_COLORS[category], names[category]
        if not draw_category(overlay, named, box, tiles, sizes[category], peak):
            unnamed.append((*named, sizes[category]))

    draw_unnamed(overlay, unnamed)
    return figure


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Return a rectangle for each size, that fill the box together and are as square as may be.

    The sizes are above zero, the largest first. Each row is filled along the shorter side for as
    long as its worst aspect ratio gets better.
    """
    left, bottom, width, height = box
    boxes: list[Box] = []

    while (total := sum(sizes)) > 0:
        areas = [size / total * width * height for size in sizes]
        short = min(width, height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], short) <= _worst(
            areas[:count], short
        ):
            count += 1

        # shares of what is left, for differences of large and small sides lose their digits
        row, sizes = sizes[:count], sizes[count:]
        in_row, left_over = sum(row) / total, sum(sizes) / total
        is_column = width >= height
        thick = (width if is_column else height) * in_row
        along = 0.0

        for size in row:
            long = short * (size / sum(row))
            if is_column:  # at the left, from the top
                boxes.append((left, bottom + height - along - long, thick, long))
            else:  # at the top, from the left
                boxes.append((left + along, bottom + height - thick, long, thick))
            along += long

        if is_column:
            left, width = left + thick, width * left_over
        else:
            height *= left_over

    return boxes


def _worst(areas: Sequence[float], short: float) -> float:
    """Return the worst aspect ratio of these areas laid in one row along the short side."""
    thick = sum(areas) / short if short else 0.0
    if not thick or not min(areas):
        return float("inf")
    return max(max(area / thick / thick, thick * thick / area) for area in areas)


def _tiles(
    held: Sequence[Holding], pattern_of: Callable[[str], str], peak: int
) -> list[tuple[str, int]]:
    """Return name and bytes of the places in these holdings, the largest first, then the rest.

    Bytes outside of all modules are named by their operator. If all bytes are outside and have the
    same operator, a single tile would only repeat the category, so there is none.
    """
    if len({holding.operator for holding in held}) < 2 and not any(h.module for h in held):
        return []

    root = _Node("")
    modules = [_module(holding) for holding in held]
    places = Counter(pattern_of(module) for module in set(modules))

    for holding, module in zip(held, modules, strict=True):
        pattern = pattern_of(module)
        path = pattern if places[pattern] > 1 else module
        operator = holding.operator.rpartition("::")[2] or "no module"
        root.add(path.split(".") if path else [operator], holding.nbytes)

    shown = _split(root, peak)
    large = [node for node in shown if node.nbytes >= LEAST_TILE * peak][:MOST_TILES]
    left = root.nbytes - sum(node.nbytes for node in large)
    tiles = [(_short(node.name), node.nbytes) for node in large]
    return [*tiles, ("other", left)] if left and large else tiles


def _module(holding: Holding) -> str:
    """Return the module of a holding; for a parameter, the module that it belongs to."""
    if holding.category in BY_PARAMETER:
        return holding.module.rpartition(".")[0] or holding.module
    return holding.module


def _split(root: _Node, peak: int) -> list[_Node]:
    """Return places that cover the root. Large ones are split while there are tiles left."""
    shown, whole = root.parts(), set()
    while True:
        candidates = [n for n in shown if n.within and id(n) not in whole]
        largest = max(candidates, key=lambda node: node.nbytes, default=None)
        if largest is None:
            break

        parts = largest.parts()
        chain = len(parts) == 1  # a single part takes no additional tile
        if not chain and (
            len(shown) + len(parts) - 1 > 2 * MOST_TILES or largest.nbytes < SPLIT_ABOVE * peak
        ):
            whole.add(id(largest))
            continue

        shown = [node for node in shown if node is not largest] + parts

    return sorted(shown, key=lambda node: -node.nbytes)


def _short(path: str) -> str:
    """Return a path from the repeated blocks on, or its last two names."""
    parts = path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part == "*" or part.isdecimal()), None)
    return ".".join(parts[-2:] if not numbered else parts[numbered - 1 :])


def draw_category(
    overlay: Canvas,
    named: tuple[str, str],
    box: Box,
    tiles: Sequence[tuple[str, int]],
    nbytes: int,
    peak: int,
) -> bool:
    """Draw a category, its colour and its name, with its tiles; return whether it was named."""
    left, bottom, width, height = _inset(box, GAP)
    color, name = named
    overlay.add_artist(Rectangle((left, bottom), width, height, facecolor=color, linewidth=0,
                                 label=name))  # fmt: skip
    lines = _headings(name, nbytes, peak, (width, height))
    ink = text_on(color)
    style = {"color": ink, "weight": "bold"}
    header = HEADER + LINE_HEIGHT * (len(lines) - 1)
    if not tiles or height < header + LINE_HEIGHT + 6 or width < 40:
        middle = bottom + height / 2 + LINE_HEIGHT * (len(lines) - 1) / 2
        for i, line in enumerate(lines):
            write(overlay, left + width / 2, middle - LINE_HEIGHT * i, line, ha="center", **style)
        return format_bytes(nbytes) in "".join(lines)

    for i, line in enumerate(lines):
        write(overlay, left + 5, bottom + height - HEADER / 2 - 1 - LINE_HEIGHT * i, line, **style)

    inner = (left + 2, bottom + 2, width - 4, height - header - 2)
    boxes = squarified([size for _, size in tiles], inner)
    for i, ((tile, size), at) in enumerate(zip(tiles, boxes, strict=True)):
        _draw_tile(overlay, tile, size, at, _tone(color, i, tile), peak)

    return format_bytes(nbytes) in "".join(lines)


def _headings(name: str, nbytes: int, peak: int, room: tuple[float, float]) -> list[str]:
    """Return a category's name, bytes and share in as many lines as fit; none if not even one."""
    size, share = format_bytes(nbytes), format_percent(nbytes / peak)
    width, height = room[0] - 8, room[1]
    for lines in (
        [f"{name}  {size}  {share}"], [f"{name}  {size}"], [name, f"{size}  {share}"],
        [name, size], [name],
    ):  # fmt: skip
        fits = BOLD * max(map(text_width, lines)) < width
        if fits and height >= HEADER + (LINE_HEIGHT if len(lines) > 1 else 0):
            return lines

    return []


def _draw_tile(overlay: Canvas, name: str, nbytes: int, box: Box, color: str, peak: int) -> None:
    left, bottom, width, height = _inset(box, 0.6)
    overlay.add_artist(Rectangle((left, bottom), width, height, facecolor=color, linewidth=0,
                                 label=name))  # fmt: skip
    room = width - 6
    style = {"ha": "center", "color": text_on(color), "fontsize": SMALL}
    x, y = left + width / 2, bottom + height / 2
    size, share = format_bytes(nbytes), format_percent(nbytes / peak)
    below = next((t for t in (f"{size}  {share}", size) if text_width(t, SMALL) < room), "")
    title = _tail(name, room)

    if title and below and height > 2 * LINE_HEIGHT:
        write(overlay, x, y + LINE_HEIGHT / 2, title, **style)
        write(overlay, x, y - LINE_HEIGHT / 2, below, **style)
    elif height > LINE_HEIGHT and (title or below):
        both = f"{title}  {size}"
        line = both if title and text_width(both, SMALL) < room else title or below
        write(overlay, x, y, line, **style)


def _tail(path: str, room: float) -> str:
    """Return the path, or as many of its last modules as fit; empty if not even the last does."""
    parts = path.split(".")
    names = (path, *("…" + ".".join(parts[i:]) for i in range(1, len(parts))))
    cut = shorten(parts[-1], room, SMALL)
    fallback = cut if len(cut) > 5 and text_width(cut, SMALL) < room else ""
    return next((name for name in names if text_width(name, SMALL) < room), fallback)


def _tone(color: str, index: int, name: str) -> str:
    """Return the category's colour, lighter; neighbours in order differ, "other" is the palest."""
    white = 0.5 if name == "other" else 0.16 + 0.12 * (index % 3)
    red, green, blue = (c + (1 - c) * white for c in to_rgb(color))
    return to_hex((red, green, blue))


def text_on(color: str) -> str:
    """Return black or white, whichever reads better on this colour."""
    red, green, blue = (c**2.2 for c in to_rgb(color))
    return "#141414" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.2 else "#ffffff"


def _inset(box: Box, gap: float) -> Box:
    left, bottom, width, height = box
    return left + gap / 2, bottom + gap / 2, max(width - gap, 0.0), max(height - gap, 0.0)


def _write_title(overlay: Canvas, result: StepResult, peak: int, limit: int | None) -> None:
    right, top = overlay.width - 6, overlay.height - 9
    ended = ", out of memory" if result.outcome is Outcome.OUT_OF_MEMORY else ""
    text = f"peak {format_bytes(peak)} allocated{ended} ({origin([result])})"
    room = right - 6
    counted = result.counted_peak
    if limit is not None and counted is not None:
        fits = result.against_limit(limit).fits
        said = counted.beside(limit, fits=fits)
        over = counted.nbytes > limit and not fits
        if text_width(f"{text}  {said}") < room:
            write(overlay, right, top, said, ha="right", **({"color": LIMIT} if over else {}))
            room -= text_width(f"{said}  ")

    texts = (*(f"{text} in {place}" for place in _places(result)), text)
    write(overlay, 6, top, next((t for t in texts if text_width(t) < room), shorten(text, room)))


def _places(result: StepResult) -> list[str]:
    """Return where the peak is, ever shorter."""
    if result.peak_place is None:
        return []
    place = replace(result.peak_place, operator="")
    if place.loss:
        return [str(p) for p in (place, replace(place, loss="", module="the loss"))]
    parts = place.module.split(".")
    tails = ["…" + ".".join(parts[i:]) for i in range(1, len(parts))]
    places = (result.peak_place, place, *(replace(place, module=tail) for tail in tails))
    return [str(place) for place in places]


def draw_unnamed(overlay: Canvas, categories: Sequence[tuple[str, str, int]]) -> None:
    """Name under the map what was too small to be named in it, the largest first, as fits."""
    x = 6.0
    for color, name, nbytes in categories:
        text = f"{name} {format_bytes(nbytes)}"
        if x + 14 + text_width(text) > overlay.width:
            break

        swatch = Rectangle((x, 5), 8, 8, facecolor=color, linewidth=0)
        overlay.add_artist(swatch)
        write(overlay, x + 12, 8.5, text)
        x += 24 + text_width(text)


@checked(size=inches)
def peak_bar(
    result: StepResult, *, limit_bytes: int | None = None, size: Size = (9.0, 0.9)
) -> Figure:
    """Return the peak as one bar, stacked by category, against the limit.

    What lies beyond the limit is hatched; what is free below it is pale. On CUDA reserved bytes
    count against the limit, and what of them is not allocated follows in grey.
    """
    peak, parts = result.peak_allocated_bytes, result.peak_by_category
    counted = result.counted_peak
    if peak is None or parts is None or counted is None:
        return placeholder(result.message, size=size)
    figure = new_figure(size)
    axes = data_axes(figure, "peak", margins=(6, 16, 6, 18))
    held = counted.nbytes
    axes.set(xlim=(0, max(held, limit_bytes or 0, 1)), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines["bottom"].set_visible(False)
    points_per_byte = box_points(axes)[2] / axes.get_xlim()[1]
    start, unnamed, names = 0, {}, category_names(result)
    for category in STACK:
        num_bytes = parts.get(category, 0)
        if not num_bytes:
            continue
        color, name = CATEGORY_COLORS[category], names[category]
        axes.barh(0.5, num_bytes, left=start, height=1, color=color, label=name)
        texts = (f"{name} {format_bytes(num_bytes)}", name)
        room = num_bytes * points_per_byte - 4
        text = next((text for text in texts if text_width(text) < room), None)
        if text:
            write(axes, start + num_bytes / 2, 0.48, text, ha="center", color=text_on(color))
        else:
            unnamed[num_bytes, color] = f"{name} {format_bytes(num_bytes)}"
        start += num_bytes
    if held > peak:
        axes.barh(0.5, held - peak, left=peak, height=1, color=GRID, label="reserved alone")
        unnamed[held - peak, GRID] = f"reserved, not allocated {format_bytes(held - peak)}"
    overlay, width, top = Canvas(figure), size[0] * POINTS, size[1] * POINTS - 8
    reserved = f", {format_bytes(held)} reserved" if counted.kind == "reserved" else ""
    text = f"peak {format_bytes(peak)} allocated{reserved} ({origin([result])})"
    write(overlay, 6, top, text)
    if limit_bytes:
        fits = result.against_limit(limit_bytes).fits is True
        _draw_limit_on_bar(axes, overlay, held, limit_bytes, width - text_width(text), fits=fits)
    _draw_unnamed(overlay, [(c, unnamed[n, c]) for n, c in sorted(unnamed, reverse=True)])
    return figure


def _draw_limit_on_bar(
    axes: Axes, overlay: Canvas, peak: int, limit: int, room: float, *, fits: bool
) -> None:
    over = peak > limit
    style: dict[str, Any] = {"label": "free", "facecolor": INK, "alpha": 0.14}
    if over:
        style = {
            "label": "over the limit",
            "facecolor": "none",
            "edgecolor": INK if fits else LIMIT,
            "hatch": "////",
        }
    axes.barh(0.5, abs(limit - peak), left=min(peak, limit), height=1, linewidth=0, **style)
    axes.axvline(limit, color=LIMIT, linestyle=(0, (4, 2)), linewidth=1.6, label="limit",
                 clip_on=False)  # fmt: skip
    left = f"{format_bytes(abs(limit - peak))} {'over' if over else 'free'}"
    texts = (f"{left}{'' if over else ' below'} the limit of {format_bytes(limit)}", left, "")
    if over and fits:
        texts = (f"fits the limit of {format_bytes(limit)} with less cache", "fits with less cache",
                 "")  # fmt: skip
    text = next(text for text in texts if text_width(text) < room or not text)
    width, height = overlay.width, overlay.height
    color = LIMIT if over and not fits else INK
    write(overlay, width - 6, height - 8, text, ha="right", color=color)


def _draw_unnamed(overlay: Canvas, parts: Sequence[tuple[str, str]]) -> None:
    """Name under the bar what was too narrow to be named in it, the largest first, as fits."""
    x = 6.0
    for color, text in parts:
        if x + 14 + text_width(text) > overlay.width:
            break
        overlay.add_artist(Rectangle((x, 4), 8, 8, facecolor=color, linewidth=0))
        write(overlay, x + 12, 7.5, text)
        x += 24 + text_width(text)


# The readings of a peak that a person can point at: one for each part of the peak bar.

MOST_PLACES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReading:
    """One part of a peak, as the bar shows it.

    Attributes:
        start: its left edge in the bar, 0..1.
        end: its right edge, 0..1.
        name: of the part, in words.
        color: of the part.
        nbytes: that it holds.
        fraction: of the peak allocated; None for memory that is reserved and not allocated.
        category: None for memory that is reserved and not allocated.
        places: the largest places in the model that hold it, in words, with their bytes.
    """

    start: float
    end: float
    name: str
    color: str
    nbytes: int
    fraction: float | None
    category: Category | None
    places: tuple[tuple[str, int], ...] = ()


def peak_readings(result: StepResult, *, limit_bytes: int | None = None) -> list[PeakReading]:
    """Return the parts of the bar that `plots.peak_bar` draws of a result, from left to right."""
    peak, parts, counted = (
        result.peak_allocated_bytes, result.peak_by_category, result.counted_peak
    )  # fmt: skip
    if not peak or parts is None or counted is None:
        return []

    whole = max(counted.nbytes, limit_bytes or 0, 1)
    places, names = _places_peak_readings(result), category_names(result)
    found, start = [], 0
    for category in STACK:
        nbytes = parts.get(category, 0)
        if nbytes:
            found.append(
                PeakReading(
                    start=start / whole,
                    end=(start + nbytes) / whole,
                    name=names[category],
                    color=CATEGORY_COLORS[category],
                    nbytes=nbytes,
                    fraction=nbytes / peak,
                    category=category,
                    places=tuple(places.get(category, Counter()).most_common(MOST_PLACES)),
                )
            )
        start += nbytes

    if counted.nbytes > peak:
        rest = PeakReading(
            start=peak / whole,
            end=counted.nbytes / whole,
            name="reserved, not allocated",
            color=GRID,
            nbytes=counted.nbytes - peak,
            fraction=None,
            category=None,
        )
        found.append(rest)
    return found


def _places_peak_readings(result: StepResult) -> dict[Category, Counter[str]]:
    """Return the bytes of each category by the place in the model, in words."""
    found: dict[Category, Counter[str]] = {}
    for held in group(result.peak_holdings):
        found.setdefault(held.category, Counter())[in_words(held)] += held.nbytes
    return found


def in_words(held: Group) -> str:
    """Return where memory is held: "mlp.act in 12 blocks" for "transformer.h.*.mlp.act"."""
    if not held.where:
        operator = held.operator.rpartition("::")[2].strip("_")
        return f"outside of all modules ({operator})" if operator else "outside of all modules"
    count = len(held.modules)
    _, star, inside = held.where.rpartition("*")
    if not star or count == 1:
        return held.where
    return f"{inside.lstrip('.')} in {count} blocks".strip() if inside else f"{count} blocks"
