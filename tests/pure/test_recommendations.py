"""What `recommend` found, as text, as tables and as a picture."""

from dataclasses import replace

from memlab import plots
from memlab.config import StepConfig
from memlab.result import FitStatus, Source
from memlab.search.answer import AtLimit, Recommendation, reason_of_limit
from tests.figure_parts import MIB, make_result, out_of_memory, recommended, texts_of


def found(seconds, mib, *, device="t4", source=Source.PREDICTED, **config):
    return make_result(
        seconds=(seconds,), source=source, device=device, config=StepConfig(**config),
        peak_allocated_bytes=10 * MIB, peak_reserved_bytes=mib * MIB,
    )  # fmt: skip


BEST = found(0.2, 40, precision="bf16-mixed")
SECOND = found(0.3, 45, memory_budget=0.5)
PLAIN = found(0.1, 60)


def lines_of(figure):
    (axes,) = figure.axes
    return {drawn.get_label(): drawn for drawn in axes.lines}


def test_the_picture_marks_the_best_the_others_and_those_too_close():
    close = found(0.25, 49, accumulation_steps=2)
    near = (Recommendation(result=close, reasons=("too close to say",), predicted=close),)
    figure = plots.recommendations(recommended(BEST, SECOND, tried=(PLAIN, close), too_close=near))
    drawn = lines_of(figure)
    markers = {
        f"fastest that fits: {BEST.config}": "*",
        f"fits too: {SECOND.config}": "D",
        f"too close to say: {close.config}": "^",
        f"predicted: {PLAIN.config}": "o",
    }
    assert {name: drawn[name].get_marker() for name in markers} == markers
    key = "\n".join(texts_of(figure))
    assert all(words in key for words in ("★ fastest that fits", "◆ fits too", "▲ too close"))
    assert "bf16-mixed" in texts_of(figure)  # the name of the best
    # the dots lie on the axis of the limit
    assert drawn[f"fastest that fits: {BEST.config}"].get_ydata()[0] == 40 * MIB
    assert drawn["limit"].get_ydata()[0] == 50 * MIB
    assert any("MiB reserved (predicted, t4)" in text for text in texts_of(figure))

    # estimates are faint and not in the front
    estimate = found(0.15, 30, memory_budget=0.2)
    figure = plots.recommendations(recommended(BEST, tried=(PLAIN,), estimated=(estimate,)))
    drawn = lines_of(figure)
    assert list(drawn["Pareto front"].get_xdata()) == [0.1, 0.2]
    faint = drawn[f"estimated: {estimate.config}"]
    assert faint.get_alpha() < drawn[f"predicted: {PLAIN.config}"].get_alpha()


def test_a_peak_far_above_a_limit_that_may_fit_with_less_cache_says_so():
    near = replace(
        found(0.2, 60), needed_bytes=51 * MIB, uncertainty={"needed_bytes": 0.03},
        memory_limit_bytes=50 * MIB, fits=False, fit=FitStatus.TOO_CLOSE,
    )  # fmt: skip
    assert reason_of_limit(near, 50 * MIB, 0.0) == (
        "too close to say whether it fits 50.0 MiB with less cache (60.0 MiB reserved, predicted "
        "where there is room; ± 3 %)"
    )


def test_what_was_measured_is_filled_and_drawn_once():
    measured = replace(BEST, source=Source.MEASURED)
    figure = plots.recommendations(recommended(measured, tried=(BEST, PLAIN)))
    drawn = lines_of(figure)
    dots = [one for name, one in drawn.items() if str(BEST.config) in name]
    assert [one.get_markerfacecolor() != "none" for one in dots] == [True]
    assert "● measured" in "\n".join(texts_of(figure))


def test_a_limit_far_above_every_setting_is_said():
    figure = plots.recommendations(recommended(BEST, limit_bytes=500 * MIB))
    assert "limit" not in lines_of(figure)
    assert "limit 500 MiB, above this picture" in "\n".join(texts_of(figure))


def test_without_a_setting_the_message_is_the_picture():
    ranked = recommended(dropped=(out_of_memory(),))
    assert texts_of(plots.recommendations(ranked)) == ["m"]


def test_every_reason_limit_and_note_has_a_cell_of_its_own():
    one = Recommendation(result=BEST, reasons=("halves <it>", "fits"), predicted=BEST)
    limits = (AtLimit(limit_bytes=MIB, result=None, best=None),)
    page = replace(
        recommended(), fitting=(one,), other_limits=limits, notes=("first", "second")
    )._repr_html_()
    for text in ("halves &lt;it&gt;", "fits", "first", "second", str(limits[0])):
        assert f"<td style='text-align:left'>{text}</td>" in page


def test_another_limit_names_the_card_that_holds_it_and_the_device_it_is_estimated_for():
    other = AtLimit(limit_bytes=8 * 2**30, card="rtx-4060", result=SECOND, best=BEST)
    assert str(other) == (
        "at 8.00 GiB, as much as rtx-4060 can hold: 50 % slower (estimated for t4), with "
        f"{SECOND.config}"
    )
    assert "as much as" not in str(replace(other, card=""))
