"""The command `python -m memlab doctor`: its options, the order of things, and what it prints."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from memlab import api
from memlab._util.units import MIB, format_bytes, format_seconds
from memlab._version import __version__
from memlab.cli import device_visit, machine, verdict
from memlab.cli.device_visit import CPU, Bench, Case, bench_of
from memlab.cli.verdict import SettingPair
from memlab.config import Precision, StepConfig
from memlab.devices.cards import of_device
from memlab.devices.here import describe
from memlab.errors import ConfigError, DeviceError, MemlabError
from memlab.result import Outcome, StepResult, format_percent
from memlab.store.recorded import costs_of, own_folder
from memlab.store.records import SUFFIX, Kind, append, cut_damage, read_lines
from memlab.workload import Workload

# `RecordKeeper`: writes the record of a visit where a person wants it, and spoils no other
# file.
#
# A file that is there already is added to if it is a record of the same device. What of it
# is damaged is put aside, as for every record. Anything else is refused before anything is
# measured.

NEEDED_BYTES = 16 * MIB  # of disk; a visit's record takes less than one


class RecordKeeper:
    """The lines of a visit: in memory, and in a file if there is one.

    Attributes:
        path: of the file; None for none.
        visit: when the visit began, by which its lines are known.
        lines: by kind, what was added.
        said: a sentence on what went wrong with the file; empty if nothing did.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.visit = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.lines: list[tuple[Kind, dict[str, Any]]] = []
        self.said = ""

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Begin a visit to a device.

        Raises:
            ConfigError: the file cannot be used; the message says why and what to do.
        """
        if self.path is not None:
            try:
                _check(self.path, str(facts["device"]))
            except OSError as error:
                raise ConfigError(_unwritable(self.path, error)) from None
        self.add(Kind.VISIT, {"visit": self.visit, **facts})
        if self.said:
            raise ConfigError(self.said)

    def add(self, kind: Kind, line: Mapping[str, Any]) -> None:
        """Add a line. A disk that is full ends the file at its last whole line."""
        self.lines.append((kind, dict(line)))
        if self.path is None or self.said:
            return
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            append(self.path, kind, line)
        except OSError as error:
            self.said = _unwritable(self.path, error)
            if self.path.exists() and self.path.stat().st_size > size:
                os.truncate(self.path, size)


def _unwritable(path: Path, error: OSError) -> str:
    return (
        f"--out {path} cannot be written ({error.strerror or error}); take a file in a folder that "
        "can be written, on a disk with room"
    )


def _check(path: Path, device: str) -> None:
    """Raise ConfigError if the file is no place for a record of this device."""
    if path.suffix != SUFFIX:
        raise ConfigError(f"--out {path} must end in {SUFFIX}, as every record does")
    folder = next(each for each in path.absolute().parents if each.exists())
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"--out {path}: the disk has {format_bytes(free)} free; allowed is at least "
            f"{format_bytes(NEEDED_BYTES)}: take another disk, or leave --out away"
        )
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; name a file in it")
    if path.exists() and path.stat().st_size:
        _take_up(path, device)


def _take_up(path: Path, device: str) -> None:
    """Make an existing record ready for more lines.

    Raises:
        ConfigError: it is of another device or schema, or no record at all.
    """
    remedy = "it is left as it is; name another file"
    try:
        lines = read_lines(path)
    except MemlabError as error:
        raise ConfigError(f"--out {path}: {error}; {remedy}") from None

    visits = lines.of(Kind.VISIT)
    if not visits:
        raise ConfigError(f"--out {path} is not a record; {remedy}")
    if visits[0].get("device") != device:
        raise ConfigError(
            f"--out {path} is a record of {visits[0].get('device')!r}, and this is {device!r}; "
            f"{remedy}"
        )
    cut_damage(lines)


# A doctor's visit to a device: its settings predicted and measured, its operators timed.
#
# A prediction is always made before its step is measured, so that it owes nothing to what
# it is compared with.

MOST_SECONDS = 60.0  # of one prediction or measurement
UNDONE = (Outcome.TIMED_OUT, Outcome.CANCELLED)  # for want of time: it says nothing of the setting


@dataclass(kw_only=True, slots=True)
class DoctorVisit:
    """What the parts of a visit share, and what they have found.

    Attributes:
        bench: the device.
        keeper: of the record.
        end: on the monotonic clock.
        tell: called with what is being done.
        limit_bytes: that a step may reserve on a card; None on a CPU.
        pairs: settings that were predicted and measured.
        left_out: a sentence on each of the others.
    """

    bench: Bench
    keeper: RecordKeeper
    end: float
    tell: Callable[[str], None]
    limit_bytes: int | None = None
    pairs: list[SettingPair] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        """What is left of the visit."""
        return self.end - time.monotonic()

    @property
    def _most(self) -> float:
        return max(min(self.seconds_left, MOST_SECONDS), 1.0)

    def compare(self, cases: Sequence[Case]) -> None:
        """Predict and measure settings, as long as there is time."""
        known: dict[str, StepResult] = {}
        for number, case in enumerate(cases, 1):
            if self.seconds_left <= 0:
                left = len(cases) - len(self.pairs)
                self.left_out.append(
                    f"{left} of {len(cases)} settings were left out: time was over."
                )
                return

            name, said = f"{case.workload}, {case.config}", f"{number} of {len(cases)}"
            key = dataclasses.replace(case, group="").key("")
            if key not in known:
                self.tell(f"predicting {said}: {name}")
                known[key] = self.bench.predict(case, self._most)
            if why := self._too_large(known[key]):
                self.left_out.append(f"{name} was left out: {why}.")
                continue

            self.tell(f"measuring {said}: {name}")
            measured = self._measured(case)
            if measured.outcome in UNDONE and self.seconds_left <= 0:
                continue  # to the sentence above
            self.pairs.append(SettingPair(case=case, predicted=known[key], measured=measured))
            if device_visit.is_broken(self.bench.device):
                self.left_out.append(
                    f"{self.bench.device} does not answer this process any more after {name}, so "
                    "that the rest was left out; run doctor again, and send its record in an issue."
                )
                return

    def _too_large(self, predicted: StepResult) -> str:
        """Return why a step is not run on a card that others use too; empty if it is."""
        peak = predicted.counted_peak
        if self.limit_bytes is None or peak is None or peak.upper_bytes <= self.limit_bytes:
            return ""
        return (
            f"it may take {format_bytes(peak.upper_bytes)}, and this visit uses at most "
            f"{format_bytes(self.limit_bytes)} of the card"
        )

    def _measured(self, case: Case) -> StepResult:
        run = device_visit.run_of(self.bench, case, self.keeper.visit, self._most, self.limit_bytes)
        if run.result.outcome not in UNDONE:
            self._keep(Kind.RUN, case, run.to_line())
        return run.result

    def _keep(self, kind: Kind, case: Case, line: Mapping[str, Any]) -> None:
        case = dataclasses.replace(case, kind=kind)
        self.keeper.add(kind, {**line, "key": case.key(torch.__version__)})

    def operators(self, cases: Sequence[Case]) -> None:
        """Record what the operators of these settings take, as long as there is time."""
        for number, case in enumerate(cases, 1):
            if self.seconds_left <= 0:
                return
            self.tell(f"operators of {number} of {len(cases)}: {case.workload}, {case.config}")
            asked = dataclasses.replace(case, kind=Kind.OPERATORS)
            line = device_visit.about(asked, self.keeper.visit)
            line |= device_visit.operators(self.bench, asked, self._most)
            self._keep(Kind.OPERATORS, case, line)

    def predicted_again(self, pairs: Sequence[SettingPair]) -> list[SettingPair]:
        """Return pairs with predictions that use the operators that were timed in this visit."""
        timed = [line for kind, line in self.keeper.lines if kind is Kind.OPERATORS]
        found = []
        for pair in pairs:
            if self.seconds_left <= 0:
                break
            self.tell(f"predicting {pair.case.workload} by the times of its operators")
            costs = costs_of(timed, tf32=pair.case.config.precision is Precision.TF32)
            target = dataclasses.replace(self.bench.target, costs=costs)
            bench = dataclasses.replace(self.bench, target=target)
            found.append(dataclasses.replace(pair, predicted=bench.predict(pair.case, self._most)))
        return found


TRY_SHARE = 0.35  # of the time, for trying techniques
OPERATOR_SHARE = 0.15  # of it, left for timing operators
TRY_SECONDS = 45.0  # of one technique; compiling takes most


class ProgressLine:
    """Says on one line of a terminal what is being done; says nothing where there is none."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._width = stream, 0

    def __call__(self, text: str) -> None:
        """Show a text instead of the last one; "" for none."""
        if not self._stream.isatty():
            return
        text = text[:78]
        self._stream.write(f"\r{text.ljust(self._width)}\r")
        self._stream.flush()
        self._width = len(text)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what a person asked for; ends the process with status 2 if it is not allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m memlab doctor",
        description="What this machine has, which techniques work on it, and how good memlab's "
        "predictions are here. It downloads nothing and uses at most half of a card's free memory",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="write a record, to keep or to send"
    )
    parser.add_argument("--device", help="the card or the CPU, where there are several devices")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="that it may take; raise it on a slow machine"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the record as one JSON object; text to stderr"
    )
    given = parser.parse_args(arguments)
    if not (math.isfinite(given.minutes) and given.minutes > 0):
        parser.error(f"--minutes {given.minutes} is not allowed; take a number above 0, such as 5")
    return given


