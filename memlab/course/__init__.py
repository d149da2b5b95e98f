"""The course: guesses, exercises that memlab grades, and what to remember.

`chapter` opens a chapter in its notebook. It keeps a guess that is made before a run and draws it
into the picture afterwards; it checks an answer against what memlab predicts, measures or verifies,
and gives a hint for each kind of mistake; at the end it says what was answered.

>>> from memlab import course
>>> course.chapter(1).check("1.1", 4 * 1000 * 4000).verdict
'not right'

- `chapters.py`: `chapter`, `Chapter`, guesses and verdicts; their texts are in `chapters.toml`.
- `exercise.py`: one question, its right answer and the mistakes that have a hint.
- `settings.py`: what judges a setting with which a step has to fit.
- `steps.py`: the exercises of chapters 0 to 2: what a step holds.
- `operators.py`: those of chapter 3: what operators save for backward.
- `allocator.py`: those of chapter 4: allocated, reserved, and what cannot be given back.
- `limits.py`: those of chapters 5 and 14: what can be known before, and the fastest that fits.
- `parts.py`: those of chapter 6: what micro-batches change.
- `recomputing.py`: those of chapters 7 and 8: what to compute again, and what that may change.
- `scripts.py`: those of chapters 13 and 16: lines at fault, in `loops/`, and a change that fails.
- `ranks.py`: those of chapter 15: what each rank holds and sends.
- `updates.py`: those of chapter 9: what an update holds.
- `giants.py`: those of chapter 10: logits, and attention that keeps its weights.
- `quantized.py`: those of chapter 11: a base in 4 bits.
- `lengths.py`: those of chapter 12: a batch that is too long, and an evaluation that keeps all.
"""

from memlab.course.chapters import Chapter, chapter
from memlab.course.scripts import numbered, script

__all__ = ["Chapter", "chapter", "numbered", "script"]
