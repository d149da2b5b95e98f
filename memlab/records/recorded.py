"""`recorded` and `recordings`: results of real devices, shown on a machine without them.

Some records ship with memlab; `python -m benchmarks.gpu_suite` makes them. A person's own, which
`python -m memlab doctor --out FILE` makes, lie in a folder of theirs (`own_folder`). Left out:
workloads that are not of the zoo, because nothing shows that a record belongs to the same workload.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab import workloads
from memlab.arguments.checks import checked
from memlab.arguments.quoting import shown
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.costs.cost_store import cache_folder
from memlab.devices import cards
from memlab.errors import DeviceError, MemlabError
from memlab.records.records import DAMAGE, SUFFIX, Kind, Lines, RecordedRun, read_lines
from memlab.result import Outcome, Source, StepResult
from memlab.workload import Workload

FOLDER = Path(__file__).parent / "data"
NUM_NEAREST = 3
SAID = ", recorded"  # after a device's name, to distinguish it from a device of this machine


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceRecord:
    """What was recorded on one device.

    Attributes:
        name: as `memlab.recorded` takes it, such as "h200".
        device: the same, without what distinguishes it from another record of such a device.
        title: as the driver or the processor names itself.
        is_card: whether it is a CUDA card.
        runs: in the order in which they were recorded.
        lines: all of the file, visits and timings of operators among it.
        notes: sentences on what of the file could not be used.
        is_own: whether it lies in the person's own folder.
    """

    name: str
    device: str
    title: str
    is_card: bool
    runs: tuple[RecordedRun, ...]
    lines: Lines
    notes: tuple[str, ...] = ()
    is_own: bool = False

    @property
    def label(self) -> str:
        """What `StepResult.device` shows."""
        return self.name + SAID

    @property
    def fitting(self) -> tuple[RecordedRun, ...]:
        """The runs by which constants may be chosen: all that are not held out."""
        return tuple(run for run in self.runs if not run.holdout)

    def __str__(self) -> str:
        """Return one line: the device, and how many runs of which workloads."""
        names = ", ".join(dict.fromkeys(run.workload for run in self.runs))
        return f"{self.label} ({self.title}): {len(self.runs)} runs of {names}"

    __repr__ = __str__


class Recordings(tuple[DeviceRecord, ...]):
    """The records of all devices.

    Attributes:
        notes: sentences on files of the person's own folder that could not be used.
    """

    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Return the records, and after them the notes."""
        return "\n".join([super().__repr__(), *self.notes])


def recordings() -> Recordings:
    """Return what each recorded device did: first the records that ship, then a person's own.

    Their own are the files in the folder `records` of memlab's cache folder, which the environment
    variable `MEMLAB_CACHE` names. A file there that cannot be used is skipped, and `notes` of what
    is returned says why. A second record of a device is called "h200-own".

    Raises:
        MemlabError: a record that ships has a schema that this version does not know.

    >>> [str(device) for device in recordings() if device.is_card]
    []
    """
    read = (read_record(path) for path in sorted(FOLDER.glob(f"*{SUFFIX}")))
    found = [record for record in read if record is not None]
    own, notes = _own(taken={record.name for record in found})
    every = Recordings([*found, *own])
    every.notes = notes
    return every


def own_folder() -> Path:
    """Return the folder of a person's own records.

    Raises:
        MemlabError: `MEMLAB_CACHE` names no folder.
    """
    return cache_folder() / "records"


def _own(taken: set[str]) -> tuple[list[DeviceRecord], tuple[str, ...]]:
    """Return a person's own records by names that are not taken, and what could not be used."""
    found: list[DeviceRecord] = []
    notes: list[str] = []
    try:
        paths = sorted(own_folder().glob(f"*{SUFFIX}"))
    except (MemlabError, OSError) as error:
        return [], (f"Your own records cannot be read: {error}.",)

    for path in paths:
        try:
            record = read_record(path)
        except (MemlabError, OSError) as error:
            notes.append(f"This record is not used: {error}.")
            continue

        if record is None:
            notes.append(f"{path} is not used: its first line is not the beginning of a record.")
            continue

        name = _free_name(record.name, taken)
        taken.add(name)
        notes += record.notes
        found.append(_named(record, name))

    return found, tuple(notes)


