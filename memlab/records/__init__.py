"""Records: what real devices did, kept as lines of JSON, and played back elsewhere.

- `records.py`: lines, files, and how they are read.
- `recorded.py`: `memlab.recorded` and `memlab.recordings`.
- `data/`: a file for each device.
"""
