"""Faults of what watches a run, and of the pages that show one."""

from tests.mutations.fault import Fault

__all__ = ["WATCHING"]

WATCHING = [
    Fault(
        "tokens that were trained with another advantage are not found",
        "rollout/audit.py::audit",
        'names = ("ids", "logprobs", array)',
        'names = ("ids", "logprobs")',
        "rollout/test_audit.py",
    ),
    Fault(
        "a two-sided probability counts one side",
        "watch/paired.py::_mcnemar",
        "2 * below / 2 ** total",
        "below / 2 ** total",
        "watch/test_paired.py",
    ),
    Fault(
        "tasks with other prompts are compared",
        "records/report/comparison.py::compare_evaluations",
        "first.prompts[each] == second.prompts[each]",
        "True",
        "records/test_comparison.py",
    ),
    Fault(
        "answers that could not be judged count as solved",
        "records/report/comparison.py::_solved",
        "reward is not None and reward >= bound",
        "reward is None or reward >= bound",
        "records/test_comparison.py",
    ),
    Fault(
        "a block of a long curve has the mean of its sums",
        "records/report/curves.py::Curves._curve",
        "found.sums / found.counts",
        "found.sums / self._width",
        "records/test_curves.py",
    ),
    Fault(
        "blocks of a long curve are joined at the wrong rows",
        "records/report/curves.py::_Blocks.fold",
        "self.ids // (width // self.width)",
        "self.ids // width",
        "records/test_curves.py",
    ),
    Fault(
        "a page follows a log whose end was replaced as if it was not",
        "records/live/follow.py::LogTail.read",
        "self.size < self.end or before != self._last",
        "self.size < self.end",
        "records/live/test_follow.py",
    ),
    Fault(
        "the first line of an older piece of samples is lost",
        "records/live/samples.py::SampleIndex._advance_backward",
        "self._begin = begin + skip",
        "self._begin = begin",
        "records/live/test_samples.py",
    ),
    Fault(
        "a filter by reward finds what has none",
        "records/live/samples.py::SampleIndex._fits",
        "fits &= table[name] <= high",
        "fits &= ~(table[name] > high)",
        "records/live/test_samples.py",
    ),
    Fault(
        "a continued search begins with its last row",
        "records/live/samples.py::SampleIndex.find",
        "int(places[0]) + 1 if len(places) else 0",
        "int(places[0]) if len(places) else 0",
        "records/live/test_samples.py",
    ),
    Fault(
        "control characters reach a page",
        "records/report/templates.py::template",
        "visible(str(value))",
        "str(value)",
        "records/test_report.py records/live/test_run.py",
    ),
    Fault(
        "a page elsewhere can read the page of a run",
        "programs/watching/live.py::guards",
        "not loopback",
        "True",
        "watch/test_live.py",
    ),
    Fault(
        "one who looks keeps a run from its directory",
        "records/lock.py::_take",
        "looks < LOOKS",
        "False",
        "records/test_lock.py",
    ),
    Fault(
        "places along an answer count its prompt",
        "rollout/diagnostics.py::_offsets",
        "positions[begin:end] - first",
        "positions[begin:end]",
        "rollout/test_diagnostics.py",
    ),
]