def main(arguments: Sequence[str]) -> int:
    """Run doctor and return the status of the process: 0, or 2 for options that cannot be met."""
    given = options(arguments)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # two lines of the profiler for each step
    try:
        device, home = machine.device_here(given.device), own_folder()
        keeper, out = RecordKeeper(given.out), sys.stderr if given.json else sys.stdout
        with _own_cache(), contextlib.redirect_stdout(out):
            status = examine(device, keeper, home, seconds=60 * given.minutes)
        if given.json:
            lines = [{"kind": str(kind), **line} for kind, line in keeper.lines]
            print(json.dumps({"visit": keeper.visit, "lines": lines}))
        return status
    except MemlabError as error:
        print(error, file=sys.stderr)
        return 2


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """Keep nothing of what memlab learns meanwhile, and let it know nothing from before."""
    before = os.environ.get("MEMLAB_CACHE")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ["MEMLAB_CACHE"] = name  # before the first worker is started
        try:
            yield
        finally:
            del os.environ["MEMLAB_CACHE"]
            if before is not None:
                os.environ["MEMLAB_CACHE"] = before


def examine(
    device: torch.device,
    keeper: RecordKeeper,
    home: Path,
    *,
    seconds: float,
    wanted: Sequence[Case] | None = None,
    configs: Mapping[str, StepConfig] | None = None,
    isolate: bool = True,
) -> int:
    """Examine a device of this machine, print what is found, and return 0.

    Args:
        device: of this machine.
        keeper: of the record.
        home: the folder of the person's own records.
        seconds: that it may take.
        wanted: settings to measure; None for all.
        configs: settings of techniques to try, by name; None for all.
        isolate: whether techniques are tried in a worker.

    Raises:
        ConfigError: the record cannot be written.
    """
    begun, tell = time.monotonic(), ProgressLine(sys.stderr)
    _show("This machine", machine.about())
    device, limit = _device_with_room(device)
    keeper.begin({"minutes": seconds / 60, **device_visit.facts(device), **_versions()})
    try:
        tried = machine.settings() if configs is None else configs
        if _try(device, limit, tried, begun + TRY_SHARE * seconds, tell, isolate=isolate):
            bench, end = bench_of(device, Bench), begun + seconds
            here = DoctorVisit(bench=bench, keeper=keeper, end=end, tell=tell, limit_bytes=limit)
            cases = machine.settings_for(device.type) if wanted is None else wanted
            _compare(here, cases, begun + (1 - OPERATOR_SHARE) * seconds)
    except KeyboardInterrupt:
        tell("")
        _show("", ["Ctrl-C ended the visit. What was measured until then is kept."])

    tell("")
    took = time.monotonic() - begun
    runs = sum(kind is Kind.RUN for kind, _ in keeper.lines)
    keeper.add(Kind.VISIT, {"visit": keeper.visit, "summary": {"seconds": took, "runs": runs}})
    about = _about_record(keeper, home, is_card=device.type == "cuda")
    _show(f"Record (after {format_seconds(took)})", about)
    return 0


