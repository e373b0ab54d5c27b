"""Default options, and options that are refused before jax is imported."""

import dataclasses
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import SFTConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.programs.online import run_rl
from launch import cli, distill, dpo, evaluate, grpo, ppo, reward, sft
from launch.recipes.demo import demo, distill_demo, ppo_demo

TEACHER = ("--algorithm.reference", "teacher")


def options(module, *arguments: str):
    return cli.read_options(module.PROGRAM, [*arguments])


@pytest.mark.parametrize(
    ("module", "start"), [(grpo, demo), (ppo, ppo_demo), (distill, distill_demo)]
)
def test_without_a_model_or_a_task_it_is_the_demo(module, start):
    assert options(module) == options(module, "--recipe", "demo") == start()
    assert options(module, "--steps=3").update.microbatch_tokens == 1024


@pytest.mark.parametrize(
    ("module", "arguments", "rate"),
    [
        (grpo, ("--model", "Qwen/Qwen2.5-0.5B"), 1e-6),
        (grpo, ("--model=models/Qwen2.5-0.5B", "--lora.rank", "16"), 1e-5),
        (grpo, ("--model", "tiny", "--lora.rank", "16"), 5e-4),
        (grpo, ("--lora.path=my/adapter",), 1e-5),
        (grpo, ("--lora.path", "my/adapter", "--env", "gsm8k"), 1e-5),
        (grpo, ("--env", "gsm8k"), 5e-4),
        (ppo, ("--model", "runs/sft/model"), 1e-6),
        (distill, ("--model", "runs/sft/model"), 1e-5),
        (sft, ("--model", "models/Qwen2.5-0.5B"), 1e-5),
        (sft, ("--model", "models/Qwen2.5-0.5B", "--lora.rank=8"), 1e-4),
        (sft, (), 1e-3),
        (dpo, ("--model", "models/Qwen2.5-0.5B"), 1e-6),
        (dpo, ("--model", "models/Qwen2.5-0.5B", "--lora.rank=8"), 1e-5),
        (reward, ("--model", "models/Qwen2.5-0.5B"), 1e-5),
    ],
)
def test_the_learning_rate_fits_the_kind_of_model(module, arguments, rate):
    assert options(module, *arguments).optimizer.learning_rate == rate
    given = options(module, *arguments, "--optimizer.learning-rate", "0.125")
    assert given.optimizer.learning_rate == 0.125


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        (grpo, {"--optimizer.learning-rate": ("0.0005", "1e-06")}),
        (
            ppo,
            {
                "--optimizer.learning-rate": ("0.0005", "1e-06"),
                "--critic.optimizer.learning-rate": ("0.001", "1e-05"),
            },
        ),
        (reward, {"--optimizer.learning-rate": ("0.001", "1e-05")}),
    ],
)
def test_a_recipe_for_a_checkpoint_needs_a_learning_rate(module, missing):
    name = next(iter(module.PROGRAM.recipes))
    arguments = ["--recipe", name, "--model", "runs/sft/model"]
    for option, (found, usual) in missing.items():
        with pytest.raises(
            ValueError,
            match=rf"{option}: must be given with --recipe {name} and --model "
            rf"runs/sft/model: --recipe {name} has {found}, for a model with random "
            rf"weights; without it the rate is {usual}",
        ):
            options(module, *arguments)
        arguments.append(f"{option}=0.125")
    config = options(module, *arguments)
    assert config.optimizer.learning_rate == 0.125
    assert config.steps == module.PROGRAM.recipes[name]().steps


@pytest.mark.parametrize(("model", "refused"), [("demo", True), ("runs/a/b", False)])
def test_a_file_of_a_preset_needs_a_learning_rate_for_a_checkpoint(
    model, refused, tmp_path
):
    began = options(grpo, "--model", model, "--env", "arithmetic")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(began)))
    arguments = ("--config", str(file), "--model", "runs/sft/model")
    if refused:
        with pytest.raises(
            ValueError,
            match=r"--optimizer.learning-rate: must be given with --config .*json and "
            r"--model runs/sft/model: .*json has 0.0005, for .* the rate is 1e-06",
        ):
            options(grpo, *arguments)
    given = options(grpo, *arguments, "--optimizer.learning_rate=0.125")
    assert given.optimizer.learning_rate == 0.125
    assert options(grpo, "--config", str(file)) == began


def test_a_run_has_one_length():
    assert options(sft, "--epochs=2.5").epochs == 2.5
    with pytest.raises(ValueError, match=r"--epochs: gives the length of the run, as"):
        options(sft, "--epochs=2", "--steps", "9")


