"""A run that continues an adapter of PEFT: its beginning, reference and output."""

import dataclasses
import io
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.algorithms import supervised
from jaxrl_post.config.checks import check_options
from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.critic import CriticConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.lora import AdapterConfig
from jaxrl_post.config.offline import PreferenceConfig
from jaxrl_post.config.plan import PlanConfig
from jaxrl_post.config.reward_model import PrmConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.run import CheckpointConfig, RunConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.adapters import continued, with_adapter
from jaxrl_post.learner.companion import open_companion
from jaxrl_post.learner.model import Model, save_model
from jaxrl_post.learner.reference import open_reference
from jaxrl_post.models import param_specs
from jaxrl_post.models.adapters.lora import LoRAConfig, merged
from jaxrl_post.pretrained.peft.bases import bases
from jaxrl_post.pretrained.peft.joined import parted
from jaxrl_post.programs.convert import convert
from jaxrl_post.programs.hub import fetch, fetch_run
from jaxrl_post.programs.offline import run_offline
from jaxrl_post.programs.places import check_inputs_are_kept, fingerprints
from jaxrl_post.records.directory import read_rows
from jaxrl_post.sharding import DEFAULT_RULES, create_mesh
from tests import tiny
from tests.hub_server import Hub, serving
from tests.learner.test_adapters import batch_of, one_device, train
from tests.pretrained.test_peft_files import PHI, random_adapter
from tests.programs.test_adapter_models import (
    CONFIG,
    QUIET,
    TOKENIZER,
    adapter,
    base,
    change,
    write_adapter,
)
from tests.tiers import daily

__all__ = ["adapter", "base", "one_device"]


def going_on(path: Path | str, model: Path | str = "demo", **options) -> RunConfig:
    """A run that continues an adapter; "demo" is what no --model is."""
    lora = AdapterConfig(path=str(path), **options)
    return PreferenceConfig(model=str(model), lora=lora)


def opened(config: RunConfig) -> Model:
    """The model at step 0, on one device."""
    local = fetch_run(config, console=QUIET).config
    mesh = create_mesh("dp1", jax.devices()[:1])
    found, params = pretrained.load(local.model, mesh=mesh)
    model = Model(
        local.model, found, param_specs(found), params, TOKENIZER, mesh, DEFAULT_RULES,
        preset=False,
    )  # fmt: skip
    return with_adapter(local.lora, model, seed=0)


@pytest.mark.parametrize(
    "options",
    daily(
        [{}, {"dora": True}, {"rank_stabilized": True, "alpha": 3.0}], [{"dora": True}]
    ),
)
def test_step_0_is_the_adapter_merged_and_is_the_reference(base, tmp_path, options):
    expected = write_adapter(tmp_path / "adapter", base, **options)
    model = opened(going_on(tmp_path / "adapter"))
    lora = model.adaptation.lora
    assert (lora.rank, lora.targets) == (2, ("query", "down"))
    assert {name: getattr(lora, name) for name in options} == options
    batch = batch_of()
    learner, state, _ = train(model, supervised.next_token, batch, steps=0)
    reference = open_reference(model, learner, None, "--loss.reference", longest=32)
    merged_model = learner.scorer.predict(expected, batch).logprobs
    bare = learner.scorer.predict(model.base, batch).logprobs
    assert np.abs(np.subtract(merged_model, bare)).max() > 0.01

    def close(params):
        found = learner.scorer.predict(params, batch).logprobs
        np.testing.assert_allclose(found, merged_model, rtol=1e-4, atol=1e-5)

    close(model.whole(state.params))
    close(reference.whole(reference.params))
    # The first update takes the trained arrays, and the reference stays.
    state, _ = learner.update(state, batch, where="step 1")
    close(reference.whole(reference.params))
    after = learner.scorer.predict(model.whole(state.params), batch).logprobs
    assert np.abs(np.subtract(after, merged_model)).max() > 1e-3


def test_a_new_adapter_has_its_base_as_reference(base):
    model = opened(PreferenceConfig(model=str(base), lora=AdapterConfig(rank=2)))
    learner, *_ = train(model, supervised.next_token, batch_of(), steps=0)
    reference = open_reference(model, learner, None, "--loss.reference", longest=32)
    assert reference.params is model.base


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"rank": 4}, r"--lora\.rank: the adapter .* has 2, .*; got 4\. Drop"),
        ({"alpha": 3.0}, r"--lora\.alpha: the adapter .* has 16\.0, .*; got 3\.0"),
        ({"dora": True}, r"--lora\.dora: the adapter .* has False, .*; got True"),
        ({"rank_stabilized": True}, r"--lora\.rank-stabilized: .*False.*; got True"),
        ({"targets": ("q_proj",)}, r"--lora\.targets: .* query down, .* got query\."),
        ({"targets": ("kv_up",)}, r"--lora\.path: lora: no layer of this llama has"),
    ],
)
def test_options_that_contradict_the_adapter_are_refused(adapter, options, told):
    change(adapter, lora_alpha=16)
    with pytest.raises(ConfigError, match=told):
        fetch_run(going_on(adapter, **options), console=QUIET)


