"""Recommending: the fastest settings that fit a memory limit, and the largest batch that does.

Start with `recommend.py`, which has `memlab.recommend`. A workload, a limit and a batch size go in.
Out come `Recommendations` (`recommendations.py`), the best first, each with its reasons.

- `space.py`: the settings that are tried, as the techniques state them.
- `alternatives.py`: other accumulation steps and budgets of a predicted step, by arithmetic.
- `combinations.py`: the workloads that are tried, where their choices may be varied.
- `known.py`: what earlier searches of the session have predicted.
- `goal.py`: what a search looks for, and where.
- `search.py`: which steps are predicted, the most promising first.
- `every_rank.py`: the other ranks of what was found.
- `confirming.py`: what of that is measured, where the device is in this machine.
- `one_step.py`: what one recorded step says of others.
- `reasons.py`: what each choice and setting of a recommendation saves and costs, in words.
- `answer.py`: the message and the notes of the answer.
- `largest.py`: `memlab.largest_batch`.
"""
