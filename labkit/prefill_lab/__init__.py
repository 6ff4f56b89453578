"""Prefill for real: every way in which this machine can take a prompt, measured in turns.

`run_prefill` measures, `PrefillResult` holds the tables, `labkit.prefill_lab.check` compares the
two-slot model with labkit's own two-slot prefill. This module imports nothing: the worker
processes begin here, and what they import is to be counted in their memory.
"""
