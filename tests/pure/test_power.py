"""Power: what a card draws, what a limit costs, and what a run of steps costs."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlab import Outcome, StepConfig, StepResult
from memlab._util.units import HOUR, KWH
from memlab.cost_model import power
from memlab.devices import cards
from memlab.errors import DeviceError, MemlabError, UnsupportedError
from memlab.result import Source

shares = st.floats(0.3, 1.0)


@given(limit=shares, less=shares, drawn=shares, clock=shares)
def test_a_lower_limit_is_never_faster_and_none_is_below_the_draw(limit, less, drawn, clock):
    less, limit = sorted((less, limit))
    assert power.slowdown(less, drawn, clock) >= power.slowdown(limit, drawn, clock) >= 1
    assert (power.slowdown(limit, drawn, clock) == 1) == (limit >= drawn)
    assert power.STATIC < cards.LEAST_POWER


def test_the_clock_falls_with_the_cube_root_and_below_the_floor_in_proportion():
    dynamic = 0.9 - power.STATIC
    at_floor = power.STATIC + dynamic * power.FLOOR**3
    assert power.slowdown(at_floor, 0.9) == pytest.approx(1 / power.FLOOR)
    assert power.slowdown(at_floor - 1e-9, 0.9) == pytest.approx(1 / power.FLOOR)
    half = power.STATIC + dynamic * power.FLOOR**3 / 2
    assert power.slowdown(half, 0.9) == pytest.approx(2 / power.FLOOR)
    # below the floor already: in proportion from there
    assert power.slowdown(power.STATIC + 0.4, power.STATIC + 0.8, 0.5) == pytest.approx(2)


def test_a_card_without_power_for_its_clock_draws_all_of_it():
    busy, t4, h100 = power.Busy(compute=1.0), cards.card("t4"), cards.card("h100")
    assert power.draw(t4, busy, 1.0, 0.6).watts == pytest.approx(70)
    assert power.draw(h100, busy, 1.0, 1.0).watts == pytest.approx(700 * power.COMPUTE)
    half = cards.card("t4, 42 W")  # 0.4 of 0.8 are left beyond the static share
    assert power.draw(half, busy, 1.0, 0.6).slower == pytest.approx(2)


def test_a_limit_near_the_draw_is_in_doubt_and_one_far_above_is_none():
    busy = power.Busy(compute=1.0)
    drawn = 700 * power.COMPUTE
    far = power.draw(cards.card("h100, 700 W"), power.Busy(memory=0.5), 1.0, 1.0)
    assert (far.slower, far.slower_half_width) == (1, 0)
    near = power.draw(cards.card(f"h100, {drawn + 1:.0f} W"), busy, 1.0, 1.0)
    assert near.slower == 1
    assert near.slower_half_width == power.LEAST_WIDTH
    below = power.draw(cards.card("h100, 400 W"), busy, 1.0, 1.0)
    assert (below.watts, below.half_width) == (pytest.approx(400), power.LIMIT_WIDTH)
    assert "takes no longer" in power.notes(cards.card("h100, 690 W"), 1.0)[0]
    assert "above the 450 W" in power.notes(cards.card("rtx-4090, 600 W"), 1.0)[0]
    assert power.notes(cards.card("h100"), 1.0) == []
    (note,) = power.notes(cards.card("rtx-3080-laptop-16"), 1.0)
    assert "of 150 W, the most" in note
    assert '", 120 W"' in note
    assert "of 90 W" in power.notes(cards.card("rtx-2070-max-q"), 1.0)[0]
    assert "most" not in power.notes(cards.card("rtx-3080-laptop-16, 90 W"), 1.2)[0]


def test_the_mean_draw_is_that_of_the_kernels_by_their_time():
    busy = power.Busy.of([(2.0, power.DrawnBy.COMPUTE), (1.0, power.DrawnBy.MEMORY)])
    assert busy == power.Busy(compute=2.0, memory=1.0)
    whole = (2 * power.COMPUTE + power.MEMORY) / 3
    assert busy.share_drawn(3.0) == pytest.approx(whole)
    assert busy.share_drawn(6.0) == pytest.approx((whole + power.WAITING) / 2)
    assert busy.scaled_to(6.0) == power.Busy(compute=4.0, memory=2.0)
    assert power.added([busy, busy]) == busy.scaled_to(6.0)
    assert power.added([]) == power.IDLE


def test_a_limit_stands_behind_a_card_or_cards_in_any_spelling():
    plain = cards.resolve("rtx-4060-laptop")
    for text in ("rtx-4060-laptop, 60 W", "RTX 4060 Laptop,60w", "4060 laptop , 60.0 watts"):
        limited = cards.resolve(text)
        assert limited.name == "rtx-4060-laptop, 60 W"
        assert limited.card == dataclasses.replace(plain.card, limit_watts=60)
    group = cards.resolve("8x-h100, 500 W")
    assert group.name == "8x-h100, 500 W"
    assert group.card.limit_watts == group.cluster.card.limit_watts == 500
    assert cards.of_several(8, group.card) == group.name
    assert cards.of_several(8, cards.card("h100")) == "8x-h100"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx-4090, 901 W", "allowed is 135 to 900 W"),
        ("rtx-4090, 134 W", "allowed is 135 to 900 W"),
        ("rtx-4090, 0 W", "allowed is 135 to 900 W"),
        ("rtx-4090, 300 W, 200 W", "two power limits"),
        ("24GiB, 100 W", "what 24GiB takes is not known"),
        ("cpu, 50 W", "what cpu takes is not known"),
        ("rtx-9999, 50 W", "device='rtx-9999' is not a card"),
        ("rtx-4090, -50 W", "not a card"),
        ("rtx-4090, 300", "not a card"),
        (", 300 W", "not a card"),
    ],
)
def test_a_limit_that_cannot_be_is_said(text, said):
    with pytest.raises(DeviceError, match="device="):
        cards.resolve(text)
    with pytest.raises(DeviceError) as caught:
        cards.resolve(text)
    assert said in str(caught.value)


def result_of(**facts):
    config = StepConfig(**({"sharding": "ddp", "world_size": 4} if facts.pop("ranks", 0) else {}))
    return StepResult(
        outcome=Outcome.OK, message="", source=Source.PREDICTED, device="h100", config=config,
        workload_name="mine", **facts,
    )  # fmt: skip


def test_a_run_costs_its_hours_and_its_energy():
    widths = {"step_seconds": 0.3, "watts": 0.4}
    result = result_of(step_seconds=0.5, watts=400.0, uncertainty=widths)
    cost = result.run_cost(7200)
    assert (cost.seconds, cost.hours, cost.money) == (HOUR, 1.0, None)
    assert (cost.joules, cost.kilowatt_hours) == (400 * HOUR, 0.4)
    assert (cost.time_width, cost.energy_width) == (0.3, pytest.approx(0.5))
    assert result.run_cost(7200, price_per_hour=2).money == 2
    assert result.run_cost(7200, price_per_hour=2, price_per_kwh=0.5).money == 2.2
    assert str(result.run_cost(7200, price_per_kwh=0.5)) == (
        "1.00 h ± 30 %, 400 Wh ± 50 %, 0.20 in money"
    )
    assert StepResult.from_dict(result.to_dict()).run_cost(7200) == cost


def test_every_device_of_a_step_works_and_is_paid():
    cost = result_of(ranks=4, step_seconds=1.0, watts=100.0).run_cost(3600, price_per_hour=1.5)
    assert (cost.num_devices, cost.money) == (4, 6.0)
    assert cost.joules == pytest.approx(0.4 * KWH)
    assert "on 4 devices" in str(cost)


def test_what_is_not_known_has_no_cost():
    measured = result_of(step_seconds=1.0)
    cost = measured.run_cost(60, price_per_kwh=0.3)
    assert (cost.joules, cost.kilowatt_hours, cost.money, cost.energy_width) == (None,) * 3 + (0,)
    assert str(cost) == "1.00 min"
    assert str(measured.run_cost(60, price_per_hour=0.5)) == "1.00 min, 0.0083 in money"
    with pytest.raises(UnsupportedError, match="mine on h100 has no time"):
        result_of().run_cost(60)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_updates", -1), ("num_updates", 1.5), ("num_updates", "10"), ("price_per_hour", -1),
     ("price_per_hour", "2"), ("price_per_kwh", float("nan"))],
)  # fmt: skip
def test_a_wrong_number_names_its_field(field, value):
    result = result_of(step_seconds=1.0, watts=100.0)
    with pytest.raises(MemlabError, match=f"{field}="):
        result.run_cost(**{"num_updates": 1, field: value})
