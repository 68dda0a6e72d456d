"""Extraction and grading of answers."""

import subprocess
import sys

import pytest

from openrlhf.utils import extract_boxed_answer, grade_answer, math_grading


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{4}", "4"),
        (r"\boxed{4}, no: \boxed{5}.", "5"),
        (r"\boxed{\frac{1}{\sqrt{2}}} and more {text}", r"\frac{1}{\sqrt{2}}"),
        (r"\fbox{ 7 }", "7"),
        (r"\boxed{a} then \fbox{b}", "b"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{1, 2}", r"\{1, 2"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {8}", "8"),
        (r"$\boxed 5$", "5"),
        (r"\boxed{4}, or rather \boxed{5", "4"),
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxedtext{4}", None),
        ("the answer is 4", None),
        ("", None),
    ],
)
def test_the_last_complete_box(text, answer):
    assert extract_boxed_answer(text) == answer


EQUAL = [
    ("5", "5"),
    (5, "5.0"),
    ("1,000", "1000"),
    ("10{,}000.50", "10000.5"),
    ("1e3", "1000"),
    ("1.5e-3", "0.0015"),
    ("1/2", r"\frac{1}{2}"),
    ("0.5", r"\frac12"),
    (".5", r"\dfrac{1}{2}"),
    ("-1/2", r"\frac{-1}{2}"),
    ("−3", "-3"),
    ("1 1/2", "1.5"),
    (r"1\frac{1}{2}", "3/2"),
    ("50%", "0.5"),
    (r"50\%", "50"),
    ("0.333333", "1/3"),
    (r"\$18", "18"),
    ("18 dollars", "18"),
    (r"5\text{ cm}", "5"),
    ("5.0 cm", "5 cm"),
    ("12 cm^2", "12.0"),
    ("5 x", "5x"),
    (r"30^\circ", "30 degrees"),
    (r"\text{Evelyn}", "evelyn"),
    ("(B)", "B"),
    ("(1, 2)", "(1.0,2)"),
    (r"\left(\frac12, 3\right)", "(0.5,3)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2, 1"),
    (r"[0,\infty)", "[0, inf)"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x = 5", "5"),
    ("2**10", "1024"),
    ("2^10", "1024"),
    ("pi/2", r"\frac{\pi}{2}"),
    ("sin(x)", r"\sin(x)"),
    (r"6.0 \times 10^3", "6000"),
    (r"x \in (3,\infty)", r"(3,\infty)"),
    ("x>3", "3<x"),
    (r"\boxed{7}", "$7$."),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
]
DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("7.0000001", "7"),
    ("0.333", "1/3"),
    ("1 1/2", "1"),
    ("1 1/2", "11/2"),
    ("5 cm", "5 m"),
    ("5 x", "5"),
    ("2**10", "2"),
    ("2^10", "20"),
    ("(1,2)", "(2,1)"),
    ("[0,1)", "(0,1]"),
    ("(1,2)", "(1,2,3)"),
    ("1", "1,2"),
    ("listen", "silent"),
    ("Paris", "London"),
    ("3 apples and 4 pears", "4"),
    ("5 or 6", "5"),
    ("13_{6}", "13"),
    ("x=5", "y=5"),
    ("2x", "2y"),
    (r"-\infty", r"\infty"),
    (r"\frac{1}{0}", "5"),
    ("", "5"),
    ("", ""),
    (None, "5"),
    ("9" * 3000, "9" * 3000),
    (r"\frac{", "1"),
]


@pytest.mark.parametrize(("given", "truth"), EQUAL)
def test_equal(given, truth):
    assert grade_answer(given, truth)
    assert grade_answer(truth, given)


@pytest.mark.parametrize(("given", "truth"), DIFFERENT)
def test_different(given, truth):
    assert not grade_answer(given, truth)
    assert not grade_answer(truth, given)


def test_plain_answers_need_no_process(monkeypatch):
    monkeypatch.setattr(math_grading, "_compare", None)
    assert grade_answer("1,000", "1000.0")
    assert grade_answer("Paris", " paris ")
    assert not grade_answer("Paris", "4")


def test_importing_it_is_cheap():
    code = "import sys, openrlhf.utils; assert not {'torch', 'sympy', 'math_verify', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
