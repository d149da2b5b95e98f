"""CUDA's caching allocator, replayed: a story of allocations in, reserved bytes out.

- `replay.py`: the allocator itself, request by request.
- `pools.py`: its two kinds of pool: segments of a fixed size, and segments that grow by pages.
- `hygiene.py`: stories that show what habits of a program do to reserved memory.
"""
