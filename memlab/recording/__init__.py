"""Record a step over fake tensors, without memory.

- `tracker.py`: `record_fake` runs a step and records every operator; `recording.py` is the data
  that it returns. `fake_outputs.py` says what an operator returns, `live_blocks.py` which storages
  are allocated and freed.
- `record_step.py` records the step of a workload, over two batches of different sizes.
- `fake_workload.py` makes a workload whose model and batches consist of fake tensors.
- What fake tensors get wrong or refuse is corrected in one file each: `faking.py`,
  `fake_kernels.py`, `real_strides.py`, `number_formats.py`, `saved_numbers.py`, `packed.py`,
  `sparse.py`, `built.py`, `scripted.py`.
- Values that a step reads: `values.py` (known), `draws.py` (random), `unknown.py` (unknown).
- `stand_in.py` and the files named after it are a device that dispatches like CUDA, without a
  card; `stand_in_attention.py` also says why a kernel is taken, `attention_notes.py` in sentences;
  `cuda_functions.py` says which functions CUDA does not take apart, `of_bitsandbytes.py` what its
  products in 8 bits allocate there, `triton_launches.py` has Triton kernels do nothing,
  `card_answers.py` says how many processors the card has,
  `triton_of_trl.py` has trl compute as on a card without them,
  `flash_attn_of_transformers.py` lets transformers find flash_attn, and
  `flex_attention_of_transformers.py` stands for the kernel that transformers compiles.
- `simulated_ranks.py` and `fake_reducer.py` let one process be a rank without the others;
  `streams.py` and `collectives.py` say on which stream of a card an operator runs, and what waits.
- `assembly.py` combines a recording with the memory of its kernels into a trace; `program.py` gives
  this trace for any batch size.

A step comes in, a `Recording` goes out. Start with `recording.py`, then `tracker.py`.
"""
