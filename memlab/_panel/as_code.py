"""What the button "code" shows: this step by memlab, in plain PyTorch, the panel, and its runs.

Pure functions of what is on screen and of the names of the notebook. No widgets.
"""

import dataclasses
import html
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from memlab._panel.choices import quantized_base, zoo_options
from memlab.arguments.functions import is_same_function
from memlab.arguments.quoting import is_a, literal
from memlab.config import StepConfig
from memlab.errors import MemlabError
from memlab.script import script
from memlab.workload import Workload
from memlab.workloads.finetuned import finetune_options

Part = tuple[str, str]
"""A heading and the code below it."""
NO_WORKLOAD = "# put the workload that the panel was given here, as `workload`"
NO_PANEL = """# no variable holds this panel yet: let the last lines of its cell be
#     panel = memlab.panel(...)
#     panel
# and run the cell again
"""


def parts(
    measured: str,
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    panel: object,
    namespace: Mapping[str, Any],
) -> list[Part]:
    """Return all that the button shows.

    Args:
        measured: the code that `source` returned.
        workload: on screen.
        config: the settings on screen.
        device: on screen.
        memory_limit: the typed text; "" for what the device can hold.
        panel: itself, whose variable is looked for.
        namespace: the names of the notebook.
    """
    return [
        ("This step by memlab", measured),
        *_of_quantized_base(workload, device, namespace),
        ("The same step in plain PyTorch", _plain_pytorch(workload, config, device)),
        ("All runs of this panel as a pandas DataFrame", _results_source(panel, namespace)),
        ("This panel again", panel_source(workload, config, device, memory_limit, namespace)),
    ]


def as_html(shown: Sequence[Part]) -> str:
    """Return headings and code as HTML."""
    return "".join(
        f"<p><b>{html.escape(heading)}</b></p><pre>{html.escape(code.strip())}</pre>"
        for heading, code in shown
    )


def panel_source(
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    namespace: Mapping[str, Any],
) -> str:
    """Return one line of Python that shows a panel with these settings.

    A comment comes before it if it uses a workload that is in no variable.
    """
    name, line = workload_source(workload, namespace)
    call = line.rpartition("workload = ")[2]
    made = name if call == line else call
    limit = f", memory_limit={literal(memory_limit)}" if memory_limit else ""
    asked = f"config={config_source(config, namespace)}"
    comment = f"{line}\n" if line == NO_WORKLOAD else ""
    return f"{comment}memlab.panel({made}, device={literal(device)}{limit}, {asked})"


def config_source(config: StepConfig, namespace: Mapping[str, Any]) -> str:
    """Return the call that makes a config; a function is named as the notebook names it."""
    shown = [f"batch_size={config.batch_size}"]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name != "batch_size" and value != field.default:
            shown.append(f"{field.name}={_expression(value, namespace)}")
    return f"memlab.StepConfig({', '.join(shown)})"


def _of_quantized_base(workload: Workload, device: str, namespace: Mapping[str, Any]) -> list[Part]:
    """Return the call that says what a quantized base saves and costs, if the workload has one."""
    if quantized_base(workload) is None:
        return []
    name, _ = workload_source(workload, namespace)
    call = f"print(memlab.compare_base({name}, config, device={literal(device)}))"
    return [("What its quantized base saves, and why it may not help", call)]


def _plain_pytorch(workload: Workload, config: StepConfig, device: str) -> str:
    """Return the script of a step, or as a comment why there is none."""
    kind = "cpu" if device == "cpu" else "cuda"  # all cards that are not here are CUDA cards
    try:
        return script(config, kind, workload=workload)
    except MemlabError as error:
        return f"# {error}"


def source(
    workload: Workload,
    config: StepConfig,
    device: str,
    memory_limit: str,
    *,
    has_known_memory: bool = False,
    ask: str = "measure",
    check_gradients: bool = False,
    namespace: Mapping[str, Any] | None = None,
) -> str:
    """Return Python source that measures this config, predicts it or plays it back.

    Args:
        workload: of the zoo, or a person's own.
        config: the settings.
        device: the device.
        memory_limit: the typed text; "" for what the device can hold.
        has_known_memory: whether it is known what the device can hold.
        ask: the function to call: "measure", "predict" or "recorded".
        check_gradients: whether the code also compares the gradients.
        namespace: the names of the notebook, among which a person's own workload is found.
    """
    limit = ""
    if memory_limit and ask != "recorded":
        limit = f", memory_limit={literal(memory_limit)}"
    elif ask == "predict" and has_known_memory:
        limit = f", memory_limit=memlab.card({literal(device)}).usable_bytes"

    name, line = workload_source(workload, namespace or {})
    lines = [
        "import memlab",
        "",
        line,
        f"config = {config_source(config, namespace or {})}",
        f"result = memlab.{ask}({name}, config, device={literal(device)}{limit})",
        "print(result)",
    ]
    if check_gradients and ask == "measure":
        verified = f"memlab.verify({name}, config, device={literal(device)})"
        lines += [f"report = {verified}", "print(report)"]

    return "\n".join(lines) + "\n"