def test_options_that_agree_and_those_of_training_may_be_given(adapter):
    same = {"rank": 2, "alpha": 32.0, "targets": ("down_proj", "query")}
    config = going_on(adapter, dropout=0.1, quantize="int8", **same)
    lora = fetch_run(config, console=QUIET).config.lora
    assert (lora.dropout, lora.quantize, lora.targets) == (
        0.1,
        "int8",
        ("query", "down"),
    )


def test_the_model_is_the_one_given_else_that_under_the_adapter(
    adapter, base, tmp_path
):
    local = fetch_run(going_on(adapter), console=QUIET).config
    assert (local.model, local.lora.path) == (str(base), str(adapter))
    moved = tmp_path / "moved"
    base.rename(moved)
    for config in (
        going_on(adapter, moved),
        dataclasses.replace(going_on(adapter), base=str(moved)),
    ):
        local = fetch_run(config, console=QUIET).config
        assert (local.model, local.base) == (str(moved), None)
    with pytest.raises(ConfigError, match="--model: tiny is a preset with random"):
        fetch_run(going_on(adapter, "tiny"), console=QUIET)
    change(adapter, base_model_name_or_path=None)
    with pytest.raises(ConfigError, match=r"--lora\.path: .*must name the model under"):
        fetch_run(going_on(adapter), console=QUIET)


def test_adapter_and_base_may_be_on_the_hub(adapter, base, tmp_path, monkeypatch):
    change(adapter, base_model_name_or_path="Org/base", revision="v1")
    files = [
        {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}
        for folder in (adapter, base)
    ]
    hub = Hub(
        {"models/Org/mine": {"main": files[0]}, "models/Org/base": {"v1": files[1]}}
    )
    run_dir = str(tmp_path / "run")
    config = dataclasses.replace(going_on("Org/mine"), run_dir=run_dir)
    with serving(hub, str(tmp_path / "cache"), monkeypatch):
        fetched = fetch_run(config, console=QUIET)
    assert set(fetched.commits) == {"Org/mine", "Org/base@v1"}
    local = fetched.config
    assert pretrained.load(local.model)[0] == CONFIG
    assert (Path(local.lora.path or "") / "adapter_model.safetensors").is_file()
    named = fetched.named(local)
    assert (named.model, named.lora.path) == ("Org/base@v1", "Org/mine")
    assert fetched.names["model"] == "Org/base@v1"


def test_what_is_no_adapter_of_this_model_is_refused(adapter, base, tmp_path):
    def refused(config, told):
        with pytest.raises(ConfigError, match=told):
            fetch_run(config, console=QUIET)

    refused(going_on(base), "--lora.path: .*base is no directory with an adapter_conf")
    refused(going_on(tmp_path / "none"), "--lora.path: .*none is no directory with")
    change(adapter, use_rslora=True, init_lora_weights="pissa")
    refused(going_on(adapter), "--lora.path: .*init_lora_weights='pissa'")
    change(adapter, init_lora_weights=True, modules_to_save=["norm"])
    refused(going_on(adapter), "--lora.path: ")
    other = dataclasses.replace(CONFIG, hidden_size=32, head_dim=8)
    pretrained.save(tmp_path / "other", other, tiny.params(other), tokenizer=TOKENIZER)
    change(adapter, modules_to_save=None)
    refused(going_on(adapter, tmp_path / "other"), r"--lora.path: .*has shape \(2, 16")
    (adapter / "adapter_model.safetensors").unlink()
    refused(going_on(adapter), "--lora.path: .*adapter_model.safetensors: no such fi")


def test_it_is_for_the_policy_of_a_run(adapter):
    lora = AdapterConfig(path=str(adapter), rank=2)
    ppo = RLConfig(critic=CriticConfig(lora=lora))
    with pytest.raises(ConfigError, match=r"--critic\.lora\.path: its adapter is al"):
        check_options(ppo)
    prime = RLConfig(prm=PrmConfig(lora=lora))
    with pytest.raises(ConfigError, match=r"--prm\.lora\.path: its adapter is always"):
        check_options(prime)
    plan = PlanConfig("tiny", "v5e:4x4", lora=lora)
    with pytest.raises(ConfigError, match=r"--lora\.path: is for a run"):
        fetch(plan, console=QUIET, weights=False)


def test_another_adapter_is_noticed_and_it_is_not_overwritten(adapter):
    fetched = fetch_run(going_on(adapter), console=QUIET)
    before = fingerprints(fetched.config)["lora.path"]
    assert set(before) == {"adapter_config.json", "adapter_model.safetensors"}
    change(adapter, lora_alpha=1)
    assert fingerprints(fetched.config)["lora.path"] != before
    with pytest.raises(ConfigError, match=r"--lora\.path: .*which the run writes"):
        check_inputs_are_kept(fetched.config, adapter.parent)


@pytest.mark.parametrize("companion", [CriticConfig(), PrmConfig()])
def test_what_begins_as_the_policy_begins_as_the_continued_one(
    adapter, base, tmp_path, companion
):
    expected = write_adapter(tmp_path / "again", base)
    model = opened(going_on(tmp_path / "again"))
    begun = open_companion(companion, model, seed=0, longest=16)
    found = begun.params.layers[0].mlp.down
    np.testing.assert_allclose(found, expected.layers[0].mlp.down, rtol=1e-6)


