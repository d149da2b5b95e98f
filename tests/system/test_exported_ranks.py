"""Exported files of sharded steps, run by torchrun in two ranks, against memlab's own ranks."""

import subprocess
import sys

import pytest
import torch

import memlab
from memlab import StepConfig
from memlab.errors import UnsupportedError
from memlab.integrations.export import export_script
from tests.exported_parts import own_functions
from tests.exported_rank_parts import NUM_STEPS, in_ranks, losses_in, of_files, of_steps

RANKS = {"world_size": 2, "batch_size": 8}
LATE = {"accumulation_steps": 2, "sync_each_micro_batch": False}
SMALL = {"hidden_size": 16, "sequence_length": 8, "dropout": 0.1}
SETTINGS = [
    {"sharding": "ddp", "max_grad_norm": 0.0123456789},
    {"sharding": "ddp", "loss_chunks": 2, **LATE},
    {"sharding": "zero1", "accumulation_steps": 2},
    {"sharding": "zero1", "precision": "bf16-master"},
    {"sharding": "zero2", "checkpointing": "blocks", "max_grad_norm": 0.0123456789},
    {"sharding": "zero2", "optimizer": "sgd-momentum", **LATE},
    {"sharding": "zero3"},
    {"sharding": "zero3", "precision": "bf16-mixed", "accumulation_steps": 4},
    {"sharding": "hybrid", "shard_group_size": 1},
    {"sharding": "zero3", "loss_chunks": 2, **LATE},
    {"sharding": "zero2", "optimizer_in_backward": True},
    {"sharding": "ddp", "compile": True, **LATE},
    {"sharding": "zero3", "compile": True},
]
OF_DEEPSPEED = [
    {"sharding": "deepspeed-zero1", "max_grad_norm": 0.0123456789, **LATE},
    {"sharding": "deepspeed-zero2", "accumulation_steps": 2, "optimizer": "sgd-momentum"},
    {"sharding": "deepspeed-zero2", "precision": "bf16-master"},
    {"sharding": "deepspeed-zero3", "checkpointing": "blocks", "max_grad_norm": 0.0123456789},
    {"sharding": "deepspeed-zero3", "precision": "bf16-mixed", "accumulation_steps": 2},
]


def assert_same(pairs, folder, flavor="pytorch"):
    files = of_files([export_script(*pair, "cpu", flavor=flavor) for pair in pairs], folder)
    for pair, file, step in zip(pairs, files, of_steps(pairs, folder), strict=True):
        assert file[0] == step[0], (pair[0].name, str(pair[1]))
        assert len(set(file[0])) == NUM_STEPS
        for ours, theirs in zip(file[1], step[1], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), str(pair[1])


@pytest.mark.slow
def test_a_file_of_ranks_has_the_losses_and_weights_of_the_step_bit_by_bit(tmp_path):
    transformer = memlab.workloads.get("plain-transformer", **SMALL)
    pairs = [(transformer, StepConfig(**RANKS, **fields)) for fields in SETTINGS]
    pairs += [
        (own_functions("rows"), StepConfig(**RANKS, sharding="ddp", accumulation_steps=steps))
        for steps in (1, 2)
    ]
    pairs.append((counted(), StepConfig(**RANKS, sharding="zero3")))
    pairs.append((counted(), StepConfig(**RANKS, sharding="ddp", accumulation_steps=2)))
    assert_same(pairs, tmp_path)


@pytest.mark.slow
def test_a_file_for_deepspeed_has_the_losses_and_weights_of_the_step_bit_by_bit(tmp_path):
    pytest.importorskip("deepspeed", reason="needs memlab[deepspeed]")
    # weights above 100,000 values, which stage 3 divides
    wide = memlab.workloads.get("plain-mlp", hidden_size=512, dropout=0.1)
    pairs = [(wide, StepConfig(**RANKS, **fields)) for fields in OF_DEEPSPEED]
    pairs.append((counted(), StepConfig(**RANKS, sharding="deepspeed-zero2", accumulation_steps=2)))
    assert_same(pairs, tmp_path, flavor="deepspeed")

    # as a person starts it: it opens the process group, and closes it
    file = tmp_path / "train.py"
    file.write_text(export_script(wide, StepConfig(**RANKS, **OF_DEEPSPEED[3]), "cpu",
                                  flavor="deepspeed"))  # fmt: skip
    losses = losses_in(in_ranks(2, file))
    assert len(losses) == 10
    assert losses[-1] < losses[0]


