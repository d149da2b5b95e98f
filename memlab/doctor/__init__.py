"""`python -m memlab doctor`: what this machine has, what works here, and how good predictions are.

- `command.py`: the options and the order of things; start reading here.
- `machine.py`: the machine and the device in words, and how much of a card may be used.
- `tries.py`: a tiny step with each technique.
- `settings.py`: the settings that are predicted and measured side by side.
- `visit.py`: carries these out; `keeping.py` writes the record, if a person wants one.
- `verdict.py`: the errors, and what they mean.

It needs torch, numpy and cloudpickle alone, downloads nothing, and writes nothing but the record.
"""
