"""--template.variables and --template.date: what a run keeps, and who takes it."""

import dataclasses
import datetime
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import models, pretrained
from jaxrl_post.config.data import DataConfig, TemplateConfig, check_template
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.offline import PairsConfig, RewardConfig, SFTConfig
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.run import EvalConfig
from jaxrl_post.config.serve import ChatConfig
from jaxrl_post.data.chat import render_text
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import ModelConfig
from jaxrl_post.programs import chat as chat_program
from jaxrl_post.programs.build.judge import open_judge
from jaxrl_post.programs.evaluation.run import run_evaluation
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.template import begun, of_evaluation, with_run
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from launch import chat, distill, dpo, evaluate, grpo, ppo, reward, serve, sft

TEMPLATE = (
    "{{ strftime_now('%Y-%m-%d') }}{{ effort | default('low') }}\n"
    "{% for m in messages %}{{ m.content }}<|eos|>{% endfor %}"
)
TODAY = datetime.date.today


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    tokenizer = Tokenizer.train(["2026-11-26low 1+2=3"], chat_template=TEMPLATE)
    config = ModelConfig(
        "llama",
        tokenizer.vocab_size,
        16,
        24,
        1,
        num_heads=2,
        num_kv_heads=2,
        max_length=128,
    )
    params = models.initialize(jax.random.key(0), models.param_specs(config))
    pretrained.save(folder, config, params, tokenizer=tokenizer)
    return folder


@pytest.fixture(scope="module")
def config(model, tmp_path_factory) -> SFTConfig:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}+2="},
                {"role": "assistant", "content": str(i + 2)},
            ]
        }
        for i in range(20)
    ]
    folder = tmp_path_factory.mktemp("sft")
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return SFTConfig(
        run_dir=str(folder / "run"),
        model=str(model),
        data=DataConfig(path=str(folder / "chats.jsonl")),
        steps=1,
        examples_per_step=2,
        max_tokens=64,
        eval=EvalConfig(num_tasks=1),
        template=TemplateConfig(('{"effort": "high"}',), "2026-11-20"),
    )


def go_on(config: SFTConfig) -> str:
    out = io.StringIO()
    run_offline(config, console=Console(file=out, width=1000), command="")
    return out.getvalue()


def kept(run: str | Path) -> dict:
    return json.loads((Path(run) / "config.json").read_text())["config"]["template"]


@pytest.fixture(scope="module")
def done(config) -> SFTConfig:
    assert 'chat template: effort="high", the date 2026-11-20' in go_on(config)
    assert kept(config.run_dir) == {
        "variables": ['effort="high"'], "date": "2026-11-20", "on_mismatch": "fail",
    }  # fmt: skip
    return config


@pytest.fixture
def copied(done, tmp_path) -> SFTConfig:
    shutil.copytree(done.run_dir, tmp_path / "run")
    return dataclasses.replace(done, run_dir=str(tmp_path / "run"), steps=2)


def test_a_run_that_is_resumed_on_another_day_keeps_its_date(copied, tmp_path):
    whole = dataclasses.replace(copied, run_dir=str(tmp_path / "whole"))
    go_on(whole)
    # Not given: the date of the run's start, which is not today.
    undated = TemplateConfig(("effort=high",))
    go_on(dataclasses.replace(copied, template=undated))
    assert kept(copied.run_dir)["date"] == "2026-11-20"
    one, other = (
        load_file(Path(run.run_dir) / "model/model.safetensors")
        for run in (whole, copied)
    )
    assert {name: each.tobytes() for name, each in one.items()} == {
        name: each.tobytes() for name, each in other.items()
    }
    # The date is trained on, so another one would not do.
    fresh = dataclasses.replace(whole, run_dir=str(tmp_path / "today"))
    before = TODAY().isoformat()
    go_on(dataclasses.replace(fresh, template=undated))
    assert before <= kept(fresh.run_dir)["date"] <= TODAY().isoformat()
    today = load_file(Path(fresh.run_dir) / "model/model.safetensors")
    assert any((one[name] != today[name]).any() for name in one)


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (TemplateConfig(("effort=low",)), "template.variables: .*high.* then"),
        (TemplateConfig(), "template.variables: .*high.* then, .. now"),
        (
            TemplateConfig(("effort=high",), "2026-11-21"),
            "template.date: '2026-11-20' then, '2026-11-21' now",
        ),
    ],
)
def test_a_resumed_run_with_another_template_is_refused(copied, template, told):
    with pytest.raises(ConfigError, match=told):
        go_on(dataclasses.replace(copied, template=template))


def test_a_variable_that_is_not_read_ends_the_run_before_anything_is_written(
    config, tmp_path
):
    wrong = TemplateConfig(("enable_thinking=false",))
    run = dataclasses.replace(config, run_dir=str(tmp_path / "run"), template=wrong)
    with pytest.raises(
        ConfigError,
        match=r"^--template.variables: .*base: chat: the chat template does not read "
        "enable_thinking; it reads effort$",
    ):
        go_on(run)
    assert not (tmp_path / "run/config.json").exists()


def test_an_evaluation_of_a_run_takes_its_variables_and_its_date(done, tmp_path):
    output = tmp_path / "results.json"
    out = io.StringIO()
    evaluation = EvaluateConfig(
        f"{done.run_dir}/model",
        env="arithmetic?level=1",
        num_tasks=2,
        max_tokens=2,
        output=str(output),
    )
    run_evaluation(evaluation, console=Console(file=out, width=1000))
    assert 'chat template: effort="high", the date 2026-11-20' in out.getvalue()
    result = json.loads(output.read_text())["config"]["template"]
    assert (result["variables"], result["date"]) == (['effort="high"'], "2026-11-20")