def counted():
    """Return a workload whose parts of a batch have different numbers of loss terms."""

    def make_batch(n):
        targets = torch.randint(3, (n, 4))
        targets[: n // 2, 1:] = -100
        return torch.randn(n, 4, 6), targets

    def compute_loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return memlab.Workload(
        name="counted",
        build_model=lambda: torch.nn.Linear(6, 3),
        make_batch=make_batch,
        compute_loss=compute_loss,
        num_loss_terms=lambda batch: int((batch[1] != -100).sum()),
    )


@pytest.mark.slow
def test_a_file_runs_as_its_first_lines_say_and_not_otherwise(tmp_path):
    file = tmp_path / "train.py"
    workload = memlab.workloads.get("plain-mlp")
    text = export_script(workload, StepConfig(**RANKS, sharding="zero3"), "cpu")
    assert "torchrun --nproc-per-node 2 FILE" in text
    file.write_text(text)
    losses = losses_in(in_ranks(2, file))
    assert len(losses) == 10
    assert losses[-1] < losses[0]

    alone = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=100)
    assert alone.returncode == 1
    assert "this file is for 2 ranks: torchrun --nproc-per-node 2" in alone.stderr


ACCELERATED = """
import accelerate.state
from accelerate.utils import DistributedType

def of_a_gpu(self, *_, **__):
    return "gloo", DistributedType.MULTI_GPU

def to_the_cpu(self):
    self.device = torch.device("cpu")

accelerate.state.PartialState._prepare_backend = of_a_gpu
accelerate.state.PartialState.set_device = to_the_cpu
"""
"""accelerate shards on accelerators only; here it takes the CPU for one, and its own code runs."""

LIBRARIES = [
    ("lightning", "cpu", "pass", ("lightning",), [
        {"sharding": "ddp", "max_grad_norm": 0.0123456789, **LATE},
        {"sharding": "zero1"},
        {"sharding": "zero2", "precision": "bf16-mixed", "max_grad_norm": 0.0123456789},
        {"sharding": "zero3", **LATE},
        {"sharding": "hybrid", "shard_group_size": 1, "accumulation_steps": 2},
    ]),
    ("accelerate", "cpu", "pass", ("accelerate",), [
        {"sharding": "ddp", "accumulation_steps": 2},
    ]),
    ("accelerate", "cuda", ACCELERATED, ("accelerate",), [
        {"sharding": "zero2", "accumulation_steps": 2},
        {"sharding": "zero3", "max_grad_norm": 0.0123456789, **LATE},
        {"sharding": "zero3", "precision": "bf16-mixed"},
    ]),
    ("transformers", "cpu", "pass", ("accelerate", "transformers"), [
        {"sharding": "ddp", "max_grad_norm": 0.0123456789, **LATE},
    ]),
    ("transformers", "cuda", ACCELERATED, ("accelerate", "transformers"), [
        {"sharding": "zero2"},
        {"sharding": "zero3", "max_grad_norm": 0.0123456789, **LATE},
    ]),
]  # fmt: skip


def pairs_of(settings):
    transformer = memlab.workloads.get("plain-transformer", **SMALL)
    return [(transformer, StepConfig(**RANKS, **fields)) for fields in settings]


