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
        "rollout/flight.py",
        "        context=Tokens.context(event.reply),\n",
        "        context=Tokens.generated(\n"
        "            event.reply, [-1.0] * len(event.reply), version=0\n        ),\n",
        EPISODES,
    ),
    Fault(
        "an answer that calls tools is rendered again",
        "data/codec.py",
        "        return found\n",
        "        whole = chat.render(self.tokenizer, [*before, *messages], options)\n"
        "        return whole[-len(found) - 1 :]\n",
        EPISODES,
    ),
    Fault(
        "tools are not written into the prompt",
        "rollout/collector.py",
        "self.codec.render(task.messages, task.tools)",
        "self.codec.render(task.messages)",
        EPISODES,
    ),
    Fault(
        "arguments between tags have no types in an episode",
        "rollout/collector.py",
        "self.codec.read(prompt, said, flight.task.tools)",
        "self.codec.read(prompt, said)",
        EPISODES,
    ),
    Fault(
        "a text of no type of its schema is handed to the tool",
        "data/replies/tagged.py",
        '    raise ValueError(f"{text!r} is none',
        '    return text\n    raise ValueError(f"{text!r} is none',
        "data/test_replies.py",
    ),
    Fault(
        "a message may be no Unicode",
        "messages.py",
        "object.__setattr__(self, name, mended(text))",
        "pass",
        ENVIRONMENT,
    ),
    Fault(
        "a checkpoint forgets tool calls",
        "messages.py",
        'value.get("tool_calls", ())',
        "()",
        EPISODES,
    ),
    Fault(
        "results are cut at their end",
        "data/tools.py",
        "before + mark + after",
        "before + mark",
        TOKENS,
    ),
    Fault(
        "a call that cannot be read ends the episode",
        "envs/tools/environment.py",
        "not (turn.tool_calls or turn.broken_calls)",
        "not turn.tool_calls",
        ENVIRONMENT,
    ),
    Fault(
        "a turn that was cut has its calls carried out",
        "envs/tools/environment.py",
        "if turn.truncated or not (",
        "if not (",
        ENVIRONMENT,
    ),
    Fault(
        "what a tool raises fails the episode",
        "envs/tools/environment.py",
        "        except Exception as error:\n",
        "        except KeyError as error:\n",
        ENVIRONMENT,
    ),
    Fault(
        "a program's exit status is its verdict",
        "envs/tasks/programs/hidden_tests.py",
        "return outcome.succeeded and not outcome.truncated and said == expected",
        "return outcome.succeeded",
        CODE,
    ),
    Fault(
        "a program finds what the test before it left",
        "envs/tasks/programs/hidden_tests.py",
        "        with self._sandbox.open() as place:\n",
        "        self._place = self._place or self._sandbox.open()\n"
        "        for place in (self._place,):\n",
        CODE,
    ),
    Fault(
        "true is one",
        "envs/tasks/programs/hidden_tests.py",
        "    if isinstance(said, bool) or isinstance(expected, bool):\n"
        "        return said is expected\n",
        "",
        CODE,
    ),
    Fault(
        "a server that is away is told to the policy",
        "envs/tools/environment.py",
        "except (SandboxError, ServerError):",
        "except SandboxError:",
        SERVERS,
    ),
    Fault(
        "a server that is away is tried once",
        "envs/servers.py",
        "if number == self._most or left <= pause:",
        "if True:",
        SERVERS,
    ),
    Fault(
        "a wait for a server takes time from the other calls",
        "envs/tools/environment.py",
        "if time.monotonic() - self._lost() > until:",
        "if time.monotonic() > until:",
        SERVERS,
    ),
    Fault(
        "an answer that broke off is whole",
        "envs/json_server.py",
        'if getattr(answer, "length", None):',
        "if False:",
        SERVERS,
    ),
    Fault(
        "a server that was started again is given no earlier calls",
        "envs/tools/mcp.py",
        "        self._journal.replay(again, slow=slow)\n",
        '        Journal("").replay(again, slow=slow)\n',
        SERVERS,
    ),
    Fault(
        "an MCP server that was started again unnoticed is asked on",
        "envs/tools/mcp.py",
        "if self._watch is not None and not self._watch.open:",
        "if False:",
        SERVERS,
    ),
    Fault(
        "a call that is not concurrent is carried out beside others",
        "envs/tools/environment.py",
        "lambda placed: placed[1].name in self._alone",
        "lambda placed: False",
        CONCURRENT,
    ),
    Fault(
        "each call that waits for a server makes a connection",
        "envs/tools/mcp.py",
        "        with self._connecting:\n",
        "        if True:\n",
        SERVERS,
    ),
    Fault(
        "a call that came too late is made when its turn is taken again",
        "envs/tools/environment.py",
        'if before == f"error: {_TOO_LATE}":',
        "if False:",
        REPEATED,
    ),
    Fault(
        "an MCP server that refuses a call is taken for gone",
        "envs/tools/mcp_http.py",
        "if status > _RAISED or status in _LATER:",
        "if True:",
        SERVERS,
    ),
]
