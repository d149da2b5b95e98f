"""The errors that memlab raises: one base class and its few kinds.

Raised is what is knowable without running: a field, a device, a type. What is found while a step
runs is an `Outcome` of the `StepResult`, with the same kind of sentence.
"""


class MemlabError(ValueError):
    """Base of every error that memlab raises; the message says what, which value, and a remedy.

    >>> import memlab
    >>> try:
    ...     memlab.workloads.get("gpt-smal")
    ... except memlab.MemlabError as error:
    ...     print(str(error).split("; ")[0])
    workload 'gpt-smal' is unknown (did you mean 'gpt-small'?)
    """


class ConfigError(MemlabError):
    """A setting that cannot be: the message names the field, the value and what is allowed."""


class DeviceError(MemlabError):
    """A device that is not in this machine, or that memlab does not know."""


class WorkloadError(MemlabError):
    """A workload that does not keep its contract: model, batch or loss."""


class UnsupportedError(MemlabError):
    """A setting that is known by name but is not built, or not possible on this device."""
