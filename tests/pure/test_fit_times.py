import numpy as np
import pytest

from benchmarks import fit_times, time_doubt, timm_operators, timm_steps
from benchmarks.fit_times import OF_OPERATORS, Prior, fitted
from benchmarks.operator_rows import Measured, card_of, read
from memlab.cost_model import roofline


def of_two(prior=(1.0, 1.0), spread=3.0):
    return Prior(("a", "b"), np.log(prior), np.full(2, spread))


def test_a_fit_finds_the_factors_that_made_the_times():
    draw = np.random.default_rng(0)
    ideal = draw.lognormal(size=(200, 2))
    measured = 2.0 * ideal[:, 0] + 5.0 * ideal[:, 1]

    def errors(values):
        return np.log((values["a"] * ideal[:, 0] + values["b"] * ideal[:, 1]) / measured)

    found = fitted(of_two(), errors, np.ones(200))
    assert found["a"] == pytest.approx(2.0, rel=0.01)
    assert found["b"] == pytest.approx(5.0, rel=0.01)

    measured[:20] *= 10  # a tenth of the rows is far off
    found = fitted(of_two(), errors, np.ones(200))
    assert found["a"] == pytest.approx(2.0, rel=0.1)
    assert found["b"] == pytest.approx(5.0, rel=0.1)


def test_a_factor_without_data_stays_at_its_prior():
    found = fitted(of_two((1.0, 7.0)), lambda values: np.log([values["a"] / 3.0]), np.ones(1))
    assert found["b"] == pytest.approx(7.0)
    assert 2.5 < found["a"] <= 3.01


def test_the_half_width_is_the_quantile_with_the_correction_for_few_samples():
    errors = np.arange(1, 20) / 100  # 19 errors: the 18th covers ceil(20 * 0.9)
    assert time_doubt.half_width(errors) == pytest.approx(0.18)
    assert time_doubt.half_width(np.array([0.1, 0.3])) == pytest.approx(0.3)


def test_coverage_is_judged_on_what_was_left_out():
    errors = np.array([0.1] * 10 + [0.5] * 10)
    assert time_doubt.coverage(errors, ["small"] * 10 + ["large"] * 10) == pytest.approx(0.5)
    assert time_doubt.coverage(errors, ["one", "other"] * 10) == 1.0


def test_steps_with_erratic_kernels_have_a_wider_half_width():
    errors = np.array([0.1] * 20 + [0.5] * 20)
    share = np.array([0.0] * 20 + [0.5] * 20)
    plain, erratic = time_doubt.widths(errors, share)
    assert plain == pytest.approx(0.1)
    assert time_doubt.stated(plain, erratic, share) == pytest.approx(errors)


def test_rows_are_the_operators_that_they_name():
    rows = read()
    assert len(rows) == 6941
    work = {row.operator: row.work for row in rows[::-1]}
    assert work["linear"].parts[0].group == work["bmm"].parts[0].group == "product"
    assert {work[name].parts[0].group for name in ("ln", "softmax")} == {"normalize_forward"}
    assert {work[name].parts[0].group for name in ("add", "addu", "gelu", "pow")} == {"stream"}
    assert work["bmm"].flops > 0 == work["gelu"].flops
    assert card_of("Tesla T4").name == "t4"


def test_the_table_is_what_a_fit_of_the_operators_gives():
    values = fit_times.fit_of_operators()
    found = roofline.table()
    assert found.reach["high"] == pytest.approx(values["reach.high"], rel=1e-3)
    assert found.reach["low"] == pytest.approx(values["reach.low"], rel=1e-3)
    assert found.joules_per_flop == pytest.approx(values["joules_per_flop"], rel=1e-3)
    factors = fit_times.factors_of(values, "product_fp32")
    assert found.groups["product_fp32"].compute == pytest.approx(factors.compute, rel=1e-3)


def test_a_card_that_was_left_out_is_closer_than_by_a_plain_roofline():
    from benchmarks import operator_times

    rows = read()[::7]
    given = fit_times.operators_of(rows)
    without, plain = fit_times.without_each_card(given), operator_times._plain(given)
    errors = [np.abs(seconds / given.measured - 1) for seconds in (without, plain)]
    for name in ("t4", "v100-pcie-32", "a100-pcie-40"):
        own = given.card == name
        assert np.median(errors[0][own]) < np.median(errors[1][own])


def test_the_time_of_a_row_has_its_measurements_overhead():
    given = fit_times.operators_of([row for row in read() if row.operator == "gelu"][:5])
    values = {name: prior for name, (prior, _) in OF_OPERATORS.items()}
    more = values | {"overhead": values["overhead"] + 1.0}
    seconds = [fit_times.seconds_of_operators(v, given) for v in (values, more)]
    assert seconds[1] - seconds[0] == pytest.approx(np.ones(5))
    assert isinstance(given.rows[0], Measured)


@pytest.mark.parametrize(
    ("model", "family"),
    [("tf_efficientnet_b0", "efficientnet"), ("gluon_seresnext50_32x4d", "resnet"),
     ("resnet50", "resnet"), ("tv_resnet50", "resnet"), ("deit3_base_patch16_224", "vit"),
     ("swinv2_tiny_window8_256", "swin"), ("ens_adv_inception_resnet_v2", "inception"),
     ("vit_base_patch16_224", "vit"), ("ecaresnet26t", "resnet")],
)  # fmt: skip
def test_families_do_not_depend_on_where_weights_come_from(model, family):
    assert fit_times.family_of(model) == family


@pytest.mark.parametrize(("batch", "larger"), [(512, None), (384, 512), (100, 128), (2, 3)])
def test_the_next_larger_batch_is_the_one_that_was_tried_before(batch, larger):
    assert timm_steps.next_larger(batch) == larger


def test_a_folder_without_steps_says_how_to_record_them(tmp_path):
    with pytest.raises(FileNotFoundError, match="timm_steps records them"):
        timm_operators.read(tmp_path)


def test_a_summary_covers_what_lies_within_the_half_width():
    line = {"family": "a", "measured ms": 100.0, "half_width": 0.2}
    lines = [line | {"predicted ms": p, "error %": p - 100} for p in (90.0, 100.0, 130.0)]
    found = timm_steps.summary(lines)[-1]
    assert found["rows"] == 3
    assert found["median %"] == pytest.approx(10)
    assert found["covered %"] == pytest.approx(100 * 2 / 3)


def test_shares_of_fits_leave_out_what_is_not_known():
    lines = [{"fits": True, "next_fits": None}, {"fits": False, "next_fits": False}, {"failed": ""}]
    found = timm_steps.fitting(lines)
    assert (found["ran"], found["said to fit %"]) == (2, 50)
    assert (found["next larger"], found["said not to fit %"]) == (1, 100)
