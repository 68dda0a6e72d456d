"""Image-text models: features of images take the place of tokens, and the language model reads the packed stream.

    tokens      x  a  a  a  y           a: the placeholder, x and y: text
    features       f0 f1 f2             what the vision tower makes of the image
    the decoder reads the embeddings x, f0, f1, f2, y

Packing needs nothing more than a text model's does. What is special about a family is asked of its own class: the
features (`get_image_features`), the rows of positions (`get_rope_index`, M-RoPE), and features of the tower's lower
layers that enter the first decoder layers ("deepstack"). Whether all this gives the model's own hidden states is
compared when a model is loaded (`models.support`).

Shapes: T tokens, K features, D hidden size, R rows of positions.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.types import ImageInput, PackedTokens, PlacedImage

DECODERS = ("language_model", "text_model")
"""What families call the decoder inside of an image-text model's body."""
_GRID = "image_grid_thw"


class ImageFeatures(NamedTuple):
    """The features of some images, image after image."""

    rows_KD: Tensor
    """They take the place of placeholder tokens."""
    deeper: tuple[Tensor, ...] = ()
    """[K, D] each: what is added to the hidden states after the first, second, … decoder layer."""

    @staticmethod
    def cat(found: Sequence[ImageFeatures]) -> ImageFeatures:
        """Those of several encodings, one after the other."""
        if len(found) == 1:
            return found[0]
        deeper = zip(*(features.deeper for features in found), strict=True)
        return ImageFeatures(torch.cat([features.rows_KD for features in found]), tuple(map(torch.cat, deeper)))


def reads_images(body: nn.Module) -> bool:
    """Whether this is the body of an image-text model that is handled here."""
    return hasattr(body, "get_image_features") and language_model(body) is not None


def language_model(body: nn.Module) -> nn.Module | None:
    """The decoder inside an image-text model's body; None for a model of text."""
    return next((part for name in DECODERS if isinstance(part := getattr(body, name, None), nn.Module)), None)


