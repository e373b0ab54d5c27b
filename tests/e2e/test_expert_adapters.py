"""launch.grpo with an adapter of experts over a mixture in four bits, and resumed."""

import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_post import pretrained
from jaxrl_post.models import MixtureOfExperts, ModelConfig, initialize, param_specs
from jaxrl_post.models.adapters.lora import merged
from jaxrl_post.models.adapters.quantized import quantize
from jaxrl_post.models.matrix import matrices
from jaxrl_post.pretrained.peft.files import load_adapter
from launch import grpo
from tests.parity.train_families import character_tokenizer

pytestmark = pytest.mark.processes

CONFIG = ModelConfig(
    "qwen3_moe", 72, 64, 64, 1, num_heads=4, num_kv_heads=4, head_dim=16,
    qk_norm="head", experts=MixtureOfExperts(8, 2, 64), max_length=64,
)  # fmt: skip
OPTIONS = (
    "--mesh=fsdp2,ep2,tp2", "--dtype=float32", "--env=arithmetic?level=0",
    "--rollout.max-tokens=3", "--rollout.prompts-per-step=4",
    "--rollout.samples-per-prompt=4", "--rollout.reward-workers=1",
    "--eval.num-tasks=4", "--eval.every=0", "--checkpoint.every=1",
    "--optimizer.learning-rate=1e-2", "--optimizer.schedule=constant",
    "--algorithm.entropy-coefficient=0.1",
    "--lora.rank=2", "--lora.alpha=4", "--lora.targets", "query", "expert_gate",
    "expert_up", "expert_down", "--lora.quantize=nf4",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _restore_mesh():
    before = jax.sharding.get_mesh()
    yield
    jax.set_mesh(before)
    jax.clear_caches()


# tests/programs/test_continued_adapters.py and tests/models guard its parts.
@pytest.mark.all
def test_two_steps_the_second_taken_again(tmp_path):
    params, run = initialize(jax.random.key(0), param_specs(CONFIG)), tmp_path / "run"
    source = tmp_path / "source"
    pretrained.save(source, CONFIG, params, tokenizer=character_tokenizer())
    command = [f"--run-dir={run}", f"--model={source}", *OPTIONS, "--steps=2"]
    found = []
    for _ in range(2):
        assert grpo.main(command) == 0
        found.append(load_file(run / "adapter" / "adapter_model.safetensors"))
        shutil.rmtree(run / "checkpoints" / "2")
    left, right = found
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)

    # The saved model is the quantised base with the change, by itself and merged.
    config, model = pretrained.load(run / "model")
    lora, adapter = load_adapter(run / "adapter", config)
    expected = matrices(merged(quantize(params), adapter, config, lora))
    for path, value in matrices(model).items():
        np.testing.assert_allclose(value, expected[path], atol=1e-6, err_msg=path)
    changes = [own for path, own in adapter.items() if ".experts." in path]
    assert len(changes) == 3
    assert all(float(np.abs(own.up).max()) > 1e-3 for own in changes)
