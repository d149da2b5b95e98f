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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memlab import workloads
from memlab._util.checks import checked
from memlab._util.units import shown
from memlab.config import FP32_FORMATS, Precision, StepConfig
from memlab.cost_model.cost_store import cache_folder, is_overhead_seconds
from memlab.devices import cards
from memlab.devices.cards import Target
from memlab.devices.clusters import check_room
from memlab.devices.here import machine_memory_bytes, resolve_device
from memlab.devices.operators import KnownCosts, OperatorCost, Signature
from memlab.errors import DeviceError, MemlabError
from memlab.result import Outcome, Source, StepResult
from memlab.store.records import (
    DAMAGE,
    SUFFIX,
    Kind,
    Lines,
    RecordedRun,
    costs_from_line,
    read_lines,
)
from memlab.trace import Phase
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


# What records know of operators, as targets of predictions.
#
# A device that is not here is asked for by its record: "h200, recorded". A card of this
# machine needs no other name: if a person has a record of it, its operators take what they
# took there, and the datasheet serves for the others. A CPU of this machine needs no
# record, because it can be asked.


def target_for(device: str | torch.device | None, config: StepConfig) -> Target:
    """Return the device that a step is predicted or planned for.

    Raises:
        DeviceError: the device is neither known nor recorded, or has fewer cards than the config
            has ranks.
    """
    tf32 = config.precision is Precision.TF32
    if isinstance(device, str) and is_recorded(device):
        return target_of(record_of(device), tf32=tf32)

    target = cards.resolve(device)
    if target.cluster is not None:
        check_room(target.cluster, config.world_size)
    is_here = target.card is not None and target.name.startswith("cuda")
    record = _own_record_of(target.card.name) if target.card and is_here else None
    return target if record is None else with_costs(target, record, tf32=tf32)


def _own_record_of(card: str) -> DeviceRecord | None:
    """Return a person's own record of a card, the one that was begun last."""
    own = [r for r in recordings() if r.is_own and r.is_card and r.device == card]
    return max(own, key=_begun, default=None)


def _begun(record: DeviceRecord) -> str:
    return str(record.lines.of(Kind.VISIT)[-1].get("visit", ""))


def with_costs(target: Target, record: DeviceRecord, *, tf32: bool) -> Target:
    """Return a target with what operators took on such a device."""
    known = _costs(record, tf32=tf32)
    if not known.operators:
        return target
    said = f"they were timed on {record.title} ({record.lines.path})"
    return dataclasses.replace(
        target, costs=dataclasses.replace(known, origin=" ".join([said, *record.notes]))
    )


@functools.lru_cache(maxsize=8)
def _costs(record: DeviceRecord, *, tf32: bool) -> KnownCosts:
    return costs_of(record.lines.of(Kind.OPERATORS), tf32=tf32)


def target_of(record: DeviceRecord, *, tf32: bool) -> Target:
    """Return the target of a prediction for a recorded device, with its costs of operators.

    Args:
        record: of the device.
        tf32: as for `costs_of`.
    """
    card = cards.find(record.device) if record.is_card else None
    if card is not None:
        size = record.lines.of(Kind.VISIT)[0].get("memory_bytes")
        if isinstance(size, int) and size > 0:  # otherwise that of the card as it is sold
            card = dataclasses.replace(card, memory_bytes=size)

    return Target(
        kind="cuda" if record.is_card else "cpu",
        card=card,
        name=record.label,
        costs=_costs(record, tf32=tf32),
    )


def costs_of(lines: Iterable[Mapping[str, Any]], *, tf32: bool) -> KnownCosts:
    """Return what the operators in lines of a record cost.

    Args:
        lines: of the kind `operators`.
        tf32: whether the step multiplies fp32 matrices as TF32, for which operators were timed
            apart.
    """
    operators: dict[Signature, OperatorCost] = {}
    overheads: dict[Phase, float] = {}
    for line in lines:
        if "packed" not in line:
            continue  # the run did not end as ok

        with contextlib.suppress(*DAMAGE):  # the prediction itself reports unknown costs
            here = {Phase(name): _overhead(value) for name, value in line["overheads"].items()}
            if line["tf32"] == tf32:
                operators |= costs_from_line(line)
            overheads |= here

    return KnownCosts(operators=operators, overheads=overheads)


def _overhead(value: Any) -> float:
    """Return the recorded time that an operator takes besides its kernel.

    Raises:
        ValueError: it is none.
    """
    if not is_overhead_seconds(value):
        raise ValueError("a time is none")
    return float(value)


# Where a step can run, and what it can hold there.


def is_here(device: str | torch.device | None) -> bool:
    """Return whether this machine has a device, so that it can measure on it."""
    try:
        resolve_device(device)
    except DeviceError:
        return False
    return True


def capacity(device: str | torch.device | None) -> int | None:
    """Return the bytes that a step can hold there at most; None if that is not known.

    Of a card it is what PyTorch can reserve, the card's memory without the CUDA context; of the
    CPU it is this machine's memory.

    Raises:
        DeviceError: the name is unknown.
    """
    if isinstance(device, str) and is_recorded(device):
        card = target_of(record_of(device), tf32=False).card
        return card.usable_bytes if card else None

    target = cards.resolve(device)
    if target.kind == "cpu":
        return machine_memory_bytes()
    return target.card.usable_bytes if target.card else None
