"""Makes judged answers from pairs, and exchanges answers between prompts."""

from collections.abc import Sequence

from jaxrl_post.data.preferences import JudgedAnswer, Preference

__all__ = ["answers_to_others", "unpaired"]


def unpaired(preferences: Sequence[Preference]) -> list[JudgedAnswer]:
    """Splits pairs: the chosen answers are desirable, the rejected ones are not.

    An answer that is chosen in several pairs, or rejected in several, counts once.

    Args:
        preferences: in any order.

    Returns:
        The answers in the order in which they first appear.

    >>> from jaxrl_post.messages import Message
    >>> prompt = (Message("user", "2+2="),)
    >>> pairs = [Preference(prompt, "4", wrong, "2+2=") for wrong in ("5", "22")]
    >>> [(each.answer, each.desirable) for each in unpaired(pairs)]
    [('4', True), ('5', False), ('22', False)]
    """
    answers = (
        JudgedAnswer(pair.messages, answer, desirable, pair.group)
        for pair in preferences
        for answer, desirable in ((pair.chosen, True), (pair.rejected, False))
    )
    return list(dict.fromkeys(answers))


def answers_to_others(judged: Sequence[JudgedAnswer]) -> list[str]:
    """Pairs the prompt of every judged answer with the answer to another prompt.

    The answers are grouped by prompt. Each is replaced by the answer `most` places
    further on, cyclically, where `most` is the number of answers to the most frequent
    prompt. So every answer is used exactly once.

    Args:
        judged: in any order; no prompt has more than half of the answers.

    Returns:
        One answer for each of `judged`.

    Raises:
        ValueError: a prompt has more than half of the answers.

    >>> from jaxrl_post.messages import Message
    >>> def judged(prompt, answer):
    ...     return JudgedAnswer((Message("user", prompt),), answer, True, prompt)
    >>> answers_to_others([judged("1+1=", "2"), judged("2+2=", "4")])
    ['4', '2']
    """
    places: dict[str, list[int]] = {}
    for index, each in enumerate(judged):
        places.setdefault(each.group, []).append(index)
    most = max(map(len, places.values()), default=0)
    if 2 * most > len(judged):
        raise ValueError(
            "judged: no prompt may have more than half of the answers, so that each "
            f"prompt can be given an answer to another one; got {most} of "
            f"{len(judged)} answers to one prompt"
        )
    order = [index for group in places.values() for index in group]
    given = [""] * len(judged)
    for place, index in enumerate(order):
        given[index] = judged[order[(place + most) % len(order)]].answer
    return given
