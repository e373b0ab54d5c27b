"""Options, the configuration file, and how a program says that it failed."""

import dataclasses
import io
import json
import os
import re
import signal
import sys

import pytest
from rich.console import Console

from jaxrl_post.config.algorithm import AlgorithmConfig
from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.programs.run import RunResult
from jaxrl_post.records.directory import RunDescription, RunDirectory
from launch import cli, distill, dpo, evaluate, grpo, helps, ppo, reward, sft
from launch.recipes.chain_sum import chain_sum
from launch.recipes.demo import demo


def program(run=None, *, default=None, errors=(ValueError,), recipes=None):
    return cli.Program(
        name="launch.grpo",
        description="Trains.",
        default=lambda arguments: default or demo(),
        load=lambda: (run, errors),
        recipes=recipes or {},
    )


def options(*arguments: str, default=None):
    return cli.read_options(program(default=default), [*arguments])


def written(tmp_path, content) -> str:
    path = tmp_path / "config.json"
    if not isinstance(content, bytes):
        content = content if isinstance(content, str) else json.dumps(content)
        content = content.encode()
    path.write_bytes(content)
    return str(path)


def described(tmp_path, config) -> str:
    """The config.json that a run of this configuration writes."""
    directory = RunDirectory(tmp_path / "run")
    directory.describe(
        RunDescription("", "", 0, "", {"jax": "0"}, dataclasses.asdict(config))
    )
    return str(directory.config)


def run_nothing(config, *, console, command, should_stop):
    return RunResult(step=3, completed=True, model=None, report=None)


def called(run, *arguments: str, errors=(ValueError,), entry=cli.main) -> int:
    return entry(program(run, errors=errors), list(arguments))


@pytest.fixture(autouse=True)
def handlers():
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("module", [grpo, sft])
def test_help_explains_every_option(module, capsys):
    with pytest.raises(SystemExit) as ended:
        module.main(["--help", "all"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "--config FILE" in text
    lines = [line.strip("│ ") for line in text.splitlines()]
    found = [i for i, line in enumerate(lines) if line.startswith("--")]
    assert len(found) > 30
    # The explanation is next to a short option, and below a long one.
    alone = [i for i in found if "  " not in lines[i]]
    unexplained = [lines[i] for i in alone if lines[i + 1].startswith("(default")]
    assert not unexplained


def helped(capsys, module, *arguments: str) -> tuple[str, list[str], int]:
    """Text, options and exit status of a help."""
    with pytest.raises(SystemExit) as ended:
        module.main([*arguments])
    text = capsys.readouterr().out
    found = re.findall(r"^[│|] (?:-h, )?(--[\w.-]+)", text, re.MULTILINE)
    return text, found, int(ended.value.code or 0)


@pytest.mark.parametrize("module", [grpo, ppo, distill, dpo, reward, sft])
def test_help_shows_what_most_runs_need(module, capsys):
    text, few, status = helped(capsys, module, "--help")
    assert status == 0
    _, every, _ = helped(capsys, module, "-h", "all")
    assert 15 <= len(few) <= 30
    assert f"{len(few)} of {len(every)} options. --help all shows" in text
    assert {"--model", "--steps", "--optimizer.learning-rate"} <= set(few) <= set(every)
    # Every box that is left has an option; the end names the others.
    assert text.count("╭") <= len(few)
    assert "belong to a section: update, optimizer, eval" in text
    text, found, _ = helped(capsys, module, "--help", "template.")
    assert {"--template.variables", "--template.date"} <= set(found)


def test_every_common_option_is_one_of_a_program(capsys):
    modules = (grpo, ppo, distill, dpo, reward, sft)
    every = {name for m in modules for name in helped(capsys, m, "--help", "all")[1]}
    assert helps.COMMON - every == set()


def test_a_program_with_few_options_shows_all(capsys):
    _, few, _ = helped(capsys, evaluate, "--help")
    assert few == helped(capsys, evaluate, "--help", "all")[1]


def test_help_of_a_word_shows_what_mentions_it(capsys):
    text, found, status = helped(capsys, grpo, "--help", "kl-coef")
    assert (found, status) == (["--algorithm.kl-coefficient"], 0)
    assert "usage" not in text
    text, _, _ = helped(capsys, grpo, "--help", "--rollout.top-p=0.5")
    assert "--help all shows" in text  # an option of the command, no word
    _, found, _ = helped(capsys, grpo, "--help", "Grader")
    assert found == ["--env", "--eval.graders"]
    # Other options hold together with it.
    text, found, _ = helped(capsys, grpo, "--recipe", "sums", "--help", "max-tokens")
    assert "--rollout.max-tokens" in found
    assert "(default: 16)" in text
    text, found, status = helped(capsys, grpo, "--help", "critc")
    assert (found, status) == ([], 1)
    assert text.startswith("no option mentions 'critc'; did you mean critic")


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        ("", "clip-high", "0.2"),
        ("--algorithm.name dapo", "clip-high", "0.28"),
        ("--algorithm.name=gspo", "clip-low", "0.0003"),
        ("--algorithm.correction.kind icepop", "correction.low", "0.5"),
        ("--algorithm.name dapo --algorithm.clip-high 0.3", "clip-high", "0.28"),
        ("--algorithm.name of:own", "clip-high", "None"),
        ("--recipe sums", "clip-low", "0.2"),
    ],
)
def test_help_shows_what_an_option_without_a_value_becomes(
    arguments, option, value, capsys
):
    text, _, _ = helped(capsys, grpo, *arguments.split(), "--help", option)
    assert f"(default: {value})" in text