def _free_name(name: str, taken: set[str]) -> str:
    """Return a name for a record: that of its device, or the device's with "own" and a number."""
    numbered = (f"{name}-own-{number}" for number in itertools.count(2))
    every = itertools.chain([name, f"{name}-own"], numbered)
    return next(each for each in every if each not in taken)


@functools.lru_cache(maxsize=32)
def _named(record: DeviceRecord, name: str) -> DeviceRecord:
    """Return a person's own record under this name."""
    runs = tuple(
        dataclasses.replace(run, result=dataclasses.replace(run.result, device=name + SAID))
        for run in record.runs
    )
    return dataclasses.replace(record, name=name, runs=runs, is_own=True)


def read_record(path: Path) -> DeviceRecord | None:
    """Return the record in a file up to the first damage; None if the first line is damaged.

    Raises:
        MemlabError: it has a schema that this version does not know.
        OSError: there is no such file.
    """
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=32)
def _read(path: Path, _mtime_ns: int, _size: int) -> DeviceRecord | None:
    lines = read_lines(path)
    visits = lines.of(Kind.VISIT)
    try:
        name, title, kind = (visits[0][field] for field in ("device", "title", "type"))
    except DAMAGE:
        return None
    if not all(isinstance(each, str) and each for each in (name, title, kind)):
        return None

    runs, notes = [], [lines.damage] if lines.damage else []
    every = lines.of(Kind.RUN)
    for line in every:
        with contextlib.suppress(*DAMAGE):
            run = _as_built(RecordedRun.from_line(line, name + SAID))
            _spec_of_run(run)  # raises for options that the zoo does not have
            runs.append(run)

    if len(runs) < len(every):
        notes.append(f"{len(every) - len(runs)} damaged runs of {path} were dropped.")

    return DeviceRecord(
        name=name,
        device=name,
        title=title,
        is_card=kind == "cuda",
        runs=tuple(runs),
        lines=lines,
        notes=tuple(notes),
    )


@checked()
def recorded(workload: Workload, config: StepConfig, device: str) -> StepResult:
    """Return what one training step cost on a real device, as it was recorded there.

    It is the latest recording of the step. If there is none, the outcome is `unsupported`, and the
    message names the closest recorded steps.

    Args:
        workload: of the zoo, with the options that were recorded.
        config: how it is trained.
        device: one of `recordings()` by name, such as "h200".

    Raises:
        DeviceError: nothing is recorded of the device; the message lists those that are.

    >>> workload = workloads.get("gpt-small", num_layers=2, sequence_length=64)
    >>> recorded(workload, StepConfig(batch_size=4), "amd-epyc").peak_allocated_bytes
    38325928
    """
    record = record_of(device)
    same = _same_workload(record, workload)
    for run in reversed(same):
        if run.result.config == config_as_built(config):
            said = (*run.result.notes, *record.notes)
            return dataclasses.replace(
                run.result, config=config, workload_name=workload.name, notes=said
            )

    return StepResult(
        outcome=Outcome.UNSUPPORTED,
        message=_missing(workload, config, record),
        source=Source.RECORDED,
        device=record.label,
        config=config,
        workload_name=workload.name,
        notes=record.notes,
    )


def is_recorded(device: object) -> bool:
    """Return whether a device name means a recorded device.

    >>> is_recorded("h200, recorded"), is_recorded("h200")
    (True, False)
    """
    return isinstance(device, str) and device.endswith(SAID)


