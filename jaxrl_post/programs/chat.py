"""A conversation with a model in the terminal, for `launch.chat`."""

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from functools import partial

import jax
from rich.console import Console

from jaxrl_post.config.data import DataConfig
from jaxrl_post.config.errors import ConfigError
from jaxrl_post.config.serve import ChatConfig, check_chat
from jaxrl_post.data.codec import Codec
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.data.tools import no_tools
from jaxrl_post.envs import Answer, Message, Step, Task, TaskSequence
from jaxrl_post.envs.env import Split
from jaxrl_post.envs.tools import ToolEnvironment, make_toolset
from jaxrl_post.examples.environment import make_environment
from jaxrl_post.examples.texts import environment_tokenizer
from jaxrl_post.learner.model import Model, context_of
from jaxrl_post.programs.build.engine import bound_engine
from jaxrl_post.programs.build.model import open_named
from jaxrl_post.programs.hub import fetch
from jaxrl_post.programs.template import template_line, with_run
from jaxrl_post.records.visible import visible
from jaxrl_post.sampler import EngineConfig, Request, SamplingParams
from jaxrl_post.sampler.requests import Completion

__all__ = ["Conversation", "run_chat"]

# Most tokens of an answer, by default.
MOST_TOKENS = 1024
# Tokens between two looks: text appears word by word.
STEPS_PER_CALL = 4
# The text of an incomplete character.
INCOMPLETE = "\ufffd"


class ContextError(ValueError):
    """The conversation has become longer than the model's context."""


@dataclasses.dataclass(frozen=True)
class _Talk:
    """Environment of a chat: an answer without a call ends the model's turns."""

    name: str = "chat"

    def tasks(self, split: Split) -> TaskSequence:
        del split
        return TaskSequence(1, lambda index: Task(index, (), ""))

    def step(self, task: Task, conversation: tuple[Message, ...]) -> Step:
        del task, conversation
        return Step(0.0, done=True)

    def demonstration(self, task: Task) -> None:
        del task


