"""The model that a run trains: loading, sharding over a mesh, and saving."""

import dataclasses
import importlib.metadata
import logging
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jaxrl_post
from jaxrl_post import models, pretrained
from jaxrl_post.config.data import (
    AS_IT_IS,
    TemplateConfig,
    date_of,
    variables_of,
)
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.run import Vision
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.files import replace_file, retried, writing
from jaxrl_post.kernels.dispatch import multiply_as_float32
from jaxrl_post.learner.belonging import check_belonging
from jaxrl_post.learner.manifest import write_manifest
from jaxrl_post.messages import PICTURE
from jaxrl_post.models import DecoderParams, Head, ModelConfig
from jaxrl_post.models.adapters.lora import LoRAConfig, adapted, merged
from jaxrl_post.models.spec import is_spec
from jaxrl_post.models.stack import staged_span
from jaxrl_post.models.vision_params import VisionParams
from jaxrl_post.pretrained.directory import CONFIG_FILE, read_config_file
from jaxrl_post.pretrained.errors import CheckpointError
from jaxrl_post.pretrained.names import nearest_first
from jaxrl_post.pretrained.orbax_files import is_orbax_directory
from jaxrl_post.pretrained.peft.beside import adapter_in
from jaxrl_post.pretrained.peft.files import save_adapter
from jaxrl_post.pretrained.presets import PRESETS
from jaxrl_post.pretrained.vision.picture_files import eyes_of
from jaxrl_post.pretrained.vision.towers import TOWERS
from jaxrl_post.records import outputs
from jaxrl_post.records.hub.card import CARD
from jaxrl_post.sharding import (
    DEFAULT_RULES,
    MeshError,
    Rules,
    create_mesh,
    processes,
    split_size,
)
from jaxrl_post.sharding.stages import STAGE_AXIS
from jaxrl_post.types import PyTree

__all__ = [
    "Adaptation",
    "Model",
    "check_beside",
    "check_context",
    "check_sample",
    "context_of",
    "describe_model",
    "is_stored",
    "open_model",
    "read_tokenizer",
    "save_model",
    "versions",
    "with_frozen_tower",
    "with_weights",
]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adaptation:
    """The frozen base of an adapter, and the adapter's config.

    Attributes:
        base: the frozen parameters; also the reference policy, if the adapter is new.
        lora: the adapter's config.
        seed: of dropout.
        continued: whether the adapter begins with the values of another one, and not
            as the base alone.
    """

    base: PyTree
    lora: LoRAConfig
    seed: int = 0
    continued: bool = False


@dataclass(frozen=True)
class Model:
    """A model with its tokenizer, on a mesh.

    Attributes:
        name: the directory or preset.
        config: hyperparameters.
        specs: tree of ParamSpecs of the trained parameters.
        params: sharded arrays of the trained parameters: the model's own, or an
            adapter; ShapeDtypeStructs before they are loaded.
        tokenizer: the model's tokenizer.
        mesh: mesh of the parameters.
        rules: mesh axes of every logical axis.
        preset: whether the model was initialised, not loaded.
        adaptation: the adapter's base and config; None if `params` are the model's own.
        published: the model's name on the hub, None for a model from elsewhere.
        tower: the vision tower, if it is not trained and there is no adapter.
    """

    name: str
    config: ModelConfig
    specs: Any
    params: Any
    tokenizer: Tokenizer
    mesh: Mesh
    rules: Rules
    preset: bool
    adaptation: Adaptation | None = None
    published: str | None = None
    tower: VisionParams[Any] | None = None

    @property
    def base(self) -> DecoderParams[Any]:
        """The model's own parameters at step 0, without an adapter."""
        if self.adaptation is not None:
            return self.adaptation.base
        return self.whole(self.params)

    def whole(self, params: PyTree) -> DecoderParams[Any]:
        """Returns the parameters for `forward`, given the trained ones; no copies."""
        adaptation = self.adaptation
        if adaptation is not None:
            return adapted(adaptation.base, params, self.config, adaptation.lora)
        return params if self.tower is None else params.replace(vision=self.tower)

    def within(self, longest: int) -> "Model":
        """The model for such sequences, as `ModelConfig.within`."""
        return dataclasses.replace(self, config=self.config.within(longest))

    @property
    def num_parameters(self) -> int:
        """Number of the model's own parameters; tied embeddings count once."""
        specs = models.param_specs(self.config)
        return sum(spec.size for spec in jax.tree.leaves(specs, is_leaf=is_spec))

    @property
    def source(self) -> Path | None:
        """The directory from which the model was loaded, None for a preset."""
        return None if self.preset else Path(self.name)

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.base.embedding.dtype


