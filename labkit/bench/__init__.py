"""Benchmarks of one model in several ways of running it, taking turns, a process for each.

`labkit.bench.run.run_bench` measures, `labkit.bench.result.BenchResult` holds the tables, and
`labkit.bench.report` says in words what they show. This module imports nothing: the worker
processes begin here, and what they import is to be counted in their memory cgroup.
"""
