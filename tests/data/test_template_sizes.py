"""One expression of a template takes neither gigabytes nor minutes."""

import subprocess
import sys
import time

import pytest

from jaxrl_post.data.templates import run
from jaxrl_post.data.tokenizer_files import TokenizerError

A = "{% set a = 'a' * 2**25 %}"
# Each list has the one before it twice: 2**40 letters, in 40 lists.
FOLDED = (
    "{% set ns = namespace(x=['a']) %}{% for i in range(40) %}{% set ns.x = [ns.x, "
)
FOLDED += "ns.x] %}{% endfor %}"
TUPLES = FOLDED.replace("['a']", "('a',)").replace("[ns.x, ns.x]", "(ns.x, ns.x)")

HOSTILE = {
    "times": "{{ 'a' * 10**10 }}",
    "times, never reached": "{% if false %}{% endif %}{% set x = 10**10 * 'a' %}",
    "list times": "{% set x = [0] * 10**9 %}",
    "list times, of a list": "{% set x = [[0] * 9**7] * 9**7 %}{{ x }}",
    "power": "{{ 10 ** (10 ** 8) }}",
    "power, negative": "{{ (-3) ** 99999999 }}",
    "product": "{% set ns = namespace(x=9**99) %}{% for i in range(50) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent, precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent, star": "{{ '%*d' % (10**9, 1) }}",
    "percent, names": A + "{{ ('%(x)s' * 999) % {'x': a} }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format, nested": "{{ '{:{}}'.format(1, 10**9) }}",
    "format, nested by name": "{{ '{:{w}}'.format(1, w=10**9) }}",
    "format, zeros": "{{ '{:01000000000d}'.format(1) }}",
    "format, nested text": "{{ '{:>{}}'.format('x', '6000000000') }}",
    "format, nested float": "{{ '{:>{}}'.format('x', 6e9) }}",
    "format, nested attribute": "{% set ns = namespace(a=6000000000) %}"
    "{{ '{1:>{0.a}}'.format(ns, 'x') }}",
    "format, a key that is a brace": "{{ '{0[}]:>6000000000}'.format({'}': 1}) }}",
    "percent, brackets in a name": "{{ '%(a(b))6000000000d' % {'a(b)': 1} }}",
    "percent, brackets alone": "{{ ('%(' * 3000000) % 1 }}",
    "searched from the right": "{{ ('a' * 4000000).rfind('ab' + 'a' * 2000000) }}",
    "split from the right": "{{ ('a' * 4000000).rsplit('ab' + 'a' * 2000000) }}",
    "letters one by one": "{{ ('a' * 60000000)|map('upper')|list|length }}",
    "letters in a list": "{{ ('a' * 60000000)|list|length }}",
    "words in a list": "{{ ('ab ' * 22000000).split()|length }}",
    "format map": "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "format by attr": "{{ ('{:>1000000000}'|attr('format'))(1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format, repeated": A + "{{ ('{0}' * 999).format(a) }}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ '1'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "encode": "{{ 'a'.encode('punycode') }}",
    "translate": "{{ ('a' * 9**6).translate({97: 'b' * 9**6}) }}",
    "replace filter": "{% set x = 'a' * 9**5 %}{{ x|replace('', x) }}",
    "replace": "{% set x = 'a' * 9**5 %}{{ x.replace('a', x) }}",
    "join filter": "{{ ([1] * 9**6)|join('a' * 9**6) }}",
    "join, of a generator": "{{ range(99999)|map('string')|join('a' * 9**6) }}",
    "join": "{{ ('a' * 9**6).join(['b'] * 9**6) }}",
    "join, of a generator's": "{{ ('a' * 9**6).join(range(99999)|map('string')) }}",
    "join, of one text": "{{ (['a' * 2**20] * 999)|join }}",
    "concat": A + "{{ a ~ a ~ a ~ a }}",
    "concat in a loop": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "plus in a loop": "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "lists in a loop": "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "slices": A + "{% set l = [" + "a[1:], " * 999 + "] %}",
    "copies": A + "{% set l = [" + "a.upper(), " * 999 + "] %}",
    "blocks": "{% set a %}"
    + "x" * 999
    + "{% endset %}"
    + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "macros": "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{{ "
    + "m(" * 50
    + "'a'"
    + ")" * 50
    + " }}",
    "filter blocks": A + "{% filter upper %}" + "{{ a }}" * 99 + "{% endfilter %}",
    "output": A + "{{ a }}" * 9999,
    "constant output": "{% for i in range(99999) %}" + "x" * 99999 + "{% endfor %}",
    "constants in a macro": "{% macro m() %}{% for i in range(99999) %}"
    + "x" * 99999
    + "{% endfor %}{% endmacro %}{{ m()|length }}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "indent": "{{ ('\n' * 9**5)|indent(10**5) }}",
    "indent, once": "{{ 'a'|indent(10**9, first=true) }}",
    "tojson": "{{ [1]|tojson(indent=10**9) }}",
    "tojson, separators": "{{ ([1] * 9**6)|tojson(separators=('a' * 9**6, '')) }}",
    "tojson, deep": "{{ "
    + "[" * 50
    + "[1] * 9**6"
    + "]" * 50
    + "|tojson(indent=99) }}",
    "wordwrap": "{{ ('a ' * 9**5)|wordwrap(1, wrapstring='b' * 9**6) }}",
    "urlize": "{{ ('www.example.com ' * 9**4)|urlize(target='b' * 9**6) }}",
    "round": "{{ 5|round(-10**9)|int }}",
    "round, up": "{{ 5|round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1]] * 9**6)|sum(start=[])|length }}",
    "int": "{{ (('f' * 9**7)|int(0, 16)) // 3 }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "strftime": "{{ strftime_now('%Y' * 9**6) }}",
    "a list that is shared": FOLDED + "{{ ns.x }}",
    "a namespace": FOLDED + "{{ ns }}",
    "a list in a concat": FOLDED + "{{ ns.x ~ '' }}",
    "a list as a string": FOLDED + "{{ ns.x|string }}",
    "a list as JSON": FOLDED + "{{ ns.x|tojson }}",
    "a list in a format": FOLDED + "{{ '%s' % [ns.x] }}",
    "a list, compared": FOLDED + "{% set y = ns.x %}" + FOLDED + "{{ ns.x == y }}",
    "a list, tested": FOLDED + "{% set y = ns.x %}" + FOLDED + "{{ ns.x is eq y }}",
    "a list, sorted": FOLDED + "{% set y = ns.x %}" + FOLDED + "{{ [y, ns.x]|sort }}",
    "a list, found": FOLDED + "{% set y = ns.x %}" + FOLDED + "{{ [y].index(ns.x) }}",
    "a key": TUPLES + "{{ {ns.x: 1} }}",
    "a key, asked for": TUPLES + "{{ {'a': 1}[ns.x] }}",
    "a key, got": TUPLES + "{{ {'a': 1}.get(ns.x) }}",
    "a key of dict": TUPLES + "{{ dict([(ns.x, 1)]) }}",
    "an error": "{{ raise_exception('a' * 2**25) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_be_too_large_is_refused(name):
    begin = time.process_time()
    with pytest.raises(
        TokenizerError, match=r"^chat: the chat template failed"
    ) as told:
        run(HOSTILE[name], {"x": 1})
    assert len(str(told.value)) < 3000
    # Seconds of processor time, several times what the slowest takes.
    assert time.process_time() - begin < 20


@pytest.mark.processes
def test_they_take_little_memory():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))\n"
        "from tests.data.test_template_sizes import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        # Some of each kind: all of them take a minute.
        "for source in [*HOSTILE.values()][::4]:\n"
        "    try: run(source, {})\n"
        "    except TokenizerError: pass\n"
        "    else: raise SystemExit('not refused: ' + source[:200])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    kib = int(done.stdout) if sys.platform == "linux" else int(done.stdout) >> 10
    assert kib < 2**20


TEXT = "It is a\nlong text, <b>of</b> many words. " * 2000


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x|replace('\n', '\n    ') }}", TEXT.replace("\n", "\n    ")),
        ("{{ x.replace('a', 'bb') }}", TEXT.replace("a", "bb")),
        ("{{ (x|trim).split('</b>', 1)[0] }}", TEXT.split("</b>", 1)[0]),
        ("{{ x[1:-1] ~ '!' }}", TEXT[1:-1] + "!"),
        ("{{ x.find('words', 20) }}", str(TEXT.find("words", 20))),
        ("{{ x.split('\n')|join('\n\n') }}", TEXT.replace("\n", "\n\n")),
        ("{{ '%s|%05.2f|%5d' % (x, 1.5, 7) }}", f"{TEXT}|01.50|    7"),
        ("{{ '{}|{:>5}|{:{}}'.format(x, 7, 1, 3) }}", f"{TEXT}|    7|  1"),
        ("{{ 'call 1234567890123: %s' % 1 }}", "call 1234567890123: 1"),
        ("{{ 2**64 // 3 % 10**9 - 1 + 0.5 }}", str(2**64 // 3 % 10**9 - 1 + 0.5)),
        ("{{ 3.14159|round(2) }} {{ 'a'|center(5) }}", "3.14   a  "),
        ("{{ [1, 2] == [1, 2] }}{{ 1 < 2 < 3 }}{{ x in [x] }}", "TrueTrueTrue"),
        ("{{ [[1]]|tojson(indent=2) }}", "[\n  [\n    1\n  ]\n]"),
        ("{{ [{'a': 1}, {'a': 2}]|sum('a') }}", "3"),
        ("{{ {'a': x}.a|length }} {{ {(1, 2): 3}[(1, 2)] }}", f"{len(TEXT)} 3"),
        ("{% set y %}{{ x }}{% endset %}{{ y|upper }}", TEXT.upper()),
        ("{{ [1, 2, 3]|map('string')|join(', ') }}", "1, 2, 3"),
        ("{{ [1, 2, 3]|batch(2, 0)|list }}", "[[1, 2], [3, 0]]"),
        ("{{ x|truncate(9, true, '') }}{{ 'a b'|wordwrap(1) }}", f"{TEXT[:9]}a\nb"),
    ],
)
def test_what_templates_write_is_what_they_wrote(source, text):
    assert run(source, {"x": TEXT}).text == text


def test_a_long_conversation_is_rendered():
    messages = [{"role": "user", "content": "word " * 400}] * 2000
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}"
        "{% if loop.index0 == messages|length - 1 or m.role in ['user', 'system'] %}"
        "{% set content = '<|' ~ m.role + '|>' ~ m.content|trim %}{{ content }}"
        "{% set ns.text = m.content %}{% endif %}{% endfor %}{{ messages|tojson }}"
    )
    text = run(source, {"messages": messages}).text
    assert text.count("<|user|>word") == 2000
