"""The command line: `memlab` and `python -m memlab`, by click.

Words of a terminal come in; text or one JSON object on stdout and an exit code go out. Each command
calls one public function of memlab.

- `commands.py`: the commands, an option for each field of `StepConfig`, and what is printed. Start
  here. `models.py`: which workload a word names.
- `doctor.py`: `memlab doctor`: what this machine has and what works here, by the models and
  settings of `doctor.toml`; `verdict.py`: how good predictions are here; `device_visit.py`: cases
  carried out on a device, as lines of a record.
- `watch.py`: `memlab watch`: a person's script under `memlab.watch`.
"""
