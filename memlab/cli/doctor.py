"""The command `python -m memlab doctor`: what this machine has, and what works on it.

From top to bottom: what there is, the settings that are predicted and measured, the techniques that
are tried, the record, the visit, and the command with what it prints. The verdict on predictions is
in `verdict.py`.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import json
import math
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from memlab import api, workloads
from memlab._util.units import GIB, MIB, format_bytes, format_seconds
from memlab._version import __version__
from memlab.cli import device_visit, verdict
from memlab.cli.device_visit import CPU, Bench, Case, bench_of
from memlab.cli.verdict import SettingPair
from memlab.config import Precision, StepConfig
from memlab.devices import cards
from memlab.devices.cards import Card, of_device
from memlab.devices.here import (
    available_memory_bytes,
    describe,
    machine_memory_bytes,
    resolve_device,
)
from memlab.errors import ConfigError, DeviceError, MemlabError
from memlab.result import Outcome, StepResult, format_percent
from memlab.store.recorded import costs_of, own_folder
from memlab.store.records import SUFFIX, Kind, append, cut_damage, read_lines
from memlab.techniques.compilation import is_compiled
from memlab.techniques.registry import EVERY, refusals
from memlab.techniques.technique import Setup
from memlab.workload import Workload

# What this machine has, in words, and how much of a card a visit may use.

SHARE = 0.5  # of what is free on a card: the other half is left to other programs
MOST_BYTES = 4 * GIB  # more than any setting needs
LEAST_BYTES = 256 * MIB  # with less, no setting would run


def device_here(name: str | None) -> torch.device:
    """Return the device of this machine that a person means.

    Args:
        name: "cpu", "cuda", "cuda:1", or the name of a card that is in this machine; None is the
            accelerator if there is one, else the CPU.

    Raises:
        DeviceError: it is not in this machine; the message says what is, and which cards are
            spelled most like it.
    """
    try:
        return resolve_device(name)
    except DeviceError as error:
        wanted = cards.find(str(name))
        for device in _cards_here():
            if wanted is not None and of_device(device).name == wanted.name:
                return device
        said = str(error)

    if wanted is not None:
        raise DeviceError(f"{said}. memlab.predict(..., {wanted.name!r}) needs no such card.")
    is_name = re.fullmatch(r"(cpu|cuda)(:\d+)?", str(name)) is None
    near = ", ".join(map(repr, cards.nearest(name))) if is_name else ""
    raise DeviceError(f"{said}.{f' The nearest cards that memlab knows: {near}.' if near else ''}")


def _cards_here() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def about_machine() -> list[str]:
    """Return lines on what this machine has."""
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    free, all_bytes = available_memory_bytes(), machine_memory_bytes()
    memory = "memory not known on this system"
    if free is not None and all_bytes is not None:
        memory = f"{format_bytes(free)} of {format_bytes(all_bytes)} of memory available"
    return [
        f"memlab {__version__}, PyTorch {torch.__version__} (built {build}), "
        f"Python {platform.python_version()} on {platform.system()}",
        f"processor: {describe(CPU)}, {os.cpu_count()} cores, of which PyTorch uses "
        f"{torch.get_num_threads()}; {memory}",
        *(_about_card(device) for device in _cards_here()),
        *([] if _cards_here() else [why_no_card()]),
    ]


def why_no_card() -> str:
    """Return why PyTorch finds no CUDA card here, and what that means."""
    if torch.version.cuda is None:
        why = f"PyTorch {torch.__version__} is built without CUDA"
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            why += f", and memlab does not measure on {accelerator.type!r}"
    else:
        why = "PyTorch finds no NVIDIA driver, or no card that the driver shows to this process"
    return (
        f"card: none ({why}). Everything below is about the processor; predictions for a card need "
        "none"
    )


def _about_card(device: torch.device) -> str:
    try:
        card, (free, total) = of_device(device), torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:  # the driver's own words, of one line or many
        return f"card {device}: it does not answer ({_first_line(error)})"

    known = f"memlab knows it as {card.name!r}"
    if cards.find(card.name) is None:
        known = "memlab does not know it, so that it predicts bytes for it and no times"
    version = device_visit.version()
    said = f"driver {version}" if version else "driver not known (nvidia-ml-py is missing)"
    return (
        f"card {device}: {card.title}, {known}; {format_bytes(free)} of {format_bytes(total)} "
        f"free; {said}"
    )


def room_on(device: torch.device) -> int | None:
    """Return the bytes that PyTorch may reserve on a card, half of what is free; None on a CPU.

    Raises:
        DeviceError: nothing can be measured there; says why.
    """
    if device.type == "cpu":
        return None
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"{device} does not answer ({_first_line(error)})") from None

    limit = min(int(free * SHARE), MOST_BYTES)
    if limit < LEAST_BYTES:
        raise DeviceError(
            f"{device} has only {format_bytes(free)} free, the rest is in use by other programs; a "
            f"visit uses half of what is free and needs {format_bytes(LEAST_BYTES)}"
        )
    return limit


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# The settings that are predicted and measured side by side: about forty, each a second or two.
#
# Each model is there in three sizes and with the techniques that change what a step holds; some of
# them twice, since what a device differs from itself no prediction can tell.

LIBRARY = "transformers"  # of the GPT-2
Fields = dict[str, Any]


@functools.cache
def data() -> Fields:
    """Return what `doctor.toml` holds."""
    text = resources.files(__package__).joinpath("doctor.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def settings_for(kind: str) -> list[Case]:
    """Return the settings for a kind of device ("cpu", "cuda"), in order of value."""
    models = [_of_model(name, kind, given) for name, given in data()["models"][kind].items()]
    # the first of every model before the second of any: what is cut short has a little of each
    longest = max(map(len, models))
    rounds = [[model[i] for model in models if i < len(model)] for i in range(longest)]
    again = [dataclasses.replace(case, group="again") for case in rounds[0]]
    found = [*rounds[0], *rounds[1], *again, *itertools.chain(*rounds[2:])]
    if has_transformers():
        for name, given in data()["gpt"][kind].items():
            found += _of_model(name, kind, given)[:3]
    return found


def has_transformers() -> bool:
    """Return whether the library of the GPT-2 is installed."""
    return importlib.util.find_spec(LIBRARY) is not None


def _of_model(name: str, kind: str, given: Fields) -> list[Case]:
    settings, options = data()["settings"], _with_tuples(given)
    sizes = options.pop("sizes")
    cases = []
    for fields in (*settings["all"], *settings[kind], *settings.get(name, ())):
        rest = {field: value for field, value in fields.items() if field != "size"}
        config = StepConfig(batch_size=sizes[fields["size"]], **rest)
        cases.append(Case(workload=name, options=options, config=config))
    return cases


def _with_tuples(given: Fields) -> Fields:
    """Return options with tuples for lists, as the zoo and the keys of records have them."""
    return {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}


# Which techniques work on a device: what memlab refuses there by itself, and a tiny step of each.
#
# The step runs in a worker, so that a technique that crashes ends no more than that. Compiled steps
# come last, since they take longer than all others together.

BATCH_SIZE = 4
PLAIN, RECOVERY = "the plain step", "an out-of-memory and the step after it"
FOR_IMAGES = ("channels_last", "inplace")
LIMIT_BYTES = 1000  # less than any model

Measure = Callable[[Workload, StepConfig, int | None], StepResult]
"""Measures one step, given a memory limit in bytes or None."""


def settings() -> dict[str, StepConfig]:
    """Return the settings to try, by name: the plain step first, compiled ones last."""
    found = {PLAIN: StepConfig(batch_size=BATCH_SIZE)}
    examples = {name: fields for t in EVERY for name, fields in t.examples.items()}
    for name, fields in (examples | data()["formats"]).items():
        found[name] = StepConfig(**{"batch_size": BATCH_SIZE, **fields})
    return dict(sorted(found.items(), key=lambda item: is_compiled(item[1])))


def tried(
    configs: Mapping[str, StepConfig], device: torch.device, card: Card | None, measure: Measure
) -> Iterator[tuple[str, str]]:
    """Yield each setting by name, with why it does not work on a device; "" if it does.

    The first is whether running out of memory ends well.

    Args:
        configs: as of `settings`.
        device: of this machine.
        card: the card that it is, if it is one.
        measure: runs a step.
    """
    yield RECOVERY, _out_of_memory(measure)
    for name, config in configs.items():
        refused = next(iter(refusals(Setup(config=config, device=device, card=card))), None)
        yield name, _why_not(config, measure) if refused is None else str(refused)


def _why_not(config: StepConfig, measure: Measure) -> str:
    result = measure(_workload(config), config, None)
    return "" if result.outcome is Outcome.OK else f"{result.outcome}: {result.message}"


def _workload(config: StepConfig) -> Workload:
    default = StepConfig()
    is_of_images = any(getattr(config, name) != getattr(default, name) for name in FOR_IMAGES)
    name = "plain-convnet" if is_of_images else "plain-transformer"
    return workloads.get(name, **_with_tuples(data()["tiny"][name]))


def _out_of_memory(measure: Measure) -> str:
    """Return why a step that has too little memory does not end as such, or the next not run."""
    config = settings()[PLAIN]
    over = measure(_workload(config), config, LIMIT_BYTES)
    if over.outcome is not Outcome.OUT_OF_MEMORY:
        return f"{over.outcome} under a limit of {LIMIT_BYTES} bytes"
    return _why_not(config, measure)


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
        device, home = device_here(given.device), own_folder()
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
    _show("This machine", about_machine())
    device, limit = _device_with_room(device)
    keeper.begin({"minutes": seconds / 60, **device_visit.facts(device), **_versions()})
    try:
        tried = settings() if configs is None else configs
        if _try(device, limit, tried, begun + TRY_SHARE * seconds, tell, isolate=isolate):
            bench, end = bench_of(device, Bench), begun + seconds
            here = DoctorVisit(bench=bench, keeper=keeper, end=end, tell=tell, limit_bytes=limit)
            cases = settings_for(device.type) if wanted is None else wanted
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
        limit = room_on(device)
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
        for name, why_not in tried(configs, device, card, measure):
            is_over = time.monotonic() > end
            if not (is_over and why_not.startswith(Outcome.TIMED_OUT)):
                found[name] = why_not
            if is_over:
                break
    finally:  # also of Ctrl-C
        tell("")
        _show(f"Techniques on {device}", _about_tries(found, configs))

    if device.type == "cpu" or not found.get(PLAIN):
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
    if not has_transformers():
        lines.append(
            f"The settings of a GPT-2 were left out: {LIBRARY} is not installed "
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
