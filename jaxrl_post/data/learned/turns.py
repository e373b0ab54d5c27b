r"""Trained texts of a conversation: each assistant turn as a model samples it.

A turn is sampled after the prompt that the chat template writes of the messages before
it. Most templates write a conversation so that it begins with each of these prompts;
then it is one sequence. Templates of models that think do not:

- Some leave the reasoning of earlier turns out, or end the last turn with another
  token. Then the conversation is cut: a turn that does not continue the sequence before
  it begins a new one, with its prompt as context. `packing.trees` shares what the
  sequences have in common.
- Some end the prompt with `<think>`, and write a turn without its reasoning. Then the
  turn is the text that a model produces after this prompt: the reasoning, `</think>`,
  and what the template writes of the turn. A turn that has no reasoning gets an empty
  one, `\n</think>\n\n`: a model that learns such turns ends its thought at once.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.data import chat, spans, templates
from jaxrl_post.data.chat import NO_OPTIONS, Messages, Options
from jaxrl_post.data.learned.pictures import Expansion
from jaxrl_post.data.learned.tokens import AsSampled
from jaxrl_post.data.replies import THINK, THOUGHT
from jaxrl_post.data.tokenizer import Tokenizer, TokenizerError
from jaxrl_post.data.tools import form_of
from jaxrl_post.messages import Message
from jaxrl_post.pictures import Shown

__all__ = [
    "answered",
    "conversation",
    "parts",
    "thought_of",
    "with_thought",
    "without_begun",
]

type Rows = Sequence[Mapping[str, Any]]
type Render = Callable[[Rows, bool], templates.Rendered]

SHOWN = 30  # characters of a template's text, in errors
# Placeholder of a turn's reasoning, to see whether a template writes it.
MARK = "qzthought"
# The end of a prompt that begins a thought, and perhaps ends it.
OPENING = re.compile(rf"(?:{THINK}\s*)?(?:{THOUGHT}\s*)?\Z")
# A thought at the beginning of what a template writes of a turn.
WRITTEN = re.compile(rf"\A\s*(?:{THINK}.*?)?{THOUGHT}", re.DOTALL)
ENDED = re.compile(rf"\s*{THOUGHT}\s*")


def conversation(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = NO_OPTIONS,
    *,
    only_last: bool = False,
) -> list[tuple[np.ndarray, np.ndarray]]:
    r"""Tokens of a conversation, and a mask of those that the assistant produces.

    The assistant produces its text, its reasoning, its tool calls and the token that
    ends its turn. These spans are the `{% generation %}` blocks of the template, each
    with a stop token that follows it. Without blocks, a turn begins where its
    generation prompt ends. Every turn must end with a stop token, or the model would
    not learn to stop. If the template ends a turn only by the head of the next turn,
    `Tokenizer.turn_end` is appended to the last turn. A token is in the mask if it
    begins in a span; a token of a picture never is. The tokens before a turn equal its
    prompt's, tokenised alone, as the sampler has them (`AsSampled`); transformers
    tokenises the text as a whole, which may give a token that reaches from the prompt
    into the turn. Without a template the contents are concatenated, with the
    end-of-sequence token after each turn of the assistant.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation, with at least one turn of the assistant.
        options: inputs of the template.
        only_last: masks only the assistant's last turn.

    Returns:
        int32 ids [length] and bool mask [length] of each sequence: one if the whole
        conversation begins with every turn's prompt, else several.

    Raises:
        TokenizerError: no turn of the assistant; the template fails, begins a turn
            differently from its prompt, or ends a turn without a stop token; the model
            sees no pictures.
        PictureError: a picture cannot be shown.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> question = {"role": "user", "content": "1+2="}
    >>> answer = {"role": "assistant", "content": "3"}
    >>> [(tokens, mask)] = conversation(tokenizer, [question, answer])
    >>> tokenizer.backend.decode(tokens[mask], skip_special_tokens=False)
    '3<|eos|>'
    """
    found, sampled, shown = [], AsSampled(tokenizer), Expansion.of(tokenizer, messages)
    for text, produced in parts(tokenizer, messages, options, only_last=only_last):
        # A span that follows another directly has no prompt before it.
        ends = {end for _, end in produced}
        prompted = [begin for begin, _ in produced if begin not in ends]
        ids, begins = sampled.encode(text, prompted)
        if not tokenizer.chat_templates:  # which would write BOS itself
            before = tokenizer.put_around[0]
            ids, begins = (*before, *ids), (*(-1 for _ in before), *begins)
        places = np.asarray(begins, np.int64)
        mask = np.zeros(len(ids), np.bool_)
        for begin, end in produced:
            mask |= (begin <= places) & (places < end)
        found.append((np.asarray(ids, np.int32), mask))
    return shown.expanded(found)


def answered(
    tokenizer: Tokenizer,
    messages: Messages,
    answer: str | Message,
    options: Options = NO_OPTIONS,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt and the answer to learn, including the token that ends the turn.

    With a chat template, this token is the template's end of a turn, which may differ
    from the end-of-sequence token; text that the template writes after it is dropped.

    Args:
        tokenizer: with or without a chat template.
        messages: the conversation so far.
        answer: the text of the assistant's answer; a message if it calls tools.
        options: inputs of the template.

    Returns:
        Token ids of the prompt, which keep its pictures in memory, and of the answer.

    Raises:
        TokenizerError: as `conversation`.
        PictureError: as `conversation`.

    >>> tokenizer = Tokenizer.train(["1+2=3"])
    >>> _, target = answered(tokenizer, [{"role": "user", "content": "1+2="}], "3")
    >>> tokenizer.backend.decode(list(target), skip_special_tokens=False)
    '3<|eos|>'
    """
    if isinstance(answer, str):
        answer = Message("assistant", answer)
    # Held while ids stand for them.
    pictures = chat.pictures_of(tokenizer, messages)
    if not tokenizer.chat_templates:
        if answer.tool_calls:
            raise TokenizerError(
                "chat: without a chat template there is no way to write a tool call; "
                f"got {answer!r:.200}"
            )
        # Tokenise the prompt apart from the answer, as the sampler sees it.
        said = chat.once_ended(tokenizer, answer.content)
        target, _ = tokenizer.encode_with_begins(said, after=True)
        return chat.render(tokenizer, messages), target
    [(tokens, mask)] = conversation(
        tokenizer, [*messages, answer], options, only_last=True
    )
    learned = np.flatnonzero(mask)
    if not learned.size:
        raise TokenizerError(
            "chat: the chat template writes nothing of the assistant's turn; got the "
            f"answer {answer!r:.80}"
        )
    first, end = int(learned[0]), int(learned[-1]) + 1
    held = tuple(itertools.chain(*pictures))
    prompt = Shown.of(tokens[:first].tolist(), held)
    return prompt, tuple(tokens[first:end].tolist())


