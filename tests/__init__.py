"""The tests, in four tiers; CONTRIBUTING.md says what runs when."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the whole repository."""
