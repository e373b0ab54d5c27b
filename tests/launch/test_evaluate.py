"""`launch.evaluate`: what it counts, prints and writes."""

import dataclasses
import io
import json
import re
import shutil
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.model import open_model
from jaxrl_post.programs.evaluation.answers import sampling_of
from jaxrl_post.programs.evaluation.run import _tell_limits
from jaxrl_post.programs.intervals import interval_over_tasks
from jaxrl_post.rollout import Episode, Group
from launch import cli, evaluate

pytestmark = pytest.mark.processes


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


def test_completions_beyond_the_context_are_refused_by_their_option(
    model, tmp_path, capsys
):
    assert run(model, tmp_path / "results.json", "--max-tokens=60") == 1
    assert re.match(
        "error: --max-tokens: a prompt and its completion must have at most 64 tokens, "
        r"the model's context; got 60 with a prompt of \d+, which is \d+; lower one",
        capsys.readouterr().out,
    )


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
    by_task = solved.reshape(5, 4)
    low, high = interval_over_tasks(by_task.mean(axis=1).tolist(), 20)
    assert found["interval"] == [low, high]
    pairs = [by_task[:, [i, j]].any(axis=1) for i in range(4) for j in range(i)]
    expected = {"2": np.mean(pairs), "4": by_task.any(axis=1).mean()}
    assert found["pass_at"] == pytest.approx(expected)
    lengths = [r["num_tokens"] for r in rows]
    assert found["mean_tokens"] == np.mean(lengths)
    assert found["max_tokens"] == max(lengths) <= 5
    assert found["stopped"] == np.mean([r["finish_reason"] == "stop" for r in rows])
    assert found["metrics"] == {"length": np.mean([len(r["completion"]) for r in rows])}
    assert found["sampling"]["temperature"] == 1.0
    assert found["sampling"]["max_tokens"] == 5
    assert found["not_done"] == {}
    assert found["config"]["model"] == str(model)
    assert found["command"].startswith("python -m launch.evaluate --model=")
    assert "jax" in found["versions"]


def test_samples_depend_on_the_seed_and_not_on_the_slots(sampled, model, tmp_path):
    few, other = tmp_path / "few.json", tmp_path / "other.json"
    assert run(model, few, *SAMPLED, "--num-slots=8") == 0
    assert results(few)[1] == sampled[1]
    assert run(model, other, *SAMPLED, "--seed=1") == 0
    assert results(other)[1] != sampled[1]


@pytest.fixture(scope="module")
def opinionated(model, tmp_path_factory):
    """The model, with a generation_config.json that says how it is sampled."""
    folder = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(model, folder)
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "repetition_penalty": 1.05,
        "max_new_tokens": 4,
    }
    file.write_text(json.dumps(settings))
    return folder


def opened(folder):
    return open_model(
        str(folder),
        mesh="",
        dtype=None,
        seed=0,
        make_tokenizer=partial(tokenizer_of, list),
    )


COMMON = ("--env=even_length:EvenLength", "--num-tasks=2")


def sampling(found):
    named = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    return tuple(found["sampling"][name] for name in named)


def test_the_defaults_of_the_model_are_used_and_said(opinionated, tmp_path, capsys):
    output = tmp_path / "results.json"
    options = [f"--model={opinionated}", f"--output={output}", "--samples=3", *COMMON]
    assert evaluate.main([*options, "--sampling-defaults=model"]) == 0
    found, rows = results(output)
    assert sampling(found) == (0.5, 3, 0.9, 0.0, 4)
    assert max(row["num_tokens"] for row in rows) == 4
    # A note names what the sampler lacks.
    assert found["not_done"] == {"repetition_penalty": 1.05}
    printed = capsys.readouterr().out
    assert "generation_config.json asks for repetition_penalty 1.05, which" in printed
    assert "temperature 0.5, top-k 3, top-p 0.9, 4 tokens at most" in printed
    assert all(f"pass@{k}" in printed for k in (2, 3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), (0.0, 0, 1.0, 0.0, 256)),
        (("--temperature=0.7",), (0.7, 0, 1.0, 0.0, 256)),
        (("--sampling-defaults=model",), (0.5, 3, 0.9, 0.0, 4)),
        # A given option wins, and greedy decoding cuts nothing.
        (
            ("--sampling-defaults=model", "--top-k=0", "--min-p=0.1", "--max-tokens=3"),
            (0.5, 0, 0.9, 0.1, 3),
        ),
        (("--sampling-defaults=model", "--temperature=0"), (0.0, 0, 1.0, 0.0, 4)),
    ],
)
def test_options_that_are_given_win(opinionated, options, expected):
    arguments = [f"--model={opinionated}", *COMMON, *options]
    config = cli.read_options(evaluate.PROGRAM, arguments)
    model = opened(opinionated)
    found, _ = sampling_of(config, model)
    named = ("temperature", "top_k", "top_p", "min_p", "max_tokens")
    assert tuple(getattr(found, name) for name in named) == expected
    assert found.stop_ids == model.tokenizer.stop_ids


