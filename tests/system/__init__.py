"""Tests of processes, notebooks, the panel and the browser."""
