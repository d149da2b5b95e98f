"""`recommend` with choices, against a prediction of each combination, one by one."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import memlab
from memlab import MemlabError, StepConfig, Workload, WorkloadChoices
from memlab.errors import WorkloadError
from memlab.search import search

recommend = partial(memlab.recommend, patience=3600)  # on a busy machine too

CARD = "t4"
BATCH = 1024
ALL = {"frozen": [False, True], "half": [False, True]}


def net(*, frozen: bool = False, width: int = 64, half: bool = False) -> Workload:
    """Return a workload whose first layer may be frozen, and in 16 bits only if it is."""
    if not isinstance(width, int):
        raise WorkloadError(f"width={width!r} is no int")
    if half and not frozen:
        raise WorkloadError("half=True needs frozen=True")

    def build():
        first = nn.Linear(512, width, dtype=torch.bfloat16 if half else None)
        return nn.Sequential(first.requires_grad_(not frozen), nn.ReLU(), nn.Linear(width, 512))

    def loss(model, x):
        first, relu, last = model
        return last(relu(first(x.to(first.weight.dtype))).float()).square().mean()

    return Workload(
        name=f"net, frozen {frozen}, width {width}, half {half}",
        build_model=build,
        make_batch=lambda n: torch.ones(n, 512),
        compute_loss=loss,
        choices=WorkloadChoices(
            values={"frozen": frozen, "width": width, "half": half},
            offered={"frozen": (False, True), "width": (64, 256), "half": (False, True)},
            make_workload=net,
        ),
    )


@pytest.fixture
def predictions(monkeypatch):
    """Return the workload and config of each prediction that a search makes."""
    made, predict = [], search.predict_with_size_model

    def predicted(workload, config, *args, **options):
        made.append((workload.name, config))
        return predict(workload, config, *args, **options)

    monkeypatch.setattr(search, "predict_with_size_model", predicted)
    search._known.clear()
    return made


def test_the_fastest_combination_that_fits_comes_first(predictions):
    ranked = recommend(net(), "1GiB", BATCH, CARD, choices=ALL, allow=[], top=8)
    possible = [
        net(frozen=frozen, half=half)
        for frozen, half in itertools.product(*ALL.values())
        if frozen or not half
    ]
    config = StepConfig(batch_size=BATCH)
    costs = {one.name: memlab.predict(one, config, CARD).step_seconds for one in possible}
    assert [one.workload.name for one in ranked] == sorted(costs, key=costs.get)
    assert all(one.result.workload_name == one.workload.name for one in ranked)
    assert len(predictions) == len(possible)  # one for each, as there are no other settings

    refused = [note for note in ranked.notes if "half=True needs frozen=True" in note]
    assert len(refused) == 1
    assert "1 of 4 combinations is left out:" in ranked.notes
    assert any("What is trained differs" in note for note in ranked.notes)
    page = ranked._repr_html_()
    assert "chosen" in page
    assert "frozen=True, half=True" in page

    recommend(net(), "512MiB", BATCH, CARD, choices=ALL, allow=[], top=8)
    assert len(predictions) == len(possible)  # another limit is arithmetic


def test_a_reason_says_the_bytes_and_the_time_of_each_choice():
    ranked = recommend(
        net(), "1GiB", BATCH, CARD, choices={"frozen": [False, True], "width": [64, 256]}, allow=[]
    )
    config = StepConfig(batch_size=BATCH)
    peaks = {
        (frozen, width): memlab.predict(net(frozen=frozen, width=width), config, CARD)
        .peak_reserved_bytes
        for frozen in (False, True)
        for width in (64, 256)
    }  # fmt: skip
    both = next(one for one in ranked if one.chosen == {"frozen": True, "width": 256})
    said = {
        "frozen=True instead of False": peaks[True, 64] - peaks[False, 64],
        "width=256 instead of 64": peaks[True, 256] - peaks[True, 64],
    }
    for what, more in said.items():
        (reason,) = [reason for reason in both.reasons if reason.startswith(what)]
        assert f"({memlab._util.units.signed_bytes(more)} reserved)" in reason
        assert "what is trained differs" in reason
    plain = next(one for one in ranked if one.chosen == {"frozen": False, "width": 64})
    assert "the others are compared with this" in plain.reasons[0]


def test_one_limit_chooses_among_workloads_and_settings(predictions):
    config = StepConfig(batch_size=BATCH)
    small, large = (memlab.predict(net(width=w), config, CARD) for w in (64, 256))
    limit = (small.needed_bytes + large.needed_bytes) // 2
    allow = ["accumulation_steps"]
    ranked = recommend(net(width=256), limit, BATCH, CARD, choices={"width": [64, 256]},
                       allow=allow, top=1)  # fmt: skip
    best = ranked[0]
    assert best.workload.name == net(width=64).name
    assert memlab.predict(best.workload, best.config, CARD, memory_limit=limit).fit == "fits"
    # it is slower anyway; a second one is what fits of it, where nothing else had been found yet
    assert [name for name, _ in predictions].count(net(width=256).name) <= 2
    assert any("width=256 is not recommended" in note for note in ranked.notes)
    script = memlab.export_script(best.workload, best.config)
    assert "width = 64" in script
    assert "256" not in script


def test_without_choices_the_workload_is_the_given_one():
    workload = net()
    ranked = recommend(workload, "1GiB", BATCH, CARD, allow=[])
    assert ranked[0].workload is workload
    assert ranked.workloads == (workload,)
    assert "chosen" not in ranked._repr_html_()


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"depth": [1, 2]}, r"names 'depth'; the choices of net, .* are \['frozen', 'width', 'h"),
        ({"width": 64}, r"choices\['width'\]=64; allowed is a list"),
        ({"width": []}, r"choices\['width'\]=\[\]; allowed is a list"),
        ({}, "names nothing; pass None"),
        (torch.zeros(3), "is of type Tensor; allowed is a dict"),
        (
            ["width"],
            r"is of type list; allowed is a dict of lists, such as choices=\{'frozen'",
        ),
        ("width", r"choices='width' is of type str; allowed is a dict of lists"),
        ({"width": ["wide"]}, r"choices\['width'\] has 'wide': .* offers 64, 256"),
        ({"half": [True], "frozen": [False]}, "leaves nothing to choose: half=True, frozen=False"),
        ({"width": list(range(1, 70))}, "has 69 combinations; allowed are at most 64"),
    ],
)
def test_what_the_workload_does_not_have_is_an_error(choices, said):
    with pytest.raises(MemlabError, match=said):
        recommend(net(), "1GiB", BATCH, CARD, choices=choices)


def test_what_cannot_be_built_is_left_out_with_its_reason():
    def other(width: int = 64) -> Workload:
        def build():
            if width == 256:
                raise RuntimeError("a library is missing")
            return nn.Linear(512, width)

        return Workload(
            name=f"other {width}",
            build_model=build,
            make_batch=lambda n: torch.ones(n, 512),
            compute_loss=lambda model, x: model(x).square().mean(),
            choices=WorkloadChoices(
                values={"width": width}, offered={"width": (64, 256)}, make_workload=other
            ),
        )

    ranked = recommend(other(), "1GiB", 8, CARD, choices={"width": [64, 256]}, allow=[])
    assert [one.chosen for one in ranked] == [{"width": 64}]
    assert "1 of 2 combinations is left out:" in ranked.notes
    assert any("width=256" in note and "a library is missing" in note for note in ranked.notes)
