"""Comparisons of whole steps: samples, gradients, and bounds."""

import numpy as np
import pytest

from benchmarks.accelerator.agreement import (
    Options,
    above,
    apart,
    main,
    samples_apart,
)
from jaxrl_post.sampler import Completion
from jaxrl_post.tokens import Tokens


def completion(ids, logprobs):
    tokens = Tokens.generated(
        np.array(ids, np.int32), np.array(logprobs, np.float32), version=0
    )
    return Completion(0, 0, tokens, "length")


def test_samples_are_compared_up_to_where_they_part():
    one = completion([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    parted = completion([5, 6, 9, 8], [-1.0, -2.5, -9.0, -9.0])
    found = samples_apart([one, parted], [one, one])
    # Seven tokens had the same tokens before them; one of these is another.
    assert found == {"flipped": pytest.approx(1 / 7), "nats": 0.5}
    assert samples_apart([one], [one]) == {"flipped": 0.0, "nats": 0.0}


def test_trees_are_compared_by_norm():
    expected = {"a": np.array([3.0, 0.0]), "b": np.array([4.0])}
    found = {"a": np.array([3.0, 0.3]), "b": np.array([4.4])}
    assert apart(found, expected) == pytest.approx(0.1)


def test_a_number_above_its_bound_fails_and_so_does_nan():
    bounds = {"gradient": 1e-4, "loss": 1e-4, "unequal": 0.0}
    found = {"gradient": 1e-4, "loss": 0.0, "unequal": 0.0, "factor": 9.0}
    assert above(found, bounds) == []
    assert above(found | {"loss": np.nan}, bounds) == ["loss"]
    assert above(found | {"gradient": 2e-4, "unequal": 0.01}, bounds) == [
        "gradient",
        "unequal",
    ]


def test_a_line_that_fails_leaves_the_others(tmp_path):
    """There is no such dtype."""
    checks = ("CPU, float31", "exact, float31")
    lines = main(Options(("demo",), checks, tmp_path / "lines.json"))
    assert lines.failed() == ["demo, CPU, float31", "demo, exact, float31"]
    assert all("float31" in row["failed"] for row in lines.rows)


def test_an_unknown_model_is_refused():
    with pytest.raises(SystemExit, match="--shapes must be of demo, tiny, small"):
        main(Options(("huge",)))
