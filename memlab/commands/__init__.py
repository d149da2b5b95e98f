"""The command line: `memlab` and `python -m memlab`, by click.

In: words of a terminal. Out: text or one JSON object on stdout, and an exit code (`answers.py`).
Each command calls one public function of memlab. Start with `group.py`.

- `group.py`: the commands together, and how a person's mistake is said.
- `models.py`: which workload a word names; `made_up.py`: one of a module without batch and loss.
- `imports.py`: what `package.module:name` means.
- `options.py`: options that several commands share.
- `settings.py`: an option for each field of `StepConfig`.
- `answers.py`: what is printed, and the exit codes.
- `one_step.py`: `predict`, `measure`, `verify`, `export`.
- `many_steps.py`: `sweep`, `recommend`, `compare`.
- `shipped.py`: `notebooks`, `doctor`.
"""
