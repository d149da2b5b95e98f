"""The look of memlab's figures, and figures as SVG or PNG.

A transparent background and mid-grey ink are legible on light and dark pages. Positions that are
not data are in points (1/72 inch). pyplot and rcParams are not used, because figures are drawn from
several threads at once. What the figures show is in `plots.py`.
"""

import functools
import html
import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends import backend_svg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Affine2D

from memlab._util.checks import checked, count, number, of_type
from memlab._util.units import GIB, KIB, MIB, TIB, printable
from memlab.errors import ConfigError
from memlab.result import Source, StepResult
from memlab.search.holdings import is_workspace, name_of_buffers
from memlab.techniques.sharding.ranks import is_tensor_parallel
from memlab.trace import Category

Size = tuple[float, float]
Box = tuple[float, float, float, float]  # left, bottom, width, height
Margins = tuple[float, float, float, float]  # left, bottom, right, top, in points
SMALLEST_INCHES, LARGEST_INCHES = 0.5, 100.0
FEWEST_DOTS_PER_INCH, MOST_DOTS_PER_INCH = 10, 2400
MOST_PIXELS = 2**16 - 1  # along one side, of matplotlib's renderer
INK = "#777677"  # text: contrast 4.5 on white, 4.2 on #111
GRID = "#9e9d9e"
LIMIT = "#d1384e"
LINE, HALO = "#26262a", "#fdfefd"  # a line with a halo is visible on any area
FONT = "DejaVu Sans"  # ships with matplotlib; in an SVG the page chooses the font
FONT_SIZE = 9.0
POINTS = 72
PAGE_COLORS = {
    INK: f"var(--jp-ui-font-color1, {INK})",
    GRID: f"var(--jp-border-color2, {GRID})",
    LINE: f"var(--jp-ui-font-color0, {LINE})",
    HALO: f"var(--jp-layout-color1, {HALO})",
}
# Okabe and Ito's colour-blind-safe palette, softened; from bottom to top, the categories that live
# longest first; the panel has its own, `CATEGORY_STYLES` of `_panel/page/colours.js`
CATEGORY_COLORS: dict[Category, str] = {
    Category.PARAMETERS: "#3c7fb5",
    Category.BUFFERS: "#8b98a5",
    Category.OPTIMIZER_STATE: "#bd87ae",
    Category.INPUTS: "#e2d265",
    Category.GRADIENTS: "#35967a",
    Category.ACTIVATIONS: "#e6a33e",
    Category.TEMPORARIES: "#86c3e6",
}
CATEGORY_LABELS: dict[Category, str] = {
    category: str(category).replace("_", " ") for category in CATEGORY_COLORS
}
STACK = tuple(CATEGORY_COLORS)  # bottom to top
GRID_LINES: dict[str, Any] = {"color": GRID, "linewidth": 0.5, "alpha": 0.45}
LIMIT_LINE: dict[str, Any] = {
    "color": LIMIT, "linestyle": (0, (5, 3)), "linewidth": 1, "label": "limit",
}  # fmt: skip
_svg_ids = itertools.count()


