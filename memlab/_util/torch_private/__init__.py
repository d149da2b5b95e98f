"""Every private name of PyTorch that memlab uses, by topic.

What comes in: names of PyTorch with a component that begins with an underscore, which may move or
change in any release. What goes out: the same objects under plain words, so that no other file of
memlab depends on where PyTorch keeps them. Names that PyTorch's users know (`FakeTensor`,
`TorchDispatchMode`, `OpOverload`, `pytree`) stay as they are.

- `tensors.py`: tensors, storages and modules; operators and their kernels; what the dispatcher
  passes through; fake tensors; autograd's nodes, and the profiler's events; settings of CUDA's
  caching allocator.
- `ranks.py`: a process group without other processes.
- `python_device.py`: the device for backends written in Python, and what is replaced for it.
- `compiler.py`: TorchDynamo and the partitioner, imported when they are first asked for.
- `inductor.py`: the function that Inductor writes for a card, without its kernels.
- `process.py`: switches and caches that PyTorch keeps for a whole process.

To support a new PyTorch, run `pytest --noconftest tests/pure/test_torch_private.py` with it: each
private name has a test, which fails by that name and says what memlab uses it for and which file to
mend. A name that only some of the supported releases have is looked for (`hasattr`), never decided
by version.

Left out: names of operators (`aten._to_copy`), by which the dispatcher reports them, and files
whose text goes into exported scripts, which are plain PyTorch and cannot import memlab. The test
lists those files.
"""

# trees of lists, tuples and dicts; imported by torch itself
from torch.utils import _pytree as pytree

__all__ = ["pytree"]
