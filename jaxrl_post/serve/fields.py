"""Fields of each client's request, with their types and ranges.

A field that would change the samples and that the sampler does not have is refused
unless it asks for nothing. Fields that name no behaviour, such as `user`, are accepted,
and null is a field left out, as OpenAI's and vLLM's own types have it. A field that is
not listed is refused by name, since it is most likely misspelt; the exceptions are the
sampling parameters of `/inference/v1/generate`, whose clients send the parameters of
every server (`GenerateSampling`).
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    model_validator,
)

from jaxrl_post.pictures.contents import TEXTS
from jaxrl_post.sampler.requests import MOST_ALTERNATIVES, MOST_FLOAT, MOST_INT
from jaxrl_post.sampler.sizes import MOST_BIASES

__all__ = [
    "FIRST",
    "MOST_MESSAGES",
    "MOST_TOLD",
    "MOST_TOOLS",
    "UNKNOWN",
    "AllSampling",
    "ChatFields",
    "ChatTokensFields",
    "CompletionFields",
    "DetokenizeFields",
    "EndFields",
    "EpisodeFields",
    "Fields",
    "GenerateFields",
    "JsonSchema",
    "Loose",
    "Nothing",
    "Parts",
    "Positive",
    "ResponseFormat",
    "RewardFields",
    "SamplingFields",
    "StreamOptions",
    "StructuredOutputs",
    "TokenizeFields",
    "Tool",
    "ToolChoice",
    "TopLogprobs",
    "neutral",
    "text_of",
]

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_WORDS = 128
MOST_MESSAGES = 16_384
MOST_PARTS = 16_384
MOST_TOOLS = 1_024
# Most errors that an answer names.
MOST_TOLD = 5
UNKNOWN = "there is no such field here; is it misspelt?"
# A body may have a million items, and errors of all of them would take half a minute:
# every list stops at its first error, and lists of objects have a greatest length.
FIRST = FailFast()


def neutral(*allowed: Any) -> AfterValidator:
    """Refuses values other than these, which ask for nothing; the first is told."""

    def check(value: Any) -> Any:
        if value is not None and value not in allowed:
            other = "" if allowed[0] is None else f", or give {allowed[0]!r}"
            raise ValueError(f"this sampler does not have it; leave it out{other}")
        return value

    return AfterValidator(check)


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a message's content, whose parts are joined.

    Raises:
        ValueError: a part is no text.
    """
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        kind = part.get("type")
        name = TEXTS.get(str(kind))
        text = None if name is None else part.get(name)
        if not isinstance(text, str):
            raise ValueError(
                f"this model reads text alone; got a part of type {kind!r:.80}"
            )
        texts.append(text)
    return "".join(texts)


type Positive = Annotated[int, Field(ge=1, le=MOST_INT)]
type Stop = Annotated[str, Field(min_length=1, max_length=256)]
type Stops = Stop | Annotated[list[Stop], FIRST, Field(max_length=MOST_STOPS)]
type Texts = Annotated[list[str], FIRST]
type Temperature = Annotated[float, Field(ge=0, le=MOST_FLOAT)]
type TokenId = Annotated[int, Field(ge=0, le=MOST_INT)]
type TokenIds = Annotated[list[TokenId], FIRST]
type Parts = Annotated[list[dict[str, Any]], FIRST, Field(max_length=MOST_PARTS)]
type TopK = Annotated[int, Field(ge=-1, le=MOST_INT)]
type TopLogprobs = Annotated[int | None, Field(ge=0, le=MOST_ALTERNATIVES)]
type Nothing = Annotated[Any, neutral(None)]
type Penalty = Annotated[float, Field(ge=-2, le=2)]
type BiasedId = Annotated[int, Field(ge=0, le=MOST_INT)]
type Bias = Annotated[float, Field(ge=-100, le=100)]


