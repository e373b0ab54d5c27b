"""A model directory, and an environment that workers can import."""

from pathlib import Path

import jax
import pytest

from jaxrl_post import pretrained
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.models import ModelConfig, initialize, param_specs

CONFIG = ModelConfig(
    "llama", 264, 16, 24, 1, num_heads=2, num_kv_heads=2, max_length=64
)


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `--env even_length:EvenLength` work."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny model of random weights and a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    params = initialize(jax.random.key(0), param_specs(CONFIG))
    tokenizer = Tokenizer.train(["eval 0: ab", "train 1: ab"] * 3, vocab_size=264)
    pretrained.save(folder, CONFIG, params, tokenizer=tokenizer)
    return folder
