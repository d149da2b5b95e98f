import pytest
import torch
from torch import nn

from memlab import MemlabError, StepConfig, Workload, measure

PAIR = (torch.randn(3, 4), torch.randn(3, 2))


def test_from_module_with_a_criterion_cycles_the_samples_and_copies_the_module():
    module = nn.Linear(4, 2)
    workload = Workload.from_module(module, PAIR, nn.functional.mse_loss)
    inputs, targets = workload.make_batch(5)
    assert torch.equal(inputs, PAIR[0][[0, 1, 2, 0, 1]])
    assert len(targets) == 5
    built = workload.build_model()
    assert built is not module
    assert torch.equal(built.weight, module.weight)
    loss = workload.compute_loss(module, PAIR)
    assert torch.equal(loss, nn.functional.mse_loss(module(PAIR[0]), PAIR[1]))


def test_from_module_with_a_loss_over_the_model_takes_any_pytree():
    workload = Workload.from_module(
        nn.Linear(4, 2), {"x": PAIR[0]}, lambda model, batch: model(batch["x"]).mean()
    )
    result = measure(workload, StepConfig(batch_size=2), "cpu", repeats=1, isolate=False)
    assert result.outcome == "ok"
    assert result.workload_name == "Linear"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("no module", PAIR, nn.functional.mse_loss), "Module"),
        ((nn.Linear(4, 2), (), nn.functional.mse_loss), "no"),
        ((nn.Linear(4, 2), (torch.ones(2), torch.ones(3)), nn.functional.mse_loss), "same number"),
        (
            (nn.Linear(4, 2), (torch.ones(0, 4), torch.ones(0)), nn.functional.mse_loss),
            "at least one",
        ),
        ((nn.Linear(4, 2), {"x": PAIR[0]}, nn.functional.mse_loss), "(inputs, targets)"),
    ],
)
def test_from_module_refuses_what_cannot_be_trained(arguments, word):
    with pytest.raises(MemlabError) as caught:
        Workload.from_module(*arguments)
    assert word in str(caught.value)


@pytest.mark.parametrize("field", ["name", "build_model", "make_batch", "compute_loss"])
def test_every_field_is_checked(field):
    fields = {
        "name": "mine",
        "build_model": lambda: None,
        "make_batch": lambda n: None,
        "compute_loss": lambda model, batch: None,
    }
    with pytest.raises(MemlabError, match=field):
        Workload(**(fields | {field: 3}))
