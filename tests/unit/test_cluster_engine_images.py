"""Images on their way to the engines of a cluster: all ends in this process, on loopback; Ray is not asked."""

import asyncio

import torch

from openrlhf.cluster.connections import Address, serve_requests
from openrlhf.cluster.engines import RayEngines
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.requests import EngineRequests, ImageStore
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, SamplingParams


class CountingStore(ImageStore):
    """Notes the images that arrive."""

    def __init__(self):
        super().__init__()
        self.arrived = []

    def keep(self, image):
        self.arrived.append(image.digest)
        super().keep(image)


class Engine:
    """Answers with the first pixel of each image that it was asked with; it fails once it has answered `most`."""

    version, max_model_len = 0, 1000

    def __init__(self, most: int):
        self.left = most

    async def generate(self, token_ids, sampling_params, images=()):
        if self.left == 0:
            raise EngineError("the engine has died")
        self.left -= 1
        ids = [int(image.tensors["pixel_values"][0]) for _, image in images]
        return Generation(token_ids=ids, logprobs=None, versions=[0] * len(ids), finish_reason=FinishReason.STOP)


class Remote:
    def __init__(self, method):
        self.remote = method


class Slot:
    """What `RayEngines` asks of `EngineSlot`: here a process is a server on the loop of the test."""

    def __init__(self, name: str, *lives: int):
        """`lives`: how many requests each process answers before it fails."""
        self.name = name
        self._lives = list(lives)
        self.stores = []
        self.start_process()

    def start_process(self):
        engine, store = Engine(self._lives.pop(0)), CountingStore()
        self.stores.append(store)

        async def address() -> Address:
            return await serve_requests(EngineRequests(engine), host="127.0.0.1", images=store)

        self.actor = type("Actor", (), {"serve_requests": Remote(address)})()

    def end_process(self):
        pass

    def require_node(self):
        pass

    def wait(self, *, deadline):
        pass


def picture(number: int) -> ImageInput:
    tensors = {"pixel_values": torch.full((8,), float(number))}
    return ImageInput(tensors=tensors, token_ids=(7,) * 5, placeholder=7, digest=f"{number:032x}")


def asked(engines, *numbers: int):
    """A request with these images, one after the other; the first tokens are the same whatever the images."""
    placed = [PlacedImage(1 + 5 * place, picture(number)) for place, number in enumerate(numbers)]
    return engines.generate([1, *[7] * 5 * len(numbers), 2], SamplingParams(), placed)


def numbers_of(store: CountingStore) -> list[int]:
    return [int(digest, 16) for digest in store.arrived]


def test_turns_of_an_episode_stay_with_the_engine_that_has_its_images():
    async def main():
        slots = [Slot("first", 100), Slot("second", 100)]
        engines = RayEngines(slots, max_model_len=1000)
        episodes = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
        for turn in (1, 2, 3):
            answers = await asyncio.gather(*(asked(engines, *shown[:turn]) for shown in episodes))
            assert [answer.token_ids for answer in answers] == [shown[:turn] for shown in episodes]
        engines._connections.close()
        return [numbers_of(slot.stores[0]) for slot in slots]

    arrived = asyncio.run(main())
    assert sorted(arrived[0] + arrived[1]) == [10, 11, 12, 20, 21, 22, 30, 31, 32]  # each once
    assert all(arrived)
    for there in arrived:  # whole episodes
        assert all({n, n + 1, n + 2} <= set(there) for n in there if n % 10 == 0)


def test_an_engine_that_takes_anothers_place_is_sent_the_images_it_needs():
    async def main():
        slot = Slot("only", 2, 100)
        engines = RayEngines([slot], max_model_len=1000)
        found = []
        async with asyncio.timeout(60):
            for shown in ([1], [1, 2], [1, 2, 3], [1, 2, 3]):
                found.append((await asked(engines, *shown)).token_ids)
        engines._connections.close()
        engines.wait_for_replacements()
        assert engines.take_replaced() == 1
        return found, [numbers_of(store) for store in slot.stores]

    found, arrived = asyncio.run(main())
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 3]]
    assert arrived[0] == [1, 2, 3]  # the last of them with the request that it did not answer
    assert sorted(arrived[1]) == [1, 2, 3]