def test_underscores_in_options_are_hyphens():
    same = ("--recipe", "demo", "--model", "runs/sft/model")
    found = options(grpo, *same, "--optimizer.learning_rate", "1e-3")
    assert found.optimizer.learning_rate == 1e-3
    # In values they stay.
    mine = options(sft, "--data.path=a_b.jsonl", "--data.eval_path", "c_d.jsonl")
    assert (mine.data.path, mine.data.eval_path) == ("a_b.jsonl", "c_d.jsonl")


def test_the_precision_of_training_has_two_names():
    for given in ("--update.precision", "--train.precision"):
        for arguments in ((given, "float8"), (f"{given}=float8",)):
            found = options(grpo, "--recipe", "demo", *arguments)
            assert found.update.precision == "float8"
    assert options(grpo, "--recipe", "demo").update.precision is None


def test_a_warm_start_of_a_recipe_is_ignored_for_a_checkpoint():
    rate = "--optimizer.learning-rate=1e-6"
    arguments = ("--recipe", "demo", "--model", "runs/sft/model", rate)
    assert options(grpo, *arguments).warm_start.steps > 0
    assert options(grpo, *arguments, "--warm-start.steps=0").warm_start.steps == 0
    for option in ("--warm-start.steps=9", "--warm-start.learning-rate=1"):
        with pytest.raises(ValueError, match=rf"{option[:-2]}: a warm start is for mo"):
            options(grpo, *arguments, option)
    with pytest.raises(ValueError, match=r"learning-rate: with --warm-start.steps 0 "):
        options(grpo, "--warm-start.steps=0", "--warm-start.learning-rate=1")


def test_a_folder_of_another_content_is_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert options(grpo).warm_start.steps > 0
    assert options(grpo, "--model=demo", "--env=arithmetic").warm_start.steps == 400
    (tmp_path / "demo" / "config.json").write_text("{}")
    assert options(grpo, "--model=demo", "--env=arithmetic").warm_start.steps == 0


def test_a_recipe_takes_another_preset_as_it_is():
    config = options(grpo, "--recipe", "demo", "--model", "tiny", "--lora.rank=4")
    assert config.optimizer.learning_rate == 5e-4


@pytest.mark.parametrize("module", [grpo, ppo, distill, sft, dpo, reward])
def test_help_says_that_defaults_depend_on_other_options(module, capsys):
    with pytest.raises(SystemExit):
        module.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Some defaults depend on --model" in text
    assert "--recipe, --algorithm.name and --loss.name: give these with --help" in text


def test_a_checkpoint_gets_nothing_of_the_demo():
    config = options(grpo, "--model", "models/Qwen2.5-0.5B", "--env", "gsm8k")
    assert config == RLConfig(model="models/Qwen2.5-0.5B", env="gsm8k")
    assert config.warm_start.steps == 0
    assert config.optimizer.schedule == "constant"
    assert config.rollout.max_tokens == 256


def test_a_model_of_random_weights_gets_a_warm_start():
    assert options(grpo, "--env", "arithmetic?level=2").warm_start.steps == 400
    assert options(sft).warm_start.steps == 0


def test_a_recipe_s_reward_model_needs_a_learning_rate_for_a_checkpoint():
    arguments = ("--recipe", "prime", "--model=a/b", "--optimizer.learning-rate=1e-6")
    with pytest.raises(
        ValueError, match=r"^--prm\.optimizer\.learning-rate: must be given with --rec"
    ):
        options(grpo, *arguments)
    given = options(grpo, *arguments, "--prm.optimizer.learning-rate=1e-6")
    assert given.prm.optimizer.learning_rate == 1e-6


def test_a_critic_has_a_learning_rate_of_its_own():
    checkpoint = ("--model", "models/Qwen2.5-0.5B")
    for arguments, rate in (
        (checkpoint, 1e-5),
        ((*checkpoint, "--critic.lora.rank=4"), 1e-4),
        (("--model=tiny",), 1e-3),
    ):
        assert options(ppo, *arguments).critic.optimizer.learning_rate == rate


