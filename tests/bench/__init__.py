"""Measurements. `make bench` prints them and rewrites docs/benchmarks.md; no test asserts a
time.
"""
