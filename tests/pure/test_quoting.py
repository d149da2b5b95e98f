"""No text of a person's becomes code: in scripts, in the panel's code, in pictures."""

import ast
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memlab import StepConfig, Workload, plots, workloads
from memlab._panel import asked
from memlab._util.units import MAX_SHOWN, in_docstring, literal, printable, shown
from memlab.errors import MemlabError
from memlab.figures import look
from memlab.techniques.script import script
from memlab.techniques.technique import Plan, Region
from tests.figure_parts import make_result, recommended, texts_of

CODE = "raise SystemExit('the text ran')"
HOSTILE = [
    f'x"""\n{CODE}\n"""',
    f"x'''\n{CODE}\n'''",
    f"x'); {CODE} #",
    f'x"); {CODE} #',
    f"x\\'); {CODE} #",
    f"x\r{CODE}",
    f"x\x0c\n{CODE}",
    f"x\u2028{CODE}\u2029{CODE}\x85{CODE}",
    f"{{{CODE}}}",
    "{0} {rule} {made!r} %s %(x)s",
    "x\\",
    'x"',
    "\\N{DASH} \\x",
    "a\x00b",
    "\u202emirrored",
    "$\\frac{$",
    "$x$",
]


class Liar(str):
    """A text whose printed forms are code."""

    def __str__(self):
        return CODE

    __repr__ = __str__

    def __format__(self, spec):
        return CODE


class LyingInt(int):
    __repr__ = __str__ = Liar.__str__
    __format__ = Liar.__format__


def texts():
    """Texts that a person might name a thing by, and pieces that end literals."""
    pieces = st.sampled_from(['"""', "'''", "\\", "\n", "\r", "\x0c", "{", "}", "\x00",
                              "#", CODE, ", ", "\u2028"])  # fmt: skip
    return st.one_of(
        st.sampled_from(HOSTILE),
        st.lists(pieces | st.text(max_size=3), min_size=1, max_size=8).map("".join),
    ).filter(lambda text: text.strip())


