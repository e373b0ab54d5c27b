"""Greedy continuations by our sampler, with its cache, against transformers'.

One case for every family and for what caches do differently: windows, latents, sinks,
layers without rotation.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post import pretrained
from jaxrl_post.data.packing import Sequence, pack
from jaxrl_post.learner.step import Policy, predict
from jaxrl_post.pretrained import families as registry
from jaxrl_post.sampler import Engine, EngineConfig, Request, SamplingParams

# Families whose caches differ: windows, local and long rotations, latents, sinks,
# layers without rotation, experts, states, keys that layers share. The other families'
# caches hold no more than these, and test_logits.py compares their forward passes.
EVERY_DAY = {
    "mixtral", "qwen2_sliding_from_layer_1", "gemma2", "gemma3_text",
    "phi3_partial_longrope_within", "smollm3", "deepseek_v3", "gpt_oss", "lfm2",
    "deepseek_v32_choosing", "glm_moe_dsa_choosing",
    "qwen3_5_text", "nemotron_h", "gemma4_text",
}  # fmt: skip
FAMILIES = (
    "llama_rope_llama3", "mistral_window", "mixtral", "qwen2_sliding_from_layer_1",
    "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text",
    "phi3_partial_longrope_within", "olmo2", "olmo3_yarn_on_full_layers", "olmoe",
    "granite", "smollm3", "seed_oss", "glm4_moe", "deepseek_v2_groups", "deepseek_v3",
    "gpt_oss", "ministral3", "youtu", "lfm2", "lfm2_biases_untied", "lfm2_moe",
    "minimax_m2", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h",
    "nemotron_h_released", "gemma4_text", "gemma4_text_experts",
    "gemma4_text_every_part", "deepseek_v32_choosing", "glm_moe_dsa_choosing",
)  # fmt: skip
# These are models of another family, or have one inside.
SEEING = {
    "gemma3", "gemma4", "gemma4_unified", "gemma4_unified_text", "kimi_k2", "kimi_k25",
    "mistral3", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe",
}  # fmt: skip
# Another's decoder under other keys, and so another's sampler.
ALIKE = {
    "ministral", "internlm3", "iquestcoder", "cwm", "dots1", "solar_open",
    "glm4_moe_lite",
}  # fmt: skip
PROMPT = 8  # As in make_fixtures.py.
FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in EVERY_DAY else pytest.mark.all)
        for name in FAMILIES
    ],
)
def test_greedy_continuations_and_their_logprobs(name):
    config, params = pretrained.load(FIXTURES / name, dtype=jnp.float32)
    with np.load(FIXTURES / name / "expected.npz") as stored:
        tokens, greedy = stored["tokens"], stored["greedy"]
    length, count = PROMPT, greedy.shape[1]
    sizes = EngineConfig(
        num_slots=2, max_prompt_tokens=length, max_tokens=count, steps_per_call=count
    )
    engine = Engine(config, sizes)
    # Without stop ids: a random model's end of text means nothing.
    sampling = SamplingParams(temperature=0.0, max_tokens=count)
    requests = [
        Request(row, tuple(tokens[row, :length].tolist()), sampling=sampling)
        for row in range(2)
    ]
    found = sorted(engine.generate(params, requests), key=lambda c: c.prompt_id)
    assert [completion.tokens.ids.tolist() for completion in found] == greedy.tolist()
    # The trainer's log-probs of these tokens, both sequences packed into one row.
    sequences = [
        (Sequence.of(request.prompt, completion.tokens.ids.tolist()),)
        for request, completion in zip(requests, found, strict=True)
    ]
    batch = pack(sequences, 2 * (length + count), 1)
    on_device = jax.tree.map(jnp.asarray, batch)
    scored = np.asarray(predict(Policy(config), params, on_device).logprobs)
    expected = np.concatenate([completion.tokens.logprobs for completion in found])
    np.testing.assert_allclose(scored[batch.loss_mask], expected, rtol=1e-4, atol=1e-4)


def test_every_family_has_a_case():
    types = {pretrained.load(FIXTURES / name)[0].model_type for name in FAMILIES}
    assert types | ALIKE | SEEING == set(registry.FAMILIES)
    assert types == {
        "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
        "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "olmoe", "granite",
        "smollm3", "seed_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "gpt_oss",
        "ministral3", "youtu", "lfm2", "lfm2_moe", "minimax_m2", "qwen3_5_text",
        "qwen3_5_moe_text", "qwen3_next", "nemotron_h", "gemma4_text", "deepseek_v32",
        "glm_moe_dsa",
    }  # fmt: skip
