"""Measurements, one command a file; their kept results are in `results/`."""
