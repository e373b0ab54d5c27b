"""Texts to train the tokenizer of a preset."""

from collections.abc import Iterable

from jaxrl_post.envs import Environment

__all__ = ["environment_texts", "shortened"]

# Limits on tasks, and on characters per text: more would not improve a tokenizer.
TOKENIZER_TEXTS = 2000
TEXT_CHARACTERS = 10_000


def environment_texts(environment: Environment) -> list[str]:
    """Texts to train a preset's tokenizer; deterministic for an environment."""
    tasks = environment.tasks("train")
    texts = []
    for task in tasks[: min(len(tasks), TOKENIZER_TEXTS)]:
        texts += [message.content for message in task.messages]
        texts.append(environment.demonstration(task) or "")
    return shortened(texts)


def shortened(texts: Iterable[str]) -> list[str]:
    """Cuts each text to the length that is used to train a preset's tokenizer."""
    return [text[:TEXT_CHARACTERS] for text in texts]
