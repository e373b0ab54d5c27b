"""Opens the model that the options of a program name: a model, or a run."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from jaxrl_post.config.convert import ConvertConfig
from jaxrl_post.config.data import TemplateConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.evaluate import EvaluateConfig
from jaxrl_post.config.serve import ChatConfig, ServeConfig
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.learner.model import Model, open_model
from jaxrl_post.programs.convert import convert

__all__ = ["open_named"]


def open_named(
    config: ChatConfig | EvaluateConfig | ServeConfig,
    *,
    make_tokenizer: Callable[[int], Tokenizer],
    template: TemplateConfig,
) -> Model:
    """Opens a model, the model of a finished run, or a checkpoint of a run.

    Args:
        config: of a program; nothing in it is on the hub.
        make_tokenizer: trains a preset's tokenizer of so many tokens.
        template: variables and date of the chat template.

    Raises:
        ConfigError: there is no such step, or `step` is given for what is no run.
        CheckpointError: the run has no checkpoint that is whole.
    """
    with _directory(config) as model:
        return open_model(
            model,
            mesh=config.mesh,
            dtype=config.dtype,
            seed=config.seed,
            make_tokenizer=make_tokenizer,
            template=template,
            vision="frozen" if config.vision else "off",
        )


@contextlib.contextmanager
def _directory(config: ChatConfig | EvaluateConfig | ServeConfig) -> Iterator[str]:
    """The directory of a model, for a run one that is removed at the end."""
    run = Path(config.model)
    finished = run / "model"
    has_model = (finished / "config.json").is_file()
    if (run / "checkpoints").is_dir() and (config.step is not None or not has_model):
        # `convert` can read every kind of run, such as an adapter and its base.
        with tempfile.TemporaryDirectory(prefix="model-") as folder:
            output = str(Path(folder) / "model")
            made = ConvertConfig(
                config.model,
                output,
                dtype=config.dtype,
                step=config.step,
                base=config.base,
            )
            # Its line would name a folder that is soon gone.
            convert(made, console=Console(quiet=True))
            yield output
        return
    for name in ("step", "base"):
        # Elsewhere, a base belongs to an adapter.
        if getattr(config, name) is not None and (name == "step" or finished.is_dir()):
            raise ConfigError(
                f"--{name}: is for a run's checkpoints, and {config.model} "
                f"{'is a run that has finished' if finished.is_dir() else 'is no run'}"
                "; drop the option"
            )
    yield str(finished) if has_model else config.model