def test_help_shows_what_the_loss_makes_of_an_option(capsys):
    assert "(default: 0.1)" in helped(capsys, dpo, "--help", "loss.beta")[0]
    simpo = helped(capsys, dpo, "--loss.name", "simpo", "--help")[0]
    assert "(default: 2.0)" in simpo[simpo.index("--loss.beta") :]


def test_help_without_boxes(capsys, monkeypatch):
    class Ascii(io.StringIO):
        encoding = "ascii"

    out = Ascii()
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        grpo.main(["--help", "kl-coef"])
    assert out.getvalue().isascii()
    assert "| --algorithm.kl-coefficient FLOAT" in out.getvalue()


def test_options_change_the_default():
    config = options("--steps", "7", "--rollout.max-tokens=9", "--no-resume")
    expected = dataclasses.replace(
        demo(),
        steps=7,
        resume=False,
        rollout=dataclasses.replace(demo().rollout, max_tokens=9),
    )
    assert config == expected


def test_an_unknown_option_is_an_error_that_suggests(capsys):
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--stepz", "3"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "Unrecognized options: --stepz" in message
    assert "--steps INT" in message


def test_an_option_of_the_wrong_type_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        grpo.main(["--steps", "many"])
    assert ended.value.code == 2
    assert "many" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"stepz": 3},
            r"config.json: unknown key 'stepz'; known: algorithm, base, callbac",
        ),
        (
            {"rollout": {"slotz": 3}},
            r"config.json: rollout: unknown key 'slotz'; known: ahead, cache_d",
        ),
        ({"rollout": 3}, "rollout must be an object; got 3"),
        ({"steps": "many"}, "steps must be int; got 'many'"),
        ({"steps": True}, "steps must be int; got True"),
        ({"steps": 1.5}, "steps must be int; got 1.5"),
        ({"resume": 1}, "resume must be bool; got 1"),
        ({"rollout": {"temperature": None}}, "temperature must be float; got None"),
        ({"rollout": {"stop_strings": [1]}}, r"stop_strings must be tuple.*; got \[1"),
        ({"algorithm": {"support": "half"}}, r"support must be .*'kept'.*; got 'half'"),
        ({"data": {"path": 4}}, r"path must be str \| None; got 4"),
        ([1], r"config.json must hold an object; got \[1\]"),
        ({"versions": {}, "config": None}, "must hold an object; got None"),
        ("{", r"cannot read .*config.json: not JSON: Expecting .* at column 2"),
        ("", "cannot read .*config.json: not JSON: the file is empty"),
        ('{"steps": 3,\n "seed" 1}', "cannot read .*: .* at line 2 column 9"),
        ("[" * 100_000, "cannot read .*: .* nested more than .* at line 1 column 201"),
        ('{"a":' * 100_000, "cannot read .*: .* nested .* at line 1 column 1001"),
        ('{"steps": ' + "[" * 199 + "]" * 199 + "}", r"steps must be int; got \[{80}$"),
        ('{"steps": 3, "steps": 4}', "cannot read .*: key 'steps' appears twice"),
        ('{"optimizer": {"learning_rate": NaN}}', "cannot read .*: NaN is not JSON"),
        ('{"seed": 1e999}', "cannot read .*: 1e999 is beyond the range of a float"),
        ('{"seed": ' + "1" * 5000 + "}", "cannot read .*: not JSON that .*4300 dig"),
        (b"\xff\xfe{\0}\0", "cannot read .*: not UTF-8 .* UTF-16: save it as UTF-8"),
        (b"\x89PNG\r\n\x1a\n\0", "cannot read .*config.json: not UTF-8 at byte 0"),
        ({"x" * 10_000: 1}, r"config.json: unknown key 'x{79}; known"),
    ],
)
def test_a_bad_configuration_file_is_an_error(content, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        options("--config", written(tmp_path, content))


def test_a_missing_configuration_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"--config: cannot read .*nothing\.json"):
        options(f"--config={tmp_path}/nothing.json")
    with pytest.raises(ValueError, match=r"--config: cannot read .*Is a directory"):
        options(f"--config={tmp_path}")
    with pytest.raises(ValueError, match="--config: needs a value"):
        options("--steps", "3", "--config")


