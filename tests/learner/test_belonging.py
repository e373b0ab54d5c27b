"""Files of a model directory that do not belong together, and normal ones that do."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
import tokenizers

from jaxrl_post.config.data import TemplateConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.belonging import check_belonging
from jaxrl_post.learner.model import open_model, save_model
from tests.programs.trainers import make_model

FIXTURES = sorted((Path(__file__).parents[1] / "parity").glob("**/config.json"))
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
ROWS = 512
# Ids of the special tokens of `written`, which begin its vocabulary.
PAD, BOS, EOS, END = range(4)
WORD = 9


def written(
    folder: Path,
    *,
    eos: str = "</s>",
    bos: str | None = "<s>",
    marks: tuple[str, ...] = (),
    template: str | None = None,
    generation: dict | None = None,
    **config,
) -> Path:
    """A model directory without weights, whose tokenizer is none of this package."""
    special = ["<pad>", "<s>", "</s>", *marks]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=[*"abcdefghijklmnop"]
    )
    backend.train_from_iterator(["abc"], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": eos, "bos_token": bos, "chat_template": template}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", generation),
        ("config.json", {"vocab_size": ROWS, **config}),
    ):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def checked(folder: Path, *, rows: int = ROWS, **template) -> None:
    tokenizer = Tokenizer.from_directory(folder)
    check_belonging(folder, tokenizer, rows, TemplateConfig(**template))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"eos_token_id": 400}, "ends a text with token 400, and the tokenizer has 23"),
        ({"eos_token_id": [400, 401]}, "ends a text with token 400"),
        ({"text_config": {"eos_token_id": 400}}, "ends a text with token 400"),
        (
            {"eos_token_id": None, "generation": {"eos_token_id": 400}},
            "ends a text with token 400",
        ),
        ({"eos_token_id": WORD}, "token 9, which is an ordinary token .* 'g'"),
        ({"eos_token_id": [400, WORD]}, "token 9, which is an ordinary token"),
        (
            {"eos_token_id": PAD, "bos_token_id": EOS},
            "begins a text with token 2 and ends it with 0, the tokenizer with 1 and 2",
        ),
        ({"template": TEMPLATE}, r"chat template writes '<\|im_end\|>', which is none"),
    ],
)
def test_a_tokenizer_of_another_model_is_refused(tmp_path, config, told):
    folder = written(tmp_path / "model", **config)
    with pytest.raises(ConfigError, match=told) as caught:
        checked(folder)
    assert str(caught.value).startswith(f"--model: {folder} has the tokenizer or ")
    assert "--template.on-mismatch allow" in str(caught.value)


def test_far_fewer_ids_than_embeddings_are_refused(tmp_path):
    folder = written(tmp_path / "model", eos_token_id=EOS)
    with pytest.raises(ConfigError, match=r"embeddings of 5000 tokens, .* only 23"):
        checked(folder, rows=5000)


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({}, ROWS),
        ({"eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": -1}, ROWS),
        # A vocabulary that is padded.
        ({"eos_token_id": EOS}, 4000),
        # One of several ids is known: a chat model's.
        ({"eos_token_id": [EOS, 400]}, ROWS),
        ({"eos_token_id": 400, "generation": {"eos_token_id": [400, EOS]}}, ROWS),
        # The default of another framework, which says nothing about the tokenizer.
        ({"eos_token_id": EOS, "bos_token_id": 300}, ROWS),
        # A stop token that was added for a chat.
        ({"eos_token_id": EOS, "eos": "<e>", "marks": ("<e>",)}, ROWS),
        ({"eos_token_id": EOS, "bos": None, "bos_token_id": 7}, ROWS),
        ({"template": TEMPLATE, "marks": ("<|im_end|>",)}, ROWS),
        ({"template": "{{ messages[0].content }}<|user|>"}, ROWS),
        # A base model whose vocabulary has a chat's tokens.
        ({"eos_token_id": EOS, "marks": ("<|im_start|>", "<|im_end|>")}, ROWS),
        ({"tokenizer_class": "LlamaTokenizerFast", "model_type": "qwen2"}, ROWS),
    ],
)
def test_a_normal_directory_is_taken(tmp_path, caplog, config, rows):
    checked(written(tmp_path / "model", **config), rows=rows)
    assert not caplog.records


@pytest.mark.parametrize("file", FIXTURES, ids=lambda file: file.parent.name)
def test_every_family_with_a_tokenizer_of_this_package_is_taken(file, tmp_path):
    (tmp_path / "config.json").write_text(file.read_text())
    Tokenizer.train(["abc"]).save(tmp_path)
    checked(tmp_path, rows=json.loads(file.read_text()).get("vocab_size", 10**6))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("model", {"eos": "<|im_end|>", "marks": ("<|im_end|>",)}),
        (
            "model",
            {"marks": ("<|eot_id|>",), "generation": {"eos_token_id": [EOS, END]}},
        ),
        ("model", {"marks": ("<end_of_turn>",), "eos_token_id": [EOS, END]}),
        ("Qwen2.5-0.5B-Instruct", {}),
        ("Llama-2-7b-chat-hf", {}),
        ("gemma-2-2b-it", {}),
        ("models--Org--Small-Instruct/snapshots/0a1b", {}),
        ("model", {"_name_or_path": "Org/Small-Instruct-v0.2"}),
    ],
)
def test_a_chat_model_without_its_template_is_refused(tmp_path, name, config):
    folder = written(tmp_path / name, **config)
    with pytest.raises(ConfigError, match=r"is a model for chats .* plain text"):
        checked(folder)
    checked(written(tmp_path / name, **config, template="{{ messages[0].content }}"))


@pytest.mark.parametrize(
    "name",
    [
        "chat",
        "instruct",
        "Qwen2.5-0.5B",
        "gemma-2-2b",
        "chatty-base",
        "bit-it",
        "model",
    ],
)
def test_a_base_model_needs_no_template(tmp_path, name):
    checked(written(tmp_path / name, eos_token_id=EOS))


def test_what_is_meant_is_taken_with_a_warning(tmp_path, caplog):
    folder = written(tmp_path / "Small-Instruct", eos_token_id=400)
    with caplog.at_level(logging.WARNING):
        checked(folder, on_mismatch="allow")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("(--template.on-mismatch allow)" in each for each in told)


def test_a_model_is_opened_or_refused(tmp_path):
    made = dataclasses.replace(make_model(), preset=True)
    save_model(tmp_path / "Small-Instruct", made, made.params)

    def opened(option="--model", **template):
        return open_model(
            str(tmp_path / "Small-Instruct"),
            mesh="dp8",
            dtype=None,
            seed=0,
            make_tokenizer=lambda size: pytest.fail("a preset"),
            option=option,
            template=TemplateConfig(**template),
        )

    with pytest.raises(ConfigError, match=r"--model: .*its name is Small-Instruct"):
        opened()
    assert opened(on_mismatch="allow").num_parameters == made.num_parameters
    # A reference reads the policy's tokens.
    assert opened("--algorithm.reference").num_parameters == made.num_parameters
