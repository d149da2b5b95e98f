"""Memory limits: the peak of a step goes in, whether it fits comes out.

`judgement.py` has the one definition of which peak counts and of what fits: `StepResult` asks it,
and everything else asks the result.
"""
