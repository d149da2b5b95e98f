"""`SourceReading`: collects what becomes of each field while a source is read.

A field that no rule names is reported as not imported, so none can be lost without a word.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from memlab.arguments.checks import count
from memlab.config import StepConfig
from memlab.importing.imported import FieldStatus, ImportedTraining, SourceField
from memlab.workload import Workload

UNKNOWN = "memlab does not know this field"
OFF = "it is off"
SHARDING = (
    "training on several devices is not imported: the config is the step of one process, which "
    "holds the whole model; pass world_size, the number of ranks, to import it"
)
NO_WORKLOAD = "there is no workload; another field that is not imported says why"
SECRET = ("token", "api_key", "password")


class SourceReading:
    """The fields of one source, and the settings of memlab that they have given so far.

    Attributes:
        values: the fields that the source has, by name.
        settings: fields of `StepConfig`.
        is_complete: False if the loss or the data cannot be taken, so that there is no workload.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)
        self.settings: dict[str, Any] = {}
        self.is_complete = True
        self._reported: dict[str, SourceField] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a part of the source that is no field of its arguments, such as a data set."""
        self.values[name] = value

    def add_if_missing(self, name: str, value: Any) -> None:
        """Add a part of the source unless it has one of this name."""
        self.values.setdefault(name, value)

    def take(self, name: str, why: str = "", **settings: Any) -> None:
        """Report a field as imported into these settings."""
        self.settings |= settings
        self._report(name, FieldStatus.IMPORTED, _written(settings), why)

    def take_into(self, part: str, name: str, why: str = "") -> None:
        """Report a field as imported into a part of the workload, such as "make_batch"."""
        self._report(name, FieldStatus.IMPORTED, f"workload.{part}", why)

    def same(self, name: str, became: str) -> None:
        """Report a field whose value is what memlab has anyway."""
        self._report(name, FieldStatus.IMPORTED, became, "memlab has the same value")

    def leave(self, name: str, why: str, **instead: Any) -> None:
        """Report a field as not imported, and set what stands in its place."""
        self.settings |= instead
        self._report(name, FieldStatus.NOT_IMPORTED, _written(instead), why)

    def skip(self, name: str, why: str = OFF) -> None:
        """Report a field as one that does not concern the step."""
        self._report(name, FieldStatus.NOT_CONCERNED, "", why)

    def skip_all(self, names: Iterable[str], why: str) -> None:
        """Report those of these fields that the source has as not concerning the step."""
        for name in names:
            self.skip(name, why)

    def leave_unless(self, off: Iterable[Any], name: str, why: str) -> None:
        """Report a field as not imported unless it has one of the values that mean nothing."""
        if name in self.values:
            value = self.values[name]
            is_off = any(value is each or (type(value) is type(each) and value == each)
                         for each in off)  # fmt: skip
            if is_off:
                self.skip(name)
            else:
                self.leave(name, why)

    def whole_number(self, name: str, otherwise: int) -> int:
        """Return a field that must be a whole number of at least 1.

        Raises:
            ConfigError: it is another value; the message names the field of the source.
        """
        value = self.values.get(name)
        return otherwise if value is None else count(1)(name, value)

    def finish(self, source: str, workload: Workload | None = None) -> ImportedTraining:
        """Return the result. A field that nothing has reported is reported as unknown."""
        for name in self.values.keys() - self._reported.keys():
            self._report(name, FieldStatus.NOT_IMPORTED, "", UNKNOWN)
        return ImportedTraining(
            source=source,
            config=StepConfig(**self.settings),
            workload=workload if self.is_complete else None,
            fields=tuple(self._reported[name] for name in self.values),
        )

    def _report(self, name: str, status: FieldStatus, became: str, why: str) -> None:
        if name not in self.values:
            return
        value = self.values[name]
        if value is not None and name.endswith(SECRET):
            value = "(hidden)"
        self._reported[name] = SourceField(
            name=name, value=value, status=status, became=became, why=why
        )


def _written(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def flattened(config: Mapping[Any, Any], before: str = "") -> dict[str, Any]:
    """Return the leaves of a nested config by names that are joined by dots.

    >>> flattened({"fp16": {"enabled": True}, "steps": 2, "amp": {}})
    {'fp16.enabled': True, 'steps': 2, 'amp': {}}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found
