"""Times carry what they were taken under; those of a busy machine are taken again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import memlab
from memlab.cost_model import calibration, cost_store, targets
from memlab.cost_model.calibration import calibrate, to_remeasure
from memlab.cost_model.cost_store import Store
from memlab.cost_model.targets import Kernels
from memlab.devices import here
from memlab.devices.operators import OperatorCost, signature_of
from memlab.errors import MemlabError
from memlab.prediction import predict
from memlab.prediction.error_bounds import Compiled

GELU = signature_of(torch.ops.aten.gelu.default, (torch.ones(4, 4),), {})
RELU = signature_of(torch.ops.aten.relu.default, (torch.ones(4, 4),), {})
TANH = signature_of(torch.ops.aten.tanh.default, (torch.ones(4, 4),), {})


class Machine:
    """A machine whose load and speed are set: what `calibrate` sees instead of this one."""

    def __init__(self, monkeypatch):
        self.others, self.times, self.clock, self.num_timed = 0.0, [0.1, 0.1, 0.1], 1e9, 0
        watch = SimpleNamespace(others_share=lambda: self.others)
        monkeypatch.setattr(calibration, "LoadWatch", lambda: watch)
        monkeypatch.setattr(calibration, "is_quiet", lambda: self.others < here.QUIET_SHARE)
        monkeypatch.setattr(calibration, "times_of", self._timed)
        monkeypatch.setattr(calibration.time, "time", lambda: self.clock)

    def _timed(self, make, evict):
        self.num_timed += 1
        return list(self.times)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def cost_of(store, *signatures):
    found = calibrate(signatures or [GELU], timed=True, store=store, max_bytes=2**20)
    return found.get(GELU)


def test_a_time_says_what_it_was_taken_under(machine, tmp_path):
    machine.others, machine.times = 0.4, [0.3, 0.1, 0.2]
    cost_of(Store(tmp_path))
    cost = Store(tmp_path).read([GELU])[GELU]
    assert (cost.num_repeats, cost.median_seconds, cost.least_seconds) == (3, 0.2, 0.1)
    assert (cost.others_share, cost.taken_at) == (0.4, 1e9)
    assert cost.is_noisy


@pytest.mark.parametrize(
    ("others", "times", "is_noisy"),
    [(0.0, [0.1, 0.1, 0.11], False), (None, [0.1, 0.1, 0.1], False), (0.9, [0.1, 0.1, 0.1], True),
     (0.0, [0.1, 0.3, 0.4], True)],
)  # fmt: skip
def test_noise_shows_in_the_load_or_in_the_spread(machine, tmp_path, others, times, is_noisy):
    machine.others, machine.times = others, times
    assert cost_of(Store(tmp_path)).is_noisy == is_noisy


def test_a_time_of_a_busy_machine_is_taken_again_once_it_is_quiet(machine, tmp_path):
    machine.others, machine.times = 0.9, [2.0, 2.0, 2.0]
    assert cost_of(Store(tmp_path)).seconds == 2.0
    machine.clock += 3600
    assert cost_of(Store(tmp_path)).seconds == 2.0, "it is still busy"
    machine.others, machine.times = 0.0, [0.1, 0.1, 0.1]
    machine.clock -= 3600
    assert cost_of(Store(tmp_path)).seconds == 2.0, "the load has just been seen"
    assert machine.num_timed == 1
    machine.clock += 3600
    assert cost_of(Store(tmp_path)).seconds == 0.1
    assert machine.num_timed == 2
    machine.clock += 3600
    assert not cost_of(Store(tmp_path)).is_noisy
    assert machine.num_timed == 2, "a quiet time stays"


def test_of_two_noisy_times_the_smaller_is_kept(machine, tmp_path):
    for seconds, kept in ((0.2, 0.2), (0.5, 0.2), (0.1, 0.1)):
        machine.times = [seconds, 2 * seconds, 2 * seconds]
        machine.clock += 3600
        assert cost_of(Store(tmp_path)).seconds == pytest.approx(kept)


def test_a_prediction_takes_again_no_more_than_fits_its_time(machine, tmp_path, monkeypatch):
    machine.others = 0.9
    cost_of(Store(tmp_path), GELU, RELU)
    machine.others, machine.clock = 0.0, machine.clock + 3600
    monkeypatch.setattr(calibration, "AGAIN_SECONDS", 0.0)
    for num_timed in (3, 4, 4):
        cost_of(Store(tmp_path), GELU, RELU)
        assert machine.num_timed == num_timed


def test_costs_that_are_doubted_are_taken_again_and_those_learned_beside_them_forgotten(
    machine, tmp_path
):
    machine.times = [2.0, 2.0, 2.0]
    cost_of(Store(tmp_path), GELU, RELU)
    machine.clock += 3600
    cost_of(Store(tmp_path), TANH)
    machine.clock += 3600
    machine.times = [0.1, 0.1, 0.1]

    def again(before):
        found = calibrate(
            [GELU], timed=True, store=Store(tmp_path), max_bytes=2**20, remeasure_before=before
        )
        return found[GELU].seconds

    assert again(None) == 2.0
    assert again(1e9) == 2.0, "it is not older than that"
    measured_at = machine.clock
    machine.clock += 10
    assert again(measured_at) == 0.1
    assert set(Store(tmp_path).read([GELU, RELU, TANH])) == {GELU, TANH}
    num_timed = machine.num_timed
    assert again(measured_at) == 0.1
    assert machine.num_timed == num_timed, "what was learned since is believed"


def test_a_cost_of_the_future_or_without_a_date_is_doubted(machine):
    dated = {GELU: machine.clock + 9, RELU: None, TANH: machine.clock - 9}
    cost = OperatorCost(output_bytes=(), peak_bytes=0, seconds=1.0)
    known = {signature: replace(cost, taken_at=date) for signature, date in dated.items()}
    assert set(to_remeasure(known, machine.clock - 60)) == {GELU, RELU}
    assert to_remeasure(known, None) == {}


def test_costs_that_are_found_right_when_taken_again_put_no_others_in_doubt(machine, tmp_path):
    cost_of(Store(tmp_path), GELU, RELU)
    machine.clock += 3600
    calibrate([GELU], timed=True, store=Store(tmp_path), max_bytes=2**20,
              remeasure_before=machine.clock)  # fmt: skip
    assert set(Store(tmp_path).read([GELU, RELU])) == {GELU, RELU}


def test_costs_that_are_forgotten_are_found_again_in_every_process(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMLAB_CACHE", str(tmp_path))
    old = tmp_path / cost_store.OLD_FILES[0]
    old.touch()
    held = Store(tmp_path)
    cost_of(held)
    memlab.forget_costs()
    assert held.read([GELU]) == {}
    assert not old.exists()
    memlab.forget_costs()  # twice is not wrong
    held.path.mkdir()
    with pytest.raises(MemlabError, match="cannot be deleted"):
        memlab.forget_costs()


def test_a_noisy_share_is_told_and_widens_the_uncertainty():
    quiet = OperatorCost(output_bytes=(), peak_bytes=0, seconds=1.0)
    noisy = OperatorCost(output_bytes=(), peak_bytes=0, seconds=3.0, others_share=0.9)
    run = [SimpleNamespace(signature=signature) for signature in (GELU, RELU)]
    share = targets.noisy_share(run, {GELU: quiet, RELU: noisy})
    assert share == 0.75
    assert targets.noise_notes(share)[0].startswith("75% of the time comes from operators")
    assert targets.noise_notes(0.0) == []
    kernels = Kernels(effects=[], seconds=None, noisy_share=share)
    found = predict._uncertainty(
        100, kernels, SimpleNamespace(assumptions=(), padded_bytes=0), None, Compiled()
    )
    assert found["step_seconds"] == pytest.approx(0.25 + 0.7 * 0.75)


@pytest.mark.parametrize(
    ("wall", "busy", "own", "share"),
    [(1.0, 200, 0.0, 1.0), (1.0, 100, 0.5, 0.25), (1.0, 100, 1.0, 0.0), (0.01, 2, 0.0, None),
     (1.0, 10, 2.0, 0.0), (1.0, 999, 0.0, 1.0)],
)  # fmt: skip
def test_the_share_of_others_is_what_this_process_did_not_use(
    monkeypatch, tmp_path, wall, busy, own, share
):
    stat, clock, used = tmp_path / "stat", [0.0], [0.0]
    monkeypatch.setattr(here, "STAT", stat)
    monkeypatch.setattr(here.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(here.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(here.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(here.time, "process_time", lambda: used[0])
    stat.write_text("cpu 100 0 0 500 7 0 0 0 0 0\n")
    watch = here.LoadWatch()
    stat.write_text(f"cpu {100 + busy} 0 0 600 9 0 0 0 0 0\n")
    clock[0], used[0] = wall, own
    assert watch.others_share() == share
    for text in ("", "nonsense", "cpu a b"):
        stat.write_text(text)
        assert here.LoadWatch().others_share() is None, "a load that cannot be read is not known"
