"""Records: measurements of real devices as lines of JSON, shown on machines without them.

- `records.py`: lines, files, and how they are read.
- `packing.py`: a result as short JSON.
- `recorded.py`: `memlab.recorded` and `memlab.recordings`, and where a person's own records lie.
- `targets.py`: what records know of operators, as targets of predictions.
- `data/`: a file for each device.
"""