def parts(
    tokenizer: Tokenizer,
    messages: Messages,
    options: Options = NO_OPTIONS,
    *,
    only_last: bool = False,
) -> list[spans.Part]:
    """The texts of `conversation`, and the spans of them that the assistant produces.

    Args:
        tokenizer: as for `conversation`.
        messages: as for `conversation`.
        options: as for `conversation`.
        only_last: as for `conversation`.

    Raises:
        TokenizerError: as `conversation`.
    """
    rows = [chat.row_of(message) for message in messages]
    turns = [end for end, row in enumerate(rows, 1) if row["role"] == "assistant"]
    if not turns:
        raise TokenizerError(
            "chat: a conversation to learn from needs a turn of the assistant; got "
            f"the roles {[row['role'] for row in rows]}"
        )
    turns = turns[-1:] if only_last else turns
    if not tokenizer.chat_templates:
        return [_plain(tokenizer, rows, only_last)]
    options = chat.timed(tokenizer, options)

    def render(part: Rows, prompt: bool) -> templates.Rendered:
        return chat.rendered(tokenizer, part, options, prompt)

    whole, stops = render(rows, False), tokenizer.stop_tokens
    if whole.generated is None:
        thinks = form_of(tokenizer).thinks
        sampled = [_sampled(render, rows[:end], stops, thinks) for end in turns]
        found = spans.joined(whole.text, sampled, stops)
        for text, produced in found:
            for span in produced[:-1]:
                _check_end(tokenizer, text, span)
    elif only_last or _rewrites(render, rows, whole.text, turns, stops):
        found = _in_blocks(render, rows, turns, stops)
    else:
        blocks = spans.through_stops(whole.text, whole.generated, stops)
        found = [spans.Part(whole.text, blocks)]
    return [_with_last_end(tokenizer, part) for part in found]


def _plain(tokenizer: Tokenizer, rows: Rows, only_last: bool) -> spans.Part:
    text, found = "", []
    for row in rows:
        begin = len(text)
        content = chat.text_of(row)
        if row["role"] == "assistant":
            content = chat.once_ended(tokenizer, content)
        text += content
        if row["role"] == "assistant":
            found.append((begin, len(text)))
    return spans.Part(text, found[-1:] if only_last else found)