def tower_parameters(body: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters outside of the decoder, by their names in the body: vision tower and projector."""
    own = tuple(f"{name}." for name in DECODERS)
    return ((name, parameter) for name, parameter in body.named_parameters() if not name.startswith(own))


def encode(body: Any, inputs: Sequence[ImageInput]) -> ImageFeatures:
    """The features of these images. Several are encoded in one call where the family allows it."""
    return ImageFeatures.cat([_features(body, batch) for batch in _batches(inputs)])


def merged_embeddings(
    body: Any, token_ids_T: Tensor, rows_T: Tensor, features: ImageFeatures
) -> tuple[Tensor, dict[str, Any]]:
    """What the decoder reads, [1, T, D], and its further arguments. `rows_T`: as in `PackedImages`.

    A stream without a single placeholder still depends on the features, with a gradient of 0: so a rank without images
    takes part in what the ranks with images do together.
    """
    placed_T = rows_T >= 0
    chosen = rows_T[placed_T]
    # The placeholder's own embedding is not used, and some families give it an id beyond their embeddings.
    embeddings = body.get_input_embeddings()(token_ids_T.masked_fill(placed_T, 0).unsqueeze(0))
    rows = features.rows_KD.index_select(0, chosen).to(embeddings.dtype)
    merged = embeddings.masked_scatter(placed_T[None, :, None], rows)
    if not features.deeper:
        return merged, {}
    deeper = [layer_KD.index_select(0, chosen).to(embeddings.dtype) for layer_KD in features.deeper]
    return merged, {"visual_pos_masks": placed_T.unsqueeze(0), "deepstack_visual_embeds": deeper}


def position_ids(body: Any, length: int, images: Sequence[PlacedImage]) -> Tensor | None:
    """int64 [R, T]: the positions of a sequence of this length with these images, on the CPU; None: they are 0 … T-1,
    as those of text are. The position after the last one follows from a longer sequence: it need not be T."""
    if not images or not hasattr(body, "get_rope_index"):
        return None
    end = images[-1].end
    head = _positions_up_to(body, images)  # [R, end + 1]
    tail = head[:, -1:] + torch.arange(max(0, length - end))
    return torch.cat([head[:, : min(end, length)], tail], dim=1)


def packed_positions(body: Any, tokens: PackedTokens) -> Tensor | None:
    """int64 [R, T]: the positions of a packed stream with images, each sequence from 0 on; None: as they are."""
    if tokens.images is None or not hasattr(body, "get_rope_index"):
        return None
    lengths = tokens.cu_seqlens.diff().tolist()
    # A stream that a rank computes for others' sake alone has images in no sequence.
    placed = tokens.images.sequences or ((),) * len(lengths)
    rows = [position_ids(body, length, images) for length, images in zip(lengths, placed, strict=True)]
    if not (several := [row for row in rows if row is not None]):
        return None
    texts = (torch.arange(length).expand(several[0].shape[0], -1) for length in lengths)
    columns = [text if row is None else row for row, text in zip(rows, texts, strict=True)]
    return torch.cat(columns, dim=1).to(tokens.token_ids.device)


_positions: weakref.WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], Tensor]] = weakref.WeakKeyDictionary()
"""For each body, by the places and sizes of images: the samples of a prompt share them, in every forward."""
_MOST_POSITIONS = 4096


def _positions_up_to(body: Any, images: Sequence[PlacedImage]) -> Tensor:
    """[R, end + 1]: the positions up to the token after the last image."""
    known = _positions.setdefault(body, {})
    key = tuple((start, image.token_ids, *image.tensors[_GRID].flatten().tolist()) for start, image in images)
    if key not in known:
        if len(known) >= _MOST_POSITIONS:
            known.clear()
        known[key] = _count_positions(body, images)
    return known[key]


def _count_positions(body: Any, images: Sequence[PlacedImage]) -> Tensor:
    """Image by image, each with the text before it and one token after it: the method takes two images without a token
    in between for one. Positions after an image depend on those before it by a sum alone."""
    parts, at, offset = [], 0, torch.tensor(0)
    for start, image in images:
        kinds_T = torch.zeros(1, start + len(image) - at + 1, dtype=torch.int32)  # 0: text, 1: image
        kinds_T[0, start - at : -1] = image.is_feature.int()
        # The method reads the number of tokens alone; which are of images is said by their kinds.
        found, _ = body.get_rope_index(
            kinds_T.long(), mm_token_type_ids=kinds_T, image_grid_thw=image.tensors[_GRID].cpu()
        )
        rows = found.squeeze(1) + offset
        parts.append(rows[:, :-1])
        at, offset = start + len(image), rows[0, -1]
    return torch.cat([*parts, rows[:, -1:]], dim=1)


def _batches(inputs: Sequence[ImageInput]) -> Iterator[list[dict[str, Tensor]]]:
    """The tensors of the images that are encoded together."""
    tensors = [image.tensors for image in inputs]
    if all(_joins_end_to_end(one, tensors[0]) for one in tensors):
        yield list(tensors)
    else:
        yield from ([one] for one in tensors)


def _joins_end_to_end(one: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of several images are those of each, end to end. Families that pad images to a common number
    of parts are not of this kind."""
    if set(one) != set(first):
        return False
    if set(one) == {"pixel_values", _GRID}:  # patches of all images, and how many of them are whose
        return one["pixel_values"].dim() == 2
    return (
        set(one) == {"pixel_values"}
        and one["pixel_values"].dim() == 4
        and (one["pixel_values"].shape == first["pixel_values"].shape)
    )


def _features(body: Any, batch: Sequence[Mapping[str, Tensor]]) -> ImageFeatures:
    parameters = inspect.signature(body.get_image_features).parameters
    tensors = {name: torch.cat([one[name] for one in batch]) for name in batch[0] if name in parameters}
    dtype = next(p.dtype for p in body.parameters() if p.is_floating_point())
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    output = body.get_image_features(**tensors, return_dict=True)
    deeper = getattr(output, "deepstack_features", None) or ()
    return ImageFeatures(_end_to_end(output.pooler_output), tuple(_end_to_end(layer) for layer in deeper))


def _end_to_end(found: Tensor | Sequence[Tensor]) -> Tensor:
    """[K, D], from a tensor for each image or part of one, or one tensor for all of them."""
    parts = [found] if isinstance(found, Tensor) else list(found)
    return torch.cat([part.flatten(0, -2) for part in parts])
