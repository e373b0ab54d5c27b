"""Texts that a preset's tokenizer is learned from."""

from collections.abc import Iterable

from jaxrl_post.envs import Environment

__all__ = ["environment_texts", "shortened"]

# So many tasks, and of each text so many characters: more teach a tokenizer nothing.
TOKENIZER_TEXTS = 2000
TEXT_CHARACTERS = 10_000


def environment_texts(environment: Environment) -> list[str]:
    """Texts for a preset's tokenizer: of the same environment the same each time."""
    tasks = environment.tasks("train")
    texts = []
    for task in tasks[: min(len(tasks), TOKENIZER_TEXTS)]:
        texts += [message.content for message in task.messages]
        texts.append(environment.demonstration(task) or "")
    return shortened(texts)


def shortened(texts: Iterable[str]) -> list[str]:
    """As much of each text as a preset's tokenizer is learned from."""
    return [text[:TEXT_CHARACTERS] for text in texts]