def test_a_recipe_is_where_options_start():
    def chosen(*arguments):
        recipes = {"demo": demo, "chain_sum": chain_sum}
        return cli.read_options(program(recipes=recipes), [*arguments])

    assert chosen() == chosen("--recipe", "demo") == demo()
    changed = dataclasses.replace(chain_sum(), steps=7)
    assert chosen("--recipe=chain_sum", "--steps", "7") == changed
    with pytest.raises(ValueError, match="no 'chains'; there are demo, chain_sum"):
        chosen("--recipe", "chains")
    with pytest.raises(ValueError, match="--recipe: needs a value"):
        chosen("--recipe")


def test_a_recipe_and_a_file_are_not_taken_together(tmp_path):
    path = written(tmp_path, {"steps": 3})
    with pytest.raises(
        ValueError, match="--recipe: gives all options, and so does --c"
    ):
        cli.read_options(
            program(recipes={"demo": demo}), ["--recipe", "demo", "--config", path]
        )


def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path):
    path = written(tmp_path, b'\xef\xbb\xbf{"steps": 3}')
    assert options("--config", path).steps == 3


def test_a_whole_number_serves_as_float(tmp_path):
    path = written(tmp_path, {"rollout": {"temperature": 1}})
    assert options("--config", path).rollout.temperature == 1.0


@pytest.mark.parametrize(
    "config",
    [
        demo(),
        RLConfig(
            run_dir="runs/x",
            resume=False,
            mesh="dp4,tp2",
            dtype="bfloat16",
            env="gsm8k",
            data=DataConfig(path="a.jsonl", on_bad_row="skip"),
            algorithm=AlgorithmConfig("cispo", clip_high=5.0, kl_estimator="k2"),
            rollout=RolloutConfig(stop_strings=("</a>", "\n"), dynamic_sampling=True),
            optimizer=OptimizerConfig(schedule="cosine"),
        ),
        SFTConfig(model="tiny", log_every=3),
    ],
    ids=["demo", "changed", "sft"],
)
def test_the_file_of_a_run_gives_its_configuration_back(config, tmp_path):
    path = described(tmp_path, config)
    other = type(config)(steps=1, seed=7)
    assert options("--config", path, default=other) == config
    changed = options("--config", path, "--seed", "11", default=other)
    assert changed == dataclasses.replace(config, seed=11)


WARMUP, RATIO = "--optimizer.warmup-steps", "--optimizer.warmup-ratio"


def warmup(config) -> tuple[int, float]:
    return config.optimizer.warmup_steps, config.optimizer.warmup_ratio


