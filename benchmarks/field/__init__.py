"""The field's benchmark: what tools say a training step takes, on the same measured rows.

`rows.py` has what was measured and what is told of each run, `tools/` one small file for each tool,
`asking.py` the environment and the process in which a tool answers, `judging.py` what became of it.
"""