def is_stored(name: str) -> bool:
    """Whether a model is a directory; otherwise it is a preset, or does not exist.

    A directory without config.json may have the name of a preset, and is none then.
    """
    folder = Path(name)
    return folder.is_dir() and (name not in PRESETS or (folder / CONFIG_FILE).is_file())


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Names the option in errors of a model's files, and --mesh in errors of a mesh."""
    try:
        yield
    except MeshError as error:
        raise MeshError(f"--{error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{option}: {error}") from error


def describe_model(
    name: str,
    *,
    mesh: str | Mesh,
    dtype: str | None,
    make_tokenizer: Callable[[int], Tokenizer],
    head: Head = "lm",
    rules: Rules = DEFAULT_RULES,
    option: str = "--model",
    template: TemplateConfig = AS_IT_IS,
    vision: Vision = "off",
) -> Model:
    """Describes a model directory or a preset; trains the preset's tokenizer.

    The parameters are abstract, ShapeDtypeStructs; `with_weights` loads them.

    Args:
        name: a Hugging Face directory or a key of `presets.PRESETS`.
        mesh: mesh axes with sizes, such as "dp4,tp8", for all devices; or a mesh.
        dtype: dtype of the parameters, None for the checkpoint's dtype.
        make_tokenizer: trains a preset's tokenizer of so many tokens.
        head: head of the model; if the directory has no value head, it gets zeros.
        rules: mesh axes of every logical axis.
        option: name of the option that gives `name`, for errors.
        template: the date and variables that its chat template reads.
        vision: as `config.run.Vision`.

    Raises:
        ConfigError: `name` is neither a directory nor a preset, it is a reward model
            but `head` is "lm", its tokenizer cannot be read, its chat template does
            not read a variable, or the files of `--model` do not belong together
            (`learner.belonging`).
        CheckpointError: its config.json cannot be read.
        MeshError: the mesh does not fit the devices or the model.
    """
    with _naming("--mesh"):
        device_mesh = mesh if isinstance(mesh, Mesh) else create_mesh(mesh)
    stored = is_stored(name)
    if stored:
        tokenizer = read_tokenizer(name, option)
        wanted = None if dtype is None else jnp.dtype(dtype)
        with _naming(option):
            config, params = pretrained.load(
                name,
                mesh=device_mesh,
                rules=rules,
                dtype=wanted,
                head=None if head == "lm" else head,
                weights=False,
                vision=vision != "off",
            )
        if config.head != head:
            raise ConfigError(
                f"{option}: {name} is a reward model; it has no output for tokens"
            )
    elif name in PRESETS:
        config = dataclasses.replace(PRESETS[name], head=head)
        if vision == "off":
            config = dataclasses.replace(config, vision=None)
        wanted = jnp.dtype(dtype or "float32")
        with _naming("--mesh"):
            params = models.abstract(
                models.param_specs(config), wanted, device_mesh, rules
            )
        tokenizer = make_tokenizer(min(config.vocab_size, 1024))
        if config.vision is not None:
            token = _image_token(tokenizer)
            seen = dataclasses.replace(config.vision, image_token=token)
            config = dataclasses.replace(config, vision=seen)
    else:
        raise ConfigError(
            f"{option}: {name!r} is neither a directory nor a preset; presets are "
            f"{nearest_first(name, PRESETS)}"
        )
    if vision != "off" and head not in ("lm", "lm+value"):
        raise ConfigError(
            "--vision: no file format has a reward model that sees; leave it out to "
            "train one of the text model"
        )
    if vision != "off" and config.vision is None:
        raise ConfigError(
            f"--vision: {option} {name} has no vision tower that is supported; leave "
            f"--vision out, or take a model of {', '.join(TOWERS)}"
        )
    if config.has_states and split_size("context", device_mesh, rules) > 1:
        raise MeshError(
            f"--mesh: cp cuts rows, and layers of {config.model_type} carry a state "
            f"along them; take dp, fsdp or tp instead of cp, for {option} {name}"
        )
    if (stages := device_mesh.shape.get(STAGE_AXIS, 1)) > 1:
        try:
            staged_span(config, stages)
        except ValueError as error:
            raise MeshError(f"--{error}, for {option} {name}") from error
    if config.selects and split_size("context", device_mesh, rules) > 1:
        whole, config = config.max_length, config.within(1)
        _LOGGER.warning(
            "--mesh: cp cuts rows, and the indexers of %s choose among all tokens of a "
            "sequence beyond index_topk; with cp, sequences may have %d of the model's "
            "%d tokens",
            name,
            config.max_length,
            whole,
        )
    try:
        tokenizer = tokenizer.for_model(config.vocab_size)
    except TokenizerError as error:
        raise ConfigError(f"{option}: {name}: {error}") from error
    if stored and option == "--model":
        check_belonging(Path(name), tokenizer, config.vocab_size, template)
    try:
        tokenizer = tokenizer.with_template(
            variables=variables_of(template), now=date_of(template)
        )
    except TokenizerError as error:
        raise ConfigError(f"--template.variables: {name}: {error}") from error
    if config.vision is not None:
        with _naming("--vision"):
            eyes = eyes_of(config.vision, Path(name) if stored else None)
        tokenizer = tokenizer.with_eyes(eyes)
    model = Model(
        name,
        config,
        models.param_specs(config),
        params,
        tokenizer,
        device_mesh,
        rules,
        preset=not stored,
    )
    multiply_as_float32(model.dtype)
    return model if vision == "trained" else with_frozen_tower(model)