def pairs(folder: Path) -> Path:
    rows = [
        {"prompt": f"{i}+2=", "chosen": str(i + 2), "rejected": "3+1"}
        for i in range(40)
    ]
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def go(config: PreferenceConfig, stop_after: int = 9) -> Path:
    asked: list[None] = []
    run_offline(
        config, console=Console(file=io.StringIO()), command="",
        should_stop=lambda: asked.append(None) or len(asked) == stop_after,
    )  # fmt: skip
    return Path(config.run_dir or "")


@pytest.mark.slow("trains a whole run three times")
def test_a_run_goes_on_is_resumed_exactly_and_gives_an_adapter_of_the_same_form(
    adapter, base, tmp_path
):
    Tokenizer.train(["1+2=3"]).save(base)
    config = going_on(adapter, dropout=0.25)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, path=str(pairs(tmp_path))),
        steps=3, examples_per_step=2, max_tokens=32, log=(),
        checkpoint=CheckpointConfig(every=1), run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    run = go(config)
    first, *_ = read_rows(run / "metrics.jsonl")
    # At step 0 the policy is its own reference.
    assert first["metrics"]["eval/loss"] == pytest.approx(np.log(2), rel=1e-5)
    saved = json.loads((run / "config.json").read_text())["config"]
    assert (saved["model"], saved["lora"]["rank"]) == (str(base), 2)
    raw = json.loads((run / "adapter/adapter_config.json").read_text())
    began = json.loads((adapter / "adapter_config.json").read_text())
    assert raw == began | {"lora_dropout": 0.25}
    tensors = load_file(run / "adapter/adapter_model.safetensors")
    before = load_file(adapter / "adapter_model.safetensors")
    shapes = {name: each.shape for name, each in before.items()}
    assert {name: each.shape for name, each in tensors.items()} == shapes
    assert any((tensors[name] != before[name]).any() for name in before)

    other = dataclasses.replace(config, run_dir=str(tmp_path / "stopped"))
    go(other, stop_after=1)
    stopped = go(other)
    again = load_file(stopped / "adapter/adapter_model.safetensors")
    for name, values in tensors.items():
        np.testing.assert_array_equal(again[name], values)
    whole = load_file(run / "model/model.safetensors")
    output = tmp_path / "converted"
    convert(ConvertConfig(str(run), str(output), step=3), console=QUIET)
    for name, values in load_file(output / "model.safetensors").items():
        np.testing.assert_array_equal(values, whole[name])
    change(adapter, lora_alpha=31)
    with pytest.raises(ConfigError, match=r"lora\.alpha: 32\.0 then, 31\.0 now"):
        go(config)
    change(adapter, lora_alpha=32, revision="other")
    with pytest.raises(ConfigError, match=r"--lora\.path: .* changed since the run"):
        go(dataclasses.replace(config, steps=4))


# Families whose checkpoints join matrices.


@pytest.mark.parametrize("targets", [(), ("qkv_proj",), ("o_proj", "up")])
def test_what_is_joined_in_a_file_keeps_its_rank_when_it_goes_on(tmp_path, targets):
    config = dataclasses.replace(PHI, vocab_size=TOKENIZER.vocab_size)
    params = tiny.params(config)
    pretrained.save(tmp_path / "base", config, params, tokenizer=TOKENIZER)
    begun = opened(
        PreferenceConfig(
            model=str(tmp_path / "base"), lora=AdapterConfig(rank=2, targets=targets)
        )
    )
    values = random_adapter(config, begun.adaptation.lora)
    save_model(tmp_path / "model", begun, values)
    expected = merged(params, values, config, begun.adaptation.lora)
    model = opened(going_on(tmp_path / "adapter"))
    lora = model.adaptation.lora
    assert (lora.rank, lora.alpha) == (2, 32.0)
    found = merged(model.base, model.params, config, lora)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        found, expected,
    )  # fmt: skip
    save_model(tmp_path / "next/model", model, model.params)
    both = [load_file(tmp_path / each / "adapter/adapter_model.safetensors")
            for each in ("", "next")]  # fmt: skip
    shapes = [{name: each.shape for name, each in tensors.items()} for tensors in both]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", ["full", "zero"])
def test_an_adapter_of_peft_over_joined_matrices_stays_as_it_is(kind):
    """Its B is not block diagonal; of a new one, whose B is zero, nothing says so."""
    lora = LoRAConfig(rank=6, alpha=12.0, targets=("query", "key", "value"))
    values = random_adapter(PHI, lora)
    if kind == "zero":
        values = {
            path: own.replace(up=np.zeros_like(own.up)) for path, own in values.items()
        }
    same, found = parted(bases(PHI, ()), values, lora)
    assert (same, found is values) == (lora, True)


def test_options_are_untouched_without_a_path():
    config = AdapterConfig(rank=3)
    assert continued(config, "no/such/model") is config