def shape(source):
    """Return the syntax tree of a program with its texts and numbers left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = 0
    return ast.dump(tree)


def constants(source):
    return [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]


def script_of(which):
    return script(StepConfig(checkpointing="blocks", checkpoint_modules=which), "cpu")


def script_of_plan(path, operator):
    regions = (Region(path=path, keep=frozenset({(operator, 0)})), Region(path=path + "."))
    plan = Plan(regions=regions, saved_bytes=1, plain_saved_bytes=2, peak_bytes=3,
                recompute_seconds=None)  # fmt: skip
    return script(StepConfig(memory_budget=0.5), "cpu", plan)


@settings(max_examples=30, deadline=None)
@given(texts())
@example(f'x"""\nimport os; os.system("{CODE}")\n"""')
def test_a_script_holds_a_pattern_as_text_alone_and_a_policy_not_at_all(text):
    with pytest.raises(MemlabError):
        script(StepConfig(checkpointing="blocks", checkpoint_policy=text), "cpu")
    config = StepConfig(checkpointing="blocks", checkpoint_modules=text)
    source = script(config, "cpu")
    assert shape(source) == shape(script_of("layers.*"))
    assert config.checkpoint_modules in constants(source)
    assert str(config).replace(", ", "\n    ") in constants(source)[0]


@settings(max_examples=30, deadline=None)
@given(texts(), texts())
def test_a_script_holds_the_paths_and_operators_of_a_plan_as_text_alone(path, operator):
    source = script_of_plan(path, operator)
    assert shape(source) == shape(script_of_plan("layers.0", "aten.mm.default"))
    assert {path, operator} <= set(constants(source))


def test_a_subclass_of_str_or_int_cannot_print_itself_as_code():
    config = StepConfig(
        batch_size=LyingInt(8), checkpointing="blocks", checkpoint_modules=Liar("layers.*")
    )
    source = script(config, "cpu")
    assert source == script_of("layers.*")
    chunked = script(StepConfig(batch_size=8, loss_chunks=LyingInt(2)), "cpu")
    assert chunked == script(StepConfig(batch_size=8, loss_chunks=2), "cpu")


def a_workload(name):
    return Workload(
        name=name,
        build_model=lambda: torch.nn.Linear(1, 1),
        make_batch=lambda n: torch.zeros(n, 1),
        compute_loss=lambda model, batch: model(batch).mean(),
    )


def panel_code(text, *, workload=None, namespace=None):
    config = StepConfig(checkpointing="blocks", checkpoint_modules=text)
    workload = workload or workloads.get("gpt-small")
    return asked.as_source(workload, config, text, text, check_gradients=True, namespace=namespace)


@settings(max_examples=30, deadline=None)
@given(texts())
def test_the_code_that_the_panel_shows_holds_names_as_text_alone(text):
    source = panel_code(text)
    assert shape(source) == shape(panel_code("layers.*"))
    assert text in constants(source)


@pytest.mark.parametrize("name", [*HOSTILE, "class", "two words", "_private", ""])
def test_the_panel_shows_a_variable_only_under_a_name_that_python_has(name):
    own = a_workload("own")
    source = panel_code("x", workload=own, namespace={name: own})
    assert shape(source) == shape(panel_code("x", workload=own))
    assert "mine" in panel_code("x", workload=own, namespace={name: own, "mine": own})


def test_the_panel_shows_a_policy_function_by_the_variable_that_holds_it():
    class Policy:
        __repr__ = Liar.__str__

        def __call__(self, context, op, *args, **kwargs):
            return False

    policy = Policy()
    config = StepConfig(checkpointing="blocks", checkpoint_policy=policy)
    workload = workloads.get("gpt-small")
    source = asked.as_source(workload, config, "cpu", "", namespace={"my_policy": policy})
    assert "checkpoint_policy=my_policy" in source
    source = asked.as_source(workload, config, "cpu", "")
    assert "checkpoint_policy=policy_function" in source


@settings(max_examples=50)
@given(texts())
def test_a_text_survives_its_literal_its_docstring_and_its_printed_form(text):
    assert ast.literal_eval(literal(text)) == text
    assert ast.literal_eval(literal((Liar(text), LyingInt(3), 2.5, None))) == (text, 3, 2.5, None)
    assert ast.get_docstring(ast.parse(f'"""{in_docstring(text)}"""'), clean=False) == text
    assert printable(text).isprintable()
    assert len(shown(text)) <= MAX_SHOWN
    assert shown(text).isprintable()


def test_a_value_that_has_no_literal_is_refused():
    with pytest.raises(TypeError, match="LyingObject has no literal"):
        literal(type("LyingObject", (), {"__repr__": Liar.__str__})())


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [Unprintable(), 10**5000, -(10**5000), [10**5000], list(range(10**5)), "x" * 10**6,
     Liar("x" * 10**6), {"a": {"b": {"c": Unprintable()}}}, torch.zeros(1000), b"x" * 10**6],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_any_value_is_shown_on_one_short_line(value):
    text = shown(value)
    assert 0 < len(text) <= MAX_SHOWN
    assert text.isprintable()


@pytest.mark.parametrize("text", [HOSTILE[0], "a\x00\x0c\u2028b", "$\\frac{$", "$x$"])
def test_pictures_show_a_hostile_name_as_it_is(text):
    config = StepConfig(checkpointing="blocks", checkpoint_modules=text)
    one, two = make_result(config=config, device=text), make_result()
    results = [one, replace(two, config=replace(config, checkpoint_modules="a"))]
    figures = {
        "times": plots.step_times(results, labels=[text, "b"]),
        "scatter": plots.memory_against_time(results, labels=["b", text]),
        "heat": plots.heat_map(results, rows="checkpoint_modules", columns="checkpoint_modules"),
        "recommended": plots.recommendations(recommended(*results)),
        "waterfall": plots.waterfall(results),
        "nothing": plots.placeholder(text, size=(9, 2)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        for figure in figures.values():
            plots.to_svg(figure, label=text)
            plots.to_png(figure, dpi=20)
    labels = [label.get_text() for axes in figures["heat"].axes for label in axes.get_yticklabels()]
    assert look.shorten(config.checkpoint_modules, 0.4 * 4.4 * 72) in labels
    assert any(printable(text)[:3] in shown for shown in texts_of(figures["scatter"]))


def test_half_of_a_surrogate_pair_is_refused_before_it_can_break_a_page():
    with pytest.raises(MemlabError, match="cannot be encoded as UTF-8"):
        StepConfig(checkpointing="blocks", checkpoint_modules="half \ud800")
    with pytest.raises(MemlabError, match="cannot be encoded as UTF-8"):
        a_workload("half \ud800")
    assert printable("half \ud800") == "half \\ud800"
