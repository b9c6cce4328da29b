"""machine: the cores that are ours, the processor's name, and what changes a measurement."""

import os

import pytest

from pdlib import machine


def test_cores_are_those_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert machine.cores() == 2


@pytest.mark.parametrize("count, cores", [(96, 96), (None, 1)])
def test_cores_where_the_system_tells_no_affinity(monkeypatch, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert machine.cores() == cores


def test_the_processor_has_a_name():
    assert machine.cpu_name().strip()


def test_settings_that_change_what_is_measured(monkeypatch):
    given = {
        "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1",
        "MALLOC_ARENA_MAX": "2",
        "MKL_NUM_THREADS": "1",
        "DNNL_VERBOSE": "0",
        "OMP_NUM_THREADS": "2",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME_OF_SOMETHING", "x")
    found = machine.settings()
    assert given.items() <= found.items() and "HOME_OF_SOMETHING" not in found