class _Read(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _left_out(cls, given: Any) -> Any:
        """Drops the fields that are null.

        Raises:
            ValueError: there are so many fields that some cannot be known.
        """
        if not isinstance(given, dict):
            return given
        closed = cls.model_config.get("extra") == "forbid"
        if None not in given.values() and len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if closed and len(given) > len(known):
            others = itertools.islice((n for n in given if n not in known), MOST_TOLD)
            raise ValueError("; ".join(f"{name:.80}: {UNKNOWN}" for name in others))
        return {
            name: value
            for name, value in given.items()
            if value is not None or name not in known
        }


class Fields(_Read):
    """Fields, and no others."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Loose(_Read):
    """Fields with further ones allowed, since templates read them."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class JsonSchema(Loose):
    """A schema of `response_format`."""

    name: str = "answer"
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Fields):
    """Form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _complete(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(
                "json_schema belongs to type json_schema, and must be there"
            )
        return self


class StructuredOutputs(Fields):
    """Form that the answer must have, as vLLM writes it; one of its fields is given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str] | None, FIRST, Field(min_length=1)] = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(f"give one of json, regex, choice, grammar; got {given}")
        return self


class StreamOptions(Fields):
    """Options of a stream, in addition to the answer."""

    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, neutral(False)] = False
    include_obfuscation: Annotated[bool, neutral(False)] = False


class AllSampling(_Read):
    """Fields for sampling that all routes have."""

    temperature: Temperature | None = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: TopK | None = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    max_tokens: Annotated[int | None, Field(ge=0, le=MOST_INT)] = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    seed: int | None = None
    stop: Stops | None = None
    stop_token_ids: Annotated[list[TokenId] | None, Field(max_length=8)] = None
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None
    frequency_penalty: Penalty = 0
    presence_penalty: Penalty = 0
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    logit_bias: Annotated[dict[BiasedId, Bias], Field(max_length=MOST_BIASES)] = {}
    best_of: Annotated[int | None, neutral(1)] = None
    use_beam_search: Annotated[bool, neutral(False)] = False
    min_tokens: Annotated[int, Field(ge=0, le=MOST_INT)] = 0
    prompt_logprobs: TopLogprobs = None
    allowed_token_ids: Nothing = None
    bad_words: Annotated[list[Stop], FIRST, Field(max_length=MOST_WORDS)] = []


class SamplingFields(AllSampling):
    """Fields that chats and completions have."""

    model_config = Fields.model_config

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    response_format: ResponseFormat | None = None
    include_stop_str_in_output: Annotated[bool, neutral(False)] = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Annotated[bool, neutral(True)] = True
    length_penalty: Annotated[float | None, neutral(1)] = None
    truncate_prompt_tokens: Nothing = None
    logits_processors: Annotated[Any, neutral([])] = None
    return_tokens_as_token_ids: Annotated[bool, neutral(False)] = False
    kv_transfer_params: Nothing = None
    vllm_xargs: Annotated[Any, neutral({})] = None
    # These fields ask for no behaviour.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    request_id: Any = None
    priority: Any = None
    cache_salt: Any = None

    @model_validator(mode="after")
    def _consistent(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options belong to stream: true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("give response_format or structured_outputs, not both")
        return self


class FunctionTool(Loose):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Fields):
    """A tool; functions are all there are."""

    type: Literal["function"] = "function"
    function: FunctionTool


