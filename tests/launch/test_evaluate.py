"""`launch.evaluate`: what it counts, prints and writes."""

import json

import numpy as np
import pytest

from jaxrl_post.rollout import Group, Rollout
from jaxrl_post.train.evaluate import score, wilson_interval
from jaxrl_post.train.rl import FailedRolloutsError
from launch import evaluate


# Newcombe, Two-sided confidence intervals for the single proportion, Statistics in
# Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("solved", "count", "interval"),
    [
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_interval_is_the_published_one(solved, count, interval):
    found = wilson_interval(solved / count, count)
    np.testing.assert_allclose(found, interval, atol=5e-5)
    # What did not happen is as certain as what did.
    mirrored = wilson_interval(1 - solved / count, count)
    np.testing.assert_allclose(mirrored, (1 - found[1], 1 - found[0]), atol=1e-12)


@pytest.mark.parametrize(("share", "count"), [(-0.1, 5), (1.1, 5), (0.5, 0)])
def test_wilson_interval_refuses_what_is_no_share(share, count):
    with pytest.raises(ValueError, match=f"got {share} of {count}"):
        wilson_interval(share, count)


def rollout(task: int, sample: int, reward: float | None, *, size=3, finish="stop"):
    return Rollout(
        prompt_id=task,
        sample_index=sample,
        task_id=task,
        tokens=(1,) * (2 + size),
        loss_mask=(False,) * 2 + (True,) * size,
        logprobs=(0.0,) * (2 + size),
        log_masses=(0.0,) * (2 + size),
        versions=(0,) * (2 + size),
        reward=reward,
        error="" if reward is not None else "timeout: 10 s",
        finish_reason=finish,
        prompt_text="?",
        response_text="!",
        metrics={} if reward is None else {"reward": reward},
    )


def test_score_counts_by_hand():
    scores = score(
        [
            Group(0, (rollout(0, 0, 1.0), rollout(0, 1, 0.25, size=7))),
            Group(1, (rollout(1, 0, 0.5), rollout(1, 1, None))),
            Group(2, (rollout(2, 0, 0.0, finish="length"), rollout(2, 1, 1.0))),
            Group(3, (rollout(3, 0, None), rollout(3, 1, None))),
        ]
    )
    assert (scores.tasks, scores.samples, scores.failed) == (3, 5, 3)
    assert scores.accuracy == 0.4
    assert scores.interval == wilson_interval(0.4, 3)
    assert scores.solved_by_any == pytest.approx(2 / 3)
    assert scores.mean_reward == pytest.approx(0.55)
    assert scores.mean_tokens == pytest.approx(3.8)
    assert scores.max_tokens == 7
    assert scores.stopped == 0.8
    assert scores.metrics == {"reward": pytest.approx(0.55)}


def test_score_takes_the_threshold():
    groups = [Group(0, (rollout(0, 0, 0.5), rollout(0, 1, 0.4)))]
    assert score(groups).accuracy == 0.0
    assert score(groups, solved_reward=0.5).accuracy == 0.5


def test_score_of_failures_alone_is_an_error():
    with pytest.raises(FailedRolloutsError, match=r"none of 1 samples.*timeout: 10 s"):
        score([Group(0, (rollout(0, 0, None),))])


def run(model, output, *arguments: str) -> int:
    return evaluate.main(
        [
            f"--model={model}",
            "--env=even_length:EvenLength",
            "--max-tokens=5",
            f"--output={output}",
            *arguments,
        ]
    )


def results(output):
    lines = output.with_suffix(".completions.jsonl").read_text().splitlines()
    return json.loads(output.read_text()), [json.loads(line) for line in lines]


SAMPLED = ("--samples=4", "--temperature=1", "--num-tasks=5")


@pytest.fixture(scope="module")
def sampled(model, tmp_path_factory):
    output = tmp_path_factory.mktemp("sampled") / "results.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(__file__.rpartition("/")[0])
        assert run(model, output, *SAMPLED) == 0
    return results(output)


def test_the_files_agree(sampled, model):
    found, rows = sampled
    assert [(r["task_id"], r["sample_index"]) for r in rows] == [
        (task, index) for task in range(5) for index in range(4)
    ]
    assert [r["prompt"] for r in rows[::4]] == [f"eval {i}: " for i in range(5)]
    solved = np.array([len(r["completion"]) % 2 == 0 for r in rows])
    # Both kinds occur, so that the counts below say something.
    assert 0 < solved.sum() < 20
    assert [r["solved"] for r in rows] == solved.tolist()
    assert [r["reward"] for r in rows] == solved.astype(float).tolist()
    assert found["accuracy"] == solved.mean()
    assert found["solved_by_any"] == solved.reshape(5, 4).any(axis=1).mean()
    lengths = [r["num_tokens"] for r in rows]
    assert found["mean_tokens"] == np.mean(lengths)
    assert found["max_tokens"] == max(lengths) <= 5
    assert found["stopped"] == np.mean([r["finish_reason"] == "stop" for r in rows])
    assert found["metrics"] == {"length": np.mean([len(r["completion"]) for r in rows])}
    assert found["config"]["model"] == str(model)
    assert found["command"].startswith("python -m launch.evaluate --model=")
    assert "jax" in found["versions"]


def test_samples_depend_on_the_seed_and_not_on_the_slots(sampled, model, tmp_path):
    few, other = tmp_path / "few.json", tmp_path / "other.json"
    assert run(model, few, *SAMPLED, "--num-slots=8") == 0
    assert results(few)[1] == sampled[1]
    assert run(model, other, *SAMPLED, "--seed=1") == 0
    assert results(other)[1] != sampled[1]


def test_failures_are_counted_apart(model, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert run(model, output, "--env=even_length:EvenLength?broken=2") == 0
    found, rows = results(output)
    assert (found["tasks"], found["samples"], found["failed"]) == (4, 4, 2)
    assert [r["reward"] is None for r in rows] == [True] * 2 + [False] * 4
    assert "out of order" in rows[0]["error"]
    table = capsys.readouterr().out
    assert "the first failure: raised: " in table
    assert f"{100 * found['accuracy']:.1f}% (95%: " in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples=2"], "--samples: 2 greedy samples of a task are all the same"),
        (["--num-tasks=0"], "--num-tasks: must be at least 1; got 0"),
        (["--model=nowhere"], "--model: 'nowhere' is neither a directory nor a preset"),
        (["--env=even_length:EvenLength?size=0"], "even-length has no eval tasks"),
        (
            ["--env=even_length:EvenLength?broken=9"],
            "none of 6 samples could be judged",
        ),
        (["--mesh=dp3"], "mesh: 'dp3' needs 3 devices, but there are 8"),
    ],
)
def test_what_cannot_be_evaluated(arguments, message, model, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert run(model, output, *arguments) == 1
    assert message in capsys.readouterr().out
    assert not output.exists()


def test_nothing_is_overwritten(model, tmp_path, capsys):
    for name in ("results.json", "results.completions.jsonl"):
        file = tmp_path / name
        file.write_text("precious")
        assert run(model, tmp_path / "results.json") == 1
        assert f"--output: {file} is already there" in capsys.readouterr().out
        assert file.read_text() == "precious"
        file.unlink()


def test_a_run_is_no_model(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert evaluate.main([f"--model={tmp_path}"]) == 1
    assert "is a run, not a model" in capsys.readouterr().out
