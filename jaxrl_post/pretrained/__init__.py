"""Loads and saves models and adapters: Hugging Face, Orbax and PEFT formats.

>>> import tempfile, jax
>>> from jaxrl_post import models, pretrained
>>> config = models.ModelConfig("llama", 32, 16, 24, 1, num_heads=2, num_kv_heads=1)
>>> params = models.initialize(jax.random.key(0), models.param_specs(config))
>>> with tempfile.TemporaryDirectory() as folder:
...     pretrained.save(f"{folder}/tiny", config, params)
...     same_config, same_params = pretrained.load(f"{folder}/tiny")
>>> config == same_config
True
"""

from jaxrl_post.pretrained.errors import CheckpointError, CheckpointWarning
from jaxrl_post.pretrained.hf import load, load_mtp, save
from jaxrl_post.pretrained.peft.files import load_adapter, save_adapter

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "load",
    "load_adapter",
    "load_mtp",
    "save",
    "save_adapter",
]
