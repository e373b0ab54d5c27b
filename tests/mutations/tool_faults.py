"""Faults of tools, and of what runs programs that a model wrote."""

from tests.mutations.fault import Fault

__all__ = ["TOOLS"]

EPISODES = "rollout/test_tools.py"
TOKENS = "data/test_tools.py"
ENVIRONMENT = "envs/tools/test_environment.py"
CODE = "envs/test_code.py"
SERVERS = "envs/tools/test_servers.py"
CONCURRENT = "envs/tools/test_concurrent.py"
REPEATED = "envs/tools/test_repeated.py"

TOOLS = [
    Fault(
        "what a tool returned is trained on",
        "rollout/flight.py::_judged",
        "Tokens.context(event.reply)",
        "Tokens.generated(event.reply, [-1.0] * len(event.reply), version=0)",
        EPISODES,
    ),
    Fault(
        "an answer that calls tools is rendered again",
        "data/codec.py::Codec.reply",
        "return _open(found)",
        "whole = chat.render(self.tokenizer, [*before, *messages], options)\n"
        "return whole[-len(found) - 1 :]",
        EPISODES,
    ),
    Fault(
        "tools are not written into the prompt",
        "rollout/dialogue.py::Dialogue.begin",
        "self.codec.render(task.messages, task.tools)",
        "self.codec.render(task.messages)",
        EPISODES,
    ),
    Fault(
        "arguments between tags have no types in an episode",
        "rollout/dialogue.py::Dialogue._completed",
        "self.codec.read(prompt, said, flight.task.tools)",
        "self.codec.read(prompt, said)",
        EPISODES,
    ),
    Fault(
        "a text of no type of its schema is handed to the tool",
        "data/replies/tagged.py::_value",
        "if 'string' in kinds:\n    return text",
        "if 'string' in kinds:\n    return text\nreturn text",
        "data/test_replies.py",
    ),
    Fault(
        "a message may be no Unicode",
        "messages.py::Message.__post_init__",
        "object.__setattr__(self, name, mended(text))",
        "pass",
        ENVIRONMENT,
    ),
    Fault(
        "a checkpoint forgets tool calls",
        "messages.py::Message.from_json",
        'value.get("tool_calls", ())',
        "()",
        EPISODES,
    ),
    Fault(
        "results are cut at their end",
        "data/tools.py::_shortened",
        "before + mark + after",
        "before + mark",
        TOKENS,
    ),
    Fault(
        "a call that cannot be read ends the episode",
        "envs/tools/environment.py::ToolSession._taken",
        "not (turn.tool_calls or turn.broken_calls)",
        "not turn.tool_calls",
        ENVIRONMENT,
    ),
    Fault(
        "a turn that was cut has its calls carried out",
        "envs/tools/environment.py::ToolSession._taken",
        "turn.truncated or not (turn.tool_calls or turn.broken_calls)",
        "not (turn.tool_calls or turn.broken_calls)",
        ENVIRONMENT,
    ),
    Fault(
        "what a tool raises fails the episode",
        "envs/tools/environment.py::ToolSession._outcome",
        "Exception",
        "KeyError",
        ENVIRONMENT,
    ),
    Fault(
        "a program's exit status is its verdict",
        "envs/tasks/programs/hidden_tests.py::_Candidate._printed",
        "return outcome.succeeded and not outcome.truncated and said == expected",
        "return outcome.succeeded",
        CODE,
    ),
    Fault(
        "a program finds what the test before it left",
        "envs/tasks/programs/hidden_tests.py::_Candidate._printed",
        "with self._sandbox.open() as place:\n    __",
        "self._place = self._place or self._sandbox.open()\n"
        "for place in (self._place,):\n"
        "    __",
        CODE,
    ),
    Fault(
        "true is one",
        "envs/tasks/programs/hidden_tests.py::_equal",
        "if isinstance(said, bool) or isinstance(expected, bool):\n"
        "    return said is expected",
        "pass",
        CODE,
    ),
    Fault(
        "a server that is away is told to the policy",
        "envs/tools/environment.py::ToolSession._outcome",
        "(SandboxError, ServerError)",
        "SandboxError",
        SERVERS,
    ),
    Fault(
        "a server that is away is tried once",
        "envs/servers.py::Retries.__call__",
        "number == self._most or left <= pause",
        "True",
        SERVERS,
    ),
    Fault(
        "a wait for a server takes time from the other calls",
        "envs/tools/environment.py::ToolSession._result",
        "time.monotonic() - self._lost()",
        "time.monotonic()",
        SERVERS,
    ),
    Fault(
        "an answer that broke off is whole",
        "envs/json_server.py::JsonServer._read",
        "getattr(answer, 'length', None)",
        "False",
        SERVERS,
    ),
    Fault(
        "a server that was started again is given no earlier calls",
        "envs/tools/mcp.py::OpenMcp._replay",
        "self._journal.replay(again, slow=slow)",
        'Journal("").replay(again, slow=slow)',
        SERVERS,
    ),
    Fault(
        "an MCP server that was started again unnoticed is asked on",
        "envs/tools/mcp.py::OpenMcp._connected",
        "self._watch is not None and (not self._watch.open)",
        "False",
        SERVERS,
    ),
    Fault(
        "a call that is not concurrent is carried out beside others",
        "envs/tools/environment.py::ToolSession._answered",
        "lambda placed: placed[1].name in self._alone",
        "lambda placed: False",
        CONCURRENT,
    ),
    Fault(
        "each call that waits for a server makes a connection",
        "envs/tools/mcp.py::OpenMcp._connected",
        "with self._connecting:\n    __",
        "if True:\n    __",
        SERVERS,
    ),
    Fault(
        "a call that came too late is made when its turn is taken again",
        "envs/tools/environment.py::ToolSession._repeated",
        "before == f'error: {_TOO_LATE}'",
        "False",
        REPEATED,
    ),
    Fault(
        "an MCP server that refuses a call is taken for gone",
        "envs/tools/mcp_http.py::_client_type.Client.send",
        "status > _RAISED or status in _LATER",
        "True",
        SERVERS,
    ),
]