def test_a_preset_has_no_defaults(opinionated):
    config = EvaluateConfig(model="demo", sampling_defaults="model")
    preset = dataclasses.replace(opened(opinionated), name="demo", preset=True)
    with pytest.raises(
        ConfigError, match=r"^--sampling-defaults: demo is a preset.*; give --temp"
    ):
        sampling_of(config, preset)


def test_defaults_that_cannot_be_meant_are_refused(opinionated, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(opinionated, folder)
    (folder / "generation_config.json").write_text('{"top_p": 2, "eos_token_id": 1}')
    options = [f"--model={folder}", "--sampling-defaults=model", *COMMON]
    assert evaluate.main(options) == 1
    message = "must be a number in [0, 1]; got 2; correct the file"
    assert message in capsys.readouterr().out


def test_failures_are_counted_apart(model, tmp_path, capsys):
    output = tmp_path / "results.json"
    assert run(model, output, "--env=even_length:EvenLength?broken=2") == 0
    found, rows = results(output)
    # An answer that could not be judged is not solved.
    assert (found["tasks"], found["samples"], found["failed"]) == (6, 6, 2)
    assert found["accuracy"] == sum(row["solved"] for row in rows) / 6
    assert [r["reward"] is None for r in rows] == [True] * 2 + [False] * 4
    assert "out of order" in rows[0]["error"]
    table = capsys.readouterr().out
    assert "the first failure: raised: " in table
    assert f"{100 * found['accuracy']:.1f}% (95%: " in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--samples=2"], "--samples: 2 greedy samples of a task are all the same"),
        (["--top-k=2"], "--top-k: nothing is cut from greedy decoding; got 2; raise"),
        (["--max-tokens=0"], "--max-tokens: must be at least 1; got 0"),
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


def test_greedy_samples_of_a_model_say_why_they_are(model, tmp_path, capsys):
    greedy = ("--sampling-defaults=model", "--samples=2")
    assert run(model, tmp_path / "results.json", *greedy) == 1
    assert (
        "are all the same: the model's generation_config.json sets no temperature and "
        "no do_sample; give --temperature, or take 1"
    ) in capsys.readouterr().out


def test_nothing_is_overwritten(model, tmp_path, capsys):
    for name in ("results.json", "results.html", "results.completions.jsonl"):
        file = tmp_path / name
        file.write_text("precious")
        assert run(model, tmp_path / "results.json") == 1
        assert f"--output: {file} is already there" in capsys.readouterr().out
        assert file.read_text() == "precious"
        file.unlink()


def test_a_run_is_its_model(model, tmp_path, capsys):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    arguments = ["--env=even_length:EvenLength", "--max-tokens=5", "--num-tasks=4"]
    assert evaluate.main([f"--model={run}", *arguments]) == 1
    assert "has checkpoints but no config.json" in capsys.readouterr().out
    shutil.copytree(model, run / "model")
    assert evaluate.main([f"--model={run}", *arguments]) == 0
    text = capsys.readouterr().out
    assert evaluate.main([f"--model={model}", *arguments]) == 0
    # All but the name and the seconds.
    assert text.splitlines()[1:-3] == capsys.readouterr().out.splitlines()[1:-3]
    assert evaluate.main([f"--model={model}", "--step=3", *arguments]) == 1
    assert f"--step: is for a run's checkpoints, and {model} is no run" in (
        " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.parametrize(
    ("options", "which"),
    [
        ([], "20, of 20 tasks (of 20 rows of rows.jsonl)"),
        (["--num-tasks=3"], "3, of 3 tasks (of 20 rows of rows.jsonl)"),
        (["--split=eval"], "1, of 1 tasks (of 1 eval tasks)"),
        (["--split=train"], "19, of 19 tasks (of 19 train tasks)"),
    ],
)
@pytest.mark.parametrize("option", ["path", "eval-path"])
def test_a_file_alone_is_evaluated_whole(
    model, tmp_path, capsys, option, options, which
):
    file = tmp_path / "rows.jsonl"
    rows = ({"prompt": f"{i}: ", "answer": "a"} for i in range(20))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [f"--model={model}", "--env=jsonl?grader=exact", "--max-tokens=2"]
    status = evaluate.main([*arguments, f"--data.{option}={file}", *options])
    text = capsys.readouterr().out
    if option == "eval-path" and any(each.startswith("--split") for each in options):
        assert (status, "--data.path: jsonl needs" in text) == (1, True)
    else:
        assert (status, which in text) == (0, True), text


def test_episodes_that_a_limit_ended_are_counted():
    def group(reason):
        return Group(0, (Episode(0, 0, 0, "", (), finish_reason=reason),))

    ends = ("stop", "turn_limit", "token_limit", "token_limit", "failed")
    text = io.StringIO()
    console = Console(file=text, width=200)
    _tell_limits([group(reason) for reason in ends], console)
    assert text.getvalue().splitlines() == [
        "1 of 5 episodes were not over when --max-turns ended them",
        "2 of 5 episodes were not over when --max-prompt-tokens ended them",
    ]
