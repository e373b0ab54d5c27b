"""A directory of PEFT as a model: it is merged into its base, or clearly refused."""

import dataclasses
import functools
import io
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from jaxrl_post import pretrained
from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.offline import PreferenceConfig, PreferenceLossConfig
from jaxrl_post.config.reward_model import RewardModelConfig
from jaxrl_post.config.rl import RLConfig
from jaxrl_post.config.rollout import RolloutConfig
from jaxrl_post.config.run import RunConfig
from jaxrl_post.config.serve import ChatConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import ModelConfig
from jaxrl_post.models.adapters.lora import LoRAConfig, initialize_adapter, merged
from jaxrl_post.pretrained.peft.files import load_adapter, save_adapter
from jaxrl_post.programs.build.judge import check_judge
from jaxrl_post.programs.chat import _model
from jaxrl_post.programs.convert import convert
from jaxrl_post.programs.hub import fetch, fetch_run
from jaxrl_post.programs.places import check_inputs_are_kept, fingerprints
from jaxrl_post.programs.run import open_run
from jaxrl_post.types import PyTree
from launch.recipes.beginnings import is_checkpoint
from tests import tiny

TOKENIZER = Tokenizer.train(["1+2=3"], chat_template="{{ messages[0].content }}<|eos|>")
CONFIG = ModelConfig(
    "llama", TOKENIZER.vocab_size, 16, 24, 2, num_heads=2, num_kv_heads=1, max_length=64
)
QUIET = Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def base(tmp_path) -> Path:
    pretrained.save(tmp_path / "base", CONFIG, tiny.params(CONFIG), tokenizer=TOKENIZER)
    return tmp_path / "base"


def write_adapter(folder: Path, base: Path, config=CONFIG, **options) -> PyTree:
    """Writes an adapter that changes its base; returns the two merged."""
    _, params = pretrained.load(base, head=config.head)
    lora = LoRAConfig(rank=2, targets=("query", "down"), **options)
    adapter = initialize_adapter(jax.random.key(1), params, config, lora)
    adapter = jax.tree.map(lambda leaf: leaf + 0.3, adapter)
    save_adapter(folder, config, adapter, lora, str(base))
    return merged(params, adapter, config, lora)


@pytest.fixture
def adapter(base, tmp_path) -> Path:
    write_adapter(tmp_path / "adapter", base)
    return tmp_path / "adapter"


def change(adapter: Path, **options) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | options))


def assert_equal(one: PyTree, other: PyTree) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("options", [{}, {"dora": True}, {"rank_stabilized": True}])
def test_the_model_is_the_adapter_merged_into_its_base(base, tmp_path, options):
    expected = write_adapter(tmp_path / "adapter", base, **options)
    output = tmp_path / "whole"
    said = io.StringIO()
    convert(
        ConvertConfig(str(tmp_path / "adapter"), str(output)),
        console=Console(file=said, width=1000),
    )
    assert f"adapter: an adapter, merged into {base}" in said.getvalue()
    config, params = pretrained.load(output)
    assert config == CONFIG
    assert_equal(params, expected)
    # The base has the tokenizer, since the adapter has none.
    assert Tokenizer.from_directory(output).chat_templates == TOKENIZER.chat_templates


def test_the_tokenizer_beside_the_adapter_goes_before_that_of_the_base(adapter):
    other = Tokenizer.train(
        ["1+2=3"], chat_template="{{ messages[0].content }}|<|eos|>"
    )
    other.save(adapter)
    local = fetch(EvaluateConfig(str(adapter)), console=QUIET).config
    found = Tokenizer.from_directory(local.model)
    assert found.chat_templates == other.chat_templates
    pretrained.load(local.model)


@pytest.mark.parametrize(
    "config",
    [
        lambda path: EvaluateConfig(path),
        lambda path: RunConfig(model=path),
        lambda path: ConvertConfig(path, "output"),
        lambda path: RLConfig(rollout=RolloutConfig(draft=path)),
        lambda path: RLConfig(reward=RewardModelConfig(model=path)),
        lambda path: PreferenceConfig(loss=PreferenceLossConfig(reference=path)),
    ],
)
def test_every_option_that_names_a_model_takes_an_adapter(adapter, config):
    given = config(str(adapter))
    fetched = fetch(given, console=QUIET)
    (name,) = fetched.names
    local = fetched.config
    for part in name.split("."):
        local = getattr(local, part)
    assert pretrained.load(local)[0] == CONFIG
    # The kept files of a run name the adapter.
    assert fetched.named(fetched.config) == given
    # The same place again, in all processes of a run.
    assert fetch(given, console=QUIET).config == fetched.config


def test_a_run_keeps_the_adapters_name_and_notices_another_adapter(adapter, tmp_path):
    config = RunConfig(model=str(adapter), run_dir=str(tmp_path / "run"))
    fetched = fetch_run(config, console=QUIET)
    opened = functools.partial(
        open_run,
        fetched,
        console=QUIET,
        command="",
        make_tokenizer=lambda size: TOKENIZER,
        memory=lambda config, model: [],
    )
    with opened() as run:
        run.describe()
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["config"]["model"] == str(adapter)
    change(adapter, lora_alpha=1)
    changed = opened()
    with pytest.raises(ConfigError, match="since the run began: adapter/adapt"):
        changed.__enter__()
    assert "adapter/adapter_model.safetensors" in fingerprints(fetched.config)["model"]
    with pytest.raises(ConfigError, match=r"lies in .*which the run writes"):
        check_inputs_are_kept(fetched.config, tmp_path)
    assert is_checkpoint(str(adapter))