def _device_with_room(device: torch.device) -> tuple[torch.device, int | None]:
    """Return the device that can be examined, this one or the CPU, and the limit that holds."""
    try:
        limit = machine.room_on(device)
    except DeviceError as error:
        _show("", [f"{error}. What follows is about the processor."])
        return CPU, None
    if limit is not None:
        said = format_bytes(limit)
        _show("", [f"This visit uses at most {said} of {device}, and what CUDA itself takes."])
    return device, limit


def _versions() -> dict[str, Any]:
    versions = {"memlab": __version__, "torch": torch.__version__}
    return {
        "versions": versions | {"python": platform.python_version(), "numpy": np.__version__},
        "processor": describe(CPU),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }


def _try(
    device: torch.device,
    limit_bytes: int | None,
    configs: Mapping[str, StepConfig],
    end: float,
    tell: ProgressLine,
    *,
    isolate: bool,
) -> bool:
    """Try techniques until a time on the monotonic clock, and show which work.

    Returns:
        Whether steps can be measured there. They run in this process on a card, which a worker
        must not have ended in before.
    """

    def measure(workload: Workload, config: StepConfig, limit: int | None) -> StepResult:
        tell(f"trying {config}")
        left = min(max(end - time.monotonic(), 1.0), TRY_SECONDS)
        return api.measure_only(
            workload, config, device, repeats=1, warmup=0, memory_limit=limit or limit_bytes,
            timeout_seconds=left, isolate=isolate,
        )  # fmt: skip

    found: dict[str, str] = {}
    try:
        card = of_device(device) if device.type == "cuda" else None
        for name, why_not in machine.tried(configs, device, card, measure):
            is_over = time.monotonic() > end
            if not (is_over and why_not.startswith(Outcome.TIMED_OUT)):
                found[name] = why_not
            if is_over:
                break
    finally:  # also of Ctrl-C
        tell("")
        _show(f"Techniques on {device}", _about_tries(found, configs))

    if device.type == "cpu" or not found.get(machine.PLAIN):
        return True
    _show("", [f"No step runs on {device}, so that nothing was measured; please send this text."])
    return False