def _image_token(tokenizer: Tokenizer) -> int:
    """The image token of a preset's tokenizer."""
    ids = tokenizer.encode(PICTURE)
    if len(ids) != 1:
        raise ConfigError(
            "--vision: no task has a picture, so the preset's tokenizer has no image "
            "token; leave it out, or choose an environment with pictures"
        )
    return ids[0]


def with_frozen_tower(model: Model) -> Model:
    """The model without its vision tower among what is trained."""
    if model.config.vision is None:
        return model
    return dataclasses.replace(
        model,
        specs=model.specs.replace(vision=None),
        params=model.params.replace(vision=None),
        tower=model.params.vision,
    )


def open_model(
    name: str,
    *,
    mesh: str,
    dtype: str | None,
    seed: int,
    make_tokenizer: Callable[[int], Tokenizer],
    head: Head = "lm",
    option: str = "--model",
    template: TemplateConfig = AS_IT_IS,
    vision: Vision = "off",
) -> Model:
    """Loads a model directory, or initialises a preset and trains its tokenizer.

    Args:
        seed: seed of a preset's weights; the others as for `describe_model`.

    Raises:
        ConfigError, CheckpointError, MeshError: as `describe_model` and `with_weights`;
            a mesh is refused before weights are read or programs compiled.
    """
    described = describe_model(
        name,
        mesh=mesh,
        dtype=dtype,
        make_tokenizer=make_tokenizer,
        head=head,
        option=option,
        template=template,
        vision=vision,
    )
    return with_weights(described, seed=seed, option=option)


