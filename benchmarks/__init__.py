"""Benchmarks: each prints a table, writes JSON and states its goal, if it has one."""
