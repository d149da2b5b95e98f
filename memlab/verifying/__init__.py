"""Verifying: did a technique leave the training alone?

- `verify.py`: three updates of both steps, compared. Start here.
- `updates.py`: what each update of a step did; `differences.py`: how far two of them are apart.
- `full_batch.py`: do the micro-batches give the gradient of the undivided batch?
- `kept_state.py`: what functions keep between runs, set back before each.
"""