MISTAKES = [
    (grpo, ("--mesh", "dp4,xp2"), "mesh: unknown axis 'xp'"),
    (grpo, ("--run-dir", ""), "--run-dir: must name a directory"),
    (
        grpo,
        ("--optimizer.learning-rate", "-1"),
        "--optimizer.learning-rate: must be gr",
    ),
    (grpo, ("--optimizer.learning-rate", "0"), "must be greater than 0; got 0"),
    (grpo, ("--optimizer.learning-rate", "nan"), "must be greater than 0; got nan"),
    (grpo, ("--optimizer.max-grad-norm", "-1"), "--optimizer.max-grad-norm: must be a"),
    (
        grpo,
        ("--optimizer.beta2", "1"),
        r"--optimizer.beta2: must be in \[0, 1\); got 1",
    ),
    (
        grpo,
        ("--rollout.temperature", "0"),
        "--rollout.temperature: must be at least 1e",
    ),
    (
        grpo,
        ("--rollout.top-p", "1.5"),
        r"--rollout.top-p: must be in \(0, 1\]; got 1.5",
    ),
    (
        grpo,
        ("--algorithm.kl-coefficient", "-0.1"),
        "kl-coefficient: must be at least 0",
    ),
    (
        grpo,
        ("--algorithm.entropy-coefficient=-1",),
        "entropy-coefficient: must be at le",
    ),
    (
        grpo,
        ("--algorithm.name=grpoo",),
        "name: no algorithm 'grpoo'.*did you mean grpo",
    ),
    (grpo, ("--rollout.judges", "nowhere"), "--rollout.judges: must be local, ray"),
    (
        ppo,
        ("--critic.warmup-steps", "160"),
        "--critic.warmup-steps: must be less than --steps, 160",
    ),
    (ppo, ("--critic.optimizer.learning-rate=-1",), "--critic.optimizer.learning-rate"),
    (ppo, ("--critic.gamma", "1.5"), r"--critic.gamma: must be in \[0, 1\]; got 1.5"),
    (
        ppo,
        ("--rollout.samples-per-prompt=1", "--rollout.dynamic-sampling"),
        "--rollout.dynamic-sampling: keeps the prompts whose samples differ",
    ),
    (
        grpo,
        ("--rollout.group-reward-low=0.2",),
        "--rollout.group-reward-low: without --rollout.dynamic-sampling it changes",
    ),
    (
        grpo,
        (
            *("--rollout.dynamic-sampling", "--rollout.group-reward-low=0.8"),
            "--rollout.group-reward-high=0.2",
        ),
        "--rollout.group-reward-low: must be below --rollout.group-reward-high, 0.2",
    ),
    (grpo, ("--prm.beta=0",), "--prm.beta: must be greater than 0; got 0"),
    (grpo, ("--rollout.max-turns=3",), "--rollout.max-prompt-tokens: must be given w"),
    (grpo, ("--algorithm.turn-credit=turns",), "with --rollout.max-turns 1 there is"),
    (grpo, ("--algorithm.turn-discount=0.5",), "turn-credit outcome it changes nothi"),
    (
        grpo,
        ("--rollout.partial=4", "--algorithm.correction.kind=none"),
        "--rollout.partial: samples that were begun by earlier parameters",
    ),
    (
        grpo,
        ("--rollout.dynamic-sampling", "--algorithm.correction.kind=none"),
        "--rollout.dynamic-sampling: .* --algorithm.correction.kind none",
    ),
    (ppo, ("--critic.coefficient=2",), "--critic.coefficient: weighs the loss of a c"),
    (grpo, ("--rollout.reward-grace-s=3",), "grace-s: without --rollout.partial it ch"),
    (
        grpo,
        (
            *("--rollout.max-turns=3", "--rollout.max-prompt-tokens=99"),
            "--reward.model=judge",
        ),
        "--reward.model: ",
    ),
    (
        grpo,
        ("--rollout.staleness=2",),
        "--rollout.staleness: without --rollout.partial a step trains on .* drop the",
    ),
    (
        grpo,
        (
            *("--rollout.staleness=2", "--rollout.partial=9"),
            *("--rollout.prompts-per-step=8", "--rollout.ahead=1"),
        ),
        "--rollout.staleness: must be at least 3, .* 9 groups, 8 each; got 2",
    ),
    (
        grpo,
        ("--rollout.no-recompute-cache",),
        "--rollout.no-recompute-cache: without --rollout.partial",
    ),
    (
        grpo,
        ("--rollout.no-recompute-cache", "--rollout.partial=4", "--exact"),
        "--rollout.no-recompute-cache: with --exact .* drop one",
    ),
    (grpo, ("--rollout.partial=-1",), "--rollout.partial: must be at least 0; got -1"),
    (
        grpo,
        ("--rollout.overlong-penalty=0.5", "--env=arithmetic"),
        "--rollout.overlong-penalty: without --rollout.overlong-buffer it changes noth",
    ),
    (grpo, ("--rollout.max-draws=9",), "max-draws: without --rollout.dynamic-sampling"),
    (grpo, ("--rollout.guess-rows=9",), "guess-rows: without --rollout.guesses it ch"),
    (
        grpo,
        ("--rollout.max-result-tokens=9",),
        "max-result-tokens: without --rollout.max-turns above 1 it changes nothing; go",
    ),
    (
        grpo,
        ("--rollout.publish-mib=9",),
        "publish-mib: without --rollout.mesh or --rollout.dtype it changes nothing",
    ),
    (
        grpo,
        ("--algorithm.kl-estimator=k2", "--env=arithmetic"),
        "--algorithm.kl-estimator: with --algorithm.kl-coefficient 0 no KL is estimat",
    ),
    (
        grpo,
        ("--algorithm.kl-weights=policy", "--env=arithmetic"),
        "--algorithm.kl-weights: with --algorithm.kl-coefficient 0 no KL is estimated",
    ),
    (grpo, ("--mesh=xx4",), "^--mesh: unknown axis 'xx'"),
    (sft, ("--warm-start.steps", "3"), "--warm-start.steps: fine-tuning is what a wa"),
    (sft, ("--examples-per-step", "0"), "--examples-per-step: must be at least 1; go"),
    (dpo, ("--loss.beta", "-1"), "--loss.beta: must be greater than 0; got -1"),
    (reward, ("--separator", ""), "--separator: must not be empty"),
    (evaluate, ("--model=m", "--samples=2"), "--samples: 2 greedy samples"),
    (evaluate, ("--model=m", "--temperature=-1"), "--temperature: must be at least 0"),
    (
        evaluate,
        ("--model=m", "--temperature=1e-6", "--samples=4"),
        "--temperature: must be 0, which is greedy, or at least 1e-5; .* got 1e-06",
    ),
    (
        evaluate,
        ("--model=m", "--max-turns=3"),
        "--max-prompt-tokens: must be given with --max-turns 3",
    ),
    *(
        (each, (f"--seed={2**32}", *more), r"--seed: must be in \[0, 4294967295\]; got")
        for each, more in ((grpo, ()), (sft, ()), (evaluate, ("--model=m",)))
    ),
]


