"""Equality of answers to a problem of mathematics."""

import os
import signal

import pytest

from jaxrl_post.envs.tasks.graders import Grader
from jaxrl_post.envs.tasks.mathematics.answers import final_answer

pytest.importorskip("math_verify", reason="needs the extra 'math'")


def grade(said: str, right: str) -> float:
    return Grader("math").grade(rf"So \boxed{{{said}}}.", right).reward


RIGHT = [
    # A comma in brackets separates.
    ("(0,100)", "(0,100)"),
    ("(10,200)", r"\left( 10,\, 200 \right)"),
    ("[100,200]", "[ 100 , 200 ]"),
    (r"\{1,100\}", r"\left\{ 100, 1 \right\}"),
    ("(1,100,200)", "(1, 100, 200)"),
    ("(2,-3,500)", "(2,-3,500)"),
    ("((1,200),(3,400))", "((1, 200), (3, 400))"),
    (r"(-\infty,-100)\cup(100,200)", r"(100,200) \cup (-\infty, -100)"),
    # Unless a group of digits begins with 0, as no element does.
    ("(1000, 2500)", "(1,000, 2,500)"),
    ("(1000,2000)", "(1{,}000, 2{,}000)"),
    # Elsewhere it groups digits.
    ("1080", "1,080"),
    ("12345678", "12,345,678"),
    ("1000", r"\$1,000"),
    ("1000", r"1,\! 000"),
    ("1000.5", "1,000.5"),
    ("-1,000", "-1000"),
    ("1000000", "1 000 000"),
    ("1,080", "1080"),
    ("1200/7", r"\frac{1,200}{7}"),
    # Numbers as JSON writes them.
    (1e-05, "1e-05"),
    (1e-05, r"1 \times 10^{-5}"),
    (1e-05, "0.00001"),
    (1e16, "10000000000000000"),
    ("100000", "1E5"),
    ("1.5e+3", "1500"),
    ("(1e-05, 2)", "(0.00001, 2)"),
    # The file's answer may be displayed.
    (r"\[ (0,1) \]", "(0,1)"),
    (r"$$\frac{1}{2}$$", r"\frac12"),
    (r"\(5\)", "5"),
    (r"\begin{equation} 5 \end{equation}", r"\[5\]"),
    (r"\[ \boxed{5}. \]", "5"),
    # One number has many spellings.
    (r"-\frac{1}{2}", "\N{EN DASH}\\frac{1}{2}"),
    (r"4\sqrt{2}", r"4\sqrt(2)"),
    (r"4\sqrt{2}", "4\N{SQUARE ROOT}2"),
    ("5/2", r"2\frac{1}{2}"),
    ("5/2", "2 1/2"),
    ("2.5", "2½"),
    ("12", "\uff11\uff12"),
    ("x^2+1", "x\N{SUPERSCRIPT TWO}+1"),
    (r"2\pi", "2\N{GREEK SMALL LETTER PI}"),
    ("1/3", "0.333333"),
    ("30", "30\N{DEGREE SIGN}"),
    ("72", "72 \\text{ cm}^2"),
    ("72", "72 clips"),
    ("5", "\N{EURO SIGN}5"),
    ("101_2", "101_{2}"),
    ("120", "5!"),
    ("3,5", r"3 \text{ or } 5"),
    (r"\pm 3", "3, -3"),
    ("72", "48 + 24 = 72"),
    (r"\sqrt{2}", r"\sqrt{2} \approx 1.414"),
    # Words are words.
    ("Paris", r"\text{paris}"),
    ("A", r"\textbf{(A)}"),
    # A break of a line is no space.
    (r"\begin{pmatrix}1\\200\end{pmatrix}", r"\begin{pmatrix} 1 \\ 200 \end{pmatrix}"),
    # Adjacent factors are multiplied, but for a mixed number; units, spaces.
    ("60", r"\binom{5}{2}\binom{4}{2}"),
    ("12", r"2\binom{4}{2}"),
    ("1", r"2(\frac{1}{2})"),
    ("1", r"2\left(\frac{1}{2}\right)"),
    ("3/2", r"\frac{6}{2}\frac{1}{2}"),
    ("12", "3(4)"),
    ("5/2", r"2\frac{1}{2}"),
    ("2.5", r"2 \frac12"),
    ("-5/2", r"-2\frac{1}{2}"),
    ("3e-05", "3 * 10^{-5}"),
    ("10", "2 * 5"),
    ("10", "2*5"),
    ("1e-05", "x = 1e-05"),
    ("1e-05", "10^-5"),
    ("1e-05", "1\N{MULTIPLICATION SIGN}10^-5"),
    ("1e-07", r"x = 1 \times 10^{-7}"),
    ("1e-07", "0.0000001"),
    ("0.5", "0{,}5"),
    ("10, 200", r"10,\,200"),
    ("10200", r"10\,200"),
    ("1080", "1{,}080"),
    ("1080", r"1,\!080"),
    ("10000", "10 000 km"),
    ("(1,2)", "(1,2)"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"\{1,2\}", "1,2"),
    ("[1,2]", "[1,2]"),
    ("(0,100)", r"\left( 0, 100 \right)"),
    (r"2\sqrt{3}", "\N{SQUARE ROOT}12"),
    ("2", "\N{SQUARE ROOT}4"),
    (r"25\pi", r"25\pi \text{ cm}^2"),
    ("25", r"25^\circ\text{C}"),
    ("25", "25 \N{DEGREE SIGN}C"),
    ("60", "60 km/h"),
    ("5", "5 m/s"),
    ("5", "5 USD"),
    ("5", "5 sq ft"),
    (r"x \ne 2", r"x \ne 2"),
    ("72", r"72\text{ clips}"),
    ("50", r"50\%"),
    (r"4\sqrt{2}", r"4\sqrt(2)"),
    ("3x", "3x"),
    ("6", r"2 \cdot 3"),
    (r"2\pi", r"2 \pi"),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}"),
    ("2x+2y", "2(x+y)"),
    (r"\begin{pmatrix}2\\4\end{pmatrix}", r"2\begin{pmatrix}1\\2\end{pmatrix}"),
    ("5", "**5**"),
    ("5", "*5*"),
]