def _about_tries(found: Mapping[str, str], configs: Mapping[str, StepConfig]) -> list[str]:
    """Return which techniques work, and of the others why not; the same reason once."""
    reasons: dict[str, list[str]] = {}
    for name, why_not in found.items():
        reasons.setdefault(why_not, []).append(name)

    works = reasons.pop("", ["nothing"])
    lines = [f"works: {'; '.join(works)}"]
    lines += [f"{'; '.join(names)}: {why_not}" for why_not, names in reasons.items()]
    if left := [name for name in configs if name not in found]:
        lines.append(f"not tried, for want of time: {'; '.join(left)}")
    return lines


def _compare(here: DoctorVisit, cases: Sequence[Case], end: float) -> None:
    """Predict and measure settings, and show the errors and a verdict.

    Args:
        here: the visit.
        cases: the settings.
        end: of measuring, on the monotonic clock; what is left is for operators.
    """
    is_card = here.bench.is_card
    try:
        dataclasses.replace(here, end=end).compare(cases)  # into the same lists
    finally:  # also of Ctrl-C
        here.tell("")
        _show_pairs(here.pairs, here.left_out, is_card=is_card)

    compared = [pair for pair in here.pairs if pair.is_compared]
    if not is_card:
        here.operators([pair.case for pair in compared])
        return
    first = {pair.case.workload: pair.case for pair in reversed(compared)}.values()
    here.operators(list(first))
    timed = [pair for pair in compared if pair.case in first]
    _show_again(timed, here.predicted_again(timed))


def _show_pairs(pairs: Sequence[SettingPair], said: Sequence[str], *, is_card: bool) -> None:
    """Show the errors of predictions, what was left out, and a verdict."""
    lines = verdict.settings_table(pairs)
    if lines:
        lines.append("error: of the prediction; !: beyond its stated uncertainty")
    ends = [p for p in pairs if not p.is_compared and p.case.group != "again"]
    lines += [f"{p.name}: {p.why_not}" for p in ends] + list(said)
    if not machine.has_transformers():
        lines.append(
            f"The settings of a GPT-2 were left out: {machine.LIBRARY} is not installed "
            "(pip install 'memlab[zoo]')."
        )
    _show("Predicted and measured", lines)
    scores = [found for what in verdict.FIELDS if (found := verdict.score(pairs, what))]
    table = verdict.summary_table(scores) if scores else []
    _show("Verdict", [*table, *verdict.words(scores, pairs, is_card=is_card)])


def _show_again(pairs: Sequence[SettingPair], again: Sequence[SettingPair]) -> None:
    """Show what the times of a card's own operators do for predictions."""
    before, after = verdict.score(pairs[: len(again)], "time"), verdict.score(again, "time")
    if before and after:
        _show("With the times of this card's own operators", [
            f"{len(after.errors)} settings whose operators were timed: the median error of time is "
            f"{format_percent(after.median)}, and by the datasheet {format_percent(before.median)}."
        ])  # fmt: skip


def _about_record(keeper: RecordKeeper, home: Path, *, is_card: bool) -> list[str]:
    """Return where the record is, and what a person can do with it."""
    if keeper.said:
        return [f"{keeper.said}. It holds what was measured until then."]
    if keeper.path is None:
        return [
            "Nothing was written. With --out FILE.jsonl there is a record, which you can keep for "
            f"predictions (in {home}) or send in an issue."
        ]
    size = format_bytes(keeper.path.stat().st_size)
    lines = [f"{keeper.path} ({size}) has every result. Send it in an issue if the verdict is bad."]
    if keeper.path.absolute().parent != home.absolute():
        use = "predicts this card by the times of its operators" if is_card else "can play it back"
        lines.append(f"Put it into {home}, and memlab {use} (memlab.recordings() lists it).")
    return lines


def _show(title: str, lines: Sequence[str]) -> None:
    print("\n".join([f"\n{title}"] * bool(title) + [f"  {line}" for line in lines]), flush=True)
