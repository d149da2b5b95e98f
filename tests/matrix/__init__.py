"""Tests of many models and of techniques together; `make test` runs a sample of them."""