@pytest.mark.parametrize(("right", "said"), RIGHT)
def test_equal_answers_earn_all(right, said):
    assert grade(said, right) == 1.0


@pytest.mark.parametrize("right", dict.fromkeys(right for right, _ in RIGHT))
def test_an_answer_equals_itself(right):
    said = Grader("math").reference(right)
    assert grade(said, right) == 1.0
    assert Grader("math").grade(Grader("math").shown(said), right).reward == 1.0


WRONG = [
    ("10200", "(10,200)"),
    ("(10,200)", "10200"),
    ("(0,100)", "[0,100]"),
    ("(1,100,200)", "(100,1,200)"),
    ("((1,200),(3,400))", "((1,200),(3,401))"),
    (1e-05, "2e-05"),
    (1e-07, r"2 \times 10^{-7}"),
    # Text that was not read to its end.
    (r"\frac{1}{2}", "\N{EN DASH}\\frac{1}{2}"),
    (r"\frac{1}{2}", r"-$\frac{1}{2}$"),
    ("4", r"4\sqrt(2)"),
    ("101", "101_2"),
    ("101_3", "101_2"),
    ("1000", "1000!"),
    ("3", r"3 \text{ or } 5"),
    ("3", r"\pm 3"),
    ("1,2", r"1,2,\ldots"),
    ("5", r"5\text{ million}"),
    ("5", r"5\text{ or more}"),
    ("5", "5'"),
    ("3", "3t"),
    ("72", "72)"),
    ("72", "72 +"),
    ("5", r"5 \\ 6"),
    ("5", "5|6"),
    ("5", r"\not 5"),
    ("5", "> 5"),
    ("5", r"5 \approx 6"),
    ("2", r"2\pi"),
    # Side by side is neither a sum nor a number of both digits.
    ("9", "7 2"),
    ("72", r"7\ 2"),
    ("7", "3(4)"),
    ("listen", "silent"),
    ("1/3", "0.33"),
    ("50", "0.5"),
    # Other kinds of lists, small numbers, groups that are none, words that count.
    ("16", r"\binom{5}{2}\binom{4}{2}"),
    ("8", r"2\binom{4}{2}"),
    ("5/2", r"2(\frac{1}{2})"),
    ("1", r"2\frac{1}{2}"),
    ("(0.0000001, 2)", "(0.0000002, 2)"),
    (r"\{0.0000001, 2\}", r"\{0.0000002, 2\}"),
    ("1e-07", "x = 0.0000002"),
    ("1e-07", r"x = 2 \times 10^{-7}"),
    ("5", "0{,}5"),
    ("35", "3{,}5"),
    ("72", r"7\,2"),
    ("10200", r"10,\,200"),
    ("1<x<2", r"\{1,2\}"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2,3)", r"\{1,2,3\}"),
    (r"\{1,2\}", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("2", "\N{SQUARE ROOT}12"),
    ("5", r"5\text{ hundredths}"),
    ("3", "3 fifths"),
    ("5", "5 factorial"),
    ("10:30", r"10:30 \text{ p.m.}"),
    (r"x \ne 2", r"x \ne 3"),
    ("1<x<2", "1<x<2<3"),
]


@pytest.mark.parametrize(("right", "said"), WRONG)
def test_other_answers_earn_nothing(right, said):
    assert grade(said, right) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{5} or \boxed{7 + ", None),
        ("#### 5\nWait, \\boxed{7 + ", None),
        ("\\boxed{7 + \n#### 5", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"\fbox{5}", "5"),
        ("#### 4\\sqrt{2}", r"4\sqrt{2}"),
        ("#### 5!", "5!"),
        ("#### 3 or 5", "3 or 5"),
        ("#### 2 1/2", "2 1/2"),
        ("#### 72/day", "72"),
        ("#### 1e-05", "1e-05"),
        ("#### 72, as 48+24", "72"),
    ],
)
def test_a_marked_answer_is_taken_whole(text, answer):
    assert final_answer(text) == answer


