"""Faults of graders and of built-in environments."""

from tests.mutations.fault import Fault

__all__ = ["ENVIRONMENTS"]

ANSWERS = "envs/test_prompt_answers.py"

SEARCH = "envs/tools/test_search.py"

QUERIES = "envs/sql/test_execution.py"
RESULTS = "envs/sql/test_results.py"
QUESTIONS = "envs/sql/test_text2sql.py"

INSTRUCTIONS = "envs/test_instructions.py"

FACTS = "envs/test_facts.py"

FORMULAS = "envs/test_formulas.py"

ENVIRONMENTS = [
    Fault(
        "a difference loses the parentheses of what is taken away",
        "envs/tasks/programs/formulas.py::Formula._needed",
        'return product and sums[0], (product or self.operation == "-") and sums[1]',
        "return product and sums[0], product and sums[1]",
        FORMULAS,
    ),
    Fault(
        "formulas that are held out are trained on",
        "envs/tasks/programs/formulas.py::asked",
        "if split_of(question) == split:\n    break",
        "break",
        FORMULAS,
    ),
    Fault(
        "a careless answer has its parentheses",
        "envs/tasks/programs/formulas.py::asked",
        "formula.python(parentheses=not careless)",
        "formula.python()",
        FORMULAS,
    ),
    Fault(
        "people who are held out are trained on",
        "envs/tasks/facts/environment.py::_Facts.tasks",
        "split_of(home[0], one_in=_ONE_IN) == split",
        "home",
        FACTS,
    ),
    Fault(
        "a slip selects what is asked for",
        "envs/tasks/sql/environment.py::Text2SQL.demonstration",
        'query = "SELECT * FROM " + query.partition(" FROM ")[2]',
        "query = query.strip()",
        QUESTIONS,
    ),
    Fault(
        "a demonstration keeps what it should forget",
        "envs/tasks/instructions/environment.py::Instructions.demonstration",
        "rng.random() >= self.slips",
        "rng.random() < self.slips",
        INSTRUCTIONS,
    ),
    Fault(
        "a game may have too few turns",
        "programs/build/agents.py::check_agents",
        "turns < environment.most_calls",
        "turns < 1",
        "programs/test_agents.py",
    ),
    Fault(
        "a word counts as often as it is said",
        "envs/tasks/token_f1.py::_f1",
        "(Counter(mine) & Counter(theirs)).total()",
        "sum(each in theirs for each in mine)",
        ANSWERS,
    ),
    Fault(
        "the first accepted text alone counts",
        "envs/tasks/token_f1.py::token_f1",
        "max(_f1(mine, each) for each in theirs)",
        "_f1(mine, theirs[0])",
        ANSWERS,
    ),
    Fault(
        "a JSON schema may refer to what is fetched",
        "envs/tasks/json_schema.py::_validator",
        "_require_references(validator, schema, REGISTRY)",
        "pass",
        ANSWERS,
    ),
    Fault(
        "a constant that is not JSON is an answer",
        "envs/tasks/json_schema.py::json_of",
        "json.loads(text, parse_constant=_refuse, parse_float=_finite)",
        "json.loads(text, parse_float=_finite)",
        ANSWERS,
    ),
    Fault(
        "the worst passages are found",
        "envs/tools/search.py",
        "_BEST = '\\nSELECT title, text FROM passages WHERE passages MATCH ? "
        "ORDER BY rank, rowid LIMIT ?\\n'",
        "_BEST = '\\nSELECT title, text FROM passages WHERE passages MATCH ? "
        "ORDER BY rank DESC, rowid LIMIT ?\\n'",
        SEARCH,
    ),
    Fault(
        "a passage needs all words of a query",
        "envs/tools/search.py::_Index.best",
        '" OR ".join',
        '" AND ".join',
        SEARCH,
    ),
    Fault(
        "a call may ask for any number of passages",
        "envs/tools/search.py::Search._limit",
        "not 1 <= value <= self.max_passages",
        "value < 1",
        SEARCH,
    ),
    Fault(
        "a query may do what it likes",
        "envs/tasks/sql/inside.py::opened",
        "database.set_authorizer(authorize)",
        "pass",
        QUERIES,
    ),
    Fault(
        "a query may draw a number that is another each time",
        "envs/tasks/sql/inside.py::Steady.install",
        "for name in CHANCE:\n    __",
        "for name in ():\n    __",
        QUERIES,
    ),
    Fault(
        "a query may ask for the day",
        "envs/tasks/sql/inside.py::Steady._time",
        "is_now(arguments[place])",
        "False",
        QUERIES,
    ),
    Fault(
        "a data base is opened to be written",
        "envs/tasks/sql/inside.py::opened",
        "f'file:{urllib.parse.quote(path)}?mode=ro&immutable=1'",
        "f'file:{urllib.parse.quote(path)}?mode=rwc'",
        QUERIES,
    ),
    Fault(
        "a query has all the memory of the machine",
        "envs/tasks/sql/inside.py::main",
        "limit_process()",
        "pass",
        QUERIES,
    ),
    Fault(
        "what SQLite does in one step is waited for",
        "envs/tasks/sql/inside.py::main",
        'limit_time(request["seconds"])',
        "pass",
        QUERIES,
    ),
    Fault(
        "equal rows count once",
        "envs/tasks/sql/results.py::equal",
        "mine, theirs = sorted(mine, key=_key), sorted(theirs, key=_key)",
        "mine, theirs = (sorted(set(x), key=_key) for x in (mine, theirs))",
        RESULTS,
    ),
    Fault(
        "order matters where a part of the query orders",
        "envs/tasks/sql/results.py::is_ordered",
        'depth += (token == "(") - (token == ")")',
        "depth += 0",
        RESULTS,
    ),
    Fault(
        "any query is right that finds nothing either",
        "envs/tasks/sql/environment.py::_wrong_with",
        "None if found.rows else 'returns no row, as any wrong query may'",
        "None if True else 'returns no row, as any wrong query may'",
        QUESTIONS,
    ),
    Fault(
        "held-out questions are asked in training",
        "envs/tasks/sql/environment.py::Text2SQL._generated",
        "split_of(question.text) == split",
        "split_of(about.schema + question.text) == split",
        QUESTIONS,
    ),
    Fault(
        "at least means more than",
        "envs/tasks/instructions/checks.py::_related",
        "count >= number",
        "count > number",
        INSTRUCTIONS,
    ),
    Fault(
        "an empty text uses no comma",
        "envs/tasks/instructions/constraints.py::Constraint.holds",
        "bool(text.strip()) and KINDS[self.kind].check(text, **self.parameters)",
        "KINDS[self.kind].check(text, **self.parameters)",
        INSTRUCTIONS,
    ),
    Fault(
        "one instruction that is fulfilled is enough",
        "envs/tasks/instructions/environment.py::Instructions.step",
        'share if self.reward == "share" else float(all(kept))',
        'share if self.reward == "share" else float(any(kept))',
        INSTRUCTIONS,
    ),
    Fault(
        "a word is forbidden inside of others",
        "envs/tasks/instructions/checks.py::_forbidden",
        'rf"(?<!\\w){re.escape(word)}(?!\\w)"',
        "re.escape(word)",
        INSTRUCTIONS,
    ),
    Fault(
        "loose verification is always done",
        "envs/tasks/instructions/environment.py::Instructions.step",
        "_loosened(said) if self.loose else (said,)",
        "_loosened(said)",
        INSTRUCTIONS,
    ),
    Fault(
        "Ctrl-C ends what runs queries",
        "envs/tasks/sql/inside.py::main",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "pass",
        QUERIES,
    ),
]
