"""Preference losses from configurations, their files, and small runs of them."""

import io
import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl_post import pretrained
from jaxrl_post.algorithms import Predictions, anchored, preference, reference_free
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.offline import (
    PREFERENCES,
    PairsConfig,
    PreferenceConfig,
    PreferenceLossConfig,
    RewardConfig,
)
from jaxrl_post.config.optimizer import OptimizerConfig
from jaxrl_post.config.run import EvalConfig, UpdateConfig
from jaxrl_post.data import packing
from jaxrl_post.examples.preferences import (
    make_preference,
    open_judgements,
    open_pairs,
    open_solutions,
)
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.records.directory import read_rows
from tests.programs.trainers import CONFIG, make_model

WITHOUT_REFERENCE = ("simpo", "cpo", "orpo", "reference_free_dpo")
NOWHERE = Console(file=io.StringIO())


@pytest.mark.parametrize("name", PREFERENCES)
def test_every_preference_loss_of_the_configuration_is_made(name):
    made = make_preference(PreferenceLossConfig(name=name))
    assert made.needs_reference == (name not in WITHOUT_REFERENCE)
    assert (made.mismatched is not None) == (name == "kto")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PreferenceLossConfig(margin=1.0), r"--loss\.margin: dpo has no such"),
        (PreferenceLossConfig("ipo", label_smoothing=0.1), r"label-smoothing: ipo has"),
        (PreferenceLossConfig("kto", label_smoothing=0.0), r"label-smoothing: kto has"),
        (PreferenceLossConfig(nll_weight=1.0), r"--loss\.nll-weight: dpo has no such"),
        (PreferenceLossConfig(alpha=0.5), r"--loss\.alpha: dpo has no such"),
        (
            PreferenceLossConfig("wpo", desirable_weight=1.0),
            r"--loss\.desirable-weight: wpo has no such",
        ),
        (
            PreferenceLossConfig("orpo", undesirable_weight=1.0),
            r"--loss\.undesirable-weight: orpo has no such",
        ),
        (
            PreferenceLossConfig("simpo", reference="x"),
            r"--loss\.reference: simpo looks at no reference",
        ),
        (
            PreferenceLossConfig("reference_free_dpo", reference="x"),
            r"--loss\.reference: reference_free_dpo looks at no reference",
        ),
    ],
)
def test_hyperparameters_that_a_loss_lacks_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        make_preference(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PreferenceLossConfig(beta=-1.0), "beta must be > 0, got -1"),
        (
            PreferenceLossConfig("kto", undesirable_weight=-1.0),
            "undesirable_weight mus",
        ),
        (PreferenceLossConfig("alpha_divergence_dpo", alpha=2.0), "alpha must be in"),
        (PreferenceLossConfig("exo", label_smoothing=0.0), r"in \(0, 0\.5\), got 0\.0"),
    ],
)
def test_a_bad_hyperparameter_is_refused_before_anything_is_loaded(config, message):
    with pytest.raises(ValueError, match=message):
        make_preference(config)


@pytest.mark.parametrize(
    ("config", "same"),
    [
        (PreferenceLossConfig("robust_dpo", label_smoothing=0.0), preference.dpo()),
        (PreferenceLossConfig("robust_dpo"), preference.robust_dpo()),
        (
            PreferenceLossConfig("exo", label_smoothing=0.2),
            anchored.exo(label_smoothing=0.2),
        ),
        (PreferenceLossConfig("exo"), anchored.exo(label_smoothing=1e-3)),
        (PreferenceLossConfig("cpo", label_smoothing=0.0), reference_free.cpo()),
    ],
)
def test_a_smoothing_of_0_is_not_the_default_of_the_loss(config, same):
    """A pair of one token an answer, with log-ratios 1 and -1 to the reference."""
    answer = packing.Sequence.of([1], [2])
    batch = packing.pack([(answer, answer)], 4, 1).replace(
        labels=jnp.array([[1.0, 1.0, -1.0, -1.0]]),
        reference_logprobs=jnp.array([[0.0, -2.0, 0.0, -2.0]]),
    )
    policy = jnp.array([[0.0, -1.0, 0.0, -3.0]])
    found, expected = (
        made.objective(Predictions(policy), batch).loss.mean().item()
        for made in (make_preference(config), same)
    )
    assert found == expected