class Picture(Figure):
    """A transparent figure that shows itself as the last line of a cell, without a pyplot backend.

    What is drawn on it, and not in its axes, is in points, origin lower left, and lies above them.
    Axes over the whole figure would do the same, and take a fifth of the time of a picture.

    Attributes:
        width: in points.
        height: in points.
    """

    def __init__(self, size: Size) -> None:
        super().__init__(figsize=size, dpi=100)
        self.patch.set_alpha(0.0)
        self.width, self.height = (float(side) for side in self.get_size_inches() * POINTS)
        self.from_points = Affine2D().scale(1 / POINTS) + self.dpi_scale_trans

    @property
    def alt(self) -> str:
        """All that is written in the picture but the ticks, row by row: its alternative text."""
        rows: dict[float, list[Text]] = {}
        for text in self.texts:
            rows.setdefault(-round(text.get_position()[1]), []).append(text)
        said = [sorted(rows[y], key=lambda text: text.get_position()) for y in sorted(rows)]
        said += [[text] for axes in self.axes for text in axes.texts]
        words = (", ".join(" ".join(text.get_text().split()) for text in row) for row in said)
        return "; ".join(filter(None, words))

    def _repr_png_(self) -> tuple[bytes, dict[str, str]]:
        return to_png(self), {"alt": self.alt}

    def place(self, artist: Artist) -> None:
        """Draw an artist whose places are in points."""
        artist.set_transform(self.from_points)
        self.add_artist(artist)

    def box(self, box: Box, color: str, **style: Any) -> None:
        """Draw a filled rectangle."""
        self.place(Rectangle(box[:2], *box[2:], facecolor=color, linewidth=0, **style))

    def head(self, text: str, *, left: float = 6.0, below: float = 8.0) -> None:
        """Write what the numbers are, so many points below the upper edge."""
        write(self, left, self.height - below, shorten(text, self.width - left - 4))

    def foot(self, text: str, *, y: float = 7.0) -> None:
        """Write what goes across, at the right under the axes."""
        write(self, self.width - 8, y, text, ha="right")

    def swatches(
        self, named: Iterable[tuple[str, str]], y: float, *, gap: float = 24.0, line: float = 99.0
    ) -> None:
        """Name colours from the left, `gap` points for each box; too many go down by a `line`."""
        x = 6.0
        for color, text in named:
            if x + 14 + text_width(text) > self.width:
                x, y = 6.0, y - line
            if y < 0:
                break
            self.box((x, y, 8, 8), color)
            write(self, x + 12, y + 3.5, text)
            x += gap + text_width(text)


def data_axes(figure: Picture, label: str, margins: Margins) -> Axes:
    """Return quiet axes with these margins."""
    width, height = figure.width, figure.height
    left, bottom, right, top = margins
    # a picture that is too small for its margins still gets one point of data area
    inner = max(width - left - right, 1.0), max(height - bottom - top, 1.0)
    box = left / width, bottom / height, inner[0] / width, inner[1] / height
    axes = figure.add_axes(box, label=label)
    axes.patch.set_alpha(0.0)
    _remember_place(axes)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(
        colors=GRID, labelcolor=INK, labelsize=FONT_SIZE, labelfontfamily=FONT, length=0
    )
    return axes


def axes_beside(
    figure: Picture, labels: Sequence[str], margins: Margins, *, between: float
) -> list[Axes]:
    """Return axes of the same width beside one another; only the first names its rows."""
    left, bottom, right, top = margins
    room = figure.width - left - right - between * (len(labels) - 1)
    wide, made = room / len(labels), list[Axes]()
    for label in labels:
        start = left + len(made) * (wide + between)
        own = start, bottom, figure.width - start - wide, top
        made.append(data_axes(figure, label, own))
    for axes in made[1:]:
        axes.set_yticks([])
    return made


def row_axes(
    figure: Picture, label: str, names: Sequence[str], *, share: float, bottom: float
) -> Axes:
    """Return axes with a named row each, the first on top; names take a share of the width."""
    names = [shorten(name, share * figure.width) for name in names]
    axes = data_axes(figure, label, (room_of(names), bottom, 6, 20))
    name_rows(axes, names)
    return axes


def room_of(names: Sequence[str]) -> float:
    """Return the points that the names of rows take."""
    return max(map(text_width, names), default=0.0) + 10


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Name the rows of axes, the first on top."""
    name_ticks(axes, "y", range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def room_beside(axes: Axes, width: float, least: float = 0.0) -> float:
    """Return the share of the x axis that bars may take if texts of a width stand beside them."""
    return max(1 - width / box_points(axes)[2], least)


def _remember_place(axes: Axes) -> None:
    """Build the transform of the ground once: every artist asks for it, to be clipped to it."""
    transform = axes.patch.get_transform()
    axes.patch.get_transform = lambda: transform  # type: ignore[method-assign]


def write(where: Axes | Picture, x: float, y: float, text: str, **style: Any) -> Text:
    """Write plain text (a "$" is a dollar) in the figures' ink and font."""
    defaults: dict[str, Any] = {"color": INK, "fontfamily": FONT, "fontsize": FONT_SIZE}
    if isinstance(where, Picture):
        defaults["transform"] = where.from_points
    lines = "\n".join(map(printable, text.split("\n")))
    return where.text(x, y, lines, **{**defaults, "va": "center", "parse_math": False, **style})