def test_the_base_may_be_given(adapter, base, tmp_path):
    change(adapter, base_model_name_or_path="no/such-base-anywhere")
    moved = tmp_path / "moved"
    base.rename(moved)
    given = EvaluateConfig(str(adapter), base=str(moved))
    fetched = fetch(given, console=QUIET)
    assert pretrained.load(fetched.config.model)[0] == CONFIG
    assert fetched.named(fetched.config) == given
    with pytest.raises(ConfigError, match=r"--base: .* and .*moved is none; drop"):
        fetch(EvaluateConfig(str(moved), base=str(moved)), console=QUIET)


def test_a_chat_takes_the_base_of_an_adapter(adapter, base):
    change(adapter, base_model_name_or_path=None)
    with pytest.raises(ConfigError, match="--base names it otherwise"):
        _model(ChatConfig(str(adapter)), QUIET)
    model = _model(ChatConfig(str(adapter), base=str(base)), QUIET)
    assert model.config == CONFIG
    with pytest.raises(ConfigError, match=r"--step: .* is no run; drop the option"):
        _model(ChatConfig(str(adapter), base=str(base), step=1), QUIET)


def test_a_model_with_an_adapter_beside_its_files_stays_as_it_is(base, adapter):
    shutil.copytree(adapter, base / "adapter")
    alone = tiny.params(CONFIG)
    assert_equal(pretrained.load(base)[1], alone)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_damaged_numbers_of_an_adapter_are_named(adapter, value):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = min(name for name in tensors if "lora_B" in name)
    tensors[name][0, 0] = value
    save_file(tensors, file)
    with pytest.warns(pretrained.CheckpointWarning, match=r"tensors hold .*lora_B"):
        load_adapter(adapter, CONFIG)


def test_an_adapter_may_begin_as_zeros_in_b_alone(adapter, recwarn):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    for name, values in tensors.items():
        values *= "lora_A" in name
    save_file(tensors, file)
    load_adapter(adapter, CONFIG)
    assert not [each for each in recwarn if "tensors hold" in str(each.message)]
    for name, values in tensors.items():
        values *= "lora_A" not in name
    save_file(tensors, file)
    with pytest.warns(pretrained.CheckpointWarning, match=r"nothing but zeros.*lora_A"):
        load_adapter(adapter, CONFIG)


def test_an_adapter_of_a_reward_model_is_one(base, tmp_path):
    value = dataclasses.replace(CONFIG, head="value")
    expected = write_adapter(tmp_path / "judge", base, value, whole=("value_head",))
    options = RLConfig(reward=RewardModelConfig(model=str(tmp_path / "judge")))
    reward = fetch(options, console=QUIET).config.reward
    check_judge(reward)
    config, params = pretrained.load(reward.model)
    assert config == value
    assert_equal(params, expected)
    assert np.abs(params.value_head).max() > 0


def refused(adapter: Path, told: str) -> None:
    def load():
        pretrained.load(fetch(EvaluateConfig(str(adapter)), console=QUIET).config.model)

    with pytest.raises(ValueError, match=told):
        load()


def test_what_is_no_adapter_of_a_model_is_refused_by_name(adapter, base, tmp_path):
    change(adapter, base_model_name_or_path="base-that-moved")
    refused(adapter, "--model: .* is an adapter of 'base-that-moved', which is neither")
    change(adapter, base_model_name_or_path=None)
    refused(adapter, "base_model_name_or_path must name the model under")
    change(adapter, base_model_name_or_path=str(adapter))
    refused(adapter, "must be the model under the adapter")
    change(adapter, base_model_name_or_path=str(tmp_path))
    refused(adapter, "must be the model under the adapter")
    change(adapter, base_model_name_or_path=str(base), r=3)
    refused(adapter, r"has shape \(2, 16\), but adapter_config.json asks for \(3, 16\)")
    change(adapter, r=2, init_lora_weights="pissa")
    refused(adapter, "init_lora_weights")
    change(adapter, init_lora_weights=True)
    whole = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    refused(adapter, "adapter_model.safetensors: truncated or damaged")
    (adapter / "adapter_model.safetensors").write_bytes(whole)
    raw = json.loads((base / "config.json").read_text())
    bits = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(raw | {"quantization_config": bits}))
    refused(adapter, "bitsandbytes")
    (base / "config.json").write_text(json.dumps(raw | {"hidden_size": 32}))
    refused(adapter, r"shape \[320, 16\]|shape \(320, 16\)|hidden|embed")
    (adapter / "model.safetensors").write_bytes(whole)
    refused(adapter, "both an adapter .* and a model")


def test_an_adapter_with_embeddings_of_its_own_is_refused_or_right(adapter):

    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.embed_tokens.weight"
    tensors[name] = np.zeros((TOKENIZER.vocab_size + 8, 16), np.float32)
    save_file(tensors, file)
    refused(adapter, "embed_tokens")


def test_an_adapter_that_is_opened_as_a_model_says_what_it_is(adapter):
    with pytest.raises(pretrained.CheckpointError, match="an adapter of PEFT and no"):
        pretrained.load(adapter)
