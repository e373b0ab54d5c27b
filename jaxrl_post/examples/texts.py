"""Trains the tokenizer of a preset."""

import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources

from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.envs import Environment, Message, Task
from jaxrl_post.messages import PICTURE

__all__ = ["environment_texts", "environment_tokenizer", "shortened", "tokenizer_of"]

# Limits on tasks, and on characters per text: more would not improve a tokenizer.
TOKENIZER_TEXTS = 2000
TEXT_CHARACTERS = 10_000

# Tokens of the chat template of tasks with tools.
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer_of(texts: Callable[[], list[str]], vocab_size: int) -> Tokenizer:
    """Trains a tokenizer without a chat template.

    If a text has U+FFFC, which stands for a picture, it is a token of its own.
    """
    found = texts()
    marks = (PICTURE,) if any(PICTURE in text for text in found) else ()
    return Tokenizer.train(found, vocab_size=vocab_size, marks=marks)


def environment_tokenizer(
    environment: Environment, vocab_size: int, *, others: Sequence[Environment] = ()
) -> Tokenizer:
    """Trains a tokenizer for the tasks of environments; deterministic.

    If a task has tools, it has a chat template that writes them. If one has pictures,
    U+FFFC, which stands for a picture, is a token of its own.
    """
    texts: list[str] = []
    first: list[Task] = []
    for each in (environment, *others):
        texts += environment_texts(each)
        tasks = each.tasks("train")
        first += tasks[: min(len(tasks), TOKENIZER_TEXTS)]
    shown = any(message.pictures for task in first for message in task.messages)
    marks = (PICTURE,) if shown else ()
    if not any(task.tools for task in first):
        return Tokenizer.train(texts, vocab_size=vocab_size, marks=marks)
    template = resources.files("jaxrl_post.data").joinpath("tool_calls.jinja")
    return Tokenizer.train(
        texts,
        vocab_size=vocab_size,
        marks=(*MARKS, *marks),
        chat_template=template.read_text(encoding="utf-8"),
    )


def environment_texts(environment: Environment) -> list[str]:
    """Texts of tasks and demonstrations; deterministic for an environment."""
    tasks = environment.tasks("train")
    texts = []
    for task in tasks[: min(len(tasks), TOKENIZER_TEXTS)]:
        for message in task.messages:
            texts += _texts(message)
        shown = environment.demonstration(task)
        texts += _texts(shown) if isinstance(shown, Message) else [shown or ""]
        texts += [_signature(tool["function"]) for tool in task.tools]
    return shortened(texts)


def shortened(texts: Iterable[str]) -> list[str]:
    """Cuts each text to the length that is used to train a preset's tokenizer."""
    return [text[:TEXT_CHARACTERS] for text in texts]


def _texts(message: Message) -> list[str]:
    calls = [
        f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}'
        for call in message.tool_calls
    ]
    return [message.content, *calls]


def _signature(function: dict[str, object]) -> str:
    """As `tool_calls.jinja` writes a tool."""
    parameters = function.get("parameters")
    names = parameters.get("properties", {}) if isinstance(parameters, dict) else {}
    return f"{function['name']}({', '.join(names)})\n"