def with_weights(model: Model, *, seed: int, option: str = "--model") -> Model:
    """Loads or draws the parameters of an abstract model.

    Args:
        model: from `describe_model`.
        seed: seed of a preset's weights.
        option: name of the option that gives the model, for errors.

    Raises:
        CheckpointError: the files of the weights cannot be read.
    """
    if model.preset:
        specs = models.param_specs(model.config)
        params = models.initialize(
            jax.random.key(seed), specs, model.dtype, model.mesh, model.rules
        )
    else:
        with _naming(option):
            _, params = pretrained.load(
                model.name,
                mesh=model.mesh,
                rules=model.rules,
                dtype=model.dtype,
                head=model.config.head,
                vision=model.config.vision is not None,
            )
    loaded = dataclasses.replace(model, params=params)
    return loaded if model.tower is None else with_frozen_tower(loaded)


def read_tokenizer(directory: str, option: str) -> Tokenizer:
    """Reads the tokenizer of a model directory.

    Args:
        directory: of the model.
        option: name of the option that gives it, for errors.

    Raises:
        ConfigError: a missing or unreadable file, or no end-of-sequence token.
    """
    try:
        return Tokenizer.from_directory(directory)
    except TokenizerError as error:
        raise ConfigError(f"{option}: {error}") from error


def save_model(
    target: Path,
    model: Model,
    params: PyTree,
    *,
    adapter: str = "adapter",
    manifest: bool = False,
    cards: Mapping[str, str] = {},
    consequence: str = "what was there before is unchanged",
) -> None:
    """Saves a trained model and replaces an earlier save, when the new one is whole.

    What is there but was not saved so is set aside, never removed (records/outputs.py).

    Of several processes all call it, process 0 writes, and the call ends in all of
    them when the model is whole.

    The value head of "lm+value" is left out, because the policy is saved. An adapter is
    merged, and also saved by itself in a directory next to `target`, in PEFT's format.

    Args:
        target: the directory to make.
        model: the model before training.
        params: the trained parameters.
        adapter: name of the adapter's directory.
        manifest: whether the model's directory gets a manifest, to detect damage.
        cards: texts of their README.md, by the directories' names.
        consequence: of an error, for its message.

    Raises:
        WriteError: the disk is full or fails.
    """
    if model.config.head == "lm+value":
        model, params = _policy_alone(model, params)
    config, source, adaptation = model.config, model.source, model.adaptation
    whole = params if adaptation is not None else model.whole(params)
    if adaptation is not None:
        whole = merged(adaptation.base, params, config, adaptation.lora)
    places, fresh = [target], outputs.staging_of(target)
    if adaptation is not None:
        places.append(target.with_name(adapter))

    def write() -> None:
        with writing(target, consequence):
            try:
                if not processes.index():
                    for place in places:
                        outputs.make_room(place)
                saved = fresh / target.name
                tokenizer = model.tokenizer
                pretrained.save(
                    saved, config, whole, tokenizer=tokenizer, source=source
                )
                if adaptation is not None:
                    base = _base_for_peft(model)
                    save_adapter(fresh / adapter, config, params, adaptation.lora, base)
                if not processes.index():
                    if manifest:
                        write_manifest(saved)
                    for name, text in cards.items():
                        if (fresh / name).is_dir():
                            replace_file(fresh / name / CARD, text)
                    for place in places:
                        outputs.install(fresh / place.name, place)
            finally:
                if not processes.index():
                    shutil.rmtree(fresh, ignore_errors=True)

    # All of several processes take part in a write, so one of them cannot try again.
    if processes.count() > 1:
        write()
    else:
        retried(write, target)
    processes.exchange(f"{target.name} is saved", None)


