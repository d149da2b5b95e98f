"""How far off predicted times are for models and cards that no factor was fitted to.

- *model*: steps of timm models without channels-last convolutions in groups, each by a fit without
  its family.
- *erratic*: the other steps. cuDNN has fast kernels for some widths of groups and slow ones for
  others, up to four times as slow, and does not say which: the half-width of such a kernel is what
  covers these steps when it is taken times its share of a step's time.
- *card*: mixes of operators on the five cards of operator_ms.csv, each by the fit without its card.
  A mix is ten operators drawn at random, half products and half of the other kinds, each repeated
  until it takes the same share of the predicted time; no whole steps on these cards are known.
- *unmeasured*: the steps of *model* once more by the priors alone, with none of them fitted: how
  far off a kind of kernel is of which there are no data.

A half-width is the quantile of |measured / predicted - 1| that 90 % of the steps do not exceed,
with the correction for few samples of split conformal prediction. Its coverage is judged on steps
that it was not taken from: of other families, and of other cards.
"""

import math
from typing import Any

import numpy as np

from benchmarks import fit_times
from benchmarks.fit_times import NOMINAL, Array, Operators, Steps, Values

ERRATIC = ("grouped_last",)
LEAST_SHARE = 0.01  # of a step's time in erratic kernels; less counts as none
MIXES, OPERATORS_OF_A_MIX, PRODUCTS_OF_A_MIX = 200, 10, 5


def errors(measured: Array, predicted: Array) -> Array:
    """Return |measured / predicted - 1|, which a stated half-width has to cover."""
    found: Array = np.abs(measured / predicted - 1)
    return found


def half_width(found: Array) -> float:
    """Return the half-width that covers the nominal share of errors like these."""
    rank = math.ceil((len(found) + 1) * NOMINAL)
    return float(np.sort(found)[min(rank, len(found)) - 1])


def coverage(found: Array, of: Any) -> float:
    """Return the share of errors within the half-width of those of all others, 0..1.

    Args:
        found: errors.
        of: for each the family or the card, which is left out as a whole.
    """
    names = np.asarray(of)
    inside = [found[names == name] <= half_width(found[names != name]) for name in np.unique(names)]
    return float(np.concatenate(inside).mean())


def widths(found: Array, share: Array) -> tuple[float, float]:
    """Return the half-width of steps without erratic kernels, and of erratic kernels alone.

    Args:
        found: errors of steps.
        share: of each step's time in erratic kernels.
    """
    is_erratic = share > LEAST_SHARE
    plain = half_width(found[~is_erratic])
    more = np.sqrt(np.maximum(found[is_erratic] ** 2 - plain**2, 0)) / share[is_erratic]
    return plain, half_width(more)


def stated(plain: float, erratic: float, share: Array) -> Array:
    """Return the half-width of each step, as `kernel_times.time_half_width` does."""
    found: Array = np.hypot(plain, erratic * share)
    return found


def coverage_of_families(found: Array, share: Array, of: Any) -> tuple[float, float]:
    """Return the share of steps within what steps of other families state, and its median."""
    names = np.asarray(of)
    inside, width = np.zeros(len(found), dtype=bool), np.zeros(len(found))
    for name in np.unique(names):
        own = names == name
        width[own] = stated(*widths(found[~own], share[~own]), share[own])
        inside[own] = found[own] <= width[own]
    return float(inside.mean()), float(np.median(width))


def mixes(given: Operators, seconds: Array) -> tuple[Array, Any]:
    """Return errors of the time of random mixes on each card, and the card of each."""
    draw = np.random.default_rng(0)
    is_product = np.isin(given.kind, ("bmm", "linear"))
    found, names = [], []
    for name in np.unique(given.card):
        products, others = (
            np.flatnonzero((given.card == name) & which) for which in (is_product, ~is_product)
        )
        for _ in range(MIXES):
            at = np.concatenate([
                draw.choice(products, PRODUCTS_OF_A_MIX),
                draw.choice(others, OPERATORS_OF_A_MIX - PRODUCTS_OF_A_MIX),
            ])  # fmt: skip
            found.append(float(abs(np.mean(given.measured[at] / seconds[at]) - 1)))
            names.append(str(name))
    return np.array(found), names


def doubt_of(operators: Operators, steps: Steps, of_operators: Values) -> dict[str, Any]:
    """Return the half-widths for `kernel_times.json`, with what they come from."""
    families = [fit_times.family_of(name) for name in steps.names]
    seconds = fit_times.without_each_family(steps, of_operators)
    of_models, of_time = errors(steps.measured, seconds), errors(seconds, steps.measured)
    share = fit_times.share_of(ERRATIC, of_operators, steps)
    plain, erratic = widths(of_models, share)
    covered, median = coverage_of_families(of_models, share, families)
    of_cards, names = mixes(operators, fit_times.without_each_card(operators))
    priors = {name: value for name, (value, _) in fit_times.OF_STEPS.items()}
    blind = errors(steps.measured, fit_times.seconds_of_steps(of_operators | priors, steps))
    is_plain = share <= LEAST_SHARE
    return {
        "nominal": NOMINAL,
        "model": {
            "half_width": round(plain, 3),
            "steps": len(of_models),
            "families": len(set(families)),
            "median_error": round(float(np.median(of_time)), 3),
            "p90_error": round(float(np.quantile(of_time, 0.9)), 3),
            "coverage_of_other_families": round(covered, 3),
            "median_half_width": round(median, 3),
        },
        "erratic": {
            "half_width": round(erratic, 3),
            "groups": list(ERRATIC),
            "steps": int((~is_plain).sum()),
        },
        "card": {
            "half_width": round(half_width(of_cards), 3),
            "mixes": len(of_cards),
            "cards": len(set(names)),
            "median_error": round(float(np.median(of_cards)), 3),
            "coverage_of_other_cards": round(coverage(of_cards, names), 3),
        },
        "unmeasured": {
            "half_width": round(half_width(blind[is_plain]), 3),
            "steps": int(is_plain.sum()),
        },
    }
