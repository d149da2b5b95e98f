"""The pages of the site, put where Sphinx reads them: `python docs/pages.py build/site/source`.

The folder has the layout of the repository, so that the links of a page are right on the forge and
on the site alike. In it are

- the Markdown files of the repository that the site shows, each with its words for the search of
  `docs/words.toml`;
- the notebooks; where `build/notebooks` has one as `make notebooks` has run it, that one;
- `reference/`, made here from docstrings, `StepConfig`, the techniques, the cards and the commands.

`docs/conf.py` then builds it. Sphinx is not needed here. Left out: tests, benchmarks and code.
"""

import inspect
import json
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import click
import torch

import memlab
from memlab import errors
from memlab._util.units import format_bytes
from memlab.cli.commands import memlab as command_line
from memlab.cli.commands import setting_option
from memlab.config import StepConfig
from memlab.devices.cards import Card, every_card
from memlab.techniques import registry
from memlab.techniques.source import ScriptLines
from memlab.techniques.technique import Setup, Technique, in_words

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md",
         "docs/*.gif", "docs/*.png", "memlab/*/README.md", "CITATION.cff", "LICENSE")  # fmt: skip
EXECUTED = ROOT / "build" / "notebooks"
CARD = torch.device("cuda")
INJECTED, BLANK = "injected-parameters", "...)"
WIDGET = "application/vnd.jupyter.widget-view+json"

WORDS = tomllib.loads((ROOT / "docs" / "words.toml").read_text(encoding="utf-8"))

VERBS = {
    "Predict": ("predict", "predict_batches", "predict_lengths", "predict_run"),
    "Measure": ("measure", "measure_loading", "measure_run", "watch"),
    "Verify": ("verify", "VerifyReport"),
    "Recommend": ("recommend", "largest_batch", "ladder", "compare_base"),
    "Explain": ("explain", "evidence", "explain_error", "open_snapshot", "replay_allocations",
                "graph_table"),
    "Bring a model": ("Workload", "WorkloadChoices", "SampleSize", "workloads", "from_script",
                      "from_trainer", "run_script"),
    "Describe a step or a run": ("StepConfig", "LoadingConfig", "TrainingRun", "Evaluation",
                                 "Generation", "card"),
    "Train": ("build_step", "training_step", "checkpoint_graph", "export_script",
              "integrations.estimator.StepClassifier",
              "integrations.lightning_recorder.step_recorder"),
    "Show": ("panel", "plots", "table", "to_frame", "course"),
    "Keep and compare": ("sweep", "results", "stored_results", "compare", "recorded", "recordings",
                         "forget_costs"),
    "Read a result": ("StepResult", "LoadingResult", "Outcome", "MemlabError", "require_ok"),
}  # fmt: skip
"""Every public name of `memlab`, by what a person wants to do."""

DIRECTIVES = {
    "module": "automodule", "function": "autofunction", "class": "autoclass",
    "exception": "autoexception",
}  # fmt: skip


def main(folder: Path) -> None:
    """Write all pages into this folder, in place of what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    for path in notebooks():
        _copy_notebook(path, folder / "notebooks" / path.name)
    for name, text in reference().items():
        place = folder / "reference" / f"{name}.md"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    for name, text in WORDS["keywords"].items():
        keywords = ", ".join(re.findall(r"\w+", text))  # the index takes them word by word
        _describe(folder / name, {"myst": {"html_meta": {"keywords": keywords}}})
    for name in WORDS["left_out_of_search"]["pages"]:
        _describe(folder / name, {"nosearch": True})


def _describe(page: Path, values: dict[str, Any]) -> None:
    """Put values for Sphinx before a page, or into the metadata of a notebook."""
    if (notebook := page.with_name(f"{page.name}.ipynb")).exists():
        held = json.loads(notebook.read_text(encoding="utf-8"))
        held["metadata"] |= values
        notebook.write_text(json.dumps(held), encoding="utf-8")
    else:
        place = page.with_name(f"{page.name}.md")
        text = f"---\n{json.dumps(values)}\n---\n\n{place.read_text(encoding='utf-8')}"
        place.write_text(text, encoding="utf-8")


def notebooks() -> list[Path]:
    """Return the notebooks, each as it was executed where it was."""
    sources = sorted((ROOT / "notebooks").glob("*.ipynb"))
    return [run if (run := EXECUTED / path.name).exists() else path for path in sources]


def _copy_notebook(path: Path, place: Path) -> None:
    """Copy a notebook, its folded code folded on the site too.

    Its pictures get their alternative texts, where MyST-NB looks for them. Left out are what
    papermill wrote into it; widgets, which need a kernel (the panel shows itself
    without one beside them); and what blanks of an exercise gave, which had memlab's own answers.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    notebook["metadata"].pop("widgets", None)
    notebook["cells"] = [c for c in notebook["cells"] if INJECTED not in _tags(c)]
    for cell in notebook["cells"]:
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            _tags(cell).append("hide-input")
        if "outputs" in cell:
            is_blank = BLANK in "".join(cell["source"])
            outputs = [o for o in cell["outputs"] if WIDGET not in o.get("data", {})]
            cell["outputs"] = [] if is_blank else outputs
            said = [o.get("metadata", {}).get("image/png", {}).get("alt") for o in cell["outputs"]]
            if alt := ". ".join(filter(None, said)):
                cell["metadata"]["mystnb"] = {"image": {"alt": alt}}
    place.write_text(json.dumps(notebook), encoding="utf-8")


