"""A fine-tuning as a person writes it, with transformers, peft, bitsandbytes and torchao.

A quantized base is loaded by `from_pretrained`, as people do it, but from random weights. A comment
says which lines load those of a checkpoint instead.
"""

import textwrap
from collections.abc import Mapping
from typing import Any

from memlab.arguments.quoting import in_docstring
from memlab.exporting.definitions import Definitions
from memlab.exporting.values import call, given
from memlab.workload import Workload
from memlab.workloads.finetuned import CAUSAL, Finetuned, finetune_import, made_of

PEFT = "peft"

PLAIN = """\
# with trained weights:
# model = {auto}.from_pretrained("a name, or a folder", dtype=torch.{dtype})
model = {auto}.from_config(config)"""

QUANTIZED = """\
# with trained weights, in place of the two statements below:
# model = {auto}.from_pretrained(
#     "a name, or a folder",
#     quantization_config=quantization,
#     dtype=torch.{dtype},
#     device_map=DEVICE,
# )
base = {auto}.from_config(config)
model = type(base).from_pretrained(
    None,
    config=config,
    state_dict=base.state_dict(),
    quantization_config=quantization,
    dtype=torch.{dtype},
    device_map=DEVICE,
)"""

BATCH = '''
def make_batch(n):
    """Return n samples of random tokens, which are also what is predicted."""
    tokens = torch.randint({words}, (n, {size}))
    return {{"input_ids": tokens, "labels": tokens.clone()}}
'''.strip()


def has_quantized_base(workload: Workload) -> bool:
    """Return whether a workload fine-tunes a base that is loaded quantized."""
    made = made_of(workload)
    return made is not None and made.is_quantized


def texts(workload: Workload, definitions: Definitions) -> dict[str, str]:
    """Return functions of a workload as text, and add what they need to the script.

    They are those that `finetune` made, of its model and batch; {} for any other workload.

    Raises:
        WorkloadError: a library is missing; the message has the command that installs it.
        UnsupportedError: transformers does not quantize this base as memlab does.
    """
    made = made_of(workload)
    if made is None:
        return {}
    lines = [
        f'"""Return {in_docstring(made.label)} with random weights.',
        "",
        f"Fine-tuning: {in_docstring(made.words)}.",
        '"""',
        *_base(made, definitions),
        "model.config.use_cache = False  # it is for generating",
        *_adapter(made, definitions),
    ]
    body = textwrap.indent("\n".join(lines), "    ")
    found = {"build_model": f"def build_model():\n{body}"}
    if workload.make_batch == made.model.batch:
        words = made.model.config().get_text_config().vocab_size
        found["make_batch"] = BATCH.format(words=words, size=made.model.size)
    return found


def _base(made: Finetuned, definitions: Definitions) -> list[str]:
    """Return the lines that make `model`, in the number format of the base."""
    values = made.built.values
    lines = [f"config = {_call(definitions, 'AutoConfig', values, method='.for_model')}"]
    text = PLAIN
    if (loading := made.loading()) is not None:
        text = QUANTIZED
        lines.append(f"quantization = {_call(definitions, *loading)}")
    auto = _bound(definitions, CAUSAL)
    return [*lines, text.format(auto=auto, dtype=values["dtype"])]


def _adapter(made: Finetuned, definitions: Definitions) -> list[str]:
    """Return the lines that put the adapter on `model`, and return it."""
    if made.adapter == "none":
        return ["return model"]
    lines = []
    if made.prepare_for_kbit:
        prepare = _bound(definitions, "prepare_model_for_kbit_training", PEFT)
        lines.append(f"model = {prepare}(model, use_gradient_checkpointing=False)")
    name, values = made.peft_arguments
    lines.append(f"adapter = {_call(definitions, name, values, PEFT)}")
    return [*lines, f"return {_bound(definitions, 'get_peft_model', PEFT)}(model, adapter)"]


def _bound(definitions: Definitions, name: str, library: str = "transformers") -> str:
    """Return the name under which the script has something of a library."""
    return definitions.bind(name, getattr(finetune_import(library), name))


def _call(
    definitions: Definitions,
    name: str,
    values: Mapping[str, Any],
    library: str = "transformers",
    method: str = "",
) -> str:
    """Return the call of something of a library, with values by their names."""
    named = [given(key, definitions.expression(value)) for key, value in values.items()]
    return call(f"{_bound(definitions, name, library)}{method}", named)