def name_ticks(axes: Axes, which: str, places: Sequence[float], names: Sequence[str]) -> None:
    """Write plain text (a "$" is a dollar) at places on the "x" or "y" axis."""
    set_ticks = getattr(axes, f"set_{which}ticks")
    set_ticks(places, list(map(printable, names)), parse_math=False)


def text_width(text: str, font_size: float = FONT_SIZE) -> float:
    """Return about how many points wide the text is, rather more than less."""
    return 0.6 * font_size * len(text)


def shorten(text: str, width: float, font_size: float = FONT_SIZE) -> str:
    """Return the text, its middle cut out where it is wider than `width` points."""
    text = printable(text)
    most = max(3, int(width / (0.6 * font_size)))
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return text[: most - 1 - tail] + "…" + text[len(text) - tail :]


def fitting(texts: Iterable[str], room: float, font_size: float = FONT_SIZE) -> str:
    """Return the first of the texts that takes less than so many points; "" if none does."""
    return next((text for text in texts if text_width(text, font_size) < room), "")


def picture_of(axes: Axes) -> Picture:
    """Return the picture that the axes are in."""
    assert isinstance(axes.figure, Picture)
    return axes.figure


def box_points(axes: Axes) -> Box:
    """Return the place of the axes in points."""
    figure, box = picture_of(axes), axes.get_position()
    width, height = figure.width, figure.height
    return box.x0 * width, box.y0 * height, box.width * width, box.height * height


def origin(results: Sequence[StepResult]) -> str:
    """Return how and where the numbers were got, such as "measured, cpu"."""
    sources = sorted({str(r.source) for r in results})
    devices = sorted({r.device for r in results})
    if Source.RECORDED in sources:  # as the devices say too
        devices = sorted({device.removesuffix(f", {Source.RECORDED}") for device in devices})
    return f"{' and '.join(sources)}, {devices[0] if len(devices) == 1 else 'several devices'}"


def near(limit: int | None, highest: float) -> int | None:
    """Return the limit; None if it is so far above the highest peak that it would flatten it."""
    return limit if limit is not None and limit <= 2 * highest else None


