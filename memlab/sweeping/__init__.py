"""Sweeping: one workload under many settings, each run once and stored, whatever is interrupted.

In: a workload and a list of configs, or a dict of lists of which all combinations are run. Out: a
`SweepTable`, whose results are in the store too. Start with `sweep.py`.

- `settings.py`: the settings of a sweep, and which combinations are refused.
- `tasks.py`: runs one setting, here or in a process of an executor; one measurement at a time on a
  machine.
- `filling.py`: claims settings, has them run, writes their results, until none is left.
- `table.py`: `SweepTable`.
- `sweep.py`: `memlab.sweep`.
"""