def _tags(cell: Any) -> list[str]:
    tags: list[str] = cell["metadata"].setdefault("tags", [])
    return tags


def reference() -> dict[str, str]:
    """Return the pages of the reference that are made from code, by their names."""
    pages = {"functions": _functions(), "techniques": _techniques(), "cards": _cards(),
             "step_config": _step_config(), "commands": _commands(), "errors": _errors(),
             "types": _types()}  # fmt: skip
    for names in VERBS.values():
        pages |= {f"memlab.{name}": _public(name) for name in names}
    return pages | {f"techniques/{t.fields[0]}": _technique(t) for t in registry.EVERY}


def value_of(name: str) -> Any:
    """Return what a public name of `VERBS` stands for."""
    module, _, last = f"memlab.{name}".rpartition(".")
    __import__(module)
    return getattr(sys.modules[module], last)


def _functions() -> str:
    parts = ["# Functions and classes, by verb", ""]
    for verb, names in VERBS.items():
        parts += [f"## {verb}", "", "| name | what it does |", "|---|---|"]
        parts += [f"| [`{_last(n)}`](memlab.{n}.md) | {_first(value_of(n))} |" for n in names]
        parts.append("")
    return "\n".join([*parts, *_toctree(f"memlab.{n}" for names in VERBS.values() for n in names)])


def _public(name: str) -> str:
    value = value_of(name)
    kind = "function" if inspect.isfunction(value) else "class"
    if inspect.ismodule(value):
        kind = "module"
    elif isinstance(value, type) and issubclass(value, Exception):
        kind = "exception"
    lines = [f"# memlab.{_last(name)}", "", *_auto(kind, f"memlab.{name}")]
    if value is StepConfig:
        lines += ["", "What each field takes: [field by field](step_config.md)."]
    return "\n".join([*lines, ""])


def _auto(kind: str, name: str) -> list[str]:
    members = [] if kind == "function" else ["   :members:"]
    return ["```{eval-rst}", f".. {DIRECTIVES[kind]}:: {name}", *members, "```"]


def _step_config() -> str:
    """Return a section for each field, with its values, default and technique."""
    owner = {name: t for t in registry.EVERY for name in t.fields}
    parts = ["# StepConfig, field by field", "",
             "A step is described by [`memlab.StepConfig`](memlab.StepConfig.md). The command line "
             "has an option for each field.", ""]  # fmt: skip
    for field in fields(StepConfig):
        option = setting_option(field)
        technique = owner[field.name]
        values = ", ".join(f"`{value}`" for value in (option.metavar or "True|False").split("|"))
        parts += [
            f"## {field.name}", "", f"{_sentence(option.help or '')}", "",
            f"Values: {values}. Option: `{option.opts[0]}`. Technique: "
            f"[{_title(technique)}](techniques/{technique.fields[0]}.md).", "",
        ]  # fmt: skip
        for kind in (*get_args(field.type), field.type):
            if isinstance(kind, type) and issubclass(kind, StrEnum):
                parts += [(inspect.getdoc(kind) or "").partition("\n")[2].strip(), ""]
    return "\n".join(parts)


def _techniques() -> str:
    rows = [
        f"| [{_title(t)}](techniques/{t.fields[0]}.md) | {', '.join(f'`{f}`' for f in t.fields)} |"
        for t in registry.EVERY
    ]
    return "\n".join([
        "# Techniques", "",
        "In the order in which they apply. [What saves memory or time](../docs/saving.md) has all "
        "of them in one table, [what combines](../docs/combinations.md) every pair.", "",
        "| technique | fields of `StepConfig` |", "|---|---|", *rows, "",
        *_toctree(f"techniques/{t.fields[0]}" for t in registry.EVERY),
    ])  # fmt: skip


def _title(technique: Technique) -> str:
    title: str = WORDS["titles"][technique.fields[0]]
    return title


def _technique(technique: Technique) -> str:
    """Return what `Technique` says: settings, how equal the numbers stay, and the plain PyTorch."""
    parts = [f"# {_title(technique)}", "", *_explanation(technique), ""]
    equal = f"How equal numbers stay to those of the plain step: {technique.equivalence}."
    parts += ["## Settings", ""]
    for row in technique.savings:
        parts += [row.setting, "", f"- saves: {row.saves}"]
        parts += [f"- costs: {row.costs}"] * bool(row.costs)
        parts += [f"- not for: {row.not_for}"] * bool(row.not_for)
        parts.append("")
    links = ", ".join(f"[`{f}`](../step_config.md#{f.replace('_', '-')})" for f in technique.fields)
    parts += [f"Fields of `StepConfig`: {links}. {equal}", ""]
    for settings in technique.examples.values():
        call = in_words(settings, ", ")
        parts += [f"## `{call}`", "", *_example(technique, StepConfig(**settings)), ""]
    return "\n".join(parts)


