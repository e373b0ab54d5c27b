"""Host memory that a function holds, measured so that other work cannot disturb it."""

import tracemalloc
from collections.abc import Callable

import numpy as np


def peak_beyond_result(function: Callable[[], object], attempts: int = 3) -> int:
    """Bytes that Python and NumPy held at the worst moment, less those at the end.

    The least of several calls: what the interpreter allocates for itself (a table that
    grows, a cache of another thread) is in some calls, what `function` needs in all.
    """
    return min(_peak_beyond_result(function) for _ in range(attempts))


def _peak_beyond_result(function: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        result = function()
        end, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return peak - end


def numpy_bytes() -> int:
    """Bytes of the data of live NumPy arrays, of those that tracemalloc has seen."""
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([arrays])
    return sum(trace.size for trace in snapshot.traces)
