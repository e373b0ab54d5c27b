"""The description of a family of models: its config.json, and its tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxrl_post.models.config import ModelConfig
from jaxrl_post.pretrained.families.keys import Key
from jaxrl_post.pretrained.hf_config import Defaults, decoder_from_hf, decoder_to_hf
from jaxrl_post.pretrained.hf_values import Json
from jaxrl_post.pretrained.layout import Weight

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """The format of a family's checkpoints.

    Attributes:
        architecture: the class in transformers, without the suffix "ForCausalLM".
        weights: name and layout on disk of every parameter by our path, with `*` for
            the layer's number.
        defaults: the family's values for absent keys that all families share.
        keys: the keys of config.json that not all families have.
        options: options of the config that all models of the family have.
        prepare: rewrites a parsed config.json before its keys are read: spellings of
            other releases, and defaults that depend on other keys.
        finish: (config, keys) to the keys that are written.
        classifier: the class of a saved reward model without the suffix
            "ForSequenceClassification"; "" for `architecture`, None for no such class.
        judges_tokens: whether transformers has a class "ForTokenClassification" of the
            family, with which a process reward model is saved.
        text_model: turns the config.json of a vision-language model into its text
            model's, which that model's family then reads; None for a family of text
            models.
        prefixes: pairs of a prefix in a checkpoint and its replacement in `weights`.
        modules: pairs of a prefix in `weights` and the prefix of transformers' modules
            where they differ; adapters are saved under the modules' names.
        experts_module: name of the module of a layer's experts in transformers.
        vision: patterns of vision tensors in a checkpoint that includes a text model
            of the family; they are left unread with a warning.
        ignored: patterns of tensors that are left unread; `*` matches any text and `+`
            the number of a layer after the model's own layers.
        unused: patterns of tensors that released files have and a model of a config
            lacks; they are left unread like `ignored`.
        carried: of `ignored`, those that are saved as they were in `save`'s source.
        mtp: weights of a layer for multi-token prediction by our path; empty if the
            family has no such layer that we read. Its decoder layer's weights are not
            in it: they are as in `weights` (`mtp_weights`).
    """

    architecture: str
    weights: Mapping[str, Weight]
    defaults: Defaults
    keys: tuple[Key, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Json], Json] = dict
    finish: Callable[[ModelConfig, Json], Json] = lambda _, keys: keys
    classifier: str | None = ""
    judges_tokens: bool = True
    text_model: Callable[[Json], Json] | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    experts_module: str = "mlp.experts"
    vision: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unused: Callable[[ModelConfig], tuple[str, ...]] = lambda _: ()
    carried: tuple[str, ...] = ()
    mtp: Mapping[str, Weight] = field(default_factory=dict)

    @property
    def mtp_weights(self) -> dict[str, Weight]:
        """All weights of a layer for multi-token prediction."""

        def beside(name: str) -> str:
            return name.replace("model.layers.", "mtp.layers.", 1)

        layers = {
            path: replace(
                weight,
                name=beside(weight.name),
                also=tuple(map(beside, weight.also)),
            )
            for path, weight in self.weights.items()
            if path.startswith("layers.")
        }
        return layers | dict(self.mtp)

    def config_from_hf(self, raw: Json) -> ModelConfig:
        """Turns a parsed config.json into our config.

        Raises:
            CheckpointError: a value is missing, invalid or not supported.
        """
        raw = self.prepare(raw)
        config = replace(decoder_from_hf(raw, self.defaults), **self.options)
        for key in self.keys:
            config = key.read(raw, config)
        return config

    def config_to_hf(self, config: ModelConfig) -> Json:
        """Turns our config into the contents of a config.json, without its classes.

        Raises:
            CheckpointError: the family in transformers cannot express the config.
        """
        keys = decoder_to_hf(config, self.defaults)
        for key in self.keys:
            keys |= key.write(config)
        return self.finish(config, keys)
