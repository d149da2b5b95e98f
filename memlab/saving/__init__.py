"""A checkpoint of a step: what it holds, and what a rank allocates while it is written.

In: a built step. Out: its tensors by name, and the bytes that saving takes beside them. Files are
written and read by `checkpoints.py`; how much memory a technique saves is another question.

Start with `contents.py`, the tensors. `peak.py` says what saving allocates, `messages.py` how large
the lists are that ranks send one another before and after they write.
"""