@pytest.fixture(scope="module")
def by_config(tmp_path_factory):
    """The losses of memlab's own ranks, by the config in words; started once for all libraries."""
    pairs = pairs_of(fields for *_, settings in LIBRARIES for fields in settings)
    once = {str(config): (workload, config) for workload, config in pairs}
    found = of_steps(list(once.values()), tmp_path_factory.mktemp("steps"))
    return {name: losses for name, (losses, _) in zip(once, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavor", "device", "prepare", "needs", "settings"),
    LIBRARIES,
    ids=[f"{flavor}-{device}" for flavor, device, *_ in LIBRARIES],
)
def test_a_library_trains_in_ranks_as_memlab_does(
    flavor, device, prepare, needs, settings, tmp_path, by_config
):
    for library in needs:
        pytest.importorskip(library, reason=f"{library} is not installed")
    pairs = pairs_of(settings)
    texts = [export_script(*pair, device, flavor=flavor) for pair in pairs]
    found = []
    if device == "cpu":  # one as a person starts it: no process group is open before
        (tmp_path / "first.py").write_text(texts.pop(0))
        found.append(losses_in(in_ranks(2, tmp_path / "first.py"))[:NUM_STEPS])
    if texts:
        found += [losses for losses, _ in of_files(texts, tmp_path, prepare=prepare)]
    for (_, config), losses in zip(pairs, found, strict=True):
        assert losses == pytest.approx(by_config[str(config)], rel=1e-6), str(config)
        assert len(set(losses)) == NUM_STEPS


@pytest.mark.slow
def test_a_file_for_a_library_says_how_it_is_launched(tmp_path):
    file = tmp_path / "train.py"
    config = StepConfig(**RANKS, sharding="ddp")
    file.write_text(export_script(memlab.workloads.get("plain-mlp"), config, "cpu",
                                  flavor="accelerate"))  # fmt: skip
    alone = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=200)
    assert "this file is for 2 ranks: torchrun --nproc-per-node 2" in alone.stderr


@pytest.mark.parametrize(("flavor", "device", "fields", "said"), [
    ("accelerate", "cpu", {"sharding": "zero3"}, "accelerators only"),
    ("transformers", "cuda", {"sharding": "zero1"}, "sharding='zero1' is not expressed"),
    ("accelerate", "cuda", {"sharding": "hybrid", "shard_group_size": 1}, "'hybrid' is not"),
    ("lightning", "cpu", {"sharding": "ddp", "accumulation_steps": 2}, "averages gradients once"),
    ("transformers", "cuda", {"sharding": "zero3", "precision": "bf16-mixed"}, "in bf16"),
    ("deepspeed", "cpu", {"sharding": "zero3"}, "engine; use sharding='deepspeed-zero1'"),
    ("deepspeed", "cuda", {"sharding": "deepspeed-zero3", "offload_parameters": True},
     "no card has run DeepSpeed's offloading .* use offload_parameters=False"),
    ("lightning", "cpu", {"sharding": "zero3", "compile": True}, "wraps the model by itself"),
    ("deepspeed", "cpu", {"sharding": "deepspeed-zero3", "loss_chunks": 2}, "use loss_chunks=1"),
    *[(flavor, "cpu", {"sharding": "deepspeed-zero2"}, "flavor='deepspeed', or sharding='zero2'")
      for flavor in ("pytorch", "lightning", "transformers", "accelerate")],
])  # fmt: skip
def test_what_a_library_cannot_do_in_ranks_is_refused_by_name(flavor, device, fields, said):
    config = StepConfig(**RANKS, **fields)
    with pytest.raises(UnsupportedError, match=said):
        export_script(memlab.workloads.get("plain-mlp"), config, device, flavor=flavor)


def test_what_a_file_of_ranks_cannot_hold_is_refused_by_name():
    workload = memlab.Workload(
        name="rows",
        build_model=lambda: torch.nn.Linear(2, 2),
        make_batch=lambda n: [torch.ones(i + 1, 2) for i in range(n)],
        compute_loss=lambda model, batch: model(torch.cat(batch)).mean(),
    )
    with pytest.raises(UnsupportedError, match=r"world_size=2 cannot be exported: .* split_batch"):
        export_script(workload, StepConfig(**RANKS, sharding="ddp"), "cpu")
