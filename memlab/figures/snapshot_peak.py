"""Who holds the peak of a memory snapshot, as a treemap: `plots.snapshot_peak`.

Areas are bytes. Each category is a region, and each stack that allocated some of it is a tile,
named by the person's own line. The rest of a category is "other".
"""

from matplotlib.figure import Figure

from memlab.arguments.checks import checked
from memlab.arguments.units import format_bytes
from memlab.figures.look import (
    POINTS,
    Canvas,
    Size,
    inches,
    new_figure,
    placeholder,
    shorten,
    write,
)
from memlab.figures.peak_map import (
    LEAST_TILE,
    MOST_TILES,
    draw_category,
    draw_unnamed,
    squarified,
)
from memlab.figures.snapshot_timeline import COLORS, LABELS
from memlab.snapshots.holders import BELOW
from memlab.snapshots.snapshot import Snapshot


@checked(size=inches)
def snapshot_peak(snapshot: Snapshot, *, size: Size = (9.0, 4.6)) -> Figure:
    """Return what holds the peak of a snapshot as nested areas: categories, and in them stacks.

    Args:
        snapshot: what `memlab.open_snapshot` returned.
        size: in inches.
    """
    peak = snapshot.peak_allocated_bytes
    if not peak:
        return placeholder("Nothing is allocated in this snapshot.", size=size)

    figure = new_figure(size)
    overlay = Canvas(figure)
    width, height = overlay.width, overlay.height
    title = f"peak {format_bytes(peak)} allocated (snapshot, device {snapshot.device})"
    write(overlay, 6, height - 9, shorten(title, size[0] * POINTS - 10))
    sizes = {name: snapshot.peak_by_category[name] for name in COLORS
             if snapshot.peak_by_category[name]}  # fmt: skip
    ranked = sorted(sizes, key=lambda name: -sizes[name])
    boxes = squarified([sizes[name] for name in ranked], (6.0, 20.0, width - 12, height - 40))
    unnamed = []
    for name, box in zip(ranked, boxes, strict=True):
        named = COLORS[name], LABELS[name]
        tiles = _tiles(snapshot, name, sizes[name])
        if not draw_category(overlay, named, box, tiles, sizes[name], peak):
            unnamed.append((*named, sizes[name]))
    draw_unnamed(overlay, unnamed)
    return figure


def _tiles(snapshot: Snapshot, category: str, nbytes: int) -> list[tuple[str, int]]:
    """Return name and bytes of the places that hold most of a category, then the rest."""
    places: dict[str, int] = {}
    for held in snapshot.peak_holdings:
        if held.category == category:
            own = held.place.split(BELOW)[0]
            places[own] = places.get(own, 0) + held.nbytes
    least = LEAST_TILE * snapshot.peak_allocated_bytes
    large = [item for item in places.items() if item[1] >= least]
    large = sorted(large, key=lambda item: -item[1])[:MOST_TILES]
    left = nbytes - sum(size for _, size in large)
    return [*large, ("other", left)] if left and large else large