def test_what_is_given_goes_before_what_the_run_has(done, model):
    run = f"{done.run_dir}/model"
    given = TemplateConfig(("effort=low",), "2020-02-02")
    spelled = TemplateConfig(('effort="low"',), "2020-02-02")
    assert of_evaluation(given, run) == spelled
    # A server's and a chat's day is today, for every day of the run.
    assert with_run(TemplateConfig(), done.run_dir) == TemplateConfig(
        ('effort="high"',)
    )
    assert with_run(TemplateConfig(), run).date is None
    best = with_run(TemplateConfig(), f"{done.run_dir}/best")
    assert best.variables == ('effort="high"',)
    # Nothing is known of a model that no run made.
    before = TODAY().isoformat()
    other = of_evaluation(TemplateConfig(), str(model))
    assert other.variables == ()
    assert before <= (other.date or "") <= TODAY().isoformat()


def test_a_run_from_the_model_of_a_run_has_its_variables(done, tmp_path):
    made = dataclasses.replace(
        done, run_dir=str(tmp_path / "next"), model=f"{done.run_dir}/model"
    )
    plain = dataclasses.replace(made, template=TemplateConfig(date="2026-11-20"))
    assert 'chat template: effort="high", the date 2026-11-20' in go_on(plain)
    # Resumed, it has them again.
    assert kept(made.run_dir)["variables"] == ['effort="high"']
    go_on(dataclasses.replace(plain, steps=2))
    # One that an earlier version began has none.
    saved = {"template": {"variables": [], "date": "2026-11-20"}}
    assert begun(TemplateConfig(), made.model, saved).variables == ()
    low = TemplateConfig(("effort=low",))
    other = dataclasses.replace(plain, run_dir=str(tmp_path / "low"), template=low)
    assert 'chat template: effort="low"' in go_on(other)


def test_a_reward_model_reads_chats_as_it_was_trained_on_them(config, tmp_path):
    rows = [{"prompt": f"{i}=", "chosen": str(i), "rejected": "-"} for i in range(40)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("\n".join(map(json.dumps, rows)))
    trained = RewardConfig(
        run_dir=str(tmp_path / "run"),
        model=config.model,
        data=PairsConfig(path=str(pairs)),
        steps=1,
        examples_per_step=2,
        max_tokens=64,
        eval=EvalConfig(num_tasks=1),
        template=config.template,
    )
    run_offline(trained, console=Console(file=io.StringIO()), command="")
    judge = open_judge(
        RewardModelConfig(f"{trained.run_dir}/model"),
        mesh=create_mesh("dp1", jax.devices()[:1]),
        rules=DEFAULT_RULES,
        dtype=jnp.dtype("float32"),
        now=datetime.datetime(2026, 11, 21),
    )
    assert judge is not None
    text = render_text(judge.tokenizer, [{"role": "user", "content": "?"}])
    assert text == "2026-11-21high\n?<|eos|>"


def test_a_chat_with_a_run_has_its_variables(done):
    out = io.StringIO()
    talk = ChatConfig(done.run_dir, max_tokens=2)
    console = Console(file=out, width=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda *_: (_ for _ in ()).throw(EOFError))
        chat_program.run_chat(talk, console=console)
    assert 'chat template: effort="high", the date of each prompt' in out.getvalue()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (TemplateConfig(("effort",)), "must be NAME=VALUE.*got 'effort'"),
        (TemplateConfig(("=3",)), "must be NAME=VALUE"),
        (TemplateConfig(("{effort: 1}",)), "must be NAME=VALUE"),
        (TemplateConfig(("a=1", '{"a": 2}')), "a is given twice"),
        (TemplateConfig(date="26.11.2026"), "--template.date: must be a day as YYYY"),
        (TemplateConfig(date="2026-02-30"), "--template.date: .*got '2026-02-30'"),
    ],
)
def test_options_that_no_template_can_be_given_are_refused(template, told):
    with pytest.raises(ConfigError, match=told):
        check_template(template)


@pytest.mark.parametrize(
    "program", [chat, distill, dpo, evaluate, grpo, ppo, reward, serve, sft]
)
def test_every_program_that_renders_a_template_checks_its_options(program, capsys):
    # Before the model, which is not there, is looked for.
    arguments = ["--model=none", "--template.date=never"]
    assert program.main(arguments) == 1
    assert "--template.date: must be a day" in capsys.readouterr().out


def test_the_model_of_a_run_that_was_allowed_is_allowed(copied):
    saved = json.loads((Path(copied.run_dir) / "config.json").read_text())
    saved["config"]["template"]["on_mismatch"] = "allow"
    (Path(copied.run_dir) / "config.json").write_text(json.dumps(saved))
    model = f"{copied.run_dir}/model"
    assert with_run(TemplateConfig(), model).on_mismatch == "allow"
    assert of_evaluation(TemplateConfig(), model).on_mismatch == "allow"
    assert begun(TemplateConfig(), model, None).on_mismatch == "allow"
    assert begun(TemplateConfig(), "demo", None).on_mismatch == "fail"
    given = TemplateConfig(on_mismatch="allow")
    assert begun(given, "demo", None).on_mismatch == "allow"
