"""`sweep`: one workload under many settings, each run once, whatever is interrupted."""

import contextlib
import itertools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memlab._util.checks import MOST_THINGS, anything, checked, count, of_type, seconds, size
from memlab._util.units import is_a, shown
from memlab.config import StepConfig, allowed_value
from memlab.devices.cards import resolve
from memlab.devices.here import resolve_device
from memlab.errors import ConfigError, StoreError
from memlab.result import Outcome, Source, StepResult
from memlab.running import Progress
from memlab.runtime.bar import shows_progress
from memlab.runtime.isolation import teller
from memlab.search.sweep_tasks import Means, SweepLoop, Task, Wanted, without_run
from memlab.store.database import RunArguments, owner, reading, store_path
from memlab.store.frames import COSTS, table, to_frame
from memlab.store.identity import workload_key
from memlab.store.keeping import hardware_of, setting_of
from memlab.store.recorded import is_here, is_recorded
from memlab.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

# The settings of a sweep: a list of configs, or all combinations of a dict of lists.

Configs = Sequence[StepConfig] | Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a sweep.

    Attributes:
        asked: the values of a combination by field; empty for a config of a list.
        config: None if the combination is refused.
        refusal: why; empty if it is not.
    """

    asked: Mapping[str, Any]
    config: StepConfig | None
    refusal: str = ""


def settings_of(configs: Any, base: StepConfig | None) -> tuple[Setting, ...]:
    """Return the settings in order; of a dict the last field varies fastest.

    Raises:
        ConfigError: it is no such list or dict, names a field that does not exist, or holds a value
            that no config allows. A combination of allowed values that is not allowed is a setting
            that is refused.
    """
    if is_a(configs, Mapping):
        return _combinations(_lists(configs), base or StepConfig())
    if base is not None:
        raise ConfigError(
            "base is for a dict of lists; a list holds whole configs, so leave base out"
        )

    try:
        listed = of_type("configs", configs, Sequence[StepConfig])
    except ConfigError as error:
        raise ConfigError(
            f"{error} of StepConfig, or a dict of lists: {{'batch_size': [8, 16]}}"
        ) from error
    if not listed:
        raise ConfigError("configs=[] holds no setting; add a StepConfig")
    return tuple(Setting(asked={}, config=config) for config in listed)


def _lists(configs: Any) -> dict[str, tuple[Any, ...]]:
    """Return the values by field, each of them checked by itself."""
    known = [field.name for field in fields(StepConfig)]
    lists, num_settings = {}, 1
    for name, values in dict(configs).items():
        if name not in known:
            raise ConfigError(
                f"configs name {shown(name)}; allowed is a field of StepConfig: {', '.join(known)}"
            )
        try:
            lists[name] = of_type(f"configs[{name!r}]", values, Sequence[Any])
        except ConfigError as error:
            raise ConfigError(f"{error}: {{{name!r}: [{shown(values)}]}}") from error
        if not lists[name]:
            raise ConfigError(f"configs[{name!r}]=[] holds no value; add one, or leave it out")

        for value in lists[name]:
            allowed_value(name, value)
        num_settings *= len(lists[name])

    if num_settings > MOST_THINGS:
        raise ConfigError(
            f"configs have {num_settings} combinations; allowed are {MOST_THINGS}: shorten a list"
        )
    return lists


def _combinations(lists: Mapping[str, tuple[Any, ...]], base: StepConfig) -> tuple[Setting, ...]:
    found = []
    for values in itertools.product(*lists.values()):
        asked = dict(zip(lists, values, strict=True))
        try:
            found.append(Setting(asked=asked, config=replace(base, **asked)))
        except ConfigError as error:
            found.append(Setting(asked=asked, config=None, refusal=str(error)))
    return tuple(found)


# `SweepTable`: the results of a sweep, in the order of its settings.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SweepTable:
    """What a sweep found.

    Attributes:
        settings: what was asked for, in order; a combination that no config allows has no result.
        by_setting: the result of each setting, or None.
        num_reused: how many results were in the store already.
        notes: sentences that a reader of the results must know.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [2, 4]}, "t4")
    >>> list(table.frame()["batch_size"])
    [2, 4]
    """

    settings: tuple[Setting, ...]
    by_setting: tuple[StepResult | None, ...]
    num_reused: int = 0
    notes: tuple[str, ...] = ()

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results, without combinations that no config allows."""
        return tuple(result for result in self.by_setting if result is not None)

    @property
    def varied(self) -> list[str]:
        """The fields of the config in which the settings differ."""
        asked = {name for setting in self.settings for name in setting.asked}
        configs = [setting.config for setting in self.settings if setting.config is not None]
        for field in fields(StepConfig):
            if len({str(getattr(config, field.name)) for config in configs}) > 1:
                asked.add(field.name)
        return [field.name for field in fields(StepConfig) if field.name in asked]

    def frame(self) -> "pd.DataFrame":
        """Return one row a setting, in order: the columns of `memlab.to_frame`.

        A combination that no config allows has the values that were asked for, the outcome
        "unsupported" and the reason.
        """
        import pandas as pd

        found = to_frame(self.results)
        found.index = pd.Index([i for i, each in enumerate(self.by_setting) if each is not None])
        refused = {
            i: {**setting.asked, "outcome": str(Outcome.UNSUPPORTED), "message": setting.refusal}
            for i, setting in enumerate(self.settings)
            if setting.config is None
        }
        if not refused:
            return found
        if found.empty:
            return pd.DataFrame.from_dict(refused, orient="index")

        both = found.astype(object).T.to_dict() | refused
        whole = pd.DataFrame.from_dict(both, orient="index").sort_index()
        names = [*found.columns, *(name for name in whole.columns if name not in found.columns)]
        return whole[names].infer_objects()

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain JSON types; timelines are left to the store."""
        results = (replace(result, timeline=None) for result in self.results)
        refused = [
            {"settings": {name: _plain(value) for name, value in setting.asked.items()},
             "message": setting.refusal}
            for setting in self.settings
            if setting.config is None
        ]  # fmt: skip
        return {
            "results": [result.to_dict() for result in results],
            "refused": refused,
            "num_reused": self.num_reused,
            "notes": list(self.notes),
        }

    def __len__(self) -> int:
        """Return the number of settings."""
        return len(self.settings)

    def __iter__(self) -> Iterator[StepResult]:
        """Iterate over the results."""
        return iter(self.results)

    def __str__(self) -> str:
        """Return one line: how many settings ended how, and how many were in the store."""
        outcomes = [str(result.outcome) for result in self.results]
        num_refused = len(self.settings) - len(self.results)
        outcomes += [str(Outcome.UNSUPPORTED)] * num_refused
        counts = [f"{outcomes.count(name)} {name}" for name in dict.fromkeys(outcomes)]
        said = f"sweep of {len(self)} settings: {', '.join(counts)}"
        if self.num_reused:
            said += f"; {self.num_reused} were in the store"
        return " ".join([f"{said}.", *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return a table for notebooks: what varies, and what it costs."""
        frame = self.frame()
        shown = [name for name in (*self.varied, *COSTS) if name in frame.columns]
        told = table(frame[shown].dropna(axis="columns", how="all"))
        return replace(told, notes=self.notes)._repr_html_()


