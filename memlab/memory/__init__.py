"""Meters and devices: what a step holds in memory, allocation by allocation."""
