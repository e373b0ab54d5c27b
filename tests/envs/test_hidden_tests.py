"""When what a program returns is what is expected."""

import pytest

from jaxrl_post.envs.tasks.programs.hidden_tests import _equal


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (1.0000009, 1.0),
        (1e-12, 1.0000005e-12),
        (3, 3.0),
        (1e-10, 0.0),
        (-0.0, 0),
        ([1.0, {"a": 2}], [1.0000001, {"a": 2}]),
        (float("inf"), float("inf")),
        ([float("-inf")], [float("-inf")]),
    ],
)
def test_numbers_are_equal_to_one_part_in_a_million(said, expected):
    assert _equal(said, expected)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (1.000002, 1.0),
        # These were taken for equal, since the difference is less than 1e-6.
        (1e-7, 1e-8),
        (5e-7, 0.0),
        (1000001, 1000000),
        (10**400, 1.5),
        (-(10**400), 0.0),
        (float("inf"), 1.5),
        (1e308, float("inf")),
        (10**400, float("inf")),
        (float("-inf"), float("inf")),
        (float("nan"), float("inf")),
        (float("nan"), 0.0),
        (True, 1),
        ("1", 1),
    ],
)
def test_other_numbers_are_wrong(said, expected):
    assert not _equal(said, expected)
