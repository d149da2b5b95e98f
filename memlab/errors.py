"""The errors that memlab raises.

memlab raises an error for a problem that can be found before anything runs: a wrong field, device
or type. A problem that shows while a step runs becomes the `Outcome` of the `StepResult`, with the
same kind of sentence as its message.
"""

from collections.abc import Mapping
from typing import Any


class MemlabError(ValueError):
    """Base of every error that memlab raises. The message names the value and a remedy.

    >>> import memlab
    >>> try:
    ...     memlab.workloads.get("gpt-smal")
    ... except memlab.MemlabError as error:
    ...     print(str(error).split("; ")[0])
    workload 'gpt-smal' is unknown (did you mean 'gpt-small'?)
    """


class ConfigError(MemlabError):
    """A setting is not allowed. The message names the field, the value and what is allowed."""


class ArgumentError(ConfigError, TypeError):
    """A function has no such argument, or lacks one: a `TypeError`, as Python raises by itself."""


class DeviceError(MemlabError):
    """A device is not in this machine, or memlab does not know it."""


class WorkloadError(MemlabError):
    """The model, the batch or the loss of a workload breaks the contract of `Workload`."""


class UnsupportedError(MemlabError):
    """A setting is not implemented, or this device or combination of settings cannot do it.

    Attributes:
        remedies: settings by field, as far as they are known; each of them lifts the refusal.
    """

    remedies: tuple[Mapping[str, Any], ...] = ()


class StoreError(MemlabError):
    """The store of results cannot be read or written. The message says why and what to do."""