def _rewrites(
    render: Render, rows: Rows, whole: str, turns: Sequence[int], stops: Sequence[str]
) -> bool:
    """Whether a template writes a turn differently once later ones follow."""
    earlier = (render(rows[:end], False).text for end in turns if end < len(rows))
    return any(spans.closed(text, whole, stops) is None for text in earlier)


def _in_blocks(
    render: Render, rows: Rows, turns: Sequence[int], stops: Sequence[str]
) -> list[spans.Part]:
    """The generation blocks of each turn, in a text that ends with the turn."""
    found = []
    for end in turns:
        through, before = render(rows[:end], False), render(rows[: end - 1], False).text
        if not through.text.startswith(before):
            raise TokenizerError(
                f"chat: the template writes what precedes messages[{end - 1}] "
                "differently once it follows: "
                f"{spans.difference(before, through.text)}; the tokens of that turn "
                "cannot be told from those before it"
            )
        blocks = spans.through_stops(through.text, through.generated or (), stops)
        own = [span for span in blocks if span[0] >= len(before)]
        found.append(spans.Part(through.text, own))
    return found


def _sampled(
    render: Render, rows: Rows, stops: Sequence[str], thinks: bool
) -> tuple[str, str]:
    """The prompt of the last turn, and the conversation with this turn as sampled.

    Args:
        render: renders messages, with or without the generation prompt.
        rows: the conversation through the turn.
        stops: the stop tokens.
        thinks: whether the template knows reasoning between <think> and </think>.

    Raises:
        TokenizerError: the template begins the turn differently from its prompt.
    """
    prompt, text, row = render(rows[:-1], True).text, render(rows, False).text, rows[-1]
    thought, own = thought_of(row), _after(prompt, text)
    if own is not None and not (thought and thinks and _marked(render, rows) is None):
        return prompt, text
    opening = _opening(prompt) if thinks else ""
    if own is None:
        own = _own(render, rows, prompt, text, opening)
    ended = spans.answer_end(own, stops)
    said, rest = WRITTEN.sub("", own[:ended], count=1), own[ended:]
    indent = _indent(row, said)
    if THOUGHT in opening:  # the prompt leaves no room for a thought
        return prompt, prompt + indent + said.lstrip() + rest
    if not thinks or not (thought or opening):
        return prompt, prompt + own
    closing = _marked(render, rows) if opening and not thought else None
    if not closing:
        closing = _thinking(row, thought, opening, indent)
    return prompt, prompt + closing + said.lstrip() + rest


def _indent(row: Mapping[str, Any], said: str) -> str:
    """The indentation of a turn's first line, if the template writes it."""
    answer = (row.get("content") or "").rpartition(THOUGHT)[2]
    own = _space(answer).rpartition("\n")[2]
    return own if _space(said).endswith(own) else ""


def _space(text: str) -> str:
    """The white space at the beginning of a text."""
    return text[: len(text) - len(text.lstrip())]


def _after(prompt: str, text: str) -> str | None:
    """Text after the prompt; None if the text does not begin with the prompt."""
    return text.removeprefix(prompt) if text.startswith(prompt) else None


def _own(render: Render, rows: Rows, prompt: str, text: str, opening: str) -> str:
    """The last turn as the template writes it, if it does not begin with its prompt.

    The prompt may begin a thought that is missing in the turn, or earlier turns may be
    written differently once this one follows them. Then the turn is what follows the
    last message before it.

    Raises:
        TokenizerError: the turn begins differently from its prompt there too.
    """
    own = _after(prompt.removesuffix(opening), text)
    if own is not None and opening:
        return own
    *before, heard = rows[:-1] or [{}]
    if isinstance(heard.get("content"), str):
        marked = [*before, {**heard, "content": f"{heard['content']} {MARK}"}]
        _, asked, head = render(marked, True).text.rpartition(MARK)
        _, told, tail = render([*marked, rows[-1]], False).text.rpartition(MARK)
        own = _after(head.removesuffix(opening), tail) if asked and told else None
        if own is not None:
            return own
    raise TokenizerError(
        f"chat: the template writes messages[{len(rows) - 1}], a turn of the "
        "assistant, differently from how it prompts for it: "
        f"{spans.difference(prompt, text)}; change the template's variables"
    )


def _opening(prompt: str) -> str:
    """Beginning of a thought at the end of a prompt; "" if there is none."""
    found = OPENING.search(prompt)
    return found[0] if found else ""


