"""The peak of one run: `peak_bar`, `peak_map`, and of its ranks `rank_peaks`, `rank_timelines`.

Left out: when each rank has its peak. The bars of two ranks may be of different instants.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from memlab._util.checks import checked
from memlab._util.collectives import named_ranks
from memlab._util.units import format_bytes
from memlab.figures.look import (
    CATEGORY_COLORS,
    GRID,
    INK,
    LIMIT,
    LIMIT_LINE,
    STACK,
    Box,
    Picture,
    Size,
    box_points,
    byte_axis,
    category_names,
    data_axes,
    fitting,
    inches,
    origin,
    placeholder,
    room_beside,
    row_axes,
    shorten,
    text_width,
    write,
)
from memlab.figures.timeline import (
    draw_stack,
    mark_phases,
    places_in_words,
    positions,
    step_axes,
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

    figure, names = Picture(size), category_names(result)
    _write_title(figure, result, peak, limit_bytes or result.memory_limit_bytes)
    pattern_of, parts = patterns(result.peak_holdings), list[Part]()
    for category in STACK:
        if nbytes := by_category.get(category, 0):
            held = [holding for holding in result.peak_holdings if holding.category is category]
            tiles = _tiles(held, pattern_of, peak)
            parts.append((CATEGORY_COLORS[category], names[category], nbytes, tiles))
    draw_map(figure, parts, peak)
    return figure


Tile = tuple[str, int]
"""Name and bytes of a place."""
Part = tuple[str, str, int, list[Tile]]
"""Colour, name and bytes of a category, and its tiles."""


def draw_map(figure: Picture, parts: Sequence[Part], peak: int) -> None:
    """Draw each category as a region with its tiles; name under the map what is too small."""
    ranked, unnamed = sorted(parts, key=lambda part: -part[2]), []
    room = (6.0, 20.0, figure.width - 12, figure.height - 40)
    boxes = squarified([nbytes for _, _, nbytes, _ in ranked], room)
    for (color, name, nbytes, tiles), box in zip(ranked, boxes, strict=True):
        if not _draw_category(figure, (color, name, nbytes, tiles), box, peak):
            unnamed.append((color, f"{name} {format_bytes(nbytes)}"))
    figure.swatches(unnamed, 5)


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
        worst = _worst(areas[:1], short)
        while count < len(areas) and (longer := _worst(areas[: count + 1], short)) <= worst:
            count, worst = count + 1, longer

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


def _tiles(held: Sequence[Holding], pattern_of: Callable[[str], str], peak: int) -> list[Tile]:
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


def _draw_category(figure: Picture, part: Part, box: Box, peak: int) -> bool:
    """Draw a category, its colour and its name, with its tiles; return whether it was named."""
    color, name, nbytes, tiles = part
    left, bottom, width, height = inset = _inset(box, GAP)
    figure.box(inset, color, label=name)
    lines = _headings(name, nbytes, peak, (width, height))
    more = LINE_HEIGHT * (len(lines) - 1)
    style: dict[str, Any] = {"color": text_on(color), "weight": "bold"}
    is_tiled = tiles and height >= HEADER + more + LINE_HEIGHT + 6 and width >= 40
    if is_tiled:
        x, y = left + 5, bottom + height - HEADER / 2 - 1
    else:
        x, y = left + width / 2, bottom + height / 2 + more / 2
        style["ha"] = "center"
    for i, line in enumerate(lines):
        write(figure, x, y - LINE_HEIGHT * i, line, **style)

    inner = (left + 2, bottom + 2, width - 4, height - HEADER - more - 2)
    boxes = squarified([size for _, size in tiles], inner) if is_tiled else []
    for i, (tile, at) in enumerate(zip(tiles, boxes, strict=False)):
        _draw_tile(figure, tile, at, _tone(color, i, tile[0]), peak)
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


def _draw_tile(figure: Picture, tile: Tile, box: Box, color: str, peak: int) -> None:
    left, bottom, width, height = inset = _inset(box, 0.6)
    name, nbytes = tile
    figure.box(inset, color, label=name)
    room, x, y = width - 6, left + width / 2, bottom + height / 2
    style = {"ha": "center", "color": text_on(color), "fontsize": SMALL}
    size, share = format_bytes(nbytes), format_percent(nbytes / peak)
    title, below = _tail(name, room), fitting([f"{size}  {share}", size], room, SMALL)
    if title and below and height > 2 * LINE_HEIGHT:
        write(figure, x, y + LINE_HEIGHT / 2, title, **style)
        write(figure, x, y - LINE_HEIGHT / 2, below, **style)
    elif height > LINE_HEIGHT and (title or below):
        both = fitting([f"{title}  {size}"], room, SMALL) if title else ""
        write(figure, x, y, both or title or below, **style)


def _tail(path: str, room: float) -> str:
    """Return the path, or as many of its last modules as fit; empty if not even the last does."""
    parts = path.split(".")
    names = [path, *("…" + ".".join(parts[i:]) for i in range(1, len(parts)))]
    cut = shorten(parts[-1], room, SMALL)
    return fitting([*names, *([cut] if len(cut) > 5 else [])], room, SMALL)


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


def _write_title(figure: Picture, result: StepResult, peak: int, limit: int | None) -> None:
    right, top = figure.width - 6, figure.height - 9
    ended = ", out of memory" if result.outcome is Outcome.OUT_OF_MEMORY else ""
    text = f"peak {format_bytes(peak)} allocated{ended} ({origin([result])})"
    room = right - 6
    counted = result.counted_peak
    if limit is not None and counted is not None:
        fits = result.against_limit(limit).fits
        said = counted.beside(limit, fits=fits)
        is_over = counted.nbytes > limit and not fits
        if text_width(f"{text}  {said}") < room:
            write(figure, right, top, said, ha="right", color=LIMIT if is_over else INK)
            room -= text_width(f"{said}  ")

    texts = [*(f"{text} in {place}" for place in places_in_words(result.peak_place)), text]
    write(figure, 6, top, fitting(texts, room) or shorten(text, room))


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
    figure, held = Picture(size), counted.nbytes
    axes = data_axes(figure, "peak", (6, 16, 6, 18))
    end = max(held, limit_bytes or 0, 1)
    axes.set(xlim=(0, end), ylim=(0, 1), yticks=[], xticks=[])
    axes.spines["bottom"].set_visible(False)
    start, unnamed = 0, []
    for part in peak_readings(result, limit_bytes=limit_bytes):
        is_held = part.category is not None
        label = part.name if is_held else "reserved alone"
        axes.barh(0.5, part.nbytes, left=start, height=1, color=part.color, label=label)
        named = f"{part.name} {format_bytes(part.nbytes)}"
        room = part.nbytes * box_points(axes)[2] / end - 4
        text = fitting([named, part.name], room) if is_held else ""
        if text:
            ink = text_on(part.color)
            write(axes, start + part.nbytes / 2, 0.48, text, ha="center", color=ink)
        else:
            unnamed.append((part.nbytes, part.color, named))
        start += part.nbytes

    reserved = f", {format_bytes(held)} reserved" if counted.kind == "reserved" else ""
    text = f"peak {format_bytes(peak)} allocated{reserved} ({origin([result])})"
    write(figure, 6, figure.height - 8, text)
    if limit_bytes:
        _draw_limit_on_bar(axes, figure, result, limit_bytes, figure.width - text_width(text))
    figure.swatches([(color, named) for _, color, named in sorted(unnamed, reverse=True)], 4)
    return figure


def _draw_limit_on_bar(
    axes: Axes, figure: Picture, result: StepResult, limit: int, room: float
) -> None:
    assert result.counted_peak is not None
    peak, fits = result.counted_peak.nbytes, result.against_limit(limit).fits is True
    is_over = peak > limit
    color = LIMIT if is_over and not fits else INK
    style: dict[str, Any] = {"label": "free", "facecolor": INK, "alpha": 0.14}
    if is_over:
        style = {"label": "over the limit", "facecolor": "none", "edgecolor": color,
                 "hatch": "////"}  # fmt: skip
    axes.barh(0.5, abs(limit - peak), left=min(peak, limit), height=1, linewidth=0, **style)
    dashed = {**LIMIT_LINE, "linestyle": (0, (4, 2)), "linewidth": 1.6}
    axes.axvline(limit, clip_on=False, **dashed)
    left, of_limit = format_bytes(abs(limit - peak)), f"the limit of {format_bytes(limit)}"
    if is_over and fits:
        texts = [f"fits {of_limit} with less cache", "fits with less cache"]
    elif is_over:
        texts = [f"{left} over {of_limit}", f"{left} over"]
    else:
        texts = [f"{left} free below {of_limit}", f"{left} free"]
    write(
        figure, figure.width - 6, figure.height - 8, fitting(texts, room), ha="right", color=color
    )


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
    if peak is None or parts is None or counted is None:
        return []

    whole, names = max(counted.nbytes, limit_bytes or 0, 1), category_names(result)
    places: dict[Category | None, Counter[str]] = {category: Counter() for category in STACK}
    for held in group(result.peak_holdings):
        places[held.category][in_words(held)] += held.nbytes

    start, found = 0, list[PeakReading]()
    all_parts: list[tuple[Category | None, str, str, int]] = [
        (c, names[c], CATEGORY_COLORS[c], parts.get(c, 0)) for c in STACK
    ]
    all_parts.append((None, "reserved, not allocated", GRID, counted.nbytes - peak))
    for category, name, color, nbytes in all_parts:
        if nbytes <= 0:
            continue
        end = start + nbytes
        found.append(
            PeakReading(
                start=start / whole, end=end / whole, name=name, color=color, nbytes=nbytes,
                fraction=nbytes / peak if category else None, category=category,
                places=tuple(places.get(category, Counter()).most_common(MOST_PLACES)),
            )
        )  # fmt: skip
        start = end
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


# The ranks of a sharded step; those that hold the same at their peak are one bar or picture.

MOST_BARS = 8  # more do not fit the height
LEAST_ROWS = 3  # of room
ALONE = "One device trains by itself; with sharding each rank has a bar here."


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBar:
    """Ranks that hold the same at their peak.

    Attributes:
        numbers: of the ranks; empty for a prediction of the heaviest rank alone.
        result: of one of them.
    """

    numbers: tuple[int, ...]
    result: StepResult

    @property
    def label(self) -> str:
        """The ranks in words: "rank 0", "ranks 1-3, 6"."""
        if not self.numbers:
            return "heaviest rank"
        return f"rank{'s' * (len(self.numbers) > 1)} {named_ranks(self.numbers)}"

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one of these ranks holds."""
        return sum((self.result.peak_by_category or {}).values())

    def __str__(self) -> str:
        """Return the ranks, their peak and its categories, as a screen reader says them."""
        names, parts = category_names(self.result), self.result.peak_by_category or {}
        held = [f"{names[c]} {format_bytes(parts[c])}" for c in STACK if parts.get(c)]
        return f"{self.label}: {format_bytes(sum(parts.values()))}, {', '.join(held)}"


