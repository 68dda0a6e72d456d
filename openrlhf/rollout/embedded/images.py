"""Forwards of prompts with images. An image is encoded once; its features are kept for other prompts that show it.

Keys and values of an image's tokens are those of its features, so a running request needs the features no more: they
are of use when a prompt is read again, or when another one shows the same image. The least recently used go first.

Shapes: T stream tokens, P positions whose predictions are wanted, V vocabulary, D hidden size, K features.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from openrlhf.models.body import decoder_body
from openrlhf.models.support import logit_transform
from openrlhf.models.vision import ImageFeatures, encode, language_model, merged_embeddings
from openrlhf.types import ImageInput, PackedImages


class ImageOutput(NamedTuple):
    """What a forward with images gives."""

    logits: Tensor
    """[P, V]"""
    cache: Any
    """The model's own cache; None where it was not asked for."""


class ImageReader:
    """The forward of an image-text model over a stream in which images stand.

    Features of tokens that a prefill reads enter it; decoding goes on with keys and values alone.
    """

    def __init__(self, model: Any, *, max_bytes: int, frozen_tower: bool) -> None:
        """
        Args:
            max_bytes: what features may take after a step. The images of one step are there together, however many.
            frozen_tower: whether features outlive a change of the weights.
        """
        self._model = model
        self._body = decoder_body(model)
        self._device = next(model.parameters()).device
        self._transform = logit_transform(model.config)
        self._max_bytes = max_bytes
        self._frozen_tower = frozen_tower
        self._features: OrderedDict[str, ImageFeatures] = OrderedDict()
        """By digest; the most recently used ones are at the end."""
        self.num_bytes = 0

    def __len__(self) -> int:
        """The number of images whose features are kept."""
        return len(self._features)

    def forward(self, token_ids_T: Tensor, images: PackedImages, *, keep: Tensor | None, **kwargs: Any) -> ImageOutput:
        """The logits at the positions `keep` (None: at the last one). `kwargs`: arguments of the language model."""
        features = self._features_of(images.inputs)
        embeddings, more = merged_embeddings(self._body, token_ids_T, images.rows_T.to(self._device), features)
        decoder = language_model(self._body)
        assert decoder is not None, "a model without one has no reader"
        output = decoder(inputs_embeds=embeddings, **more, **kwargs)
        hidden_PD = output[0][0, -1:] if keep is None else output[0][0, keep]
        logits = self._transform.scaled(self._model.get_output_embeddings()(hidden_PD))
        return ImageOutput(logits, getattr(output, "past_key_values", None))

    def forget(self) -> None:
        """The weights may have changed."""
        if not self._frozen_tower:
            self.clear()

    def clear(self) -> None:
        """Give the memory back."""
        self._features.clear()
        self.num_bytes = 0

    def _features_of(self, inputs: Sequence[ImageInput]) -> ImageFeatures:
        """The features of these images, image after image. All are different."""
        missing = [image for image in inputs if image.digest not in self._features]
        if missing:
            self._add(missing)
        for image in inputs:
            self._features.move_to_end(image.digest)
        found = [self._features[image.digest] for image in inputs]
        while self.num_bytes > self._max_bytes:
            _, dropped = self._features.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)
        return ImageFeatures.cat(found)

    def _add(self, images: Sequence[ImageInput]) -> None:
        there = [
            dataclasses.replace(image, tensors={name: t.to(self._device) for name, t in image.tensors.items()})
            for image in images
        ]
        encoded = encode(self._body, there)
        counts = [image.num_features for image in images]
        if len(encoded.rows_KD) != sum(counts):
            raise ValueError(
                f"{type(self._model).__name__} makes {len(encoded.rows_KD)} features of images with {sum(counts)} "
                "placeholder tokens: they were prepared for another model"
            )
        # Clones, because a part of a tensor would keep the memory of the whole.
        rows = [part.clone() for part in encoded.rows_KD.split(counts)]
        deeper = [[part.clone() for part in layer_KD.split(counts)] for layer_KD in encoded.deeper]
        for i, image in enumerate(images):
            features = ImageFeatures(rows[i], tuple(parts[i] for parts in deeper))
            self._features[image.digest] = features
            self.num_bytes += _num_bytes(features)


def _num_bytes(features: ImageFeatures) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in (features.rows_KD, *features.deeper))
