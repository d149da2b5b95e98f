"""Seconds of a kernel on a card: the roofline with what kinds of kernels reach of it.

The idea. A kernel takes the longer of two times, since arithmetic and memory traffic overlap:

    seconds = max(compute_factor * compute, memory_factor * read + written_factor * written)
              + layout_factor * layout

`compute` is its arithmetic at the sustained peak of the card, in whole tiles and waves: 80
multiprocessors take as long for 81 tiles as for 160. `read`, `written` and `layout` are bytes at
the bandwidth that the card's kind of memory reaches. The factors depend on the kind of kernel and
not on the card. `python -m benchmarks.fit_times` fits them, with few parameters, to what others
measured and writes `kernel_times.json`, which also says how far off steps of models and cards were
that the fit had not seen. Where a kind of kernel has no data the factor is one of the priors there.

On data-centre cards the factor of compute is no less than what the fastest products and attention
kernels took when others timed them on the tensor cores of such a card (`devices/reached.py`).

An example: 128 x 128 outputs make 2 tiles of 128 x 64, and a card with 40 multiprocessors uses 2 of
them, so such a product takes 20 times as long as its flops at the peak.

Left out: overlap of operators, the host when the card waits for it, heat.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import torch

from memlab.costs.kernel_parts import KernelPart, Product
from memlab.devices.cards import Card

FILE = "kernel_times.json"
# Tiles of cuBLAS kernels, as their names give them, rows and columns of the result.
TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (16, 64),
         (64, 16), (16, 16))  # fmt: skip
# A tile loads rows + columns numbers for rows * columns multiply-adds, so small ones reach less:
# 1 / (1 + TILE_LOADS * (1 / rows + 1 / columns)); and it fills and empties its pipeline, as long
# as TILE_START steps of the inner size take. Values from 1 to 6 and from 10 to 35 fit the cards of
# operator_ms.csv equally well.
TILE_LOADS, TILE_START = 2.0, 24.0
SPLITS = (1, 2, 4, 8, 16, 32)  # of the inner size over tiles, where there are few tiles
LEAST_SPLIT = 256  # of the inner size that is left to each

# Power of a chip at one speed, as a share of 16 nm, by what the foundries state: TSMC N10 35-40 %
# less than 16 nm, N7 40 % less than N10, N5 (and 4N) 30 % less than N7; Samsung 10LPE 40 % less
# than 14 nm, 10LPP 15 % less than that, 8LPP another 10 %. 12 nm is 16 nm with denser cells.
POWER_OF_PROCESS = {6: 1.0, 7: 1.0, 8: 0.39, 9: 0.27, 10: 0.27, 12: 0.27}  # by compute capability
POWER_OF_OTHERS = {(8, 6): 0.46, (8, 9): 0.27}
LEAST_SHARE = 0.05  # of a step's time; less is not mentioned
VOLTA = (7, 0)  # delivers 1.22 times as large a share of its bandwidth as Pascal (white paper)


@dataclass(frozen=True, slots=True)
class Factors:
    """How many times its ideal a kind of kernel takes."""

    compute: float = 1.0
    memory: float = 1.0
    written: float = 1.0
    layout: float = 1.0


class Ideal(NamedTuple):
    """The seconds of a part on a card, before factors."""

    compute: float
    read: float
    written: float
    layout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorTable:
    """What `kernel_times.json` holds.

    Attributes:
        reach: share of the bandwidth that streaming kernels reach, "high" and "low" (see `reach`).
        joules_per_flop: of fp32 at 16 nm, that a board must have to work at its boost clock.
        groups: factors by kind of kernel.
        formats: number formats of the data of each kind; empty if there were none.
        cards: names of the cards whose whole steps are in the data.
        operator_cards: of those whose single operators are.
        doubt: half-widths that cover 90 %, and how many steps they come from.
    """

    reach: dict[str, float]
    joules_per_flop: float
    groups: dict[str, Factors]
    formats: dict[str, tuple[str, ...]]
    cards: tuple[str, ...]
    operator_cards: tuple[str, ...]
    doubt: dict[str, Any]


@functools.cache
def table() -> FactorTable:
    """Return what the fit has written."""
    found = json.loads(resources.files("memlab.costs").joinpath(FILE).read_text())
    return FactorTable(
        reach=found["reach"],
        joules_per_flop=found["joules_per_flop"],
        groups={name: Factors(**group["factors"]) for name, group in found["groups"].items()},
        formats={name: tuple(group["formats"]) for name, group in found["groups"].items()},
        cards=tuple(found["cards"]["steps"]),
        operator_cards=tuple(found["cards"]["operators"]),
        doubt=found["doubt"],
    )


def group_of(part: KernelPart, dtype: torch.dtype | None) -> str:
    """Return the kind of kernel with its number format, where the data tell formats apart."""
    is_half = dtype is not None and dtype.itemsize <= 2  # int8 is multiplied by the same cores
    if part.group in ("stream", "product"):
        return f"{part.group}_{'half' if is_half else 'fp32'}"
    return "attention" if part.group == "attention_backward" else part.group


def is_measured(group: str, dtype: torch.dtype | None) -> bool:
    """Return whether the fit has seen this kind of kernel in this number format."""
    return str(dtype).removeprefix("torch.") in table().formats[group]


def half_width_of(part: KernelPart, dtype: torch.dtype | None) -> float:
    """Return the relative half-width that a part adds to that of a step: 0 for most.

    It is wide for what no data are of, and for kernels of which cuDNN has fast and slow ones.
    """
    doubt, group = table().doubt, group_of(part, dtype)
    widths = [0.0]
    if part.flops and not is_measured(group, dtype):
        widths.append(doubt["unmeasured"]["half_width"])
    if group in doubt["erratic"]["groups"]:
        widths.append(doubt["erratic"]["half_width"])
    return float(max(widths))


def seconds_of(
    part: KernelPart, dtype: torch.dtype | None, card: Card, peak: float | None
) -> float:
    """Return the seconds of a part on a card whose peak for its number format is given."""
    found = table()
    ideal = ideal_of(part, card, peak, found.reach, found.joules_per_flop)
    factors = found.groups[group_of(part, dtype)]
    least = least_factor(part, card, peak)
    return float(combined(ideal, replace(factors, compute=max(factors.compute, least))))


def least_factor(part: KernelPart, card: Card, peak: float | None) -> float:
    """Return the factor of compute with which a part takes no less than the fastest of its kind.

    0 where none was timed on such a card, and on its CUDA cores, which are known by their peak.
    """
    is_on_tensor_cores = peak is not None and peak > (card.fp32_flops_per_second or 0.0)
    if card.reached is None or not is_on_tensor_cores:
        return 0.0
    if part.group == "attention":
        return 1 / card.reached.attention_share
    if part.group == "attention_backward":
        return 1 / card.reached.attention_backward_share
    if part.product is not None:
        return least_of_products(card)
    return 1 / card.reached.product_share


@functools.cache
def least_of_products(card: Card) -> float:
    """Return the same for products in whole tiles: with it the timed one takes what it took."""
    assert card.reached is not None
    rows, columns, inner = card.reached.product_shape
    flops = whole_tiles((1, rows, columns, inner), card.reached.num_multiprocessors)
    return 2 * rows * columns * inner / flops / card.reached.product_share


def combined(ideal: Ideal, factors: Factors) -> Any:
    """Return the seconds of an ideal, which may be of arrays, with these factors."""
    memory = factors.memory * ideal.read + factors.written * ideal.written
    return np.maximum(factors.compute * ideal.compute, memory) + factors.layout * ideal.layout


def ideal_of(
    part: KernelPart,
    card: Card,
    peak: float | None,
    reach: dict[str, float],
    joules_per_flop: float,
) -> Ideal:
    """Return the seconds of a part on a card before factors.

    Args:
        part: what a kernel does.
        card: with a known bandwidth.
        peak: operations per second of the part's number format; None if it is not known.
        reach: as in `FactorTable`.
        joules_per_flop: as in `FactorTable`.
    """
    assert card.memory_bytes_per_second is not None
    bandwidth = card.memory_bytes_per_second * reach[reach_of(card)]
    compute = 0.0
    if peak and part.flops:
        flops = part.flops
        if part.product is not None:
            flops = whole_tiles(part.product, card.num_multiprocessors or 1)
        compute = flops / (peak * sustained(card, joules_per_flop))
    return Ideal(
        compute=compute,
        read=part.read_bytes / bandwidth,
        written=part.written_bytes / bandwidth,
        layout=part.layout_bytes / bandwidth,
    )


def reach_of(card: Card) -> str:
    """Return "low" for cards whose memory delivers a smaller share of its bandwidth, else "high".

    These are cards before Volta, and GDDR with error correction, which shares its bus.
    """
    is_old = card.compute_capability is not None and card.compute_capability < VOLTA
    return "low" if is_old or card.ecc_in_memory else "high"


def sustained(card: Card, joules_per_flop: float) -> float:
    """Return the clock that a card keeps up when it multiplies, as a share of its boost clock.

    Power is in proportion to the clock, so a board with half the power that its chip would need
    works at about half its boost clock: a T4 has 8.6 W for each TFLOP/s, a P4 13.6, a V100 17.9.
    """
    capability = card.compute_capability
    if capability is None or card.board_watts is None or not card.fp32_flops_per_second:
        return 1.0
    process = POWER_OF_OTHERS.get(capability, POWER_OF_PROCESS.get(capability[0], 1.0))
    joules = card.board_watts / card.fp32_flops_per_second
    return min(1.0, joules / (joules_per_flop * process))


@functools.lru_cache(maxsize=2**16)
def whole_tiles(product: Product, num_multiprocessors: int) -> int:
    """Return the flops of a product in whole tiles and waves, of the tile that takes least.

    The time of the slowest multiprocessor, as flops of all of them.
    """
    batch, rows, columns, inner = product
    least = math.inf
    for tile_rows, tile_columns in TILES:
        tiles = batch * -(-rows // tile_rows) * -(-columns // tile_columns)
        each = 2.0 * tile_rows * tile_columns
        each *= 1 + TILE_LOADS * (1 / tile_rows + 1 / tile_columns)
        for split in SPLITS:
            if split > 1 and (tiles * split > num_multiprocessors or inner < LEAST_SPLIT * split):
                break
            waves = -(-tiles * split // num_multiprocessors)
            least = min(least, waves * each * (inner / split + TILE_START))
    return round(least * num_multiprocessors)


def time_half_width(card: Card | None, unsure_share: float) -> float:
    """Return the relative half-width of a predicted step time.

    Three errors that do not depend on one another: of a model that the fit has not seen, of a card
    that it has not seen, and of kinds of kernels and number formats with few or no data.

    Args:
        card: that the step would run on.
        unsure_share: of the step's time, as `StepTime.unsure_seconds` has it.
    """
    doubt = table().doubt
    widths = [doubt["model"]["half_width"], unsure_share]
    if not _is_seen(card):
        widths.append(doubt["card"]["half_width"])
    return math.hypot(*widths)


def time_note(card: Card | None, unsure_share: float, of: str = "The time") -> str:
    """Return a sentence that says where the half-width of a predicted time comes from.

    Args:
        card: as for `time_half_width`.
        unsure_share: as for `time_half_width`.
        of: which time it is.
    """
    doubt = table().doubt
    steps = doubt["model"]["steps"] - doubt["erratic"]["steps"]
    text = (
        f"{of} is stated ± {time_half_width(card, unsure_share):.0%}, from "
        f"{steps} steps of other models in fp16 on an RTX 3090"
    )
    if not _is_seen(card):
        others = set(table().operator_cards) - {card.name if card else ""}
        text += f" and fp32 operators on {len(others)} other cards"
    if unsure_share > LEAST_SHARE:
        text += "; it is wide because there are few or no measurements of some of its kernels"
    return f"{text}."


def _is_seen(card: Card | None) -> bool:
    return card is not None and card.name in table().cards
