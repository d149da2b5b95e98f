"""What people write and read: arguments, sizes and times, their own values as text.

- `checks.py`: arguments of public functions, checked before anything runs.
- `units.py`: bytes and seconds, parsed and printed. Nothing else converts them.
- `quoting.py`: a person's value in a message, in a picture or in generated Python.

Every public function comes through here first; start with `checks.checked`.
"""