def rank_bars(result: StepResult) -> list[RankBar]:
    """Return the ranks of a result of which a peak is known; none without sharding."""
    if result.config.world_size == 1:
        return []
    found: dict[tuple[tuple[str, int], ...], RankBar] = {}
    for rank in result.ranks or (result,):
        parts = rank.peak_by_category
        if parts is not None:
            held = tuple(sorted(parts.items()))
            before = found[held].numbers if held in found else ()
            found[held] = RankBar(numbers=(*before, *rank.rank_numbers), result=rank)
    return sorted(found.values(), key=lambda bar: bar.numbers[:1])


@checked(size=inches)
def rank_peaks(result: StepResult, *, size: Size = (6.0, 2.8)) -> Figure:
    """Return the peak of each rank as a bar, bytes in live tensors, stacked by category.

    Ranks that hold the same are one bar. Of more than 8 bars those with the highest peaks are
    drawn.
    """
    bars = rank_bars(result)
    if not bars:
        is_alone = result.config.world_size == 1
        return placeholder(ALONE if is_alone else result.message, size=size)

    shown = _highest(bars)
    figure = Picture(size)
    names = [bar.label for bar in shown]
    axes = row_axes(figure, "rank peaks", names, share=0.3, bottom=46)
    around = max(LEAST_ROWS - len(shown), 0) / 2  # few bars are in the middle, and not thicker
    axes.set_ylim(len(shown) - 0.5 + around, -0.5 - around)
    room = max(text_width(f" {format_bytes(bar.peak_bytes)} ") for bar in shown)
    most = max(1, *(bar.peak_bytes for bar in shown))
    unit = byte_axis(axes, "x", most / room_beside(axes, room, 0.2), highest=most)
    for row, bar in enumerate(shown):
        _draw_rank(axes, row, bar)
    left_out = f", the {MOST_BARS} highest of {len(bars)}" if len(bars) > MOST_BARS else ""
    figure.head(f"peak allocated of each rank, {unit} ({origin([result])}){left_out}")
    figure.swatches(_named_categories(shown), 18, gap=20, line=14)
    return figure


