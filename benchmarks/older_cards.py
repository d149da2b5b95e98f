"""How far off is the time of a step on cards before Ampere, and in laptops?

`benchmarks/data/older_cards_ms.csv`: steps that others timed on cards without TF32, which multiply
fp32 numbers on their CUDA cores, and on laptops.

- NVIDIA's BERT and ResNet-50 as in `one_card.py`, on seven desktop cards and four laptops.
- BERT base, ResNet-50 and a ResNet-18 for 32 x 32 images by the authors of AdaptDL and Sia, by
  batch, on a T4, an RTX 2080 Ti and a V100. Their program does more in an update than the step
  (it measures how noisy gradients are), so what each further sample takes is compared.
- torchvision's models at a batch of 12, as in `host_pace.py`, on a TITAN Xp; the rows of
  `convnet_ms.csv` of such cards are read too.

Two factors of `kernel_times.json` are fitted to fp32 rows of these: those of convolutions that
Winograd's algorithm can take (windows of 3 x 3 that move by one), and of all others. Fitted: rows
without convolutions in groups whose kernels take at least four times what the host takes to issue
them; laptops are left out, whose clocks are not known. Each card is also left out in turn, each
generation of cards, and each family of models.

    python -m benchmarks.older_cards [--write]

The packages are those of `gpu_peaks.py`.
"""

import csv
import functools
import json
import re
import statistics
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memlab
from benchmarks import host_pace, one_card, report
from benchmarks.fit_times import OUT, Array, fitted, prior_of
from benchmarks.public_runs import options_with_packages, use_packages
from memlab import StepConfig
from memlab.cost_model import roofline
from memlab.cost_model.overlap import HOST_SECONDS
from memlab.cost_model.roofline import LAUNCH_SECONDS, Factors, Ideal, Work
from memlab.cost_model.targets import LAST_STEP
from memlab.cost_model.traced_step import Failure, TracedStep, from_traced_step
from memlab.devices.cards import card, resolve

DATA = Path(__file__).resolve().parent / "data" / "older_cards_ms.csv"
OF_SIA = ("azure", "rtx", "default")
OF_TORCHVISION = ("b12", "TITAN Xp")
FACTORS = {"convolution_winograd.compute": (0.8, 0.5), "convolution_fp32.compute": (1.2, 0.3)}
BUSY = 4  # times what the host takes, at least, for the rows of a fit
STATED = roofline.time_half_width(None, 0.0)  # of a step whose kernels are all known
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A step that was timed, or what samples more than `fewer` take in it."""

    card: str
    system: str
    model: str
    format: str
    batch: int
    seconds: float
    source: str
    fewer: int = 0

    @property
    def family(self) -> str:
        """The letters that its name begins with."""
        found = re.match("[a-z]+", self.model)
        assert found is not None
        return found[0]

    @property
    def generation(self) -> tuple[int, int] | None:
        """The compute capability of its card."""
        return card(self.card).compute_capability


def rows() -> list[Row]:
    """Return the rows, those by batch as what further samples take."""
    found, by_batch = [], []
    with DATA.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            names = (row["card"], row["system"], row["model"], row["format"])
            source = row["source"].partition(":")[0]
            made = Row(*names, int(row["batch"]), float(row["step_ms"]) / 1e3, source)
            (by_batch if made.system in OF_SIA else found).append(made)
    for names in dict.fromkeys((r.card, r.system, r.model, r.format) for r in by_batch):
        own = [row for row in by_batch if (row.card, row.system, row.model, row.format) == names]
        most = max(own, key=lambda row: row.batch)
        fewer = min((row for row in own if 2 * row.batch >= most.batch), key=lambda row: row.batch)
        seconds = most.seconds - fewer.seconds
        found.append(Row(*names, most.batch, seconds, most.source, fewer.batch))
    with host_pace.DATA.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["format"] == "fp32" and not card(row["card"]).tf32_flops_per_second:
                seconds = float(row["median_ms"]) / 1e3
                found.append(
                    Row(row["card"], "b12", row["model"], "fp32", 12, seconds, host_pace.SOURCE)
                )
    return found


# --- the factors


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a row: seconds of those that are no fp32 convolution, and ideals of these."""

    others: float
    groups: tuple[str, ...]
    count: Array
    ideal: Ideal
    num_operators: int
    has_grouped: bool

    def seconds(self, values: dict[str, float]) -> float:
        """Return their time with these factors."""
        found = self.others
        for group in {*self.groups}:
            at = np.array([name == group for name in self.groups])
            factors = Factors(values[f"{group}.compute"], _memory())
            each = roofline.combined(Ideal(*(x[at] for x in self.ideal)), factors)
            found += float((self.count[at] * each).sum())
        return found


