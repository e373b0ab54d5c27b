"""Fields of `POST /v1/responses`, OpenAI's Responses API.

An item of the input may have further fields, such as `id` and `status`, which are
dropped: clients send items back as they got them, and no template reads these. All
other fields are as strict as the fields of the other routes.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from jaxrl_post.serve.fields import (
    FIRST,
    MOST_MESSAGES,
    MOST_TOOLS,
    UNKNOWN,
    AllSampling,
    Fields,
    Loose,
    Nothing,
    Parts,
    Positive,
    ResponseFormat,
    StreamOptions,
    Tool,
    ToolChoice,
    TopLogprobs,
    neutral,
    text_of,
)

__all__ = ["LOGPROBS", "ResponsesFields", "flat"]

PICTURE = "input_image"
LOGPROBS = "message.output_text.logprobs"
# OpenAI's limits.
MOST_METADATA = 16

type Text = Annotated[str | Parts, AfterValidator(text_of)]


def _seen(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The parts of a content with pictures, which chats read; else its text."""
    if isinstance(content, list) and any(p.get("type") == PICTURE for p in content):
        return content
    return text_of(content)


type Content = Annotated[str | Parts, AfterValidator(_seen)]


class _Item(Loose):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class InputMessage(_Item):
    """A message, also an earlier one of the model."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    @model_validator(mode="after")
    def _shown_by_users(self) -> "InputMessage":
        if self.role != "user" and not isinstance(self.content, str):
            raise ValueError(
                f"a message of the {self.role} has a part of type {PICTURE!r}; send "
                "pictures in messages of the user or in outputs of calls"
            )
        return self


class FunctionCall(_Item):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"


class FunctionCallOutput(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class Reasoning(_Item):
    """Thoughts of the model before an answer."""

    type: Literal["reasoning"]
    content: Text = ""
    summary: Text = ""
    encrypted_content: Nothing = None


def _kind(item: Any) -> str:
    return str(item.get("type") or "message") if isinstance(item, dict) else "message"


type Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    Discriminator(
        _kind,
        custom_error_type="unknown_item",
        custom_error_message="this server reads items of the types message, "
        "function_call, function_call_output and reasoning",
    ),
]


def _listed(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _nests(level: str, *names: str) -> BeforeValidator:
    """Reads an object whose fields chats have one level deeper, under this name."""

    def nested(value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") in ("text", "json_object"):
            return value
        kind = value.get("type")
        if kind != level:
            raise ValueError(
                f"its type must be {level!r}; got {kind!r:.80}, which this server does "
                "not have"
            )
        given = {k: v for k, v in value.items() if k in names and v is not None}
        others = {k: v for k, v in value.items() if k not in ("type", *names)}
        if asks := [k for k, v in others.items() if v not in (None, False, ["direct"])]:
            raise ValueError(f"{asks[0]:.80}: {UNKNOWN}")
        return {"type": kind, kind: given}

    return BeforeValidator(nested)


def flat(value: BaseModel) -> dict[str, Any]:
    """An object that `_nests` has read, as it was given."""
    told = value.model_dump(by_alias=True, exclude_none=True)
    return {"type": told["type"]} | told.get(told["type"], {})


class TextOptions(Fields):
    """Options of the answer's text."""

    format: Annotated[
        ResponseFormat | None,
        _nests("json_schema", "name", "description", "schema", "strict"),
    ] = None
    verbosity: Annotated[str | None, neutral("medium")] = None


class ReasoningOptions(Fields):
    """Options of the reasoning, whose text is in the answer in any case."""

    effort: str | None = None
    summary: Annotated[str | None, neutral("auto")] = None
    generate_summary: Annotated[str | None, neutral("auto")] = None
    context: Annotated[str | None, neutral("auto")] = None
    mode: Annotated[str | None, neutral("standard")] = None


class ResponsesFields(AllSampling):
    """`POST /v1/responses`; sampling parameters of chats are further fields."""

    model_config = Fields.model_config

    model: str | None = None
    input: Annotated[
        list[Item],
        FIRST,
        Field(min_length=1, max_length=MOST_MESSAGES),
        BeforeValidator(_listed),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[
        list[
            Annotated[
                Tool,
                _nests("function", "name", "description", "parameters", "strict"),
            ]
        ],
        FIRST,
        Field(max_length=MOST_TOOLS),
    ] = Field(default=[])
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ToolChoice, _nests("function", "name")
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    # Thoughts are never encrypted: their text is there in any case.
    include: list[
        Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
    ] = Field(default=[])
    top_logprobs: TopLogprobs = None
    truncation: Annotated[str, neutral("disabled")] = "disabled"
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]
        ],
        Field(max_length=MOST_METADATA),
    ] = Field(default={})
    chat_template_kwargs: dict[str, Any] | None = None
    n: Annotated[int, neutral(1)] = 1
    # Chats have this name for max_output_tokens.
    max_tokens: Nothing = None
    prompt_logprobs: Nothing = None
    background: Annotated[bool, neutral(False)] = False
    background_options: Nothing = None
    conversation: Nothing = None
    context_management: Nothing = None
    prompt: Nothing = None
    moderation: Nothing = None
    image: Nothing = None
    access_programs: Nothing = None
    # These fields ask for no behaviour; there are no tools of the server to limit.
    max_tool_calls: Any = None
    user: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    client_metadata: Any = None

    @property
    def scored(self) -> bool:
        """Whether the log-probs of the answer's tokens are asked for."""
        return LOGPROBS in self.include or bool(self.top_logprobs)
