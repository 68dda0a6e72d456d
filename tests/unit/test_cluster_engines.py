"""What the driver knows of its engines' weights. Engines are objects of this process; Ray is not asked."""

import asyncio
from concurrent.futures import Future

from openrlhf.cluster.engine_shell import EngineShell
from openrlhf.cluster.engines import RayEngines


class Engine:
    """Whether it needs a base, and nothing else."""

    needs_base = True

    async def pause(self): ...

    async def resume(self, version): ...

    async def wake(self): ...

    async def sleep(self):
        self.needs_base = True


class Answer:
    def __init__(self, value):
        self._value = value

    def future(self):
        done = Future()
        done.set_result(self._value)
        return done


class Actor:
    """A process with an engine, as Ray would show it."""

    def __init__(self):
        self.shell = EngineShell()
        self.shell._engine = self.engine = Engine()

    def __getattr__(self, name):
        def remote(*arguments):
            try:
                getattr(self.shell, name)(*arguments).send(None)  # nothing there has to be waited for
            except StopIteration as ended:
                return Answer(ended.value)

        return type("Method", (), {"remote": staticmethod(remote)})


class Slot:
    def __init__(self, name):
        self.name, self.actor = name, Actor()


def test_a_base_is_due_while_one_that_samples_is_new_or_has_slept():
    slots = [Slot("first"), Slot("second")]
    engines = RayEngines(slots, max_model_len=10)
    first, second = (slot.actor.engine for slot in slots)

    def told(*calls):
        """What the driver says after these calls."""

        async def play():
            for call, arguments in calls:
                await getattr(engines, call)(*arguments)
            return engines.needs_base

        return asyncio.run(play())

    assert engines.needs_base
    assert told(("pause", ()))
    first.needs_base = False
    assert told(("pause", ()))
    second.needs_base = False
    assert told(("resume", (1,))) is False
    assert told(("sleep", ()), ("wake", ()), ("pause", ()))
    first.needs_base = second.needs_base = False
    assert told(("resume", (2,))) is False
    slots[1].actor = Actor()  # another process in its place
    assert engines.needs_base
    assert told(("pause", ()))
    slots[1].actor.engine.needs_base = False
    assert told(("pause", ())) is False
    engines._router.close_to(0)  # one that is lost is nobody to push to
    slots[0].actor = Actor()
    assert engines.needs_base is False
