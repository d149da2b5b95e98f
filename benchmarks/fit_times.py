"""Fit the factors of `memlab/cost_model/kernel_times.json` to what real cards took.

Two files of public measurements (benchmarks/data/README.md says whose) decide different factors:

    operator_ms.csv     fp32 operators on five cards: reach of memory, power, products, norms
    timm_rtx3090.csv    fp16 steps of convnets and vision transformers on one card: the rest

Each factor is fitted on a log scale with a prior from physics: how many passes a kernel makes, what
large kernels reach. Robust: errors above 10 % count in proportion and not squared. The same fit
leaves out whole cards and whole families of models, one at a time; what it then says of them gives
the stated half-width of a predicted time. No factor depends on the name of a card or of a model.

    python -m benchmarks.fit_times --steps build/timm_operators

`benchmarks/timm_steps.py` records the steps, about 40 seconds each, and keeps them in that folder.
Left out: kept steps with fused attention, which PyTorch 1.12 did not have, and those whose images
had another layout than the row.
"""

import argparse
import collections
import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import operator_rows, timm_operators
from benchmarks.operator_rows import Measured
from memlab.cost_model import power, roofline
from memlab.cost_model.roofline import (
    LAUNCH_SECONDS,
    Factors,
    Ideal,
    Work,
    combined,
    group_of,
    ideal_of,
    peak_of,
)
from memlab.devices import cards
from memlab.devices.cards import Card

Array = npt.NDArray[np.float64]
OUT = Path(roofline.__file__).parent / roofline.FILE
NOMINAL = 0.9  # share of the steps that the half-width is to cover
ROBUST = 0.1  # of the error of a row on a log scale
MOST_STEPS = 12  # of Gauss and Newton
FOLDS = 10
UNIT = {"high": 1.0, "low": 1.0}

# factor: prior, and its spread on a log scale. From operator_ms.csv:
OF_OPERATORS = {
    "reach.high": (0.9, 0.2),
    "reach.low": (0.8, 0.2),
    "joules_per_flop": (15e-12, 0.3),
    "overhead": (15e-6, 0.7),  # of each measurement: the launch on an idle card
    "product_fp32.compute": (1.2, 0.2),
    "product_fp32.written": (2.0, 0.5),
    "normalize_forward.memory": (1.5, 0.3),
}
# From timm_rtx3090.csv. Streaming kernels, and norms, would be ideal at 1.
OF_STEPS = {
    "stream_half.memory": (1.1, 0.15),
    "batch_norm.memory": (1.1, 0.15),
    "transpose.memory": (1.5, 0.4),
    "pool.memory": (1.3, 0.4),
    "reduce.memory": (1.3, 0.4),
    "normalize_backward.memory": (1.5, 0.3),
    "product_half.compute": (1.3, 0.2),
    "product_half.memory": (1.1, 0.3),
    "convolution.compute": (1.3, 0.2),
    "convolution.memory": (1.1, 0.3),
    "convolution.layout": (1.0, 0.5),
    "grouped_first.compute": (2.0, 0.7),
    "grouped_last.compute": (4.0, 0.7),
    "grouped_first.memory": (1.5, 0.5),
    "depthwise_forward.memory": (2.0, 0.7),
    "depthwise_data.memory": (2.5, 0.7),
    "depthwise_weight.memory": (4.0, 0.7),
}
SAME = {
    "product_half.written": "product_half.memory",
    "grouped_last.memory": "grouped_first.memory",
}
# Without data on any card. Attention: matrix products of large bf16 matrices at their best shape
# reach 0.78-0.86 of the dense peak (MAMF table of stas00/ml-engineering), other shapes less; fused
# RNNs and other products the same.
WITHOUT_DATA = {
    "attention.compute": 1 / 0.7,
    "other_product.compute": 1 / 0.7,
}
Values = dict[str, float]


@dataclass(frozen=True, slots=True)
class Prior:
    """Names of factors with the logarithm of what they are before any data, and its spread."""

    names: tuple[str, ...]
    middle: Array
    spread: Array


def prior_of(factors: dict[str, tuple[float, float]]) -> Prior:
    """Return factors by name, with their priors, as arrays of logarithms."""
    middle = np.log([value for value, _ in factors.values()])
    return Prior(tuple(factors), middle, np.array([spread for _, spread in factors.values()]))