def _highest(bars: Sequence[RankBar]) -> list[RankBar]:
    """Return those with the highest peaks, as many as are drawn, in their own order."""
    highest = sorted(bars, key=lambda bar: bar.peak_bytes, reverse=True)[:MOST_BARS]
    return [bar for bar in bars if bar in highest]


def _draw_rank(axes: Axes, row: int, bar: RankBar) -> None:
    """Draw a bar, longest-lived categories first, and its sum beside it."""
    start, parts = 0, bar.result.peak_by_category or {}
    for category in STACK:
        nbytes = parts.get(category, 0)
        axes.barh(row, nbytes, left=start, height=0.66, color=CATEGORY_COLORS[category])
        start += nbytes
    write(axes, start + axes.get_xlim()[1] * 0.01, row, format_bytes(start))


def _named_categories(bars: Sequence[RankBar]) -> Iterable[tuple[str, str]]:
    """Yield colour and name of each category that any bar holds."""
    names = category_names(bars[0].result)
    for category in STACK:
        if any((bar.result.peak_by_category or {}).get(category) for bar in bars):
            yield CATEGORY_COLORS[category], names[category]


# `rank_timelines` has the same height in bytes for all ranks, and for each its own operators from
# left to right: they run the same phases, though not at the same moment.

LEFT, TOP, NAMES = 34.0, 22.0, 26.0  # points: the scale, the title, the names of categories
ABOVE, BELOW, BETWEEN = 12.0, 22.0, 8.0  # points around each picture