def _memory() -> float:
    return roofline.table().groups["convolution"].memory


def _works(step: TracedStep) -> Counter[Work]:
    recording = step.program.recording
    return Counter(
        roofline.work_of(operator.signature, operator.outputs)
        for operator in recording.operators
        if recording.intervals[operator.interval].step == LAST_STEP
        and operator.signature is not None
        and not operator.crosses
    )


@functools.cache
def works_of(model: str, batch: int) -> Counter[Work]:
    """Return what the operators of a step in fp32 do, with how often."""
    config = StepConfig(batch_size=batch, optimizer="sgd")
    made = from_traced_step(
        _works, _workload(model), config, resolve("t4"), seed=0, report=lambda _: None,
        purpose="for its operators",
    )  # fmt: skip
    if isinstance(made, Failure):
        raise RuntimeError(f"{model}: {made.message}")
    return made


def _workload(model: str) -> memlab.Workload:
    if model in (one_card.RESNET, one_card.SMALL_RESNET):
        return one_card.workload(model, "fp32")
    return host_pace.workload(model)


def kernels_of(row: Row, batch: int) -> Kernels:
    """Return the kernels of a row's model at a batch size."""
    found, own = roofline.table(), card(row.card)
    others, groups, count, ideals = 0.0, [], [], []
    works = works_of(row.model, batch)
    for work, number in works.items():
        peak, seconds = roofline.peak_of(work, own, False), 0.0
        for part in work.parts:
            group = roofline.group_of(part, work.dtype, own)
            ideal = roofline.ideal_of(part, own, peak, found.reach, found.joules_per_flop)
            if f"{group}.compute" in FACTORS:
                groups.append(group)
                count.append(float(number))
                ideals.append(ideal)
            else:
                seconds += float(roofline.combined(ideal, found.groups[group]))
        is_convolution = any(part.group == "convolution" for part in work.parts)
        if work.num_bytes and not is_convolution:
            others += number * max(seconds, LAUNCH_SECONDS)
    columns = Ideal(*np.array(ideals).T)
    has_grouped = any(part.group.startswith("group") for work in works for part in work.parts)
    return Kernels(others, tuple(groups), np.array(count), columns, works.total(), has_grouped)


def fit() -> tuple[dict[str, float], list[Line]]:
    """Return the factors of all rows, and a line for each row by the fit without its card."""
    used, kernels = [], []
    priors = {name: value for name, (value, _) in FACTORS.items()}
    for row in rows():
        if row.format != "fp32" or row.model in one_card.SIZES or _is_laptop(row.card):
            continue
        own = [kernels_of(row, batch) for batch in (row.batch, row.fewer) if batch]
        is_busy = own[0].seconds(priors) > BUSY * HOST_SECONDS * own[0].num_operators
        if is_busy and not own[0].has_grouped:
            used.append(row)
            kernels.append(own)
    measured = np.array([row.seconds for row in used])
    kinds = [(row.card, row.system, row.family) for row in used]
    weights = np.array([1 / kinds.count(kind) for kind in kinds])

    def seconds(values: dict[str, float]) -> Array:
        each = [[made.seconds(values) for made in own] for own in kernels]
        return np.array([more[0] - sum(more[1:]) for more in each])

    def fit_to(chosen: Any) -> dict[str, float]:
        def errors(values: dict[str, float]) -> Array:
            found: Array = np.log(seconds(values) / measured)[chosen]
            return found

        return fitted(prior_of(FACTORS), errors, weights[chosen])

    everything = fit_to(np.ones(len(used), dtype=bool))
    fits = seconds(everything)
    left_out = {}
    for what in ("card", "generation", "family"):
        left_out[what] = np.zeros(len(used))
        names = np.array([str(getattr(row, what)) for row in used])
        for name in np.unique(names):
            own = names == name
            left_out[what][own] = seconds(fit_to(~own))[own]
    uses_old = {name: roofline.table().groups["convolution"].compute for name in FACTORS}
    before = seconds(uses_old)
    return everything, [
        {"card": row.card, "system": row.system, "model": row.model, "batch": row.batch,
         "beyond": row.fewer, "ms": 1e3 * row.seconds,
         "as on tensor cores %": 100 * (old / row.seconds - 1),
         "fitted %": 100 * (fits[at] / row.seconds - 1),
         **{f"{what} left out %": 100 * (each[at] / row.seconds - 1)
            for what, each in left_out.items()}}
        for at, (row, old) in enumerate(zip(used, before, strict=True))
    ]  # fmt: skip


