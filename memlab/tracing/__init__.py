"""Tracing: a step runs over fake tensors, on a device that need not be there, and all is noted.

- `trace_step.py` traces the step of a workload as a `Program` (`program.py`), the trace for any
  batch size. Start here.
- `fake_workload.py`: the workload with a model and batches of fake tensors, by `fakify.py`.
- `tracker.py` sees every operator; `fake_outputs.py` says what it returns, `values.py` and
  `data_dependent.py` what is known of values, `repeats.py` what was seen before, `faking.py` what
  PyTorch does otherwise.
- `recording.py`: what is noted; `assembly.py`: with the memory of its kernels, a `Trace`.
- `fake_cuda.py`: a CUDA device that is not there, `card_answers.py` what it says of itself,
  `attention_kernels.py` the kernel that it would choose for attention, `triton_launches.py` its
  Triton kernels.
- `person_script.py` records a person's own script in the same way: `script_card.py` is the card
  that it finds, `script_sandbox.py` its files, processes and loaders, `script_ranks.py` its ranks,
  `script_stages.py` its stages, `script_updates.py` its updates without an optimizer,
  `script_facts.py` what else it did. `script_step.py` sees its training step,
  `script_workload.py` is that step as a workload.
- `simulated_ranks.py`: one of many ranks, without the others.
- Libraries: `transformers_attention.py`, `bitsandbytes_layers.py`.
"""
