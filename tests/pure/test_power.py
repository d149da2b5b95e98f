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


@given(limit=shares, less=shares, drawn=shares)
def test_a_lower_limit_is_never_faster_and_none_is_below_the_draw(limit, less, drawn):
    less, limit = sorted((less, limit))
    assert power.slowdown(less, drawn) >= power.slowdown(limit, drawn) >= 1
    assert (power.slowdown(limit, drawn) == 1) == (limit >= drawn)
    assert power.half_width(power.slowdown(less, drawn)) >= 0


def test_the_clock_falls_with_the_cube_root_and_below_the_floor_in_proportion():
    dynamic = 0.9 - power.STATIC
    at_floor = power.STATIC + dynamic * power.FLOOR**3
    assert power.slowdown(at_floor, 0.9) == pytest.approx(1 / power.FLOOR)
    assert power.slowdown(at_floor - 1e-9, 0.9) == pytest.approx(1 / power.FLOOR)
    half = power.STATIC + dynamic * power.FLOOR**3 / 2
    assert power.slowdown(half, 0.9) == pytest.approx(2 / power.FLOOR)


def test_the_mean_draw_is_that_of_the_kernels_by_their_time():
    busy = power.Busy.of([(2.0, power.Draw.COMPUTE), (1.0, power.Draw.MEMORY)])
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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx-4090, 451 W", "allowed is 135 to 450 W"),
        ("rtx-4090, 134 W", "allowed is 135 to 450 W"),
        ("rtx-4090, 0 W", "allowed is 135 to 450 W"),
        ("24GiB, 100 W", "what 24GiB takes is not known"),
        ("cpu, 50 W", "what cpu takes is not known"),
        ("cuda, 50 W", "not known"),
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
