"""The tokenizer of a model: its tokenizer.json, special tokens and chat template."""

import copy
import datetime
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_post.data.templates import names_read
from jaxrl_post.data.tokenizer_files import (
    TextError,
    TokenizerError,
    read_files,
    write_settings,
    write_stop_ids,
)
from jaxrl_post.data.turn_end import find_turn_end
from jaxrl_post.messages import PICTURE
from jaxrl_post.pictures.eyes import Eyes
from jaxrl_post.pictures.numbered import spots

__all__ = ["TextError", "Tokenizer", "TokenizerError"]

PAD, EOS = "<|pad|>", "<|eos|>"
# `BpeTrainer` gives special tokens the first ids, in this order.
SPECIAL = [PAD, EOS]
# From this many characters or tokens on, the library gets a batch of one: meanwhile
# other threads run, such as a server's event loop.
LONG = 2**14


class Tokenizer:
    """Encodes and decodes text, and knows which ids end a completion.

    Args:
        backend: a tokenizer of the tokenizers library.
        stop_ids: ids that end a completion, the end-of-sequence id first; the token
            that ends a turn of the chat template may be missing.
        chat_template: Jinja source, several by name, or None for a plain text format.
        special_tokens: variables of chat templates, such as "bos_token", to tokens.
        num_embeddings: number of the model's embeddings; None for no limit on the ids.
        settings: all of the base's tokenizer_config.json, which `save` keeps.

    `variables` and `now` are what templates read where `chat.Options` say nothing else;
    see `with_template`. `eyes` show pictures to the model; see `with_eyes`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_ids: Sequence[int],
        chat_template: str | Mapping[str, str] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        num_embeddings: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if not stop_ids:
            raise TokenizerError(
                "tokenizer: no end-of-sequence token is known; name eos_token in "
                "tokenizer_config.json or eos_token_id in generation_config.json"
            )
        self.backend = backend
        self._named_stops = tuple(stop_ids)
        if isinstance(chat_template, str):
            chat_template = {"default": chat_template}
        self.chat_templates = dict(chat_template or {})
        self.special_tokens = dict(special_tokens or {})
        self.num_embeddings = num_embeddings
        self.settings = dict(settings or {})
        self.variables: Mapping[str, Any] = {}
        self.now: datetime.datetime | None = None
        self.eyes: Eyes | None = None

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and, if present, the other files of the tokenizer.

        As in transformers 5, the post-processor adds tokens around a text (BOS), and
        add_bos_token of tokenizer_config.json is ignored; named special tokens and the
        tokens of added_tokens_decoder are matched whole; truncation and padding of
        tokenizer.json are disabled. Special tokens that are missing in the vocabulary
        are not added to it, unless the next id is listed for them.

        The stop ids come from generation_config.json and config.json, the eos_token of
        tokenizer_config.json, and the token that ends a turn of the chat template.

        Raises:
            TokenizerError: a missing or unreadable file, or no end-of-sequence token.
        """
        files = read_files(Path(path))
        return cls(
            files.backend,
            stop_ids=files.stop_ids,
            chat_template=files.chat_templates,
            special_tokens=files.special_tokens,
            settings=files.settings,
        )

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        vocab_size: int = 512,
        marks: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> "Tokenizer":
        """Trains a byte-level BPE in which every digit is a token of its own.

        Args:
            texts: the training texts.
            vocab_size: at least 258, for the bytes and two special tokens, and `marks`.
            marks: texts that become tokens of their own.
            chat_template: Jinja source, or None for a plain text format.

        >>> tokenizer = Tokenizer.train(["12+30=42"] * 3)
        >>> tokenizer.decode(tokenizer.encode("12+3=ü"))
        '12+3=ü'
        """
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(marks),
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        backend.add_tokens([tokenizers.AddedToken(m, normalized=False) for m in marks])
        return cls(
            backend,
            stop_ids=(SPECIAL.index(EOS),),
            chat_template=chat_template,
            special_tokens={"eos_token": EOS, "pad_token": PAD},
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a completion, the end-of-sequence id first.

        They include the token that ends a turn of the chat template: a model trained on
        the template's turns learns to produce it, but the files of a base model do not
        name it as a stop token.
        """
        if not self.chat_templates:
            return self._named_stops
        try:
            end = self.backend.token_to_id(self.turn_end)
        except TokenizerError:  # an error where answers are learned; see `turn_end`
            return self._named_stops
        if end is None or end in self._named_stops:
            return self._named_stops
        return (*self._named_stops, end)

    @cached_property
    def turn_end(self) -> str:
        """The token that ends a turn of the assistant.

        Without a chat template this is the end-of-sequence token. Of several templates,
        the one named "default" is used, or else the first.

        Raises:
            TokenizerError: the template ends a turn without a token, or fails.
        """
        if not self.chat_templates:
            return self.eos_token
        template = self.chat_template or next(iter(self.chat_templates.values()))
        added = self.backend.get_added_tokens_decoder().values()
        named = map(self.backend.id_to_token, self._named_stops)
        tokens = {token.content for token in added} | {
            token for token in named if token
        }
        given = {**self.special_tokens, **self.variables}
        return find_turn_end(template, given, tokens)

    @property
    def eos_id(self) -> int:
        """The id that ends a sequence."""
        return self._named_stops[0]

    @property
    def eos_token(self) -> str:
        """The token that ends a sequence."""
        token = self.backend.id_to_token(self.eos_id)
        if token is None:
            raise TokenizerError(
                f"tokenizer: the end-of-sequence id {self.eos_id} is not in the "
                "vocabulary; correct eos_token_id in generation_config.json"
            )
        return token

    @property
    def stop_tokens(self) -> tuple[str, ...]:
        """The tokens of the stop ids, except ids outside the vocabulary."""
        tokens = map(self.backend.id_to_token, self.stop_ids)
        return tuple(token for token in tokens if token)

    @property
    def chat_template(self) -> str | None:
        """The template named "default"; None if there is none."""
        return self.chat_templates.get("default")

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether every token has the same id in both tokenizers."""
        return self.backend.get_vocab() == other.backend.get_vocab()

    def for_model(self, num_embeddings: int) -> "Tokenizer":
        """This tokenizer, restricted to ids that a model has embeddings for.

        Added tokens may lie beyond the embeddings, e.g. Gemma 3's image token in its
        text models; `encode` then raises for texts with such tokens.

        Args:
            num_embeddings: number of the model's embeddings.

        Raises:
            TokenizerError: the vocabulary, or a stop id, lies beyond the embeddings.

        >>> Tokenizer.train(["1+2=3"]).for_model(100)
        Traceback (most recent call last):
        ...
        jaxrl_post.data.tokenizer_files.TokenizerError: tokenizer: its ids reach to ...
        """
        last = max(self.backend.get_vocab(with_added_tokens=False).values(), default=0)
        last = max(last, *self.stop_ids)
        if last >= num_embeddings:
            raise TokenizerError(
                f"tokenizer: its ids reach to {last} "
                f"({self.backend.id_to_token(last)!r}), the model has only "
                f"{num_embeddings} embeddings; they do not belong together"
            )
        restricted = copy.copy(self)
        restricted.num_embeddings = num_embeddings
        return restricted

    def with_template(
        self,
        *,
        variables: Mapping[str, Any] = MappingProxyType({}),
        now: datetime.datetime | None = None,
    ) -> "Tokenizer":
        """This tokenizer, with variables and a time for its chat templates.

        `chat.Options` of a rendering go before both. The files that `save` writes stay
        as they are.

        Args:
            variables: JSON values by name, such as {"enable_thinking": False}.
            now: the time that the templates see; None for the time of a rendering.

        Raises:
            TokenizerError: no template reads one of the variables.

        >>> asks = "{% for m in messages %}{{ m.content }}{{ effort }}{% endfor %}"
        >>> plain = Tokenizer.train(["12"], chat_template=asks)
        >>> plain.with_template(variables={"efort": 1})
        Traceback (most recent call last):
        ...
        jaxrl_post.data.tokenizer_files.TokenizerError: chat: the chat template does ...
        """
        if variables:
            self._check_read(variables)
        given = copy.copy(self)
        given.variables, given.now = dict(variables), now
        # These are computed from renderings.
        for name in ("stop_ids", "turn_end"):
            vars(given).pop(name, None)
        return given

    def with_eyes(self, eyes: Eyes | None) -> "Tokenizer":
        """This tokenizer for a model that also sees pictures.

        The functions that render messages then put the tokens of pictures in their
        places; `encode` itself reads text alone.

        Args:
            eyes: of the model; None for a model that reads text alone.
        """
        given = copy.copy(self)
        given.eyes = eyes
        return given

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text; `special` adds the special tokens around it (BOS).

        Raises:
            TextError: the text is no Unicode, or one of its tokens lies beyond the
                model's embeddings.
        """
        return self._known(_encoding(self.backend, text, special).ids)

    def encode_document(self, text: str) -> tuple[int, ...]:
        """Token ids of a whole document: what the tokenizer puts before it, one EOS.

        A text that begins with BOS, or ends with EOS, gets no second one. White space
        behind that EOS, as a chat template writes, is left out.

        Raises:
            TextError: as `encode`.

        >>> tokenizer = Tokenizer.train(["1"])
        >>> tokenizer.encode_document("1") == tokenizer.encode_document("1<|eos|>")
        True
        """
        ids, (before, behind) = self.encode(text), self.put_around
        ended = self.encode(text.rstrip())
        if ended[-1:] == (self.eos_id,):
            ids = ended
        if ids[: len(before)] != before:
            ids = (*before, *ids)
        if ids[-1:] != (self.eos_id,):
            ids = (*ids, *behind)
        return ids if ids[-1:] == (self.eos_id,) else (*ids, self.eos_id)

    @cached_property
    def put_around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The special tokens that the tokenizer puts before a text and behind it."""
        found = _encoding(self.backend, "a", True)
        own = [i for i, part in enumerate(found.sequence_ids) if part is not None]
        first, end = (own[0], own[-1] + 1) if own else (len(found.ids), len(found.ids))
        return tuple(found.ids[:first]), tuple(found.ids[end:])

    def encode_with_begins(
        self, text: str, *, special: bool = False, after: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Token ids of a text, and the index in the text at which each token begins.

        Args:
            text: the text to encode.
            special: adds the special tokens around the text, which begin at -1.
            after: the text follows other tokens, so its first word gets no space
                from those tokenizers that put one before a text.

        Raises:
            TextError: as `encode`.

        >>> Tokenizer.train(["12"]).encode_with_begins("1 2")[1]
        (0, 1, 2)
        """
        backend = self._without_prefix if after else self._with_offsets
        found = _encoding(backend, text, special)
        places = zip(found.offsets, found.sequence_ids, strict=True)
        begins = tuple(-1 if part is None else begin for (begin, _), part in places)
        ids = self._known(found.ids)
        if backend is self._with_offsets:
            return ids, begins
        # Restores the space of words after a token that is matched whole.
        end = next((i for i, id_ in enumerate(ids) if id_ in self.added_tokens), None)
        if end is None:
            return ids, begins
        more, where = self.encode_with_begins(text[begins[end] :])
        moved = (begins[end] + place for place in where)
        return (*ids[:end], *more), (*begins[:end], *moved)

    def decode(self, ids: Sequence[int], *, keep: Collection[str] = ()) -> str:
        """Text of token ids, without special tokens.

        Text that only looks like a special token, because a model spelled it with
        other tokens, is text.

        Args:
            ids: what to decode.
            keep: special tokens that are written.

        >>> tokenizer = Tokenizer.train(["12"])
        >>> ids = [*tokenizer.encode("<|pad|><|eos|>"), *tokenizer.encode("1")]
        >>> tokenizer.decode(ids), tokenizer.decode(ids, keep=["<|eos|>"])
        ('1', '<|eos|>1')
        """
        if not keep:
            return self.decoded(ids, special=False)
        dropped = {id_ for text, id_ in self.special_ids.items() if text not in keep}
        return self.decoded([id_ for id_ in ids if id_ not in dropped], special=True)

    def decoded(self, ids: Sequence[int], *, special: bool) -> str:
        """Text of token ids, with all special tokens or without any.

        The numbers of a picture (`pictures.numbered`) are U+FFFC.
        """
        ids, skip = list(ids), not special
        if ids and min(ids) < 0:
            return self._seen(ids, special)
        if len(ids) < LONG:
            return self.backend.decode(ids, skip_special_tokens=skip)
        [text] = self.backend.decode_batch([ids], skip_special_tokens=skip)
        return text

    def _seen(self, ids: list[int], special: bool) -> str:
        """`decoded` of ids with numbers of pictures."""
        texts = []
        for seen, group in itertools.groupby(ids, lambda id_: id_ < 0):
            run = list(group)
            # In a part of a row, a picture may be cut.
            texts.append(
                PICTURE * len(spots(run))
                if seen
                else self.decoded(run, special=special)
            )
        return "".join(texts)

    def with_special_broken(self, text: str) -> str:
        """A text in which no special token is written: each gets a space in it.

        For text that others wrote, which must not end its own turn or begin another.

        >>> Tokenizer.train(["12"]).with_special_broken("1<|eos|>2")
        '1< |eos|>2'
        """
        for token in self.special_ids:
            broken = f"{token[0]} {token[1:]}" if token[1:] else " "
            text = text.replace(token, broken)
        return text

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The special tokens, and their ids."""
        added = self.added_tokens
        return {token.content: id_ for id_, token in added.items() if token.special}

    @cached_property
    def added_tokens(self) -> Mapping[int, tokenizers.AddedToken]:
        """The tokens that are matched whole, special or not, by their ids."""
        return self.backend.get_added_tokens_decoder()

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates.

        Other settings of the base's tokenizer_config.json are kept. The stop ids are
        added to generation_config.json, which keeps its other entries.
        """
        directory = Path(directory)
        # The library's own `save` fails with a bare Exception on a full disk.
        text = self.backend.to_str(pretty=True)
        (directory / "tokenizer.json").write_text(text, encoding="utf-8")
        eos = self.backend.id_to_token(self.eos_id)
        names = {**({"eos_token": eos} if eos else {}), **self.special_tokens}
        write_settings(directory, self.settings, names, self.chat_templates)
        write_stop_ids(directory, self.stop_ids)

    def _check_read(self, variables: Mapping[str, Any]) -> None:
        """Raises TokenizerError if no chat template reads one of the variables."""
        known = set[str]().union(*map(names_read, self.chat_templates.values()))
        known -= self.special_tokens.keys()
        unread = ", ".join(name for name in variables if name not in known)
        if unread:
            raise TokenizerError(
                f"chat: the chat template does not read {unread}; it reads "
                f"{', '.join(sorted(known)) or 'no variables'}"
                if self.chat_templates
                else f"chat: without a chat template nothing reads {unread}"
            )

    def _known(self, ids: Sequence[int]) -> tuple[int, ...]:
        if self.num_embeddings is not None:
            last = max(ids, default=0)
            if last >= self.num_embeddings:
                raise TextError(
                    f"tokenizer: the text has the token {last} "
                    f"({self.backend.id_to_token(last)!r}), the model only "
                    f"{self.num_embeddings} embeddings; take that token out of the "
                    "text or the chat template"
                )
        return tuple(ids)

    @cached_property
    def _with_offsets(self) -> tokenizers.Tokenizer:
        """The backend, with offsets that include the white space of a token."""
        if b'"trim_offsets":true' not in _state(self.backend.post_processor):
            return self.backend
        whole = json.loads(self.backend.to_str())
        _untrim(whole["post_processor"])
        return tokenizers.Tokenizer.from_str(json.dumps(whole))

    @cached_property
    def _without_prefix(self) -> tokenizers.Tokenizer:
        """`_with_offsets`, but nothing is put before the first word of a text."""
        backend = self._with_offsets
        parts = {
            "normalizer": backend.normalizer,
            "pre_tokenizer": backend.pre_tokenizer,
        }
        given = {
            name: json.loads(_state(part) or "null") for name, part in parts.items()
        }
        plain = {name: _unprefixed(part) for name, part in given.items()}
        if plain == given:
            return backend
        whole = json.loads(backend.to_str()) | plain
        return tokenizers.Tokenizer.from_str(json.dumps(whole))


def _encoding(
    backend: tokenizers.Tokenizer, text: str, special: bool
) -> tokenizers.Encoding:
    """The tokens of a text.

    Raises:
        TextError: the text has half of a surrogate pair.
    """
    try:
        if len(text) < LONG:
            return backend.encode(text, add_special_tokens=special)
        [found] = backend.encode_batch([text], add_special_tokens=special)
        return found
    except TypeError:
        for place, character in enumerate(text):
            if "\ud800" <= character <= "\udfff":
                raise TextError(
                    f"tokenizer: character {place} of the text is {character!r}, half "
                    "of a surrogate pair and no Unicode; write the whole character, or "
                    "U+FFFD in its place"
                ) from None
        raise


def _state(post_processor: Any) -> bytes:
    return b"" if post_processor is None else post_processor.__getstate__()


def _unprefixed(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before a text."""
    if isinstance(part, list):
        return [_unprefixed(each) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    none = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: none.get(name, _unprefixed(each)) for name, each in part.items()}


def _untrim(processor: dict[str, Any]) -> None:
    if "trim_offsets" in processor:
        processor["trim_offsets"] = False
    for part in processor.get("processors", ()):
        _untrim(part)