def drawn_ranks(result: StepResult) -> list[RankBar]:
    """Return the ranks of a result of which a timeline is known, at most 8: the highest peaks."""
    return _highest([bar for bar in rank_bars(result) if bar.result.timeline is not None])


@checked(size=inches)
def rank_timelines(result: StepResult, *, size: Size = (9.0, 4.2)) -> Figure:
    """Return the live bytes of one step in each rank, stacked by category, on one scale.

    Ranks that hold the same at their peak are one picture, with the timeline of one of them. Of
    more than 8 those with the highest peaks are drawn.

    Args:
        result: of a sharded step, measured or predicted.
        size: in inches.

    >>> import memlab
    >>> workload = memlab.workloads.get("plain-mlp")
    >>> config = memlab.StepConfig(batch_size=8, sharding="zero3", world_size=2)
    >>> memlab.plots.rank_timelines(memlab.predict(workload, config, "cpu")).get_size_inches()
    array([9. , 4.2])
    """
    ranks = drawn_ranks(result)
    if not ranks:
        is_alone = result.config.world_size == 1
        return placeholder(ALONE if is_alone else result.message, size=size)

    figure, unit = Picture(size), ""
    num_columns = 1 if len(ranks) < 3 else 2
    num_rows = -(-len(ranks) // num_columns)
    wide = (figure.width - LEFT) / num_columns
    high = (figure.height - TOP - NAMES) / num_rows
    most = max(1, *(bar.peak_bytes for bar in ranks))
    for number, bar in enumerate(ranks):
        row, column = divmod(number, num_columns)
        left, bottom = LEFT + column * wide, NAMES + (num_rows - row - 1) * high
        unit = _draw_rank_timeline(figure, bar, (left, bottom, wide, high), most)
        if column:
            figure.axes[-1].set_yticklabels([])

    num_drawn, num_ranks = sum(len(bar.numbers) for bar in ranks), result.config.world_size
    left_out = f", {num_drawn} of {num_ranks} ranks" if 0 < num_drawn < num_ranks else ""
    figure.head(f"{unit} allocated in each rank over a step ({origin([result])}){left_out}")
    figure.swatches(_named_categories(ranks), 18, gap=20, line=14)
    return figure


def _draw_rank_timeline(figure: Picture, bar: RankBar, box: Box, most: int) -> str:
    """Draw the picture of a rank in a box; return the unit of its scale."""
    left, bottom, wide, high = box
    right, top = figure.width - left - wide + BETWEEN, figure.height - bottom - high + ABOVE
    axes, unit = step_axes(figure, bar.label, (left, bottom + BELOW, right, top), most)
    timeline = bar.result.timeline
    assert timeline is not None
    draw_stack(axes, timeline, positions(timeline), None)
    mark_phases(axes, timeline, with_micro_batches=False)
    start, bottom, room, tall = box_points(axes)
    text = f"{bar.label}: peak {format_bytes(bar.peak_bytes)}"
    write(figure, start, bottom + tall + 6, shorten(text, room))
    return unit