def test_the_warm_up_that_is_given_replaces_another():
    steps = SFTConfig(optimizer=OptimizerConfig(warmup_steps=7))
    ratio = SFTConfig(optimizer=OptimizerConfig(warmup_ratio=0.1))
    assert warmup(options(default=steps)) == (7, 0)
    assert warmup(options(RATIO, "0.2", default=steps)) == (0, 0.2)
    assert warmup(options(f"{WARMUP}=5", default=ratio)) == (5, 0)
    assert warmup(options("--optimizer.warmup_steps", "0", default=ratio)) == (0, 0)
    given = options(
        *("--critic.optimizer.warmup-steps", "3"),
        *("--prm.optimizer.warmup-steps", "4"),
    )
    for each, count in ((given.critic, 3), (given.prm, 4)):
        assert (each.optimizer.warmup_steps, each.optimizer.warmup_ratio) == (count, 0)


@pytest.mark.parametrize("section", ["--", "--critic.", "--prm."])
def test_one_length_of_the_warm_up_is_given(section):
    both = f"{section}optimizer.warmup-steps", f"{section}optimizer.warmup-ratio"
    with pytest.raises(ValueError, match=f"^{both[1]}: .* as {both[0]} does; give one"):
        options(both[0], "5", f"{both[1]}=0.1")


@pytest.mark.parametrize(
    ("content", "arguments", "expected"),
    [
        # As a run writes it: the ratio, and what came of it.
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, (), (0, 0.1)),
        ({"warmup_ratio": 0.1, "warmup_steps": 20}, (WARMUP, "5"), (5, 0)),
        # As an earlier version wrote it, where 0.1 is a default today.
        ({"warmup_steps": 20}, (), (20, 0)),
        ({"warmup_steps": 20}, (RATIO, "0.3"), (0, 0.3)),
        ({"learning_rate": 1e-3}, (), (0, 0.1)),
    ],
)
def test_the_warm_up_of_a_file(content, arguments, expected, tmp_path):
    path = written(tmp_path, {"optimizer": content})
    assert (
        warmup(options("--config", path, *arguments, default=SFTConfig())) == expected
    )


def test_an_expected_error_is_one_line_and_status_1(capsys):
    def fail(config, *, console, command, should_stop):
        raise ValueError("mesh: [dp4] needs 4 devices")

    assert called(fail) == 1
    assert capsys.readouterr().out == "error: mesh: [dp4] needs 4 devices\n"


def test_an_unexpected_error_keeps_its_trace():
    def fail(config, *, console, command, should_stop):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        called(fail)


def test_the_end_names_model_and_report(capsys, tmp_path):
    def run(config, *, console, command, should_stop):
        assert command == "python -m launch.grpo --steps 4 --env 'arithmetic?level=2'"
        assert not should_stop()
        return RunResult(4, True, tmp_path / "[a]", tmp_path / "r.html")

    assert called(run, "--steps", "4", "--env", "arithmetic?level=2") == 0
    assert capsys.readouterr().out == (
        f"model:  {tmp_path}/[a]\nreport: {tmp_path}/r.html\n"
    )


def test_a_stopped_run_says_how_to_go_on(capsys):
    def run(config, *, console, command, should_stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert should_stop()
        return RunResult(2, False, None, None)

    assert called(run) == 0
    text = capsys.readouterr().out
    assert re.match("SIGTERM: finishing this step, then saving; again to end", text)
    assert "stopped after step 2, all of it saved; the same command continues" in text


def test_a_run_that_was_stopped_in_its_warm_start_says_that_nothing_is_kept(capsys):
    assert called(lambda config, **rest: RunResult(0, False, None, None)) == 0
    text = capsys.readouterr().out
    assert re.fullmatch("stopped in the warm start.*not saved.*same command.*\n", text)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_is_left_to_the_system(number):
    stop = cli.Stop(Console(quiet=True))
    assert not stop()
    os.kill(os.getpid(), number)
    assert stop()
    assert stop.name == number.name
    assert signal.getsignal(number) == signal.SIG_DFL


def test_ctrl_c_ends_a_program_that_does_not_train(capsys):
    # Not so already where the tests run in the background: there shells ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(config, *, console, command):
        os.kill(os.getpid(), signal.SIGINT)

    assert called(run, entry=cli.call) == 130
    assert capsys.readouterr().out == "stopped\n"
