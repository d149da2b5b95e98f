"""What the "?" button and the tooltips say: how to read the page, and a row about every control.

What settings save comes from their techniques, as docs/saving.md does. Rows about controls that
belong to no technique are here.
"""

import html
import re

from memlab.techniques.every import CONTROLS, EVERY
from memlab.techniques.technique import Saving

HEADER = {
    "workload": "Workload",
    "device": "On",
    "memory_limit": "Limit",
    "check_gradients": "check gradients",
    "sample_size": "Sequence length or image size",
    "choices": "Adapter, rank, base and others",
}
"""The labels of controls that are no field of a config."""

OWN_ROWS = (
    Saving(
        setting='`workload="gpt-small"`',
        saves="nothing: it is what is trained, a model with its batches and its loss",
    ),
    Saving(
        setting='`device="h200"`',
        saves="nothing: it is where the step runs; for a card that is not in this machine all is "
        "predicted, and Run becomes Keep this prediction",
    ),
    Saving(
        setting='`memory_limit="2 GiB"`',
        saves="nothing: the peak is compared with it, allocated bytes on a CPU and reserved bytes "
        "on CUDA; empty is all that the device can hold, which for a card is its memory without "
        "the CUDA context",
    ),
    Saving(
        setting="`batch_size=8`",
        saves="activations and temporaries, in proportion to the samples in each update",
        costs="a noisier gradient from fewer samples; kernels that use a device less well",
    ),
    Saving(
        setting="`sample_size=256`",
        saves="activations and temporaries, in proportion to the tokens or pixels of each sample; "
        "plain attention in proportion to their square",
        costs="another workload: its model may have another table of positions",
        not_for="workloads without a `sample_size`, which have no such slider",
    ),
    Saving(
        setting='`choices={"adapter": "lora", "base": "nf4"}`',
        saves="gradients and optimizer state of what an adapter leaves frozen, and weights by a "
        "base in fewer bits",
        costs="another workload: what is trained, and how exactly its base computes",
        not_for="workloads without `choices`, which have no such controls",
    ),
    Saving(
        setting="`budget_solver`, `budget_estimator`",
        saves="nothing by itself: of a budget that `torch.compile` plans, it is how the plan is "
        "chosen, and how the time of each operator is estimated",
    ),
    Saving(
        setting="`world_size=4`",
        saves="activations, in proportion to the samples of each rank, and what is divided",
        costs="communication; the batch stays that of all ranks together",
    ),
    Saving(
        setting="`shard_group_size=8`",
        saves="nothing by itself: it is how many ranks share one copy of the model",
        costs="more memory in each rank the smaller it is, and less communication between groups",
    ),
    Saving(
        setting="`tensor_parallel_size=2`",
        saves="weights and activations, of which each rank computes a part for the same samples",
        costs="communication within every layer",
    ),
    Saving(
        setting="`sync_each_micro_batch=False`",
        saves="communication: the ranks average their gradients once an update",
        costs="whole gradients in each rank until then, whatever is divided",
        not_for="one micro-batch",
    ),
    Saving(
        setting="`check_gradients=True`",
        saves="nothing: after the run, the gradients are compared with those of the plain step",
        costs="the time of some more updates",
    ),
)
MORE = "more in the help (?)"

GENERAL = """<p><b>A step</b> is one optimizer update: forward and backward over each micro-batch,
then the optimizer. <b>Run</b> (or Enter in a number box) measures it in a separate process: one
pass measures memory from every allocation, and another pass measures time without any meter.</p>
<p><b>Allocated</b> is the bytes of live tensors; <b>reserved</b>, on CUDA, is what the caching
allocator holds. The peak is that of a step in which the optimizer state exists.</p>
<p>Before you press Run, and for cards that are not in this machine, the same numbers are
<b>predicted</b>: another process runs the same step on tensors without data. While you move a
slider the numbers are interpolated between predictions, and an exact prediction follows. ± is the
uncertainty. After a run the measured line is drawn over the prediction, and each <b>error</b> in
the table is predicted divided by measured, minus one. For a card that is not in this machine,
<b>Keep this prediction</b> stands in the place of Run and adds a row to the table; <b>cards</b>
shows the setting on screen on several cards side by side.</p>
<p>The <b>limit</b> is what the device can hold, or less if you type less. <b>Fit for me</b>
searches by prediction for the fastest setting that certainly fits it, moves the sliders there, and
lists what else fits under <b>what fits</b>. The batch size and whatever you changed from its
default stay; memory budget, accumulation and what an earlier search has set are searched anew.
<b>Undo</b> brings back the settings as they were.</p>
<p>Where the base of a fine-tuning is quantized, <b>what nf4 saves</b> predicts the step with a base
in bf16 too, and says what each cause adds to the peak or takes off it, whether the base helps, and
what would change that.</p>
<p>At the same batch size, <b>accumulation</b> splits the work and does not change the gradient,
unless a module draws random numbers or mixes samples. <b>Pin</b> keeps a run and names it;
<b>compare</b> draws its memory as a line over that of the setting on screen. Your code gets the
same numbers if the panel has a name, as in <code>panel = memlab.panel(workload)</code>: from
<code>panel.result</code>, <code>panel.results</code> and <code>panel.code()</code>.</p>
<p><b>Sort</b> and <b>Filter</b> choose the rows of the table, <b>stopped</b> shows the runs that
were stopped, <b>clear</b> takes unpinned runs off the table and can be undone, and <b>CSV</b> saves
all runs as a file.</p>"""


def page() -> str:
    """Return the help as HTML: how to read the page, and a table of what each control saves."""
    rows = "".join(
        f"<tr><td>{html.escape(_labels(saving))}</td><td>{_code(saving.setting)}</td>"
        f"<td>{_code(saving.saves)}</td><td>{_code(saving.costs) or 'nothing'}</td>"
        f"<td>{_code(saving.not_for)}</td></tr>"
        for saving in _savings()
    )
    names = ("control", "setting", "saves", "costs", "not for")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'{GENERAL}<table class="memlab-savings"><tr>{head}</tr>{rows}</table>'


def tooltip(field: str) -> str:
    """Return what a field saves and costs, for the tooltip of its control; "" without a row of it.

    >>> tooltip("loss_chunks").split(",")[0]
    'loss_chunks=16: saves the logits'
    """
    found = [saving for saving in _savings() if re.search(rf"\b{field}\b", saving.setting)]
    return "\n".join([*map(_sentence, found), MORE]) if found else ""


def _savings() -> list[Saving]:
    """Return all rows of the table."""
    return [*OWN_ROWS, *(saving for technique in EVERY for saving in technique.savings)]


def _labels(saving: Saving) -> str:
    """Return the labels of the controls that a row is about."""
    names = re.findall(r"`(\w+)", saving.setting)
    labels = {name: control.label for name, control in CONTROLS.items()} | HEADER
    return ", ".join(dict.fromkeys(labels[name] for name in names if name in labels))


def _sentence(saving: Saving) -> str:
    text = f"{saving.setting}: saves {saving.saves}"
    if saving.costs:
        text += f"; costs {saving.costs}"
    if saving.not_for:
        text += f"; not for {saving.not_for}"
    return text.replace("`", "")


def _code(markdown: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(markdown, quote=False))
