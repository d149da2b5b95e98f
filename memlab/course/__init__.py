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
- `updates.py`: those of chapter 9: what an update holds.
- `giants.py`: those of chapter 10: logits, and attention that keeps its weights.
- `quantized.py`: those of chapter 11: a base in 4 bits.
- `lengths.py`: those of chapter 12: a batch that is too long, and an evaluation that keeps all.
"""

from memlab.course.chapters import Chapter, chapter

__all__ = ["Chapter", "chapter"]
