"""`python -m benchmarks.gpu_suite`: what a card does, recorded in one short visit.

It runs on a bare machine: torch and numpy, and of the zoo what is installed there. It leaves the
card's clocks, limits and modes alone.
"""