def fitted(prior: Prior, errors: Callable[[Values], Array], weights: Array) -> Values:
    """Return the factors that make log errors small, by Gauss-Newton with robust weights."""
    at = prior.middle.copy()
    for _ in range(MOST_STEPS):
        now = errors(_values(prior, at))
        slopes = np.empty((len(now), len(at)))
        for index in range(len(at)):
            moved = at.copy()
            moved[index] += 1e-4
            slopes[:, index] = (errors(_values(prior, moved)) - now) / 1e-4
        trust = weights / np.sqrt(1 + (now / ROBUST) ** 2) / ROBUST**2
        left = slopes.T @ (trust[:, None] * slopes) + np.diag(prior.spread**-2.0)
        right = slopes.T @ (trust * now) + (at - prior.middle) / prior.spread**2
        change = np.clip(np.linalg.solve(left, right), -0.5, 0.5)
        at = at - change
        if np.abs(change).max() < 5e-3:
            break
    return _values(prior, at)


def _values(prior: Prior, at: Array) -> Values:
    return dict(zip(prior.names, np.exp(at).tolist(), strict=True))


def factors_of(values: Values, group: str) -> Factors:
    """Return the factors of a kind of kernel among values by "kind.what"; 1 where there is none."""
    named = {**WITHOUT_DATA, **values}
    named |= {name: named[other] for name, other in SAME.items() if other in named}
    found = {name.split(".")[1]: x for name, x in named.items() if name.split(".")[0] == group}
    if "memory" in found and group != "convolution":
        found.setdefault("written", found["memory"])
    return Factors(**found)


# --- operators on five cards


@dataclass(frozen=True, slots=True)
class Operators:
    """Rows of operator_ms.csv as arrays: ideals before reach and sustained clock."""

    rows: Sequence[Measured]
    measured: Array
    card: npt.NDArray[np.str_]
    group: npt.NDArray[np.str_]
    kind: npt.NDArray[np.str_]
    ideal: Ideal
    weights: Array


def operators_of(rows: Sequence[Measured]) -> Operators:
    """Return the rows as arrays; every kind of operator on every card has the same weight."""
    ideals = []
    for row in rows:
        peak = peak_of(row.work, row.card, False)
        ideals.append(ideal_of(row.work.parts[0], row.card, peak, UNIT, 1e-24))
    kinds = [(row.card.name, row.operator) for row in rows]
    count = collections.Counter(kinds)
    return Operators(
        rows=rows,
        measured=np.array([row.seconds for row in rows]),
        card=np.array([row.card.name for row in rows]),
        group=np.array([group_of(row.work.parts[0], row.work.dtype, row.card) for row in rows]),
        kind=np.array([row.operator for row in rows]),
        ideal=Ideal(*np.array(ideals).T),
        weights=np.array([min(20.0, count[kind]) / count[kind] for kind in kinds]),
    )


def seconds_of_operators(values: Values, given: Operators) -> Array:
    """Return the time of each row, its measurement's overhead included."""
    seconds = np.zeros(len(given.measured))
    for name in np.unique(given.card):
        card = cards.card(str(name))
        clock = power.sustained(card, values["joules_per_flop"])
        reach = values[f"reach.{roofline.reach_of(card)}"]
        for group in np.unique(given.group):
            at = (given.card == name) & (given.group == group)
            compute, read, written, layout = (x[at] for x in given.ideal)
            scaled = Ideal(compute / clock, read / reach, written / reach, layout / reach)
            seconds[at] = combined(scaled, factors_of(values, str(group)))
    return seconds + values["overhead"]


def fit_operators(given: Operators, chosen: npt.NDArray[np.bool_]) -> Values:
    """Return the factors that fit the chosen rows."""

    def errors(values: Values) -> Array:
        found: Array = np.log(seconds_of_operators(values, given) / given.measured)[chosen]
        return found

    return fitted(prior_of(OF_OPERATORS), errors, given.weights[chosen])


def fit_of_operators(given: Operators | None = None) -> Values:
    """Return the factors that fit all rows, which are read where they are not given."""
    given = given or operators_of(operator_rows.read())
    return fit_operators(given, np.ones(len(given.measured), dtype=bool))


