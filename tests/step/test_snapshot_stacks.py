"""The rules that tell a phase by its stack, held against the stacks of a real step.

There is no card here. So a step runs on the CPU, and each new storage is written down with the
Python frames under which it was made, as PyTorch writes them on a card.
"""

import sys
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import memlab
from memlab.integrations.snapshot_blocks import RunPhase, phase_of
from memlab.integrations.snapshot_file import Frame
from tests.snapshot_parts import dump

WIDTH, BATCH = 256, 64
HIDDEN = WIDTH * BATCH * 4


def frames():
    """Return the stack of the caller, the innermost frame first, without the mode's own."""
    found, frame = [], sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        found.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return found


class Recorder(TorchDispatchMode):
    """Writes an event for each storage that an operator makes, and for its end."""

    def __init__(self):
        super().__init__()
        self.events, self.known, self.count = [], weakref.WeakKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {leaf.untyped_storage() for leaf in tree_leaves((args, kwargs))
                 if isinstance(leaf, torch.Tensor)}  # fmt: skip
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage not in given and storage not in self.known:
                    self._add(storage)
        return result

    def _add(self, storage):
        self.count += 1
        self.known[storage] = self.count
        event = {"addr": 4096 * self.count, "size": storage.nbytes(), "stream": 0}
        self.events.append({**event, "action": "alloc", "frames": frames()})
        weakref.finalize(storage, self._free, event)

    def _free(self, event):
        for action in ("free_requested", "free_completed"):
            self.events.append({**event, "action": action, "frames": frames()})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.blocks, self.recomputes = nn.ModuleList([Block(), Block()]), recomputes

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def recorded(tmp_path, *, recomputes=False, num_steps=2):
    with Recorder() as recorder:
        model = Model(recomputes)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(num_steps):
            train(model, optimizer)
    snapshot = {"device_traces": [recorder.events]}
    return memlab.open_snapshot(dump(tmp_path / "s.pickle", snapshot)), recorder.events


def train(model, optimizer):
    x = torch.ones(BATCH, WIDTH)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_gradients_and_state_are_told_to_the_byte(tmp_path):
    found, _ = recorded(tmp_path)
    weights = 2 * WIDTH * WIDTH * 4
    peaks = dict(zip(found.timeline.categories, found.timeline.bytes_by_category.max(axis=0),
                     strict=True))  # fmt: skip
    assert peaks["parameters"] == weights
    assert peaks["gradients"] == weights
    assert peaks["optimizer_state"] == 2 * weights
    assert found.num_steps == 2


def test_what_forward_saves_is_told_as_activations(tmp_path):
    found, _ = recorded(tmp_path)
    highest = found.timeline.bytes_by_category[:, found.timeline.categories.index("activations")]
    # both outputs of tanh, which its backward and the next layer need, and the loss
    assert 2 * HIDDEN <= highest.max() <= 4 * HIDDEN


def test_a_recompute_on_any_thread_is_backward(tmp_path):
    _, events = recorded(tmp_path, recomputes=True, num_steps=1)
    stacks = [tuple(Frame(f["filename"], f["line"], f["name"]) for f in event["frames"])
              for event in events if event["action"] == "alloc"]  # fmt: skip
    again = [stack for stack in stacks if any(f.name == "recompute_fn" for f in stack)]
    assert again
    assert {phase_of(stack) for stack in again} == {RunPhase.BACKWARD}
    # on a card backward runs on a thread of its own, whose frames begin in the hook
    for stack in again:
        begin = max(i for i, frame in enumerate(stack) if frame.name == "unpack_hook")
        assert phase_of(stack[: begin + 1]) is RunPhase.BACKWARD