def byte_axis(axes: Axes, name: str, end: float, *, highest: float | None = None) -> str:
    """Let the "x" or "y" axis go from 0 to `end` bytes, with ticks at powers of two.

    Return the unit of the ticks, which end at `highest` or else with the axis.
    """
    top = end if highest is None else highest
    units = {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}
    unit = next((name for name, factor in units.items() if top >= 2 * factor), "B")
    factor = units[unit]
    step = factor * 2 ** max(0, math.ceil(math.log2(max(top, 1) / factor / 5)))
    ticks = [i * step for i in range(int(top // step) + 1)]
    getattr(axes, f"set_{name}ticks")(ticks, [str(tick // factor) for tick in ticks])
    getattr(axes, f"set_{name}lim")(0, end)
    axes.grid(axis=name, **GRID_LINES)  # type: ignore[arg-type]
    return unit


def second_axis(axes: Axes, slowest: float) -> str:
    """Label the ticks of the x axis in s, ms or us, as fits `slowest` seconds; return the unit."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    unit = next((unit for unit, factor in units.items() if slowest >= factor), "us")
    low, high = axes.get_xlim()
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(low, slowest)
    ticks = [tick for tick in ticks if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick / units[unit]:g}" for tick in ticks])
    axes.grid(axis="x", **GRID_LINES)
    return unit


def inches(name: str, value: Any) -> Size:
    """Return the size of a figure, width and height.

    Raises:
        ConfigError: it is none, or so small or large that no picture can be drawn.
    """
    width, height = of_type(name, value, Size)
    rule = number(SMALLEST_INCHES, LARGEST_INCHES)
    return rule(f"{name}[0]", width), rule(f"{name}[1]", height)


@checked(size=inches)
def placeholder(text: str, *, size: Size) -> Figure:
    """Return a figure that only says something, wrapped to its width."""
    figure = Picture(size)
    width, height = figure.width, figure.height
    per_line = max(10, int((width - 40) / (0.55 * FONT_SIZE)))
    most = max(1, int((height - 16) / (1.4 * FONT_SIZE)))
    lines = textwrap.wrap(text, per_line, placeholder=" …", max_lines=most)
    write(figure, width / 2, height / 2, "\n".join(lines), ha="center", linespacing=1.4)
    return figure


@checked(dpi=count(FEWEST_DOTS_PER_INCH, MOST_DOTS_PER_INCH))
def to_png(figure: Figure, *, dpi: int = 120) -> bytes:
    """Return the figure as a transparent PNG, legible on white and on dark pages.

    Raises:
        ConfigError: `dpi` is not a number of dots, or gives more of them than can be drawn.
    """
    if max(figure.get_size_inches()) * dpi > MOST_PIXELS:
        raise ConfigError(
            f"dpi={dpi} gives this figure more than {MOST_PIXELS} pixels along a side; lower dpi"
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, transparent=True)
    return buffer.getvalue()


class _TextRenderer(backend_svg.RendererSVG):
    """Text stays text whatever `svg.fonttype` says, which is global and so not ours to set."""

    _draw_text_as_path = backend_svg.RendererSVG._draw_text_as_text

    def get_text_width_height_descent(
        self, s: str, prop: FontProperties, ismath: bool | str
    ) -> tuple[float, float, float]:
        # matplotlib caches text sizes by renderer, and here each picture has its own
        return _text_size(s, prop.copy(), ismath)


@functools.lru_cache(4096)
def _text_size(text: str, prop: FontProperties, ismath: Any) -> tuple[float, float, float]:
    size: tuple[float, float, float] = text_to_path.get_text_width_height_descent(
        text, prop, ismath
    )
    return size


@checked()
def to_svg(figure: Figure, *, label: str) -> str:
    """Return the figure as inline SVG for HTML: as wide as its container, in the page's colours.

    Text takes the font and colour of JupyterLab's theme where there is one, the figure's own ink
    elsewhere. Ids differ from call to call, so that one page can hold many figures.

    Args:
        figure: of this module or `plots`.
        label: what a screen reader says in place of the picture.
    """
    width, height = figure.get_size_inches() * POINTS
    buffer, dpi = io.StringIO(), figure.dpi
    figure.dpi = POINTS  # SVG units are points

    try:
        renderer = _TextRenderer(width, height, buffer, image_dpi=POINTS)  # type: ignore[no-untyped-call]
        figure.draw(renderer)
        renderer.finalize()  # type: ignore[no-untyped-call]
    finally:
        figure.dpi = dpi

    body = buffer.getvalue()
    body = body[body.index(">", body.index("<svg")) + 1 :]  # from here to "</svg>"
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", body, flags=re.S)
    # two digits are enough for coordinates, which stand in tags; between these are words
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(?<=\.\d\d)\d+", "", tag[0]), body)
    body = _unique_ids(body)
    for color, on_page in PAGE_COLORS.items():
        body = body.replace(color, on_page)

    body = body.replace(f"'{FONT}'", "var(--jp-ui-font-family, sans-serif)")
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="100%" viewBox="0 0 {width:g} {height:g}" preserveAspectRatio="xMidYMid meet" '
        f'role="img" aria-label="{html.escape(label)}" '
        'style="stroke-linejoin: round; stroke-linecap: butt; font-family: inherit">' + body.strip()
    )


def _unique_ids(body: str) -> str:
    """Drop the ids that nothing refers to; number the others, unlike in any other call."""
    prefix = f"memlab{next(_svg_ids)}"
    used = dict.fromkeys(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    names = {name: f"{prefix}-{i}" for i, name in enumerate(used)}

    def rename(match: re.Match[str]) -> str:
        return f' id="{names[match[1]]}"' if match[1] in names else ""

    body = re.sub(r'\sid="([^"]+)"', rename, body)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda m: m[1] + names[m[2]], body)


# What a picture calls the categories of a result: their labels, but for memory of a library.


def category_names(result: StepResult) -> dict[Category, str]:
    """Return the name of each category, as it is right for what this result holds."""
    is_cuda = result.peak_reserved_bytes is not None
    buffers = [held for held in result.peak_holdings if held.category is Category.BUFFERS]
    is_tried = is_tensor_parallel(result.config)
    kinds = {is_workspace(held, is_cuda=is_cuda, is_tried=is_tried) for held in buffers}
    label = CATEGORY_LABELS[Category.BUFFERS]
    return {**CATEGORY_LABELS, Category.BUFFERS: name_of_buffers(kinds, label)}
