"""The benchmark of kernels: what rows hold, and lines of programs that do not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernel_cases import cases, rows_of
from benchmarks.kernels import Options, device_times, measured, prepare
from jaxrl_post.kernels.attention.forest import require_forest


def test_ragged_rows_are_forests_of_several_prompts():
    positions, ends = rows_of("ragged", 4, 2048)
    assert positions.shape == ends.shape == (4, 2048)
    require_forest(ends)
    rows = [set(), set(), set(), set()]
    for row, seen in enumerate(rows):
        begins = np.flatnonzero((positions[row] == 0) & (ends[row] > 0))
        # A tree ends where the next one begins, or padding.
        trees = [(int(begin), int(ends[row, begin])) for begin in begins]
        assert len(trees) >= 2
        counted = int((ends[row] > 0).sum())
        assert counted > 0.8 * 2048
        assert [end for _, end in trees] == [*(b for b, _ in trees[1:]), counted]
        for begin, end in trees:
            prompt = int((ends[row, begin:end] == end).argmin())
            answers = np.unique(ends[row, begin + prompt : end], return_counts=True)[1]
            assert len(answers) >= 6
            seen.update(answers.tolist())
    # Answers of many lengths, and no two rows alike.
    assert min(map(len, rows)) >= 8
    assert len({row.tobytes() for row in ends}) == 4
    again = rows_of("ragged", 4, 2048)
    np.testing.assert_array_equal(ends, again[1])


def test_equal_answers_and_one_sequence():
    positions, ends = rows_of("answers", 1, 32)
    assert positions[0].tolist() == [*range(16), *[16, 17] * 8]
    assert ends[0].tolist() == [32] * 16 + [n for n in range(18, 33, 2) for _ in "12"]
    positions, ends = rows_of("causal", 2, 4)
    assert positions.tolist() == [[0, 1, 2, 3]] * 2
    assert ends.tolist() == [[4] * 4] * 2


@pytest.mark.parametrize(
    ("operation", "name", "rate"),
    [
        ("attention", "llama-3.3-70b, tp8", "tflops"),
        ("decode_attention", "views of 16", "gbs"),
    ],
)
def test_the_plain_program_is_measured_too(operation, name, rate):
    options = Options(packs=("ragged",), dtype="float32", repeats=1)
    (case,) = cases((operation,), (name,), ("ragged",), jnp.dtype("float32"), 2**6)
    (prepared,) = prepare(options, [case])
    plain, xla = measured(options, prepared, 1e12, 2.0**40)
    assert (plain["by"], xla["by"]) == ("reference", "xla")
    assert plain["ms"] > 0
    assert plain[rate] > 0
    assert 0 <= xla["error"] < 1e-4
    json.dumps([plain, xla])


def test_a_program_that_does_not_fit_is_not_run():
    options = Options(by=("reference",), dtype="float32")
    arguments = (("attention",), ("llama-3.3-70b, tp8",), ("ragged",))
    (case,) = cases(*arguments, jnp.dtype("float32"), 2**4)
    (line,) = measured(options, *prepare(options, [case]), 1e12, 2.0**20)
    # Scores of 8 heads and 512 x 512 tokens, as float32, are 8 MiB.
    assert line["gib"] > 2**-7
    assert line["skipped"] == f"needs {line['gib']:.1f} GiB; 0.0 are free"
    assert "ms" not in line


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda logprob: logprob, False),
        # Half a percent of a log-prob's size, and far more than a kernel may err.
        (lambda logprob: logprob + 0.05, True),
        (lambda logprob: logprob.at[0, 3].set(jnp.nan), True),
    ],
)
def test_a_log_prob_that_is_off_by_little_is_not_timed(change, refused):
    options = Options(by=("xla",), dtype="float32", repeats=1)
    arguments = (("token_logprob",), ("qwen2.5-0.5b",), ("causal",))
    (case,) = cases(*arguments, jnp.dtype("float32"), 2**10)

    def wrong(*arrays):
        (logprob, *others), gradients = case.implementations["xla"](*arrays)
        return (change(logprob), *others), gradients

    passes = {**case.implementations, "xla": jax.jit(wrong)}
    small = dataclasses.replace(
        case, implementations=passes, arrays=case.small, needed=1.0
    )
    (line,) = measured(options, *prepare(options, [small]), 1e12, 2.0**40)
    assert ("ms" in line) != refused
    assert (line.get("skipped") == "differs from the reference") == refused
    assert line["error"] < 1e-4


def test_a_program_that_cannot_be_compiled_costs_one_line():
    options = Options(by=("reference", "xla"), dtype="float32", repeats=1)
    arguments = (("decode_attention",), ("views of 16",), ("causal",))
    (case,) = cases(*arguments, jnp.dtype("float32"), 2**6)

    def refuses(*arrays):
        raise NotImplementedError("such heads")

    passes = {**case.implementations, "xla": refuses}
    broken = dataclasses.replace(case, implementations=passes)
    plain, xla = measured(options, *prepare(options, [broken]), 1e12, 2.0**40)
    assert plain["ms"] > 0
    assert xla["skipped"] == "such heads"


def test_times_of_a_profile_are_those_of_the_device(tmp_path):
    """Lines of its streams or operations; other lines of a plane name them again."""
    plane = """
        planes { name: "%s"
          lines { name: "%s" %s }
          lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 9000000 } }
          event_metadata { key: 1 value { id: 1 name: "product" } }
          event_metadata { key: 2 value { id: 2 name: "softmax" } } }
    """
    events = """
        events { metadata_id: 1 duration_ps: 3000000 }
        events { metadata_id: 2 duration_ps: 500000 }
        events { metadata_id: 1 duration_ps: 2000000 }
    """
    files = []
    for device, line in (
        ("/device:GPU:0", "Stream #14(Compute)"),
        ("/device:TPU:0", "XLA Ops"),
        ("/host:CPU", "Stream #1"),
    ):
        text = plane % (device, line, events)
        made = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
        files.append(tmp_path / f"{len(files)}.xplane.pb")
        files[-1].write_bytes(made)
    assert device_times(list(map(str, files))) == {"product": 10.0, "softmax": 1.0}
