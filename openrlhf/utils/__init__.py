"""The functions that users' reward and agent files import: answer extraction and grading; agents are in
`openrlhf.utils.agent`."""

from openrlhf.utils.math_grading import extract_boxed_answer, grade_answer

__all__ = ["extract_boxed_answer", "grade_answer"]
