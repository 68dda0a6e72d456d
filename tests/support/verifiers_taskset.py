"""A taskset of verifiers for tests: say a letter, and look one up with a tool."""

import verifiers.v1 as vf


class LetterData(vf.TaskData):
    letter: str


class Lookup(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "book"

    @vf.tool
    def letter(self, page: int) -> str:
        """The letter on a page."""
        return "abcd"[page % 4]


class LetterTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    with_tools: bool = False


class LetterTask(vf.Task[LetterData, vf.State, LetterTaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Lookup(config.tools)] if config.with_tools else []

    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        return float(self.data.letter in (trace.assistant_messages[-1].content or ""))

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class LetterConfig(vf.TasksetConfig):
    num_tasks: int = 4
    task: LetterTaskConfig = LetterTaskConfig()


class LetterTaskset(vf.Taskset[LetterTask, LetterConfig]):
    def load(self):
        return [
            LetterTask(
                LetterData(prompt=f"Say {'abcd'[i % 4]}.", system_prompt="Be brief.", letter="abcd"[i % 4]),
                self.config.task,
            )
            for i in range(self.config.num_tasks)
        ]


__all__ = ["LetterTaskset"]

if __name__ == "__main__":
    Lookup.run()
