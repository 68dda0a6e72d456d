"""What every engine checks of a prompt before it takes it."""

from __future__ import annotations

import pytest

from openrlhf.rollout.base import check_images
from openrlhf.types import ImageInput, PlacedImage

PLACEHOLDER, VIDEO, ROW_END = 90, 91, 92
IMAGE = ImageInput(tensors={}, token_ids=(PLACEHOLDER, ROW_END, PLACEHOLDER), placeholder=PLACEHOLDER, digest="abc")
TOKENS = [1, *IMAGE.token_ids, *IMAGE.token_ids, 2]


def check(token_ids: list[int], *starts: int) -> None:
    check_images(token_ids, [PlacedImage(start, IMAGE) for start in starts], unsampled=(PLACEHOLDER, VIDEO))


def test_images_may_stand_side_by_side_and_tokens_that_are_no_placeholders_anywhere():
    check(TOKENS, 1, 4)
    check([1, 2, ROW_END])


@pytest.mark.parametrize(
    ("token_ids", "starts", "message"),
    [
        (TOKENS, (0, 4), "the tokens from 0 on are not those of the image abc"),
        (TOKENS, (1, 1), "the image at token 1 stands before token 4"),  # one place for two images
        (TOKENS, (4, 1), "the image at token 1 stands before token 7"),  # not in order
        (TOKENS[:-2], (1, 4), "the tokens from 4 on are not those"),  # the last one is cut
        (TOKENS, (1,), "the prompt has the token 90, which stands for an image, and no image belongs to it"),
        ([VIDEO, *TOKENS], (2, 5), "the prompt has the token 91"),
    ],
)
def test_images_that_are_not_where_their_tokens_are_are_refused(token_ids, starts, message):
    with pytest.raises(ValueError, match=message):
        check(token_ids, *starts)
