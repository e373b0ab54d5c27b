"""The user's own conversations and texts for supervised fine-tuning."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console

from jaxrl_post.config.data import DataConfig, OnUnwritten, columns_of
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.data import chat, learned, packing, spans
from jaxrl_post.data.chats import Chat, Text, read_chats
from jaxrl_post.data.held_out import is_held_out, one_a_group
from jaxrl_post.data.learned import unwritten
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.envs.env import Split
from jaxrl_post.examples.packed import TEXTS, fitting
from jaxrl_post.examples.tasks import SPLITS, dropped, left_out
from jaxrl_post.examples.texts import shortened
from jaxrl_post.pictures import PictureError
from jaxrl_post.records.sinks import show_report, warnings_shown

__all__ = ["Chats", "open_chats"]

# Share of the prompts that is held out without --data.eval-path.
EVAL_SHARE = 0.1


@dataclass(frozen=True)
class Chats:
    """Conversations, whose assistant's turns are learned, or plain texts.

    Attributes:
        train: training examples.
        eval: held-out examples; may be empty.
        on_unwritten: what to do about examples if the chat template leaves out a part
            of them, as for `examples.tasks.dropped`.
        checked: whether it has been done.
    """

    train: Sequence[Chat | Text]
    eval: Sequence[Chat | Text]
    on_unwritten: OnUnwritten = "fail"
    checked: bool = field(default=False, compare=False)

    def size(self, split: Split) -> int:
        """Number of conversations or texts."""
        return len(self._of(split))

    def texts(self) -> list[str]:
        """Texts of the first conversations, to train a preset's tokenizer."""
        return shortened(
            text
            for each in self.train[:TEXTS]
            for text in (
                [each.text]
                if isinstance(each, Text)
                else [turn.get("content") or "" for turn in each.messages]
            )
        )

    def contents(self, split: Split, index: int) -> Iterable[str]:
        """The texts of a conversation; none of a plain text, which is not rendered."""
        each = self._of(split)[index]
        turns = () if isinstance(each, Text) else each.messages
        texts = (turn.get("content") for turn in turns)
        return [text for text in texts if isinstance(text, str)]

    def messages(self, split: Split, index: int) -> chat.Messages:
        """The messages of a conversation; none of a plain text."""
        each = self._of(split)[index]
        return () if isinstance(each, Text) else each.messages

    def written(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[str, ...]:
        """The texts of a conversation's sequences."""
        each = self._of(split)[index]
        if isinstance(each, Text):
            return (each.text,)
        try:
            return tuple(text for text, _ in _parts(tokenizer, each))
        except TokenizerError as error:
            raise _unfit(each, error) from error

    def unwritten(
        self, tokenizer: Tokenizer, split: Split, index: int, texts: Sequence[str]
    ) -> tuple[str, ...]:
        """Lists the parts of a conversation that the chat template leaves out."""
        return _unwritten(tokenizer, self._of(split)[index], texts)

    def encode(
        self, tokenizer: Tokenizer, split: Split, index: int
    ) -> tuple[packing.Sequence, ...]:
        """The sequences of a conversation, each up to its last learned token.

        One, if the chat template writes every turn where it was sampled, as in
        `learned.conversation`.

        Raises:
            ConfigError: the chat template cannot render the conversation, or leaves
                something out of it, which `on_unwritten` does not allow; or a picture
                cannot be shown.
        """
        each = self._of(split)[index]
        try:
            if self.on_unwritten != "allow" and not self.checked:
                texts = self.written(tokenizer, split, index)
                dropped({index: _unwritten(tokenizer, each, texts)}, split, "fail")
            return _sequences(tokenizer, each)
        except (TokenizerError, PictureError) as error:
            raise _unfit(each, error) from error

    def fitting(self, tokenizer: Tokenizer, max_tokens: int) -> "Chats":
        """Drops conversations that are too long or not written, logging their number.

        Args:
            tokenizer: the model's tokenizer.
            max_tokens: maximum tokens of a conversation, or of each of its sequences.

        Raises:
            ConfigError: a split would be empty, or as `examples.tasks.dropped`.
        """
        checked = replace(self, checked=True)
        train, held_out = (
            [
                self._of(split)[index]
                for index in fitting(
                    checked, split, tokenizer, max_tokens, "examples", self.on_unwritten
                )
            ]
            for split in SPLITS
        )
        return replace(checked, train=train, eval=held_out)

    def _of(self, split: Split) -> Sequence[Chat | Text]:
        return self.train if split == "train" else self.eval


def open_chats(config: DataConfig, console: Console) -> Chats:
    """Reads conversations, and holds out one example of each of a share of the prompts.

    Args:
        config: names the files.
        console: shows warnings about bad rows.

    Raises:
        ConfigError: no file is named, both files have common prompts, or all prompts
            fall into the held-out share.
        ValueError: a file is bad.
    """
    if config.path is None:
        raise ConfigError(
            "--data.path: needs a .jsonl or .parquet file with messages, prompt and "
            "completion, or text, or of ShareGPT or Alpaca"
        )
    with warnings_shown(console):
        found = _read(config.path, config, console)
        if config.eval_path is not None:
            held_out = one_a_group(_read(config.eval_path, config, console))
            apart = _apart(found, held_out, config)
            return Chats(apart, held_out, config.on_unwritten)
        held_out = [each for each in found if is_held_out(each.group, EVAL_SHARE)]
        train = [each for each in found if not is_held_out(each.group, EVAL_SHARE)]
        if not train:
            raise ConfigError(
                f"--data.path: all prompts of {config.path} fall into the share that "
                "is held out; give more of them, or --data.eval-path"
            )
        if not held_out:
            console.print(
                f"{config.path}: so few prompts that none is held out; "
                "--data.eval-path names a file to evaluate on",
                style="yellow",
                markup=False,
            )
        return Chats(train, one_a_group(held_out), config.on_unwritten)


def _read(path: str, config: DataConfig, console: Console) -> list[Chat | Text]:
    found, report = read_chats(
        path,
        on_bad_row=config.on_bad_row,
        columns=columns_of(config.columns),
        file_format=config.format,
    )
    show_report(report, console)
    return found


def _apart(
    train: list[Chat | Text], held_out: Sequence[Chat | Text], config: DataConfig
) -> list[Chat | Text]:
    """The training examples after --data.on-overlap is applied."""
    groups = {each.group for each in held_out}
    apart = [each for each in train if each.group not in groups]
    shared = len(train) - len(apart)
    if not shared or config.on_overlap == "allow":
        return train
    what = f"examples of {config.path}"
    if config.on_overlap == "fail" or not apart:
        raise ConfigError(
            f"--data.on-overlap: {shared} of {len(train)} {what} have a prompt of "
            f"--data.eval-path {config.eval_path}; choose other files"
            + (", or leave these out with --data.on-overlap drop" if apart else "")
        )
    why = "their prompts are held out (--data.on-overlap drop)"
    left_out(shared, len(train), what, why)
    return apart


def _sequences(tokenizer: Tokenizer, each: Chat | Text) -> tuple[packing.Sequence, ...]:
    if isinstance(each, Text):
        tokens = chat.shown(tokenizer, tokenizer.encode_document(each.text), ())
        # The first token has no predecessor to be predicted from.
        return (packing.Sequence.of(tokens[:1], tokens[1:]),)
    *prompt, reply = each.messages
    options = _options(each)
    # Held until the sequences keep them.
    held = chat.pictures_of(tokenizer, each.messages)
    if each.only_last and reply.keys() <= {"role", "content"}:
        # Without a template, the prompt is tokenised apart, as the sampler sees it.
        answer = reply["content"]
        found = learned.answered(tokenizer, prompt, answer, options)
        return (packing.Sequence.of(*found),)
    found = tuple(
        _up_to_the_last(tokens, produced)
        for tokens, produced in learned.conversation(
            tokenizer, each.messages, options, only_last=each.only_last
        )
    )
    del held
    return found


def _up_to_the_last(tokens: np.ndarray, produced: np.ndarray) -> packing.Sequence:
    if not produced.any():
        raise TokenizerError(
            "chat: the chat template writes nothing of the assistant's turns"
        )
    end = int(np.flatnonzero(produced)[-1]) + 1
    sequence = packing.Sequence.of((), tokens[:end].tolist())
    sequence.loss_mask[:] = produced[:end]
    sequence.loss_mask[0] = False
    return sequence


def _parts(tokenizer: Tokenizer, each: Chat) -> list[spans.Part]:
    return learned.parts(
        tokenizer, each.messages, _options(each), only_last=each.only_last
    )


def _unwritten(
    tokenizer: Tokenizer, each: Chat | Text, texts: Sequence[str]
) -> tuple[str, ...]:
    if isinstance(each, Text):
        return ()
    which = "last" if each.only_last else "all"
    return unwritten(
        tokenizer, each.messages, _options(each), learned=which, texts=texts
    )


def _options(each: Chat) -> chat.Options:
    return chat.Options(tools=each.tools, adapt=True)


def _unfit(each: Chat | Text, error: TokenizerError | PictureError) -> ConfigError:
    return ConfigError(
        f"--data.path: the conversation that begins with {each.group!r:.80}: {error}"
    )
