"""Tests that build, run or predict steps of small models, each technique alone."""
