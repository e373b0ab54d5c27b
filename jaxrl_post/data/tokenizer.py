"""A tokenizer.json, its special tokens and its chat template."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

__all__ = ["Tokenizer", "TokenizerError"]

PAD, EOS = "<|pad|>", "<|eos|>"
# A trainer numbers them first, in this order.
SPECIAL = [PAD, EOS]


class TokenizerError(ValueError):
    """A tokenizer directory that cannot be used."""


class Tokenizer:
    """Encodes and decodes text, and knows which ids end a completion.

    Args:
        backend: of the tokenizers library.
        stop_ids: ids that end a completion, the end-of-sequence id first.
        chat_template: Jinja source, or None for a plain text format.
        special_tokens: names that a chat template may use, such as "bos_token".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_ids: Sequence[int],
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        if not stop_ids:
            raise TokenizerError(
                "tokenizer: no end-of-sequence token is known; name eos_token in "
                "tokenizer_config.json or eos_token_id in generation_config.json"
            )
        self.backend = backend
        self.stop_ids = tuple(stop_ids)
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, path: str | Path) -> "Tokenizer":
        """Reads tokenizer.json and, where present, the files that go with it.

        Stop ids are those of generation_config.json, config.json and the eos_token of
        tokenizer_config.json together.

        Raises:
            TokenizerError: a missing or unreadable file, or no end-of-sequence token.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(
                f"tokenizer: {file} does not exist; a Hugging Face model directory "
                "with a fast tokenizer has one (save_pretrained of a fast tokenizer "
                "makes it)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"tokenizer: cannot read {file}: {error}") from error
        settings = _read_json(path / "tokenizer_config.json")
        special = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name.endswith("_token") and isinstance(token, dict | str)
        }
        return cls(
            backend,
            stop_ids=_stop_ids(path, backend, special.get("eos_token")),
            chat_template=_chat_template(path, settings.get("chat_template")),
            special_tokens=special,
        )

    @classmethod
    def train(cls, texts: Iterable[str], *, vocab_size: int = 512) -> "Tokenizer":
        """Learns a byte-level BPE in which every digit is a token of its own.

        Args:
            texts: what to learn from.
            vocab_size: at least 258, the bytes and two special tokens.

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
            vocab_size=vocab_size,
            special_tokens=SPECIAL,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(
            backend,
            stop_ids=(SPECIAL.index(EOS),),
            special_tokens={"eos_token": EOS, "pad_token": PAD},
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_id(self) -> int:
        """The id that ends a sequence."""
        return self.stop_ids[0]

    def same_ids(self, other: "Tokenizer") -> bool:
        """Whether every token has the same id in both."""
        return self.backend.get_vocab() == other.backend.get_vocab()

    def encode(self, text: str, *, special: bool = False) -> tuple[int, ...]:
        """Token ids of a text; `special` adds what belongs around it (BOS)."""
        return tuple(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return self.backend.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat template.

        The stop ids go into generation_config.json, beside what it says already.
        """
        directory = Path(directory)
        self.backend.save(str(directory / "tokenizer.json"))
        settings: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.special_tokens,
        }
        settings.setdefault("eos_token", self.backend.id_to_token(self.eos_id))
        if self.chat_template is not None:
            settings["chat_template"] = self.chat_template
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
        file = directory / "generation_config.json"
        generation = _read_json(file) | {"eos_token_id": list(self.stop_ids)}
        file.write_text(json.dumps(generation, indent=2), encoding="utf-8")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"tokenizer: {file} must hold an object")
    return content


def _chat_template(path: Path, setting: Any) -> str | None:
    """chat_template.jinja, or what tokenizer_config.json says."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(setting, list):  # several by name, as for tool use
        named = {entry["name"]: entry["template"] for entry in setting}
        setting = named.get("default")
        if setting is None:
            raise TokenizerError(
                f"tokenizer: {path / 'tokenizer_config.json'} must name one of its "
                f"chat templates 'default'; got {', '.join(named)}"
            )
    return setting


def _stop_ids(
    path: Path, backend: tokenizers.Tokenizer, eos_token: str | None
) -> tuple[int, ...]:
    found: list[int] = []
    eos_id = None if eos_token is None else backend.token_to_id(eos_token)
    if eos_id is not None:
        found.append(eos_id)
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id")
        if ids is not None:
            found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(found))
