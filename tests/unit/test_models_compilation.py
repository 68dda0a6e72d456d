"""Compiled layers: the same numbers, and a constant number of compilations. More in `integration/test_compiled_layers.py`."""

import copy

import pytest
import torch
from compiling import (
    PIECES,
    as_it_is,
    assert_alike,
    compiled_pair,
    compiling_with,
    gradient,
    make_model,
    scored,
    streams,
)

from openrlhf.models import compilation
from openrlhf.models.compilation import compile_layers, uncompiled
from openrlhf.models.policy import Policy
from openrlhf.models.tiles import tile_mlps
from openrlhf.types import PackedTokens


def test_a_piece_is_compiled_once_without_gradients_and_once_with_them_whatever_the_streams():
    """Streams with and without shared prompts have plans of different classes."""
    with compiling_with(as_it_is) as compiling:
        plain, compiled = compiled_pair(make_model())
        for tokens in streams(8):
            assert_alike(plain, compiled, tokens)
        assert compiling.pieces == 2 * PIECES


def test_nothing_is_compiled_where_it_is_not_wanted():
    with compiling_with(as_it_is) as compiling:
        _, compiled = compiled_pair(make_model())
        with uncompiled():
            for tokens in streams(2):
                gradient(compiled, tokens)
        assert compiling.pieces == 0
        scored(compiled, next(streams(1)))
        assert compiling.pieces == PIECES


def test_a_long_sequence_is_tiled_outside_of_what_is_compiled():
    """However many tiles: the last piece falls into three, which short sequences use too from then on."""
    with compiling_with(as_it_is) as compiling:
        model = make_model()
        plain, made = Policy(copy.deepcopy(model)), []
        tile_mlps(model, long=8, tile=3)
        compile_layers(model)
        for lengths in ([5, 3], [8], [6], [17, 2], [30], [7]):
            tokens = PackedTokens.from_sequences(
                [torch.arange(length) % 13 for length in lengths], [torch.arange(length) > 0 for length in lengths]
            )
            assert_alike(plain, Policy(model), tokens)
            made.append(compiling.pieces)
        assert made[0] == 2 * PIECES
        assert made[2:] == [made[2]] * 4
        assert made[2] <= 4 * PIECES


def test_too_many_versions_of_a_piece_are_a_failure_too(caplog, monkeypatch):
    monkeypatch.setattr(compilation, "_MOST_VERSIONS", 1)
    with compiling_with(as_it_is), torch._dynamo.config.patch(recompile_limit=1):
        plain, compiled = compiled_pair(make_model())
        for tokens in streams(3):
            assert_alike(plain, compiled, tokens)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("--ds.deepcompile: compilation failed")
    assert "recompile_limit" in said


def test_a_model_without_layers_is_told_by_the_flag():
    class Layerless(torch.nn.Module):
        base_model = property(lambda self: self)

        def get_decoder(self):
            return torch.nn.Linear(2, 2)

    with pytest.raises(compilation.NoLayersError, match=r"--ds\.deepcompile: Layerless has no list of layers"):
        compile_layers(Layerless())
