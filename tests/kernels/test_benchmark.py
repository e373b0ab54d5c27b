"""The benchmark of kernels: what rows hold, and what is not timed.

Programs that do not fit, differ from others or cannot be compiled cost one line.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accelerator.errors import drawn_errors, relative_errors
from benchmarks.accelerator.lines import read
from benchmarks.kernel_cases import Selection, cases, rows_of
from benchmarks.kernels import Options, device_times, main, measured, prepare
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


def only(operation, name, divide):
    """A case in float32."""
    dtype = jnp.dtype("float32")
    (case,) = cases(Selection((operation,), (name,), ("ragged",), dtype, divide))
    return case


def test_a_drawn_token_is_judged_by_its_part_of_the_distribution():
    """Four tokens of 0.1, 0.2, 0.3 and 0.4."""
    hidden = jnp.eye(4)[:2]
    weight = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]]).T) * jnp.ones((1, 4))
    arrays = hidden, weight, jnp.array([0.25, 0.9]), jnp.ones(2)

    def errors(tokens, logprobs):
        found = jnp.array(tokens), jnp.log(jnp.array(logprobs))
        return drawn_errors(arrays, found, None)

    right = errors([1, 3], [0.2, 0.4])
    assert right["cumulative"] < 1e-6
    assert right["nats"] < 1e-6
    # 0.25 is 0.05 below the third token's part, 0.9 is 0.3 above the second one's.
    assert errors([2, 3], [0.3, 0.4])["cumulative"] == pytest.approx(0.05, abs=1e-6)
    assert errors([1, 2], [0.2, 0.3])["cumulative"] == pytest.approx(0.3, abs=1e-6)
    assert errors([1, 3], [0.2, 0.5])["nats"] == pytest.approx(np.log(1.25), rel=1e-5)
    assert np.isnan(errors([1, 3], [0.2, np.nan])["nats"])


def test_relative_errors_lose_no_nan():
    one, other = jnp.array([3.0, 4.0]), jnp.array([3.0, 4.5])
    found = relative_errors((one, other), (one, one), logprobs=(1,))
    assert found == {"error": 0.0, "nats": 0.5}
    assert relative_errors((other,), (one,)) == pytest.approx({"error": 0.1})
    broken = relative_errors((one, one * jnp.nan, one), (one, one, one))
    assert np.isnan(broken["error"])


@pytest.mark.parametrize(
    ("operation", "name", "rate"),
    [
        ("attention", "llama-3.3-70b, tp8", "tflops"),
        ("decode_attention", "views of 16", "gbs"),
    ],
)
def test_the_plain_program_is_measured_too(operation, name, rate):
    options = Options(packs=("ragged",), dtype="float32", repeats=1)
    case = only(operation, name, 2**6)
    (prepared,) = prepare(options, [(case, ["reference", "xla"])])
    plain, xla = measured(options, prepared, 1e12, 2.0**40)
    assert (plain["by"], xla["by"]) == ("reference", "xla")
    assert plain["ms"] > 0
    assert plain[rate] > 0
    assert 0 <= xla["error"] < 1e-4
    # At the case's own size, with the first program that ran.
    assert 0 <= xla["whole"]["error"] < 1e-4
    assert "whole" not in plain
    assert plain["same_bits"] is xla["same_bits"] is True
    json.dumps([plain, xla])


def test_a_program_that_does_not_fit_is_not_run():
    options = Options(by=("reference",), dtype="float32")
    case = only("attention", "llama-3.3-70b, tp8", 2**4)
    ready = prepare(options, [(case, ["reference"])])
    (line,) = measured(options, *ready, 1e12, 2.0**20)
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
    case = only("token_logprob", "qwen2.5-0.5b", 2**10)

    def wrong(*arrays):
        (logprob, *others), gradients = case.implementations["xla"](*arrays)
        return (change(logprob), *others), gradients

    passes = {**case.implementations, "xla": jax.jit(wrong)}
    small = dataclasses.replace(
        case, implementations=passes, arrays=case.small, needed=1.0
    )
    (line,) = measured(options, *prepare(options, [(small, ["xla"])]), 1e12, 2.0**40)
    assert ("ms" in line) != refused
    assert (line.get("failed") == "differs from the reference") == refused
    assert line["error"] < 1e-4


def test_a_program_that_cannot_be_compiled_costs_one_line():
    options = Options(dtype="float32", repeats=1)
    case = only("decode_attention", "views of 16", 2**6)

    def refuses(*arrays):
        raise NotImplementedError("such heads")

    passes = {**case.implementations, "xla": refuses}
    broken = dataclasses.replace(case, implementations=passes)
    ready = prepare(options, [(broken, ["reference", "xla"])])
    plain, xla = measured(options, *ready, 1e12, 2.0**40)
    assert plain["ms"] > 0
    assert xla["failed"] == "such heads"


def test_a_kernel_must_give_the_same_bits_twice():
    """At the case's own size, without the comparison at a small one."""
    options = Options(dtype="float32", check=False, repeats=1)
    case = only("decode_attention", "views of 16", 2**6)
    plain, calls = case.implementations["reference"], []

    def moves(*arrays):
        def noise():
            calls.append(1)
            return np.float32(1e-6 * len(calls))

        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return plain(*arrays) + jax.experimental.io_callback(noise, kind)

    passes = {"reference": plain, "pallas_gpu": moves, "xla": moves}
    noisy = dataclasses.replace(case, implementations=passes)
    ready = prepare(options, [(noisy, list(passes))])
    lines = {row["by"]: row for row in measured(options, *ready, 1e12, 2.0**40)}
    assert lines["pallas_gpu"]["failed"] == "gave other bits the second time"
    assert "ms" not in lines["pallas_gpu"]
    # Other programs may add in any order.
    assert lines["xla"]["same_bits"] is False
    assert lines["xla"]["ms"] > 0


def test_a_run_that_was_cut_measures_the_missing_lines(tmp_path, capsys):
    path = tmp_path / "lines.json"
    chosen = {"operations": ("decode_attention",), "shapes": ("views of 16",)}
    options = Options(**chosen, dtype="float32", divide=8, repeats=1, json=path)
    whole = main(options).rows
    assert [row["by"] for row in whole] == ["reference", "xla"]
    record = read(path)
    assert record["matmul_tflops"] > 0
    record["rows"] = whole[1:]
    path.write_text(json.dumps(record))
    capsys.readouterr()
    again = main(options).rows
    assert [row["by"] for row in again] == ["xla", "reference"]
    assert again[0] == whole[1]
    assert '"by": "xla"' not in capsys.readouterr().out
    # Nothing is missing, so nothing is measured, not even the machine.
    assert main(options).rows == again
    assert read(path)["rows"] == again
    assert read(path)["matmul_tflops"] > 0


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
