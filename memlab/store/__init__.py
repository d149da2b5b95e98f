"""The store: every result in one SQLite file, which outlives kernels and serves several at once.

In: a `StepResult`, and what was asked for to get it. Out: the same result later, in any process,
and the DataFrame of `memlab.results`. Start with `keeping.py`, which is what `measure` calls.

- `database.py`: the file: its path, its schema with migrations, and its problems in words.
- `identity.py`: when two workloads, and two settings, are the same.
- `rows.py`: a result with what was asked for, as a row.
- `keeping.py`: writes a result before it is shown; a problem becomes a note.
- `claims.py`: who runs which setting of a sweep.
- `frames.py`: `memlab.to_frame`, `memlab.results` and `stored_results`.
- `from_records.py`: copies records of devices into the store.
"""