def test_an_unclosed_box_in_a_file_is_a_bad_answer():
    reason = Grader("math").wrong_with(r"It is \boxed{5")
    assert reason == r"has no box that closes at its end, got 'It is \\boxed{5'"


def test_a_machine_so_busy_that_every_alarm_rings_changes_no_verdict(monkeypatch):
    # The clock's alarm of math-verify, and of all else that sets one.
    monkeypatch.setattr(
        signal,
        "alarm",
        lambda seconds: seconds and os.kill(os.getpid(), signal.SIGALRM),
    )
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        assert grade(r"\frac{11}{2}", "5.50") == 1.0
        assert grade("seventy-two", "72") == 0.0
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_comparison_without_end_is_a_failure_and_no_0():
    with pytest.raises(TimeoutError, match="comparing an answer took more than 2 s of"):
        grade("(" * 90 + "1" + ")" * 90, "1")


@pytest.mark.parametrize(
    ("right", "said", "reward"),
    [
        ("72", "#### 96 - 24 = 72", 1),
        ("96", "#### 96 - 24 = 72", 0),
        ("10", "#### 10 - 5", 0),
        ("5", "#### 5-6", 0),
        ("5", "#### 5 to 6", 0),
        ("5", "#### 5 million", 0),
        ("5", r"#### 5 \text{ million}", 0),
        ("1000", "#### 1 000", 1),
        ("1", "#### 1 000", 0),
        ("3", "#### 3:2", 0),
        ("10", "#### 5 * 2", 1),
        ("5", "#### 5 * 2", 0),
        ("5", "#### +5", 1),
        ("1/2", r"#### \frac{1}{2}", 1),
        ("(1,2)", "#### (1,2)", 1),
        ("72", "#### 72", 1),
        ("72", "#### 72.", 1),
        ("72", "#### 72 apples", 1),
        ("72", "#### $72 (in total)", 1),
        ("4", r"It is \boxed{4}. No: \boxed 5", 0),
        ("5", r"#### \boxed{5}", 1),
        ("72", "#### 72 - the total", 1),
        ("-5", "#### -5", 1),
        ("72", "#### 72: done", 1),
    ],
)
def test_a_line_behind_the_mark_is_taken_whole(right, said, reward):
    assert Grader("math").grade(f"So\n{said}", right).reward == reward


def test_the_last_number_may_have_an_exponent():
    for text, number in (
        ("The answer is 1e-05.", "1e-05"),
        ("It is 2.5e3.", "2.5e3"),
        ("It is *5*.", "5"),
    ):
        assert final_answer(text, extraction="flexible") == number