def without_begun(
    tokenizer: Tokenizer, messages: Messages, steps: Sequence[str]
) -> tuple[str, list[str]]:
    r"""Steps of an answer as they follow a prompt that may begin a thought.

    Args:
        tokenizer: with or without a chat template.
        messages: the prompt.
        steps: at least one.

    Returns:
        The end of an empty thought, if the prompt begins one and no step ends it, else
        "", and the steps, without the beginning of a thought that the prompt has.
    """
    if not tokenizer.chat_templates or not form_of(tokenizer).thinks:
        return "", list(steps)
    opening = _opening(chat.render_text(tokenizer, messages))
    if not opening or THOUGHT in opening:
        return "", list(steps)
    if not any(THOUGHT in step for step in steps):
        return _thinking({}, "", opening), list(steps)
    return "", [_without(steps[0], opening), *steps[1:]]


def _without(content: str, opening: str) -> str:
    """Sampled text after the beginning of a thought, which a content may repeat."""
    if content.startswith(opening) or not content.lstrip().startswith(THINK):
        return content.removeprefix(opening)
    content = content.lstrip().removeprefix(THINK)
    return content.removeprefix("\n") if opening.endswith("\n") else content


def _thinking(
    row: Mapping[str, Any], thought: str, opening: str, indent: str = ""
) -> str:
    r"""Text that a model samples before its answer: its thought, and the end mark.

    Args:
        row: the turn.
        thought: of the turn; "" for none.
        opening: the end of the prompt with which the thought begins; "" if the model
            begins it.
        indent: of the answer's first line.
    """
    content = row.get("content") or ""
    if THOUGHT in content:
        raw = _without(content, opening) if opening else content
        before, mark, answer = raw.rpartition(THOUGHT)
        return before + mark + _space(answer)
    if opening and not opening.endswith("\n"):
        return thought + THOUGHT + indent
    begin = "" if opening else f"{THINK}\n"
    return f"{begin}{thought}\n{THOUGHT}\n\n{indent}"


def thought_of(row: Mapping[str, Any]) -> str:
    r"""The reasoning of a turn, of its own field or of its content; "" for none.

    >>> thought_of({"content": "<think>\nhm\n</think>\n\n4"})
    'hm'
    """
    content = row.get("content")
    if _in_field(row):
        return row["reasoning_content"].strip("\n")
    if not isinstance(content, str) or THOUGHT not in content:
        return ""
    return content.partition(THOUGHT)[0].strip().removeprefix(THINK).strip("\n")


def _in_field(row: Mapping[str, Any]) -> bool:
    reasoning = row.get("reasoning_content")
    return isinstance(reasoning, str) and bool(reasoning.strip())


def with_thought(row: Mapping[str, Any], thought: str) -> dict[str, Any]:
    """A turn with other reasoning, in the same place."""
    if THOUGHT not in (row.get("content") or "") or _in_field(row):
        return {**row, **dict.fromkeys(chat.REASONING, thought)}
    answer = row["content"].partition(THOUGHT)[2]
    return {**row, "content": f"{THINK}\n{thought}\n{THOUGHT}{answer}"}


def _marked(render: Render, rows: Rows) -> str | None:
    """The template's end mark of the last turn's thought; None if it writes none.

    "" if what ends it is not </think>.
    """
    *before, row = rows
    _, mark, after = render([*before, with_thought(row, MARK)], False).text.rpartition(
        MARK
    )
    ended = ENDED.match(after)
    return None if not mark else ended[0] if ended else ""


def _with_last_end(tokenizer: Tokenizer, part: spans.Part) -> spans.Part:
    """A text and its spans, with a stop token at the end of the last span.

    The token is appended if the template ends a turn by the head of the next turn.
    """
    text, found = part
    if not found or spans.ends_with_stop(text, found[-1], tokenizer.stop_tokens):
        return part
    begin, end = found[-1]
    if text[end:].strip():
        _check_end(tokenizer, text, found[-1])
    text = text[:end] + tokenizer.turn_end
    return spans.Part(text, [*found[:-1], (begin, len(text))])


def _check_end(tokenizer: Tokenizer, text: str, span: spans.Span) -> None:
    """Raises TokenizerError if a turn of the assistant has no stop token at its end."""
    if spans.ends_with_stop(text, span, tokenizer.stop_tokens):
        return
    _ = tokenizer.turn_end  # raises where the template has none
    raise TokenizerError(
        "chat: after a turn of the assistant the chat template writes "
        f"{text[span[1] : span[1] + SHOWN]!r}, which begins with no stop token "
        f"({', '.join(tokenizer.stop_tokens)}), so a model would not learn to stop "
        "there; add that token's id to eos_token_id of generation_config.json, or move "
        "{% endgeneration %} behind it where the template has such blocks"
    )
