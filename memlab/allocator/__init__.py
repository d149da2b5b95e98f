"""Replay CUDA's caching allocator: allocations and frees come in, reserved bytes go out.

- `replay.py` is the allocator itself, request by request. Start here.
- `pools.py` has its two kinds of pool: fixed segments, and segments that grow by pages.
- `hygiene.py` shows what the habits of a program do to reserved memory.
"""