def _plain(value: Any) -> Any:
    """Return a value of a setting as JSON has it."""
    return value if value is None or isinstance(value, bool | int | float) else str(value)


OF_THIS_MACHINE = (ThreadPoolExecutor, ProcessPoolExecutor)
NO_IDENTITY = (
    "The workload cannot be pickled, or is too large, to be recognised. So a later sweep does not "
    "find these results and runs every setting again."
)


@checked(
    configs=anything,
    path=anything,
    repeats=count(1),
    memory_limit=size,
    timeout_seconds=seconds,
)
@shows_progress
def sweep(
    workload: Workload,
    configs: Sequence[StepConfig] | Mapping[str, Sequence[Any]],
    device: str | torch.device | None = None,
    *,
    base: StepConfig | None = None,
    executor: Executor | None = None,
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout_seconds: float = 120,
    path: str | os.PathLike[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    progress: bool = True,
    on_result: Callable[[StepResult], None] | None = None,
    pause: threading.Event | None = None,
    cancel: threading.Event | None = None,
) -> SweepTable:
    """Run one workload under many settings and return a table of what each costs.

    Each result is written to the store (`memlab.results`) before it is shown. A sweep that was
    interrupted, even by `kill -9`, is resumed by the same call: a setting that the store has for
    the same code of the workload, config, device, versions, seed, limit and repeats is not run
    again, unless it has failed. Two sweeps at once share the settings between them. One measurement
    runs at a time on a machine.

    Args:
        workload: what is trained.
        configs: configs, or a dict of lists of which all combinations are run. A combination that
            no config allows is a row of the table with the reason.
        device: measured if it is in this machine, else predicted, as `memlab.predict` takes it.
        base: what a dict of lists varies; None is `StepConfig()`.
        executor: runs the settings; None runs one after another in this thread. For an executor of
            other machines, such as `dask.distributed.Client(...).get_executor()`, "cpu" and "cuda"
            are devices of those machines, and a setting counts as run whichever of them ran it.
        repeats: timed steps of each setting.
        warmup: untimed steps before them.
        seed: set before the model, the batch and each step.
        memory_limit: as for `measure`.
        timeout_seconds: after which a setting ends as `timed_out`.
        path: of another store.
        on_progress: called in this thread with a `Progress`, its fraction that of the whole sweep.
        progress: as for `measure`.
        on_result: called in this thread with each result, after it was written.
        pause: while this event is set, no further setting is begun.
        cancel: once this event is set, the sweep ends; what has not ended is `cancelled`. What an
            executor is running is waited for.

    Raises:
        MemlabError: an argument is not allowed, or the store cannot be used when the sweep begins.
            A store that fails later becomes a note of the results that are not in it.

    >>> import memlab
    >>> workload = memlab.workloads.get("vit-digits")
    >>> table = memlab.sweep(workload, {"batch_size": [8], "accumulation_steps": [2, 16]}, "t4")
    >>> [str(outcome) for outcome in table.frame()["outcome"]]
    ['ok', 'unsupported']
    """
    settings = settings_of(configs, base)
    place = _device_of(device, executor)
    options: dict[str, Any] = {
        "seed": seed, "memory_limit": memory_limit, "timeout_seconds": timeout_seconds,
    }  # fmt: skip
    if place.source is Source.MEASURED:
        options |= {"repeats": repeats, "warmup": warmup}

    asked = RunArguments(
        seed=seed,
        repeats=options.get("repeats"),
        warmup=options.get("warmup"),
        memory_limit_bytes=size("memory_limit", memory_limit),
        timeout_seconds=timeout_seconds,
    )
    key = workload_key(workload)
    wanted, index_of = _wanted(settings, key, place, asked)
    file = store_path(path)
    with owner(file) as name:
        means = Means(
            task=Task(workload=workload, device=place.device, source=place.source, options=options),
            asked=asked,
            workload_key=key,
            path=file,
            owner=name,
            executor=executor,
            tell=teller(on_progress),
            show=teller(on_result, "on_result", "a StepResult"),
            pause=pause or threading.Event(),
            cancel=cancel or threading.Event(),
        )
        loop = SweepLoop(wanted, means)
        loop.run()

    found = [loop.results.get(i) or _not_run(means.task, each.config) for i, each in
             enumerate(wanted)]  # fmt: skip
    notes = [loop.problem, NO_IDENTITY if key is None else _of_other_code(file, workload, key)]
    return SweepTable(
        settings=settings,
        by_setting=tuple(None if index is None else found[index] for index in index_of),
        num_reused=loop.num_reused,
        notes=tuple(note for note in notes if note),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepDevice:
    """Where the settings of a sweep run.

    Attributes:
        device: as `measure` or `predict` takes it.
        source: measured or predicted.
        hardware: what the numbers depend on besides the name of the device.
    """

    device: str | None
    source: Source
    hardware: dict[str, str]


def _device_of(device: str | torch.device | None, executor: Executor | None) -> SweepDevice:
    """Return where settings run: measured where the device is, predicted where it is nowhere.

    Raises:
        DeviceError: it is no device and no card that memlab knows.
    """
    is_elsewhere = executor is not None and not isinstance(executor, OF_THIS_MACHINE)
    if is_elsewhere and (device is None or re.fullmatch(r"(cpu|cuda)(:\d+)?", str(device))):
        name = None if device is None else str(device)
        hardware = {"device_name": "of the machines of an executor"}
        return SweepDevice(device=name, source=Source.MEASURED, hardware=hardware)

    if is_here(device):
        here = resolve_device(device)
        return SweepDevice(device=str(here), source=Source.MEASURED, hardware=hardware_of(here))
    name = str(device) if is_recorded(device) else resolve(device).name
    return SweepDevice(device=name, source=Source.PREDICTED, hardware={})


def _wanted(
    settings: Sequence[Setting], key: str | None, place: SweepDevice, asked: RunArguments
) -> tuple[list[Wanted], list[int | None]]:
    """Return what to run, each setting once, and the index in it for every setting."""
    wanted: list[Wanted] = []
    first: dict[str, int] = {}
    index_of: list[int | None] = []
    for each in settings:
        if each.config is None:
            index_of.append(None)
            continue

        setting = setting_of(
            key, each.config, asked, place.source, str(place.device), place.hardware
        )
        said = setting or str(asdict(each.config))
        if said not in first:
            first[said] = len(wanted)
            wanted.append(Wanted(config=each.config, setting=setting))
        index_of.append(first[said])
    return wanted, index_of


def _not_run(task: Task, config: StepConfig) -> StepResult:
    said = "stopped before it began; call sweep again to run what is left"
    return without_run(task, config, Outcome.CANCELLED, said)


def _of_other_code(file: Path, workload: Workload, key: str) -> str:
    """Return a note on results under the name of a workload that are of other code or data."""
    number = 0
    # notes of the results say why, if the store can no longer be used
    with contextlib.suppress(StoreError), reading(file) as connection:
        if connection is not None:
            number = connection.execute(
                "SELECT count(*) FROM result WHERE workload_name = ? AND workload_key != ?",
                (workload.name, key),
            ).fetchone()[0]
    if not number:
        return ""
    return (
        f"The store has {number} results of another workload named {workload.name!r}: its code, or "
        "whole numbers in its batch, are different. They were not used."
    )