def pair(i: int) -> dict:
    return {"prompt": f"{i}=", "chosen": f"yes {i}", "rejected": f"no {i} {i}"}


PAIRS = [pair(i) for i in range(40)]
SCORED = [
    row | {"score_chosen": 7, "score_rejected": i % 3} for i, row in enumerate(PAIRS)
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


@pytest.fixture
def written(tmp_path):
    def write(rows: list[dict]) -> PairsConfig:
        path = tmp_path / "answers.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PairsConfig(str(path), eval_share=0.3)

    return write


def test_judged_answers_are_those_of_pairs_taken_apart(written):
    assert open_judgements(written(PAIRS), NOWHERE) == open_judgements(
        written(JUDGED), NOWHERE
    )
    # One answer a held-out prompt, of both kinds; all of the others'.
    found = open_judgements(written(PAIRS), NOWHERE)
    held_out = [each.group for each in found.eval]
    assert len(set(held_out)) == len(held_out) == 40 - len(found.train) / 2
    assert {each.desirable for each in found.eval} == {True, False}
    assert not set(held_out) & {each.group for each in found.train}


def test_columns_and_formats_of_pairs(written):
    names = {"prompt": "instruction", "chosen": "better", "rejected": "worse"}
    rows = [{names[name]: value for name, value in row.items()} for row in PAIRS]
    columns = ("chosen=better", "rejected=worse")
    plain = open_pairs(written(PAIRS), NOWHERE, remedy="")
    for more, told in (
        ({"columns": (*columns, "prompt=instruction")}, ""),
        ({"columns": columns}, "read as Alpaca"),
        ({"columns": columns, "format": "alpaca"}, "read as Alpaca"),
    ):
        console = Console(file=io.StringIO(), width=200)
        config = replace(written(rows), **more)
        assert open_pairs(config, console, remedy="") == plain
        assert told in console.file.getvalue()
    steps = [
        {"question": f"{i}", "completions": ["a"], "labels": [i % 2]} for i in range(40)
    ]
    config = replace(written(steps), columns=("prompt=question",))
    assert open_solutions(config, NOWHERE, separator="\n").train


def test_labelled_steps_have_no_other_format(written):
    data = replace(written(PAIRS), format="sharegpt")
    config = RewardConfig(kind="process", data=data)
    with pytest.raises(ConfigError, match=r"--data.format: sharegpt has no labelled"):
        check_options(config)


def test_held_out_pairs_are_not_the_first_of_each_prompt(written):
    # As data sets sort them: the easiest first.
    rows = [pair(i) | {"rejected": "no" * n} for i in range(40) for n in (1, 2, 3)]
    found = open_pairs(written(rows), NOWHERE, remedy="")
    assert len({each.group for each in found.eval}) == len(found.eval)
    assert {each.rejected for each in found.eval} == {"no", "nono", "nonono"}


@pytest.mark.parametrize("rows", [PAIRS, [*SCORED[:-1], PAIRS[-1]]])
def test_a_margin_without_scores_is_refused(written, rows):
    missing = sum("score_chosen" not in row for row in rows)
    with pytest.raises(
        ConfigError,
        match=rf"--margin: {missing} of the 40 pairs in .*jsonl have no scores; every",
    ):
        open_pairs(written(rows), NOWHERE, margin=1.0, remedy="")
    assert open_pairs(written(rows), NOWHERE, remedy="").margin == 0


def test_pairs_are_not_made_of_judged_answers(written):
    with pytest.raises(
        ConfigError,
        match=r"--data\.path: .*jsonl holds answers with a label each, no pairs; .*"
        "prompt, chosen and rejected, or use --loss.name kto for these",
    ):
        run_offline(PreferenceConfig(data=written(JUDGED)), console=NOWHERE, command="")
    with pytest.raises(ConfigError, match=r"with prompt, chosen and rejected$"):
        run_offline(RewardConfig(data=written(JUDGED)), console=NOWHERE, command="")


@pytest.mark.parametrize(
    ("label", "noun"), [(True, "desirable"), (False, "undesirabl")]
)
def test_answers_of_one_kind_are_refused(written, label, noun):
    rows = [row for row in JUDGED if row["label"] == label]
    with pytest.raises(
        ConfigError, match=rf"--data\.path: all \d+ train answers of .* are {noun}"
    ):
        open_judgements(written(rows), NOWHERE)


def test_no_file_is_refused():
    for read in (open_judgements, lambda *given: open_pairs(*given, remedy="")):
        with pytest.raises(
            ConfigError, match=r"--data\.path: needs a \.jsonl or \.par"
        ):
            read(PairsConfig(), NOWHERE)


def test_a_negative_margin_is_refused(written):
    config = RewardConfig(data=written(SCORED), margin=-1.0)
    with pytest.raises(ConfigError, match=r"--margin: must be at least 0; got -1"):
        run_offline(config, console=NOWHERE, command="")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "model"
    made = make_model()
    pretrained.save(folder, CONFIG, made.params, tokenizer=made.tokenizer)
    return folder


QUICK = PreferenceConfig(
    steps=12,
    examples_per_step=24,
    max_tokens=24,
    log_every=1,
    update=UpdateConfig(microbatch_tokens=24 * 8),
    optimizer=OptimizerConfig(learning_rate=1e-2),
    eval=EvalConfig(every=0, num_tasks=8),
)


def ran(config) -> tuple[dict[int, dict[str, float]], str]:
    console = Console(file=(out := io.StringIO()), width=200)
    assert run_offline(config, console=console, command="").completed
    rows = read_rows(Path(config.run_dir) / "metrics.jsonl")
    return {row["step"]: row["metrics"] for row in rows}, out.getvalue()


def test_kto_learns_what_is_desirable(written, model, tmp_path):
    config = replace(
        QUICK,
        run_dir=str(tmp_path / "run"),
        model=str(model),
        data=written(JUDGED),
        loss=PreferenceLossConfig("kto", undesirable_weight=1.5),
    )
    found, said = ran(config)
    # At initialisation nothing is gained or lost: half of each weight.
    assert found[0]["eval/reference_point"] == pytest.approx(0.0, abs=1e-4)
    assert found[0]["eval/accuracy"] < found[12]["eval/accuracy"]
    assert found[12]["eval/accuracy"] > 0.8
    assert found[12]["eval/loss"] < found[0]["eval/loss"] - 0.02
    assert found[12]["eval/desirable_reward"] > found[12]["eval/undesirable_reward"]
    assert "of 8 answers, each of another prompt" in said


def test_the_margin_moves_the_rewards_apart(written, model, tmp_path):
    shared = {
        field: getattr(QUICK, field)
        for field in ("examples_per_step", "max_tokens", "log_every", "update")
    }
    margins = {}
    for margin in (0.0, 1.0):
        config = RewardConfig(
            **shared,
            run_dir=str(tmp_path / str(margin)),
            model=str(model),
            steps=1,
            data=written(SCORED),
            eval=EvalConfig(every=0, num_tasks=8),
            centering=0.0,
            margin=margin,
        )
        found, _ = ran(config)
        margins[margin] = found[1]["train/loss"]
    # Rewards begin near 0; softplus(margin) for margins of 5 to 7.
    assert margins[0.0] == pytest.approx(0.693, abs=0.1)
    assert 5.0 < margins[1.0] < 7.0
