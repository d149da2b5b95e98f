"""The readout of a picture: what is held where a person points, and what would lower it.

Over each column of the timeline, and over each part of the peak bar, lies a radio button with its
words. The page's own style shows the words of the one under the pointer, or of the one that is
chosen by click or by arrow keys. All is HTML and CSS, so it works without a kernel, offline, and
wherever HTML is shown.
"""

import functools
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memlab._panel.verdicts import setting_words
from memlab.arguments.units import format_bytes
from memlab.explaining.remedies import Remedy, remedies
from memlab.figures.look import CATEGORY_COLORS, CATEGORY_LABELS
from memlab.figures.peak_readings import PeakReading
from memlab.figures.readings import Reading
from memlab.result import StepResult, format_percent
from memlab.trace import Category

MOST_CATEGORIES, MOST_SETTINGS = 5, 3
MOMENTS = "moments of the step; arrow keys move through them"
PARTS_OF_PEAK = "parts of the peak; arrow keys move through them"

# what does not change in a step, such as the parameters, is in each of its moments
_size = functools.lru_cache(1024)(format_bytes)

Box = tuple[float, float, float, float]
"""Left, top, width and height, as fractions of the picture."""
Lowering = Mapping[Category, str]
"""For each category, a line about the settings that would free some of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spot:
    """A place of a picture that a person can point at.

    Attributes:
        start: its left edge, 0..1.
        end: its right edge, 0..1.
        heard: what a screen reader says.
        content: what is shown, as HTML.
    """

    start: float
    end: float
    heard: str
    content: str


def moments(
    readings: Sequence[Reading],
    lowering: Lowering,
    names: Mapping[Category, str] = CATEGORY_LABELS,
) -> list[Spot]:
    """Return the spots of a timeline, one for each of its readings; `names` of the categories."""
    lower = {category: f"<em>{html.escape(line)}</em>" for category, line in lowering.items()}
    return [_moment(reading, lower, names) for reading in readings]


def _moment(reading: Reading, lower: Mapping[Category, str], names: Mapping[Category, str]) -> Spot:
    said = ", ".join(part for part in (reading.when, reading.where) if part)
    title = f"{format_bytes(reading.nbytes)}{', the peak' if reading.is_peak else ''}"
    rows = "".join(
        f'<i style="background:{CATEGORY_COLORS[category]}"></i>'
        f"{names[category]} <b>{_size(nbytes)}</b> "
        f"<em>{format_percent(nbytes / reading.nbytes)}</em><br>"
        for category, nbytes in reading.by_category[:MOST_CATEGORIES]
    )
    line = lower.get(reading.by_category[0][0], "") if reading.by_category else ""
    content = f"<b>{title}</b><br>{html.escape(said)}<br>{rows}{line}"
    return Spot(start=reading.start, end=reading.end, heard=f"{title}, {said}", content=content)


def parts_of_peak(readings: Sequence[PeakReading], lowering: Lowering) -> list[Spot]:
    """Return the spots of a peak bar, one for each of its parts."""
    return [_part(reading, lowering) for reading in readings]


def _part(reading: PeakReading, lowering: Lowering) -> Spot:
    share = "" if reading.fraction is None else f", {format_percent(reading.fraction)} of the peak"
    title = f"{reading.name} {format_bytes(reading.nbytes)}{share}"
    places = [f"{place} {format_bytes(nbytes)}" for place, nbytes in reading.places]
    line = lowering.get(reading.category, "") if reading.category else ""
    rows = "".join(f"{html.escape(place)}<br>" for place in places)
    return Spot(
        start=reading.start,
        end=reading.end,
        heard=", ".join([title, *places, *([line] if line else [])]),
        content=f'<i style="background:{reading.color}"></i><b>{title}</b><br>{rows}'
        f"<em>{html.escape(line)}</em>",
    )


def readout(spots: Sequence[Spot], box: Box, *, name: str, kind: str, label: str) -> str:
    """Return the readout as HTML, to lie over a picture.

    Args:
        spots: from left to right, each beginning where the one before ends.
        box: where they lie in the picture.
        name: of the group of radio buttons; another for each picture of a page.
        kind: "moment" or "part", for the style.
        label: what a screen reader says of them all.
    """
    if not spots:
        return ""
    left, top, width, height = (f"{share:.2%}" for share in box)
    columns = " ".join(f"{spot.end - spot.start:.4f}fr" for spot in spots)
    rest = 1 - spots[-1].end  # below the limit, where nothing is held
    columns += f" {rest:.4f}fr" if rest > 0 else ""
    style = f"left:{left};top:{top};width:{width};height:{height};grid-template-columns:{columns}"
    strips = "".join(_strip(spot, html.escape(name), kind) for spot in spots)
    return (
        f'<div class="memlab-spots memlab-{kind}s" style="{style}" role="radiogroup" '
        f'aria-label="{label}">{strips}</div>'
    )


def _strip(spot: Spot, name: str, kind: str) -> str:
    side = "right" if spot.start < 0.5 else "left"
    return (  # the attribute keeps keys from JupyterLab's own shortcuts
        f'<label class="memlab-spot memlab-{kind}"><input type="radio" name="{name}" '
        f'data-lm-suppress-shortcuts="true" aria-label="{html.escape(spot.heard)}">'
        f'<span class="memlab-reading memlab-{side}">{spot.content}</span></label>'
    )


def lowering(result: StepResult, said_of_division: str = "") -> dict[Category, str]:
    """Return for each category a line about the settings that would free some of it.

    The settings and their savings are those of `memlab.explain`, in the words of the controls;
    those that lower the peak most come first. A category that no setting frees is left out. With
    more micro-batches comes what is said of their gradient.
    """
    offered = remedies(result)
    said = {}
    for category, label in CATEGORY_LABELS.items():
        freeing = [remedy for remedy in offered if category in remedy.categories]
        if freeing:
            settings = ", ".join(
                _in_words(one, said_of_division) for one in freeing[:MOST_SETTINGS]
            )
            said[category] = f"lower {label}: {settings}"
    return said


def _in_words(remedy: Remedy, said_of_division: str) -> str:
    """Return for instance "accumulation 2 (peak about 12.0 MiB lower)"."""
    setting = ", ".join(setting_words(field, value) for field, value in remedy.change.items())
    said = [said_of_division] if said_of_division and "accumulation_steps" in remedy.change else []
    if remedy.freed_bytes is not None:
        said.insert(0, f"peak about {format_bytes(remedy.freed_bytes)} lower")
    return f"{setting} ({'; '.join(said)})" if said else setting