type Tools = Annotated[list[Tool], FIRST, Field(max_length=MOST_TOOLS)]


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class ToolChoice(Fields):
    """The function that has to be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class CalledFunction(Loose):
    """A function with its arguments, in an earlier message."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class CalledTool(Loose):
    """A tool call of an earlier message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Loose):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Parts | None = None
    tool_calls: (
        Annotated[list[CalledTool], FIRST, Field(max_length=MOST_TOOLS)] | None
    ) = None
    tool_call_id: str | None = None
    prompt_token_ids: TokenIds | None = None
    generation_token_ids: TokenIds | None = None
    generation_log_probs: Annotated[list[float], FIRST] | None = None


class ChatFields(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[
        list[ChatMessage], FIRST, Field(min_length=1, max_length=MOST_MESSAGES)
    ]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Parts | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: Annotated[bool, neutral(False)] = False
    echo: Annotated[bool, neutral(False)] = False
    include_reasoning: Annotated[bool, neutral(True)] = True
    verbosity: Annotated[str | None, neutral("medium")] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    audio: Nothing = None
    prediction: Nothing = None
    web_search_options: Nothing = None
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none", "auto")] = None
    chat_template: Nothing = None
    mm_processor_kwargs: Nothing = None

    @model_validator(mode="after")
    def _chat(self) -> "ChatFields":
        _check_ending(self)
        scores = self.prompt_logprobs is not None
        _check_scored(self, scores=scores, echo=False, stream=self.stream)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        needs = self.tool_choice not in (None, "none", "auto")
        if needs and not self.tools:
            raise ValueError("tool_choice needs tools")
        if needs and (self.response_format or self.structured_outputs):
            raise ValueError("a required call leaves no room for a response format")
        return self


def _check_ending(fields: "ChatFields | TokenizeFields") -> None:
    """Refuses an open last message together with the head of a further one."""
    asked = fields.model_fields_set
    both = fields.continue_final_message and fields.add_generation_prompt
    if both and "add_generation_prompt" in asked:
        raise ValueError(
            "continue_final_message leaves the last message open, and "
            "add_generation_prompt begins a further one; give one of them, and "
            "add_generation_prompt: false with the former"
        )


class ChatTokensFields(ChatFields):
    """`POST /v1/chat/completions/tokens`: a chat whose prompt is given as token ids."""

    tokens: Annotated[list[TokenId], FIRST, Field(min_length=1)]


class CompletionFields(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], FIRST]
    logprobs: TopLogprobs = None
    echo: bool = False
    suffix: Annotated[str | None, neutral("")] = None
    add_special_tokens: bool = True

    @property
    def scores(self) -> bool:
        """Whether the prompt's log-probs are asked for."""
        echoed = self.echo and self.logprobs is not None
        return echoed or self.prompt_logprobs is not None

    @model_validator(mode="after")
    def _completion(self) -> "CompletionFields":
        _check_scored(self, scores=self.scores, echo=self.echo, stream=self.stream)
        return self


def _check_scored(
    fields: AllSampling, *, scores: bool, echo: bool, stream: bool = False
) -> None:
    """Refuses log-probs of a prompt in a stream, and a request for nothing."""
    if scores and stream:
        raise ValueError(
            "log-probs of a prompt come with the whole answer; leave out stream, or "
            "prompt_logprobs and echo with logprobs"
        )
    if fields.max_tokens == 0 and not (scores or echo):
        raise ValueError(
            "max_tokens: 0 asks for the prompt alone, with echo: true or "
            "prompt_logprobs; otherwise it must be at least 1"
        )


class GenerateSampling(AllSampling):
    """Sampling parameters of `/inference/v1/generate`; unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    logprobs: TopLogprobs = None

    @model_validator(mode="after")
    def _scored(self) -> "GenerateSampling":
        _check_scored(self, scores=self.prompt_logprobs is not None, echo=False)
        return self


class GenerateFields(Fields):
    """`POST /inference/v1/generate`."""

    model: str | None = None
    token_ids: Annotated[list[TokenId], FIRST, Field(min_length=1)]
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    stream: Annotated[bool, neutral(False)] = False
    request_id: str | None = None
    cache_salt: Any = None
    priority: Any = None
    # Images and the like, in the place of some token ids.
    features: Nothing = None


class TokenizeFields(Fields):
    """`POST /tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[ChatMessage], FIRST, Field(max_length=MOST_MESSAGES)] | None
    ) = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> "TokenizeFields":
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give prompt or messages, one of them")
        _check_ending(self)
        return self


class DetokenizeFields(Fields):
    """`POST /detokenize`: the text of token ids, special ones too."""

    model: str | None = None
    tokens: TokenIds


class EpisodeFields(Fields):
    """`POST /episodes`."""

    id: str | None = None
    seed: int | None = None
    deadline_s: Annotated[float | None, Field(gt=0)] = None


class RewardFields(Fields):
    """`POST /episodes/ID/reward`: of a turn, or of the episode as a whole.

    Of a player, `POST /episodes/ID/players/NAME/reward`: of a turn, or of the last one.
    """

    reward: float
    turn: Annotated[int | None, Field(ge=0, le=MOST_INT)] = None


class EndFields(Fields):
    """`POST /episodes/ID/end`."""

    reward: float | None = None
    reason: Annotated[str, Field(min_length=1, max_length=256)] = "the agent is done"
