"""A taskset of verifiers in a few lines: sums of two small numbers. Needs the package verifiers (`verifiers.v1`)."""

import re

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    """One where the last number is right, and a fifth where the answer is a number alone."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(re.findall(r"\d+", said(trace))[-1:] == [str(self.data.answer)])

    @vf.reward(weight=0.2)
    async def alone(self, trace: vf.Trace) -> float:
        return float(said(trace).isdecimal())


class SumConfig(vf.TasksetConfig):
    largest: int = 9


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        numbers = range(self.config.largest + 1)
        return [
            SumTask(SumData(prompt=f"What is {a} + {b}? Answer with the number alone.", answer=a + b), self.config.task)
            for a in numbers
            for b in numbers
        ]


def said(trace: vf.Trace) -> str:
    return (trace.assistant_messages[-1].content or "").strip()


__all__ = ["SumTaskset"]
