"""Data that is rendered already gets one warning, with its count and its first row."""

import dataclasses
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import AddedToken

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.offline import PairsConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Message, Task
from jaxrl_post.envs.tasks.arithmetic import Arithmetic
from jaxrl_post.examples.chats import open_chats
from jaxrl_post.examples.demonstrations import Demonstrations
from jaxrl_post.examples.preferences import open_pairs
from jaxrl_post.examples.rendered import Rendered
from jaxrl_post.examples.tasks import TaskSets, fitting_prompts

TEMPLATES = Path(__file__).parents[1] / "parity/chat_templates"
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|end|>",
]  # fmt: skip


def tokenizer(name: str | None) -> Tokenizer:
    template = name and (TEMPLATES / f"{name}.jinja").read_text()
    made = Tokenizer.train(["1+2=3"], chat_template=template)
    made.backend.add_special_tokens([AddedToken(each) for each in SPECIAL])
    made.backend.add_tokens(["<think>", "</think>"])
    made.special_tokens |= {"bos_token": "<s>", "eos_token": "</s>"}
    return made


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", "3<|im_end|>"),
        ("qwen3", "<|im_start|>user\n1"),
        ("llama2", "[INST] 1+2= [/INST]"),
        ("llama3_1", "<|start_header_id|>user<|end_header_id|>\n\n1"),
        ("gemma", "<start_of_turn>user\n1"),
        ("llama2", "<s>1"),
    ],
)
def test_what_the_template_writes_around_turns_is_seen(name, text):
    assert Rendered(tokenizer(name)).look(["1", text])


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama2", "llama3_1", None])
@pytest.mark.parametrize(
    "text",
    [
        "", "What is 1+2, user?", "user\nassistant\nsystem", "<think>\n1\n</think>\n3",
        "a[INS] <|im_|> <b> </b> x </ s>", '{"role": "user"}',
    ],
)  # fmt: skip
def test_other_texts_are_not_taken_for_it(name, text):
    assert not Rendered(tokenizer(name)).look([text])


def test_without_a_template_only_what_is_put_around_a_text_counts():
    plain = tokenizer(None)
    assert not Rendered(plain).look(["<s>1", "<|im_start|>user"])
    state = json.loads(plain.backend.to_str())
    begin = plain.backend.token_to_id("<s>")
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}},
    }
    plain.backend = plain.backend.from_str(json.dumps(state))
    assert Rendered(plain).look(["<s>1"])
    assert not Rendered(plain).look(["<|im_start|>user"])


WARNING = (
    "{} of {} {} have {!r} in their texts (the first is example {}, from 0): they look "
    "rendered already, and the chat template renders them once more; take its tokens "
    "out of the texts"
)


def written(folder: Path, rows: list) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "rows.jsonl")


def test_chats_and_pairs_are_looked_at_once(tmp_path, caplog):
    rows = [
        {
            "messages": [
                {"role": "user", "content": str(i)},
                {"role": "assistant", "content": "3<|im_end|>" if i % 2 else "3"},
            ]
        }
        for i in range(4)
    ]
    path = written(tmp_path, rows)
    chats = open_chats(DataConfig(path=path), Console(quiet=True))
    (tmp_path / "rows.jsonl").write_text('{"text": "<|im_start|>user"}\n' * 4)
    texts = open_chats(DataConfig(path=path), Console(quiet=True))
    train = [*chats.train, *chats.eval, *texts.train]
    chats = dataclasses.replace(chats, train=train, eval=[])
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        chats.fitting(tokenizer("chatml"), 64)
    (said,) = caplog.messages
    assert said.startswith("2 of 8 train examples have '<|im_end|>' in their texts")
    caplog.clear()
    pairs = [
        {"prompt": f"[INST] {i} [/INST]", "chosen": "1", "rejected": "2"}
        for i in range(8)
    ]
    data = open_pairs(
        PairsConfig(path=written(tmp_path, pairs)), Console(quiet=True), remedy=""
    )
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        data.fitting(tokenizer("llama2"), 64)
    size = data.size("train")
    assert caplog.messages[0] == WARNING.format(size, size, "train pairs", "[INST]", 0)


@dataclasses.dataclass(frozen=True)
class Asking(Arithmetic):
    """Tasks; some have a rendered prompt."""

    prompts: tuple[str, ...] = ("1", "<|im_start|>user\n1<|im_end|>\n", "2")

    def tasks(self, split):
        return [
            Task(i, (Message("user", text),), "") for i, text in enumerate(self.prompts)
        ]

    def demonstration(self, task):
        return "3"


def test_tasks_and_demonstrations_are_looked_at(caplog):
    tasks = TaskSets.of(Asking())
    with caplog.at_level(logging.WARNING, logger="jaxrl_post"):
        fitting_prompts(tasks, tokenizer("chatml"), 64, "--x", context=64)
        Demonstrations(tasks, 64).fitting(tokenizer("chatml"))
    told = [
        WARNING.format(1, 3, f"{split} tasks of {tasks.name}", "<|im_start|>", 1)
        for split in ("train", "eval")
    ]
    assert caplog.messages == told * 2