def _base_for_peft(model: Model) -> str | None:
    """Returns the name or directory of the base model for PEFT, or None."""
    source = model.source
    if source is None or is_orbax_directory(source) or adapter_in(source):
        return None
    # Modules have other names if the directory holds a larger model around this one.
    if read_config_file(source).get("model_type") != model.config.model_type:
        return None
    return model.published or str(source)


def _policy_alone(model: Model, params: PyTree) -> tuple[Model, PyTree]:
    """Returns model and trained parameters without the value head."""
    config, adaptation = dataclasses.replace(model.config, head="lm"), model.adaptation
    if adaptation is None:
        params = params.replace(value_head=None)
    else:
        lora = adaptation.lora
        rest = tuple(name for name in lora.whole if name != "value_head")
        adaptation = dataclasses.replace(
            adaptation,
            base=adaptation.base.replace(value_head=None),
            lora=dataclasses.replace(lora, whole=rest),
        )
        params = {path: own for path, own in params.items() if path != "value_head"}
    return dataclasses.replace(model, config=config, adaptation=adaptation), params


def context_of(config: ModelConfig) -> int:
    """Returns the length in tokens of the longest sequence for training."""
    return min(config.max_length, config.rotation_limit or config.max_length)


def check_context(config: ModelConfig, longest: int, option: str) -> None:
    """Refuses sequences that are too long for the model's context.

    Args:
        config: the model's config.
        longest: tokens of the longest sequence.
        option: name of the command-line option for `longest`.

    Raises:
        ConfigError: the context is shorter, or the rotary scaling of longer sequences
            depends on their length, which packed rows do not support.
    """
    limit = context_of(config)
    if longest > limit:
        raise ConfigError(
            f"{option}: must be at most {limit}, {_limit_is(config)}; got {longest}"
        )


def check_sample(
    config: ModelConfig, prompt: int, completion: int, option: str, beside: str
) -> None:
    """Refuses samples that are too long for the model's context.

    Args:
        config: the model's config.
        prompt: tokens of the longest prompt, >= 1.
        completion: most tokens of a completion.
        option: name of the command-line option for `completion`.
        beside: what sets `prompt`, such as an option, for the message.

    Raises:
        ConfigError: as `check_context`, of prompt and completion together.
    """
    limit = context_of(config)
    if prompt + completion > limit:
        raise ConfigError(
            f"{option}: a prompt and its completion must have at most {limit} tokens, "
            f"{_limit_is(config)}; got {completion} with {beside} {prompt}, which is "
            f"{prompt + completion}; lower one of them"
        )


def _limit_is(config: ModelConfig) -> str:
    """The reason for the limit of a sequence's length, for messages."""
    if context_of(config) < config.max_length:
        return "up to which the model's rope_scaling is the same for all sequences"
    return f"the model's {config.meaning_of_length}"


def check_beside(
    config: ModelConfig, directory: str, longest: int, option: str
) -> None:
    """Refuses a second model, such as a reference, that cannot read all sequences.

    Args:
        config: of the second model.
        directory: where the model is from.
        longest: tokens of the longest sequence.
        option: name of the directory's command-line option.

    Raises:
        ConfigError: see `check_context`.
    """
    limit = context_of(config)
    if longest > limit:
        what = f"has a context of {limit} tokens"
        if limit < config.max_length:
            what = f"has the same rope_scaling for all sequences up to {limit} tokens"
        raise ConfigError(
            f"{option}: {directory} {what}, and the longest sequence may have "
            f"{longest}; use a model with a longer context, or shorter sequences"
        )


def versions() -> dict[str, str]:
    """Returns the versions of the software and device that a result depends on."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
    found = {name: importlib.metadata.version(name) for name in packages}
    # Not by its metadata: it may run from its sources, without an installation.
    found["jaxrl_post"] = jaxrl_post.__version__
    device = jax.devices()[0].device_kind
    return {"python": platform.python_version(), **found, "device": device}