def nearest(workload: Workload, config: StepConfig, device: str) -> list[StepConfig]:
    """Return the recorded settings of a workload, ordered by how little they differ from a config.

    Raises:
        DeviceError: nothing is recorded of the device.
    """
    same = _same_workload(record_of(device), workload)
    configs = {str(run.result.config): run.result.config for run in same}
    asked = config_as_built(config)
    return sorted(configs.values(), key=lambda other: _distance(asked, other))


def sizes(workload: Workload, device: str) -> list[RecordedRun]:
    """Return one recorded run of each size in which a workload was recorded, whatever its size is.

    Raises:
        DeviceError: nothing is recorded of the device.
    """
    runs = [run for run in record_of(device).runs if run.workload == workload.base_name]
    return list({str(run.options): run for run in runs}.values())


def config_as_built(config: StepConfig) -> StepConfig:
    """Return the config with "as-built" for "fp32", which is the same step of any zoo workload.

    The zoo builds every model in fp32, and "fp32" is what older records call that step.
    """
    if config.precision is not Precision.FP32:
        return config
    return dataclasses.replace(config, precision=Precision.AS_BUILT)


def _as_built(run: RecordedRun) -> RecordedRun:
    """Return a run of the zoo with the config that asks for it today, and its formats."""
    config = config_as_built(run.result.config)
    formats = run.result.parameter_formats
    if config.precision is Precision.AS_BUILT:
        formats = FP32_FORMATS
    result = dataclasses.replace(run.result, config=config, parameter_formats=formats)
    return dataclasses.replace(run, result=result)


def _same_workload(record: DeviceRecord, workload: Workload) -> list[RecordedRun]:
    spec = _spec(workload)
    return [run for run in record.runs if spec is not None and _spec_of_run(run) == spec]


def record_of(device: str) -> DeviceRecord:
    """Return the record of a device, by its name with or without ", recorded".

    Raises:
        DeviceError: there is none; the message lists those that are.
    """
    every = recordings()
    card = cards.find(device) if isinstance(device, str) else None
    wanted = (str(device).removesuffix(SAID), card.name if card else None)
    for record in every:
        if record.name in wanted:
            return record

    names = ", ".join(repr(record.name) for record in every) or "none yet"
    raise DeviceError(
        f"device={shown(device)} has no record; allowed is one of {names}: take another, or use "
        "memlab.predict, which needs no record" + "".join(f". {note}" for note in every.notes)
    )


def _spec(workload: Workload) -> Any:
    """Return the sizes of a workload of the zoo; None for any other."""
    spec = getattr(workload.build_model, "__self__", None)
    return spec if type(spec) in {type(known) for known in workloads.SPECS.values()} else None


def _spec_of_run(run: RecordedRun) -> Any:
    return _spec(workloads.get(run.workload, **run.options))


def _missing(workload: Workload, config: StepConfig, record: DeviceRecord) -> str:
    near = nearest(workload, config, record.name)[:NUM_NEAREST]
    if not near:
        known = dict.fromkeys(_told(run) for run in record.runs)
        return (
            f"{workload.name} of these sizes is not recorded on {record.name}; recorded are: "
            f"{'; '.join(known)}"
        )

    return (
        f"{workload.name}, {config} is not recorded on {record.name}; the nearest that are: "
        f"{'; '.join(map(str, near))}"
    )


def _told(run: RecordedRun) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in run.options.items())
    return f"{run.workload} ({options})" if options else run.workload


def _distance(config: StepConfig, other: StepConfig) -> tuple[int, float]:
    """Return in how many fields besides the batch two configs differ, and by how much in that."""
    fields = {f.name for f in dataclasses.fields(config)} - {"batch_size"}
    differing = sum(getattr(config, name) != getattr(other, name) for name in fields)
    return differing, abs(math.log(config.batch_size / other.batch_size))


def device_name(device: torch.device, title: str) -> str:
    """Return the name of a device of this machine in records.

    >>> device_name(torch.device("cpu"), "AMD EPYC 7B13")
    'amd-epyc-7b13'
    """
    if device.type == "cuda":
        return cards.of_device(device).name
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())