def without_each_card(given: Operators) -> Array:
    """Return the time of each row by the fit that has not seen its card."""
    seconds = np.zeros(len(given.measured))
    for name in np.unique(given.card):
        own = given.card == name
        seconds[own] = seconds_of_operators(fit_operators(given, ~own), given)[own]
    return seconds


# --- steps on one card


@dataclass(frozen=True, slots=True)
class Steps:
    """Rows of timm_rtx3090.csv: the kernels of all, one after the other, and whose they are."""

    names: list[str]
    layouts: list[str]
    measured: Array
    groups: dict[str, npt.NDArray[np.int64]]  # the kernels of each kind
    ideal: Ideal
    operator: npt.NDArray[np.int64]  # of each kernel
    least: Array  # seconds of each operator, its bound and its launch
    step: npt.NDArray[np.int64]  # of each operator
    count: Array  # how often each operator runs
    works: frozenset[Work]


def steps_of(
    rows: Sequence[timm_operators.Step], card: Card, reach: dict[str, float], watts: float
) -> Steps:
    """Return the kernels of the steps as arrays."""
    kernels: list[tuple[str, int, Ideal]] = []
    operators: list[tuple[int, float, float]] = []
    for index, row in enumerate(rows):
        for work, number in row.works:
            peak = peak_of(work, card, False)
            for part in work.parts:
                ideal = ideal_of(part, card, peak, reach, watts)
                kernels.append((group_of(part, work.dtype, card), len(operators), ideal))
            least = max(_bound(work, card, peak), LAUNCH_SECONDS)
            operators.append((index, float(number), least))
    names = np.array([group for group, _, _ in kernels])
    step, count, least_seconds = np.array(operators).T
    return Steps(
        names=[row.model for row in rows],
        layouts=[row.layout for row in rows],
        measured=np.array([row.seconds for row in rows]),
        groups={str(group): np.flatnonzero(names == group) for group in np.unique(names)},
        ideal=Ideal(*np.array([ideal for _, _, ideal in kernels]).T),
        operator=np.array([operator for _, operator, _ in kernels]),
        least=least_seconds,
        step=step.astype(np.int64),
        count=count,
        works=frozenset(work for row in rows for work, _ in row.works),
    )


def steps_in(folder: Path, of_operators: Values) -> Steps:
    """Return the steps that are kept in a folder, with what operators say of memory and power."""
    return steps_of(
        timm_operators.read(folder),
        cards.card(timm_operators.CARD),
        reach_of(of_operators),
        of_operators["joules_per_flop"],
    )


def reach_of(values: Values) -> dict[str, float]:
    """Return the shares of bandwidth as `ideal_of` takes them."""
    return {name: values[f"reach.{name}"] for name in ("high", "low")}


def _bound(work: Work, card: Card, peak: float | None) -> float:
    assert card.memory_bytes_per_second is not None
    return max(work.num_bytes / card.memory_bytes_per_second, work.flops / peak if peak else 0.0)


def seconds_of_steps(values: Values, given: Steps) -> Array:
    """Return the time of each step."""
    each = np.zeros(len(given.operator))
    for group, at in given.groups.items():
        ideal = Ideal(*(x[at] for x in given.ideal))
        each[at] = combined(ideal, factors_of(values, group))
    whole = np.maximum(np.bincount(given.operator, each, len(given.least)), given.least)
    return np.bincount(given.step, whole * given.count, len(given.measured)).astype(np.float64)


def share_of(groups: Sequence[str], of_operators: Values, given: Steps) -> Array:
    """Return the share of each step's time that is in these kinds of kernels, by the full fit."""
    values = fit_steps(given, of_operators, np.ones(len(given.measured), dtype=bool))
    own = np.zeros(len(given.operator))
    for group in groups:
        if group not in given.groups:
            continue
        at = given.groups[group]
        own[at] = combined(Ideal(*(x[at] for x in given.ideal)), factors_of(values, group))
    seconds = np.bincount(given.operator, own, len(given.least)) * given.count
    found: Array = np.bincount(given.step, seconds, len(given.measured))
    return found / seconds_of_steps(values, given)