class Conversation:
    """A conversation: the user's messages, the model's answers, its tools' results.

    What the model said stays in the context as it was sampled.

    Args:
        config: the options.
        model: on its mesh.

    Raises:
        ConfigError: tools that cannot be had, or that the model cannot be given.
        SandboxError: tools need a sandbox, and none can be had.
    """

    def __init__(self, config: ChatConfig, model: Model) -> None:
        self._config = config
        self._tokenizer = model.tokenizer
        self._codec = Codec(model.tokenizer, config.max_result_tokens)
        context = context_of(model.config)
        self._most = config.max_tokens or max(1, min(context // 2, MOST_TOKENS))
        if self._most >= context:
            raise ConfigError(
                f"--max-tokens: {self._most} leaves no room for a message in the "
                f"model's context of {context} tokens; lower it"
            )
        sizes = EngineConfig(
            # One conversation; a mesh that splits the batch wants a slot a device.
            num_slots=model.mesh.size,
            max_prompt_tokens=context - self._most,
            max_tokens=self._most,
            steps_per_call=STEPS_PER_CALL,
            max_stop_ids=max(4, len(model.tokenizer.stop_ids)),
            few_shapes=True,
        )
        self._room = sizes.max_prompt_tokens
        self._sampler = bound_engine(model, sizes, seed=config.seed)
        self._environment = _tools(config.tools, model.tokenizer)
        self._ended = ExitStack()
        self._answers = 0
        self.reset()

    def close(self) -> None:
        """Closes the tools."""
        self._ended.close()

    def reset(self) -> None:
        """Begins a new conversation."""
        self.close()
        system = self._config.system
        begun = () if system is None else (Message("system", system),)
        self._messages: tuple[Message, ...] = begun
        # All tokens up to the end of the last answer.
        self._tokens: tuple[int, ...] = ()
        self._stop_id: int | None = None
        self._task = Task(0, begun, "")
        self._session = None
        if self._environment is not None:
            self._task = self._environment.tasks("train")[0]
            self._session = self._environment.open(self._task)
            self._ended.callback(self._session.close)

    def say(self, text: str) -> Generator[str]:
        """Sends a message to the model; yields its answer piece by piece.

        Results of tools are yielded too, each as a line that begins with "> ". If the
        caller stops in the middle, the answer ends there.

        Raises:
            ContextError: the conversation no longer fits. It stays as it was.
            TokenizerError: the chat template refuses the conversation.
        """
        new: tuple[Message, ...] = (Message("user", text),)
        for number in range(self._config.max_turns):
            prompt = self._prompt(new)
            if len(prompt) > self._room:
                raise ContextError(
                    f"the conversation has {len(prompt)} tokens, and the model's "
                    f"context has room for {self._room} before an answer of "
                    f"{self._most}; /reset begins a new one"
                )
            self._messages = (*self._messages, *new)
            answer = yield from self._answer(prompt)
            step = Step(0.0, done=True)
            if self._session is not None:
                step = self._session.step(answer)
            if step.done:
                return
            new = step.messages
            for message in new:
                yield "".join(f"\n> {line}" for line in message.content.splitlines())
            yield "\n"
            if number + 1 == self._config.max_turns:
                yield "[no more turns: --max-turns]\n"

    def _prompt(self, new: Sequence[Message]) -> tuple[int, ...]:
        tools = self._task.tools
        if not self._tokens:
            return self._codec.render((*self._messages, *new), tools)
        try:
            after = self._codec.reply(self._messages, new, tools, stop_id=self._stop_id)
        except TokenizerError:
            # A template that rewrites earlier turns: nothing is trained here, so the
            # model may read them as the template has them.
            return self._codec.render((*self._messages, *new), tools)
        return (*self._tokens, *after)

    def _answer(self, prompt: tuple[int, ...]) -> Generator[str, None, Answer]:
        config, engine = self._config, self._sampler.engine
        sampling = SamplingParams(
            config.temperature,
            config.top_k,
            config.top_p,
            config.min_p,
            max_tokens=self._most,
            stop_ids=self._tokenizer.stop_ids,
        )
        self._answers += 1
        engine.submit(Request(self._answers, prompt, 1, 0, sampling))
        done: list[Completion] = []
        shown = ""
        try:
            while not done:
                done = engine.step(self._sampler.params)
                for each in engine.unfinished():
                    text = self._text(each.tokens.ids.tolist()).rstrip(INCOMPLETE)
                    yield text[len(shown) :]
                    shown = text
        finally:
            if not done:
                done = engine.cancel()
            (completion,) = done
            self._take(prompt, completion)
        ids = completion.tokens.ids.tolist()
        stopped = completion.finish_reason == "stop"
        yield self._text(ids[: -1 if stopped else None])[len(shown) :]
        if completion.finish_reason == "length":
            yield "[cut: --max-tokens]"
        if completion.finish_reason == "failed":
            yield f"[failed: {completion.error}]"
        answer = self._messages[-1]
        assert isinstance(answer, Answer)
        return answer

    def _take(self, prompt: tuple[int, ...], completion: Completion) -> None:
        """Adds the model's answer to the conversation."""
        ids = tuple(completion.tokens.ids.tolist())
        stopped = completion.finish_reason == "stop"
        said = ids[:-1] if stopped else ids
        self._tokens, self._stop_id = (*prompt, *ids), ids[-1] if stopped else None
        reason = "stop" if stopped else "length"
        answer = Answer("assistant", self._text(said), reason, len(ids))
        if self._task.tools:
            reply = self._codec.read(prompt, said, self._task.tools)
            answer = dataclasses.replace(
                answer,
                content=reply.content,
                reasoning=reply.reasoning,
                tool_calls=reply.calls,
                broken_calls=reply.broken,
            )
        self._messages = (*self._messages, answer)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def _tools(specs: Sequence[str], tokenizer: Tokenizer) -> ToolEnvironment | None:
    if not specs:
        return None
    reason = no_tools(tokenizer)
    if reason is not None:
        raise ConfigError(f"--tools: the model cannot be given any: {reason}")
    try:
        environment = ToolEnvironment(_Talk(), tuple(map(make_toolset, specs)))
    except (ModuleNotFoundError, OSError, ValueError) as error:
        raise ConfigError(f"--tools: {error}") from error
    environment.prepare()
    return environment


def run_chat(config: ChatConfig, *, console: Console, command: str = "") -> None:
    """Chats until the end of the input; Ctrl-C ends an answer, and then the chat.

    Args:
        config: the options.
        console: where the person reads and writes.
        command: not used.

    Raises:
        ConfigError: an option makes no sense.
    """
    del command
    check_chat(config)
    template = with_run(config.template, config.model)
    config = dataclasses.replace(config, template=template)
    model = _model(config, console)
    if line := template_line(template, model.tokenizer):
        console.print(line, markup=False, highlight=False)
    with jax.set_mesh(model.mesh):
        conversation = Conversation(config, model)
        console.print(
            f"{config.model}: /reset begins a new conversation, Ctrl-D ends",
            markup=False,
            highlight=False,
        )
        try:
            _talk(conversation, console)
        finally:
            conversation.close()


def _model(config: ChatConfig, console: Console) -> Model:
    fetched = fetch(config, console=console).config
    environment = partial(make_environment, fetched.env, DataConfig())
    return open_named(
        fetched,
        make_tokenizer=lambda size: environment_tokenizer(environment(), size),
        template=config.template,
    )


def _talk(conversation: Conversation, console: Console) -> None:
    def write(text: str) -> None:
        # A model may write what a terminal acts on.
        text = visible(text)
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    while True:
        try:
            text = console.input("\n> " if console.is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        if not text:
            continue
        if text == "/reset":
            conversation.reset()
            continue
        pieces = conversation.say(text)
        try:
            for piece in pieces:
                write(piece)
        except KeyboardInterrupt:
            write("[stopped]")
        except (ContextError, TokenizerError) as error:
            write(f"[{error}]")
        finally:
            pieces.close()
        write("\n")
