"""Which of several engines gets a request."""

from openrlhf.rollout.router import SLACK, Router, beginning_of
from openrlhf.types import ImageInput, PlacedImage


def test_router_chooses_the_engine_with_the_fewest_requests():
    router = Router(3)
    with (
        router.chosen(1) as first,
        router.chosen(2) as second,
        router.chosen(3) as third,
    ):
        assert {first, second, third} == {0, 1, 2}
        assert router.running == [1, 1, 1]
    assert router.running == [0, 0, 0]


def test_router_keeps_equal_prompts_together_until_the_engine_is_much_busier():
    router = Router(2)
    prompt = list(range(100))
    opened = [router.chosen(beginning_of([*prompt, i])) for i in range(SLACK + 2)]
    engines = [request.__enter__() for request in opened]
    assert engines == [0] * (SLACK + 1) + [1]
    for request in opened:
        request.__exit__(None, None, None)
    with router.chosen(beginning_of(prompt)) as engine:
        assert engine == 1  # where it was last


def test_router_gives_a_lost_engine_no_requests_until_it_is_back():
    router = Router(2)
    with router.chosen(1) as known:
        assert known == 0
    router.close_to(0)
    with (
        router.chosen(1) as first,
        router.chosen(1) as second,
        router.chosen(2) as third,
    ):
        assert {first, second, third} == {1}
    router.open_to(0)
    with router.chosen(2) as stays, router.chosen(3) as least_busy:
        assert (stays, least_busy) == (1, 0)


def test_router_chooses_an_engine_also_when_all_are_lost():
    router = Router(1)
    router.close_to(0)
    assert not router.open
    with router.chosen(1) as engine:
        assert engine == 0


def test_prompts_that_differ_in_their_images_alone_are_told_apart_and_later_turns_stay():
    """Images of the same size have the same tokens, so a data set of one question has one beginning without them."""
    tokens = [1, *[7] * 80, 2]

    def image(digest: str) -> ImageInput:
        return ImageInput(tensors={}, token_ids=(7,) * 80, placeholder=7, digest=digest)

    first, other = [PlacedImage(1, image("aa"))], [PlacedImage(1, image("bb"))]
    assert beginning_of(tokens, first) != beginning_of(tokens, other)
    later = [*first, PlacedImage(90, image("cc"))]
    assert beginning_of([*tokens, *[7] * 99], later) == beginning_of(tokens, first)