WEIGHTS = "tf|gluon|legacy|swsl|ssl|ig|jx|skip|nf|ecanf|eca|tv|adv|ens|dm|wide"
SAME_BLOCKS = {"deit": "vit", "beit": "vit", "swinv": "swin", "resnext": "resnet"}


def fit_steps(given: Steps, fixed: Values, chosen: npt.NDArray[np.bool_]) -> Values:
    """Return the factors that fit the chosen steps, beside those of operators, which stay."""

    def errors(values: Values) -> Array:
        found: Array = np.log(seconds_of_steps(fixed | values, given) / given.measured)[chosen]
        return found

    return fixed | fitted(prior_of(OF_STEPS), errors, np.ones(int(chosen.sum())))


def family_of(model: str) -> str:
    """Return the family of a model's name, without where its weights come from.

    Networks of the same blocks are one family, whatever their names.
    """
    name = re.sub(rf"^(({WEIGHTS})_)+", "", model)
    found = re.match(r"(se|eca|gc|sk|bat|lam|halo|sebot|bot|ese)?(resnet|resnext|[a-z]+)", name)
    family = found[2] if found else name
    return SAME_BLOCKS.get(family, family)


def without_each_family(given: Steps, fixed: Values) -> Array:
    """Return the time of each step by a fit that has not seen a model of its family.

    Families are left out in ten parts, each of whole families.
    """
    _, family = np.unique([family_of(name) for name in given.names], return_inverse=True)
    seconds = np.zeros(len(given.measured))
    for fold in range(FOLDS):
        own = family % FOLDS == fold
        if not own.any():
            continue
        seconds[own] = seconds_of_steps(fit_steps(given, fixed, ~own), given)[own]
    return seconds


def main() -> None:
    """Fit, leave out, and write the table."""
    from benchmarks import time_doubt

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=Path, default=timm_operators.FOLDER, help="recorded steps")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    operators = operators_of(operator_rows.read())
    of_operators = fit_of_operators(operators)
    steps = steps_in(given.steps, of_operators)
    values = fit_steps(steps, of_operators, np.ones(len(steps.measured), dtype=bool))
    doubt = time_doubt.doubt_of(operators, steps, of_operators)
    written = {
        "written_by": "python -m benchmarks.fit_times",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "rows": {"operators": len(operators.measured), "steps": len(steps.measured)},
        "cards": {
            "operators": sorted({*operators.card.tolist()}),
            "steps": [timm_operators.CARD],
            **_kept("cards"),
        },
        "reach": {name: _rounded(value) for name, value in reach_of(of_operators).items()},
        "joules_per_flop": _rounded(of_operators["joules_per_flop"]),
        "groups": dict(sorted((groups_of(values, operators, steps) | _kept("groups")).items())),
        "doubt": doubt,
    }
    given.out.write_text(json.dumps(written, indent=1) + "\n")
    print(given.out.read_text())


def _kept(what: str) -> dict[str, Any]:
    """Return what `benchmarks.older_cards` has written."""
    found: dict[str, Any] = json.loads(OUT.read_text())[what]
    return {name: value for name, value in found.items() if name.startswith("convolution")
            and name != "convolution"}  # fmt: skip


def groups_of(values: Values, operators: Operators, steps: Steps) -> dict[str, Any]:
    """Return factors and number formats of every kind of kernel."""
    formats: dict[str, set[str]] = collections.defaultdict(set)
    timed = {(row.work, row.card) for row in operators.rows}
    for work, card in timed | {(work, cards.card(timm_operators.CARD)) for work in steps.works}:
        for part in work.parts:
            formats[group_of(part, work.dtype, card)].add(str(work.dtype).removeprefix("torch."))
    names = {name.split(".")[0] for name in (*values, *SAME, *WITHOUT_DATA) if "." in name}
    names = (names | set(formats)) - {"reach"}
    found = {}
    for name in sorted(names):
        factors = factors_of(values, name)
        numbers = {key: _rounded(getattr(factors, key)) for key in factors.__slots__}
        seen = sorted(formats.get(name, ())) if f"{name}.compute" not in WITHOUT_DATA else []
        found[name] = {"factors": numbers, "formats": seen}
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    main()
