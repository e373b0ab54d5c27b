"""A base model with a chat template learns to end its turns, and is read back so."""

import json
import re
from functools import partial

import jax
import numpy as np
import pytest
import tokenizers

from jaxrl_post import pretrained
from jaxrl_post.data import learned
from jaxrl_post.data.tokenizer import EOS, Tokenizer
from jaxrl_post.envs import Message
from jaxrl_post.examples.texts import tokenizer_of
from jaxrl_post.learner.model import open_model
from jaxrl_post.models import ModelConfig, initialize, param_specs
from launch import convert, evaluate, sft

CONFIG = ModelConfig(
    "llama", 266, 16, 24, 1, num_heads=2, num_kv_heads=2, max_length=64
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """As Qwen 2.5's base models: the template's end of a turn is in no file's eos."""
    folder = tmp_path_factory.mktemp("base") / "model"
    plain = Tokenizer.train(["eval 0: ab", "train 1: ab"] * 3, vocab_size=264)
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = Tokenizer(
        backend,
        stop_ids=plain.stop_ids,
        chat_template=CHATML,
        special_tokens={"eos_token": EOS},
    )
    params = initialize(jax.random.key(0), param_specs(CONFIG))
    pretrained.save(folder, CONFIG, params, tokenizer=tokenizer)
    settings = {"eos_token_id": plain.eos_id}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.processes
def test_fine_tuning_teaches_a_base_model_to_stop(base, tmp_path, capsys):
    end = Tokenizer.from_directory(base).backend.token_to_id("<|im_end|>")
    run, output = tmp_path / "run", tmp_path / "results.json"
    common = [f"--model={base}", "--env=even_length:EvenLength"]
    assert sft.main(
        [
            *common, f"--run-dir={run}", "--steps=30", "--examples-per-step=8",
            "--max-tokens=32", "--optimizer.learning-rate=3e-2", "--eval.every=0",
            "--optimizer.warmup-steps=0",
        ]
    ) == 0  # fmt: skip
    # The checkpoint as a model ends its answers as the run's model does; a copy of the
    # base is a copy.
    assert convert.main([f"--input={run}", f"--output={tmp_path / 'made'}"]) == 0
    assert convert.main([f"--input={base}", f"--output={tmp_path / 'copy'}"]) == 0
    for folder, ends in (
        (run / "model", [1, end]), (tmp_path / "made", [1, end]), (tmp_path / "copy", 1)
    ):  # fmt: skip
        settings = json.loads((folder / "generation_config.json").read_text())
        assert settings["eos_token_id"] == ends
    assert open_model(
        str(run / "model"),
        mesh="",
        dtype=None,
        seed=0,
        make_tokenizer=partial(tokenizer_of, list),
    ).tokenizer.stop_ids == (1, end)
    common[0] = f"--model={run / 'model'}"
    assert evaluate.main([*common, "--max-tokens=8", f"--output={output}"]) == 0
    assert re.search(r"ended by itself\W+100\.0%", capsys.readouterr().out)
    lines = output.with_suffix(".completions.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert {row["completion"] for row in found} == {"ab"}
    assert {row["finish_reason"] for row in found} == {"stop"}


def test_the_end_is_what_fine_tuning_has_as_its_target(base):
    tokenizer = Tokenizer.from_directory(base)
    [(tokens, mask)] = learned.conversation(
        tokenizer, [Message("user", "eval 0: "), Message("assistant", "ab")]
    )
    stops = np.isin(tokens[mask], tokenizer.stop_ids)
    assert stops.tolist() == [False] * (mask.sum() - 1) + [True]
