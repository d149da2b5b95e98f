"""Store: results that outlive a kernel, and what changed between them.

- `database.py`: one SQLite file (`schema.sql`), whose rows are runs, written before they are
  shown. Start here. `frames.py` shows them as tables, `identity.py` says which steps are the same.
- `records.py`: measurements of real devices as lines of JSON, in `data/`; `recorded.py` shows them
  on machines without these devices.
- `compare.py`: `memlab.compare`; `sources.py` reads what it is given.
"""