def workload_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str]:
    """Return the expression that is the workload, and a line before it: its creation, or a comment.

    The expression is a variable, or makes the form on screen of a workload that a variable holds.
    """
    if (options := zoo_options(workload)) is not None:
        return "workload", f"workload = {zoo_source(workload.base_name, options)}"
    own = _variable(workload, namespace)
    if own is None and (made := _made_source(workload, namespace)):
        return made
    if own is None and (call := finetune_source(workload)):
        return "workload", f"{_without_lengths(workload)}workload = {call}"
    if own:
        return own, f"# {own} is the workload that the panel was given"
    return "workload", NO_WORKLOAD


def zoo_source(name: str, options: Mapping[str, Any]) -> str:
    """Return the call that makes a workload of the zoo."""
    given = "".join(f", {option}={literal(value)}" for option, value in options.items())
    return f"memlab.workloads.get({literal(name)}{given})"


def finetune_source(workload: Workload) -> str | None:
    """Return the call that makes a workload of `memlab.workloads.finetune`; None for any other."""
    options = finetune_options(workload)
    if options is None:
        return None
    given = ", ".join(
        literal(value) if name == "model" else f"{name}={literal(value)}"
        for name, value in options.items()
    )
    return f"memlab.workloads.finetune({given})"


def _without_lengths(workload: Workload) -> str:
    """Return a comment on lengths that are too many to be written; "" if none are missing."""
    options, lengths = finetune_options(workload), workload.lengths
    if lengths is None or options is None or "lengths" in options:
        return ""
    return f"# its {len(lengths):,} lengths are left out; a step does not depend on them\n"


def _results_source(panel: object, namespace: Mapping[str, Any]) -> str:
    """Return code that gives the runs; without a variable, from the output of the panel's cell."""
    if name := _variable(panel, namespace):
        return f"{name}.results"
    outputs = namespace.get("Out")  # which a notebook may use for something else
    for number, output in outputs.items() if isinstance(outputs, Mapping) else ():
        if output is panel:
            return f"Out[{number}].results"
    return f"{NO_PANEL}panel.results"


def _expression(value: Any, namespace: Mapping[str, Any]) -> str:
    """Return the value of a setting as Python: a literal, or the variable that holds a function."""
    if not callable(value):
        return literal(value)
    # a function has no literal; an undefined name shows where to put it
    return _variable(value, namespace) or "policy_function"


def _made_source(workload: Workload, namespace: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return an expression and a comment, if a variable holds the workload in another form."""
    for held in namespace.values():
        if not is_a(held, Workload) or not (name := _variable(held, namespace)):
            continue
        call = f"{name}{_chosen_source(held, workload)}{_resized_source(held, workload)}"
        if call != name and _is_same(held, workload):
            return call, f"# {name} is the workload that the panel was given"
    return None


def _chosen_source(held: Workload, shown: Workload) -> str:
    """Return the call that gives a workload the choices of another one; "" for none."""
    if held.choices is None or shown.choices is None:
        return ""
    own, asked = held.choices.values, shown.choices.values
    changed = {name: value for name, value in asked.items() if value != own.get(name)}
    given = ", ".join(f"{name}={literal(value)}" for name, value in changed.items())
    return f".chosen({given})" if given else ""


def _resized_source(held: Workload, shown: Workload) -> str:
    """Return the call that gives a workload the sample size of another one; "" for none."""
    own, asked = held.sample_size, shown.sample_size
    if own is None or asked is None or own.value == asked.value:
        return ""
    return f".resized({asked.value})"


def _is_same(held: Workload, shown: Workload) -> bool:
    """Return whether a workload is another one once it has its choices and its sample size."""
    size, asked = held.sample_size, shown.sample_size
    if held.choices is None or shown.choices is None:
        return size is not None and asked is not None and size.make_workload is asked.make_workload
    try:
        made = held.chosen(**shown.choices.values)
        if asked is not None:
            made = made.resized(asked.value)
    except MemlabError:
        return False
    return made.name == shown.name and is_same_function(made.build_model, shown.build_model)


def _variable(value: Any, namespace: Mapping[str, Any]) -> str | None:
    """Return the name of the notebook's variable that holds this value, if it has one."""
    for name, held in namespace.items():
        is_name = name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_")
        if held is value and is_name:
            return name
    return None