def _is_laptop(name: str) -> bool:
    own = resolve(name).card
    return own is not None and own.is_laptop


def summary(found: list[Line]) -> list[Line]:
    """Return the errors of each kind of prediction over the rows of the fit."""
    names = [name for name in found[0] if name.endswith("%")]
    return [
        {"what": name.removesuffix(" %"), "rows": len(found),
         "median |off| %": statistics.median(abs(line[name]) for line in found),
         "9 of 10 within %": float(np.quantile([abs(line[name]) for line in found], 0.9)),
         "within what is stated %": 100 * statistics.mean(
             float(abs(1 / (1 + line[name] / 100) - 1) <= STATED) for line in found)}
        for name in names
    ]  # fmt: skip


def write(values: dict[str, float], lines: list[Line]) -> None:
    """Put the factors into `kernel_times.json`, with the cards they come from."""
    found = json.loads(OUT.read_text())
    for name, value in values.items():
        factors = {"compute": float(f"{value:.4g}"), "memory": _memory(), "written": 1.0,
                   "layout": 1.0}  # fmt: skip
        group = {"factors": factors, "formats": ["float32"]}
        found["groups"][name.removesuffix(".compute")] = group
    found["groups"] = dict(sorted(found["groups"].items()))
    found["cards"]["convolutions"] = sorted({line["card"] for line in lines})
    OUT.write_text(json.dumps(found, indent=1) + "\n")


# --- whole steps


def steps(quick: bool) -> list[Line]:
    """Return a line for each step, or for what further samples take, as memlab predicts it."""
    found = []
    given = [row for row in rows() if row.system not in OF_TORCHVISION]
    for row in given[:: 8 if quick else 1]:
        made = one_card.predicted(row.card, row.model, row.format, row.batch)
        assert made.step_seconds is not None
        seconds = made.step_seconds
        if row.fewer:
            fewer = one_card.predicted(row.card, row.model, row.format, row.fewer).step_seconds
            assert fewer is not None
            seconds -= fewer
        found.append({
            "card": row.card, "model": row.model, "format": row.format, "batch": row.batch,
            "beyond": row.fewer, "system": row.system, "ms": 1e3 * row.seconds,
            "predicted ms": 1e3 * seconds, "off %": 100 * (seconds / row.seconds - 1),
            "stated %": 100 * (made.uncertainty or {})["step_seconds"], "source": row.source,
            "laptop": _is_laptop(row.card),
        })  # fmt: skip
    return found


def main() -> None:
    """Print the fit and the steps, and the errors of each card."""
    given, before = options_with_packages(__file__, __doc__ or "", "--write"), report.environment()
    use_packages(given.packages)
    values, fits = fit()
    report.show("fp32 convolutions on CUDA cores", fits)
    report.show("the same, all rows", summary(fits))
    print({name: round(value, 4) for name, value in values.items()})
    if given.write:
        write(values, fits)
        return
    found = steps(given.quick)
    report.show("steps on cards before Ampere and in laptops", [
        {name: value for name, value in each.items() if name not in ("source", "laptop")}
        for each in found
    ])  # fmt: skip
    berts = [each for each in found if each["model"] in one_card.SIZES
             and each["format"] != one_card.O2 and not each["beyond"]]  # fmt: skip
    with_host = one_card.with_host(berts)
    of_all = [each for each in found if each not in berts] + with_host
    tables = {
        "all, BERT with what its optimizer waits, by the other cards": of_all,
        "laptops": [each for each in of_all if each["laptop"]],
        **{f"{kind} in {number_format}": [
            each for each in of_all
            if each["format"] == number_format and (each["model"] in one_card.SIZES) == is_bert
        ] for kind, is_bert in (("BERT", True), ("ResNet", False))
          for number_format in ("fp32", "fp16-mixed", one_card.O2)},
    }  # fmt: skip
    cards = {name: one_card.by_card(own) for name, own in tables.items() if own}
    for name, table in cards.items():
        report.show(name, table)
    report.write(report.Options(quick=given.quick, out=given.out), before, {
        "fit": fits, "factors": values, "steps": found, "cards": cards,
    })  # fmt: skip


if __name__ == "__main__":
    main()
