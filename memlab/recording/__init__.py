"""Recording: a step that is run over fake tensors, without memory, and what it did.

- `tracker.py`: `record_fake` runs a step and notes every operator, and every birth and death of a
  storage; `recording.py` holds what it found.
- `record_step.py`: the step of a workload, recorded over two batches of different sizes.
- `fake_workload.py`: a workload whose model and batches are made of fake tensors.
- What fake tensors get wrong or refuse, one file each: `faking.py`, `fake_kernels.py`,
  `real_strides.py`, `number_formats.py`, `saved_numbers.py`, `packed.py`, `sparse.py`, `built.py`,
  `scripted.py`.
- Values that a step reads: `values.py` (known), `draws.py` (random), `unknown.py` (unknown).
- `stand_in.py` and its two files: a device that dispatches as CUDA does, without a card.
- `assembly.py`, `program.py`: a recording and the memory of its kernels, put together as a trace;
  that trace for any batch size.

A step comes in, a `Recording` goes out. Start with `recording.py`, then `tracker.py`.
"""