def _explanation(technique: Technique) -> list[str]:
    """Return the docstring of the module that ends with this technique."""
    for module in vars(registry).values():
        if inspect.ismodule(module) and any(v is technique for v in vars(module).values()):
            return (inspect.getdoc(module) or "").splitlines()
    raise LookupError(technique.fields)


def _example(technique: Technique, config: StepConfig) -> list[str]:
    """Return the lines that a technique adds to an exported script, or why it has none."""
    try:
        source = technique.source(Setup(config=config, device=CARD))
    except errors.UnsupportedError as error:
        return [f"{error}."]
    places = [field.name for field in fields(ScriptLines) if field.name != "functions"]
    lines = [line for place in places for line in getattr(source, place)]
    if not lines:
        return ["It adds no line of its own to an exported script."]
    return ["What it adds to a plain PyTorch step on a card:", "", "```python", *lines, "```"]


def _cards() -> str:
    head = ("card", "name", "memory", "bandwidth, GB/s", "fp32", "tf32", "bf16", "fp16")
    flops = [f"{name}_flops_per_second" for name in head[4:]]

    def row(card: Card) -> str:
        speed = (card.memory_bytes_per_second or 0) / 1e9
        peaks = [getattr(card, name) for name in flops]
        cells = [card.title, f"`{card.name}`", format_bytes(card.memory_bytes), f"{speed:,.0f}"]
        return "| " + " | ".join(cells + [f"{p / 1e12:.4g}" if p else "-" for p in peaks]) + " |"

    return "\n".join([
        "# Cards", "",
        "The cards that `device=` takes by name; [`memlab.card`](memlab.card.md) returns one, or "
        "one of another size. Rates are dense peaks of the datasheet in TFLOP/s, memory is what "
        "CUDA can give. `memlab/devices/cards.toml` names the source of each number.", "",
        "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *map(row, every_card()), "",
    ])  # fmt: skip


def _commands() -> str:
    """Return what `memlab COMMAND --help` prints, of each command."""
    parts = ["# Options of the commands", "",
             "What `--help` prints. [The command line](../docs/command_line.md) says what the "
             "commands are for.", ""]  # fmt: skip
    for name in command_line.list_commands(click.Context(command_line)):
        command = command_line.get_command(click.Context(command_line), name)
        context = click.Context(command, info_name=f"memlab {name}", max_content_width=88)
        parts += [f"## memlab {name}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(parts)


def _errors() -> str:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    parts = ["# Errors", "", textwrap.dedent(inspect.getdoc(errors) or ""), ""]
    for kind in kinds:
        if kind is not errors.MemlabError:  # which is public, and has a page
            parts += _auto("exception", f"memlab.errors.{kind.__name__}")
    return "\n".join(
        [*parts, "", "Their base is [`memlab.MemlabError`](memlab.MemlabError.md).", ""]
    )


def _types() -> str:
    """Return a page of the classes that public functions and classes name in their annotations."""
    public = [value_of(name) for names in VERBS.values() for name in names]
    public += [vars(m)[n] for m in public if inspect.ismodule(m) for n in m.__all__]
    kinds = {kind for value in public for kind in _annotated(value)}
    found = {f"{k.__module__}.{k.__qualname__}" for k in kinds if k not in public}
    parts = [
        "# Types of results and settings",
        "",
        "What public functions take and return, beside the [public classes](functions.md).",
        "",
    ]
    for name in sorted(found, key=lambda name: _last(name).lower()):
        parts += [f"## {_last(name)}", "", *_auto("class", name), ""]
    return "\n".join(parts)


def _annotated(value: Any) -> Iterator[type]:
    """Yield the classes of memlab that the annotations of a function, or of a class, name."""
    inner = [value]
    if isinstance(value, type):
        inner += [getattr(v, "fget", v) for n, v in vars(value).items() if not n.startswith("_")]
        inner += [base for base in value.__mro__[1:] if base.__module__.startswith("memlab")]
    for each in filter(callable, inner):
        names = vars(sys.modules.get(getattr(each, "__module__", ""), memlab))
        for text in map(str, inspect.get_annotations(inspect.unwrap(each)).values()):
            for word in re.findall(r"[\w.]+", text):
                kind = names.get(word) or _by_path(word)
                if isinstance(kind, type) and kind.__module__.startswith("memlab."):
                    yield kind


def _toctree(names: Any) -> list[str]:
    return ["```{toctree}", ":hidden:", "", *names, "```", ""]


def _by_path(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, None)


def _first(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()).replace("|", "\\|")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _sentence(text: str) -> str:
    said, _, default = text.partition("  [default: ")
    return f"{said[0].upper()}{said[1:]}. Default: `{default.rstrip(']')}`."


if __name__ == "__main__":
    main(Path(sys.argv[1]))
