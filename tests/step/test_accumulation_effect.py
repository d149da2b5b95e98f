"""What is said of micro-batches, against `verify` and what is known of each loss."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import memlab
from benchmarks import accumulation
from memlab import StepConfig, api, recommend
from memlab.api import accumulation_effect
from memlab.errors import UnsupportedError, WorkloadError
from memlab.runtime import isolation
from memlab.runtime.same_step import CONTENT_BYTES
from tests.models import made_of
from tests.verify_parts import check

ALLOWED = ["accumulation_steps"]


@pytest.mark.parametrize("name", accumulation.LOSSES)
def test_micro_batches_are_judged_as_verify_judges_them(name):
    one = accumulation.case(name)
    assert check(one.workload, batch_size=12, accumulation_steps=3).same_as_full_batch == one.same
    found = accumulation_effect(one.workload)
    assert found.same == one.same
    assert bool(str(found)) == (one.same != "yes")


@pytest.mark.parametrize("name", accumulation.LOSSES)
def test_shapes_alone_never_call_another_gradient_the_same(name):
    one = accumulation.case(name)
    found = isolation.run("per_sample", {"workload": one.workload}, timeout_seconds=300)
    undecided = "triplet, batch-hard"  # it needs more samples
    assert found.same == ("unknown" if name == undecided else one.same)


def of_number(model, batch, how):
    apart, n = model(batch[0]) - batch[1], len(batch[0])
    losses = {
        "product": lambda: apart.square() * n,
        "quotient": lambda: (apart.square() / n).sum(),
        "tensor": lambda: apart.square() * torch.tensor(float(n)),
        "of a weight": lambda: apart.square() * (1 + (model[0].bias * n).mean()),
        "slope": lambda: functional.leaky_relu(apart, 1 / n),
        "elu": lambda: functional.elu(apart, 1 / n),
        "clamp": lambda: apart.clamp(max=40 / n).square(),
        "clamp by a tensor": lambda: apart.clamp(max=torch.tensor(40 / n)).square(),
        "delta": lambda: functional.huber_loss(apart, batch[1], delta=40 / n),
        "mean": lambda: functional.leaky_relu(apart, 0.1) / (n * torch.tensor(1 / n)),
        "labels": lambda: apart.log_softmax(-1)[torch.arange(n), batch[1].argmax(-1)],
        "probability": lambda: apart.sigmoid().log(),
    }
    return losses[how]().mean()


@pytest.mark.parametrize(
    ("how", "same"),
    [
        ("product", "no"), ("quotient", "yes"), ("tensor", "no"), ("of a weight", "no"),
        ("slope", "no"), ("elu", "no"), ("clamp", "unknown"), ("clamp by a tensor", "unknown"),
        ("delta", "unknown"), ("mean", "yes"), ("labels", "yes"), ("probability", "yes"),
    ],
)  # fmt: skip
def test_what_a_loss_does_with_the_number_of_samples_is_seen(how, same):
    workload = made_of(
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 4)),
        lambda n: (torch.randn(n, 8), torch.randn(n, 4)),
        functools.partial(of_number, how=how),
        name=how,
    )
    found = isolation.run("per_sample", {"workload": workload}, timeout_seconds=300)
    assert found.same == same


@pytest.mark.slow
def test_labels_that_change_in_place_are_judged_again():
    labels = torch.randint(0, 50, (2000, accumulation.TOKENS))
    workload = made_of(
        accumulation.language_model,
        lambda n: (labels[:n].clamp(min=0), labels[:n]),
        accumulation.of_tokens,
    )
    assert labels.nbytes > CONTENT_BYTES
    assert accumulation_effect(workload).same == "yes"
    for row, own in enumerate(labels):
        own[: row % 10] = accumulation.IGNORED
    assert accumulation_effect(workload).same == "no"


def test_a_ladder_is_kept_where_nothing_can_be_told_of_its_micro_batches(monkeypatch):
    def runner(*options):
        run = isolation.runner(*options)

        def asked(job, arguments):
            if job in ("accumulation", "per_sample"):
                raise WorkloadError("it cannot be built now")
            return run(job, arguments)

        return asked

    monkeypatch.setattr(api, "runner", runner)
    workload = replace(accumulation.case("cross-entropy").workload, name="unjudged")
    rungs = memlab.ladder(workload, [{"accumulation_steps": 2}], device="t4", batch_size=8)
    assert len(rungs) == 2
    assert any("it cannot be built now" in note for note in rungs[-1].notes)


@pytest.mark.slow
def test_several_losses_are_not_divided():
    def losses(model, batch):
        image, text = model(*batch)
        return {"image": image.square().mean(), "text": text.pow(4).mean()}

    one = accumulation.case("contrastive, CLIP").workload
    workload = replace(one, name="two losses", compute_loss=losses)
    for job in ("accumulation", "per_sample"):
        found = isolation.run(job, {"workload": workload}, timeout_seconds=300)
        assert found.same == "refused"
    ranked = recommend(workload, "1GiB", 32, "cpu", allow=ALLOWED, confirm=0)
    assert {each.config.accumulation_steps for each in ranked} == {1}
    assert any("not divided, because micro-batches are refused" in note for note in ranked.notes)
    assert not any("memlab.verify" in note for note in ranked.notes)


def test_an_error_about_micro_batches_is_no_refusal_of_them():
    def fails(model, batch):
        raise UnsupportedError("accumulation_steps=2 is only the text of an error")

    one = accumulation.case("cross-entropy").workload
    workload = replace(one, name="not refused", compute_loss=fails)
    assert accumulation_effect(workload).same == "unknown"


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 1024])
def test_what_cannot_be_counted_runs_only_if_it_is_small(width, tmp_path):
    def without_fakes(model, batch):
        assert type(batch) is torch.Tensor
        (tmp_path / "ran").touch()
        return model(batch).square().mean()

    workload = made_of(
        lambda: torch.nn.Linear(width, width), (width,), without_fakes, name=f"uncounted {width}"
    )
    found = accumulation_effect(workload)
    is_small = width == 64
    assert (tmp_path / "ran").exists() == is_small
    assert found.same == ("yes" if is_small else "unknown")
    assert ("operations could not be counted" in found.why) != is_small


def test_a_loss_that_reads_a_value_is_counted():
    def reads(model, batch):
        loss = model(batch).square().mean()
        return loss if loss.item() < 1e9 else 2 * loss

    workload = made_of(lambda: torch.nn.Linear(1024, 1024), (1024,), reads, name="reads")
    assert accumulation_effect(workload).same == "yes"


@pytest.mark.matrix
@pytest.mark.parametrize("name", memlab.workloads.names())
def test_the_loss_of_a_workload_of_the_zoo_is_a_mean_over_the_samples(name):
    found = accumulation_effect(memlab.workloads.get(name))
    assert found.same != "no" or "normalises over the samples" in found.why


@pytest.mark.slow
def test_what_is_too_large_to_run_is_judged_by_shapes():
    tuned = memlab.workloads.finetune("llama-1b")
    assert accumulation_effect(tuned).same == "yes"


@pytest.mark.parametrize("name", ["contrastive, CLIP", "labels, ignored", "BatchNorm"])
@pytest.mark.slow
def test_what_changes_the_gradient_is_offered_only_if_it_is_asked_for(name):
    workload = accumulation.case(name).workload
    options = {"batch_size": 32, "device": "cpu", "allow": ALLOWED, "confirm": 0}
    exact, asked = (recommend(workload, "1GiB", exact=e, **options) for e in (True, False))
    tried = [one.config.accumulation_steps for one in (*exact.tried, *exact.estimated, *exact)]
    assert set(tried) == {1}
    assert any("give another gradient" in note for note in exact.notes)
    assert any("give another gradient" in note for note in asked.notes)
    unasked = recommend(
        workload, "1GiB", 32, "cpu", config=StepConfig(optimizer="sgd"), top=20, confirm=0
    )
    assert {one.config.accumulation_steps for one in unasked} == {1}


@pytest.mark.slow
def test_what_is_offered_exactly_has_the_gradient_of_the_whole_batch():
    found = accumulation.row("labels, num_loss_terms")
    assert found["offered"] != "not"
    assert (found["verify"], found["contradicts"], found["over-cautious"]) == ("yes", 0, 0)


def test_a_divided_recommendation_says_that_its_gradient_differs():
    workload = accumulation.case("Dice, whole batch").workload
    peak = memlab.predict(workload, StepConfig(batch_size=32), "cpu").peak_allocated_bytes
    ranked = recommend(workload, int(0.9 * peak), 32, "cpu", allow=ALLOWED, confirm=0)
    assert ranked[0].config.accumulation_steps > 1
    assert any("give another gradient" in reason for reason in ranked[0].reasons)


@pytest.mark.slow
def test_ranks_divide_a_batch_too():
    workload = accumulation.case("contrastive, CLIP").workload
    ranked = recommend(
        workload, "1GiB", 32, "cpu", world_size=2, allow=["sharding"], exact=True, confirm=0
    )
    assert any("give another gradient" in note for note in ranked.notes)
    assert all(any("another gradient" in why for why in one.reasons) for one in ranked)


def test_a_gradient_of_zero_shows_nothing():
    _, model, batch, loss, _ = accumulation.LOSSES["cross-entropy"]
    workload = made_of(model, batch, lambda model, batch: 0.0 * loss(model, batch))
    assert accumulation_effect(workload).same == "unknown"
    ranked = recommend(workload, "1GiB", 32, "cpu", allow=ALLOWED, exact=True, confirm=0)
    assert any("accumulation_steps=2" in note for note in ranked.notes)


@pytest.mark.slow
def test_largest_batch_and_ladder_say_that_a_divided_batch_trains_another_way():
    workload = accumulation.case("Dice, whole batch").workload
    config = StepConfig(accumulation_steps=2)
    limits = {"memory_limit": "64MiB", "batch_limit": 16}
    divided, whole = (memlab.largest_batch(workload, c, "cpu", **limits) for c in (config, None))
    assert any("give another gradient" in note for note in divided.result.notes)
    assert not any("gradient" in note for note in whole.result.notes)
    rungs = memlab.ladder(workload, [{"accumulation_steps": 2}], device="t4", batch_size=8)
    assert any("give another gradient" in note for note in rungs[-1].notes)
