"""What changed between two results, or two sets of them: `memlab.compare`.

In: results, tables, files or stores of an older and a newer version of torch, or of a person's
model. Out: `CostChanges`: settings that cost more, less or the same, and settings of one side only.
Start with `compare.py`.

- `setting_cost.py`: what one setting costs, wherever it was written down.
- `reading.py`: results, tables, JSON and CSV files, and stores, as such costs.
- `judging.py`: whether a setting costs more, within which noise.
- `cost_changes.py`: the answer.
- `compare.py`: settings of both sides are matched.
"""
