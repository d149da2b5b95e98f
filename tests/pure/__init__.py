"""Tests that train nothing: they neither build a step nor start a worker."""