@pytest.mark.parametrize(("module", "arguments", "message"), MISTAKES)
def test_a_mistake_is_refused_before_anything_is_imported(
    module, arguments, message, monkeypatch
):
    loaded = cli.Program(
        name=module.PROGRAM.name,
        description="",
        default=module.PROGRAM.default,
        load=lambda: pytest.fail("imports jax"),
        check=module.PROGRAM.check,
    )
    with pytest.raises(ValueError, match=message):
        loaded.check(cli.read_options(loaded, [*arguments]))
    assert cli.call(loaded, [*arguments]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rollout.samples-per-prompt", "1"), "grpo compares the samples of a pro"),
        (("--algorithm.name=rloo", "--update.epochs=2"), "rloo weighs no token by h"),
        (
            ("--algorithm.name=max_rl", "--rollout.overlong-buffer=2"),
            "--rollout.overlong-buffer: max_rl divides by a prompt's mean reward",
        ),
        (
            (
                *("--rollout.max-turns=3", "--rollout.max-prompt-tokens=99"),
                *("--algorithm.name=gdpo", "--algorithm.turn-credit=turns"),
            ),
            "--algorithm.turn-credit turns: gdpo looks at more of an episode",
        ),
        (
            ("--algorithm.name=remax", "--rollout.partial=4"),
            "--rollout.partial: remax compares with a greedy answer",
        ),
        *(
            (
                (
                    *("--rollout.max-turns=3", "--rollout.max-prompt-tokens=99"),
                    *(f"--algorithm.name={name}", "--algorithm.turn-credit=turns"),
                ),
                f"turn-credit turns: {name} has one ratio for a sequence",
            )
            for name in ("clipped_rloo", "gmpo")
        ),
    ],
)
def test_what_an_algorithm_contradicts_is_refused_before_a_model_is_read(
    arguments, message, tmp_path
):
    place = (f"--run-dir={tmp_path / 'run'}", "--model=demo", "--env=arithmetic")
    config = options(grpo, *arguments, *place)
    with pytest.raises(ConfigError, match=message):
        run_rl(config, console=Console(file=io.StringIO()), command="")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "config",
    [
        options(ppo, "--rollout.samples-per-prompt=1"),
        options(distill, *TEACHER, "--rollout.samples-per-prompt=1"),
        options(
            grpo,
            "--algorithm.name=reinforce_plus_plus",
            "--rollout.samples-per-prompt=1",
        ),
        options(grpo, "--optimizer.max-grad-norm=0"),
        options(grpo, "--algorithm.name=rloo"),
        SFTConfig(),
    ],
)
def test_what_makes_sense_is_accepted(config):
    check_options(config)


@pytest.mark.processes
def test_reading_options_imports_no_jax():
    names = (
        "cli, convert, distill, dpo, evaluate, grpo, plan, ppo, report, reward, serve"
    )
    code = f"import sys; from launch import {names}, sft; print('jax' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
    )
    assert finished.stdout == "False\n", finished.stderr
