"""The models of an RL run: what is decided about them once they are loaded."""

import dataclasses

import pytest
from mixtures import make_mixture
from small_rl import make_models

from openrlhf.config import ConfigError, parse
from openrlhf.runs.rl_models import replays_routes

AUTO, ON, OFF = ([], ["--algo.router_replay", "true"], ["--algo.router_replay", "false"])


@pytest.mark.parametrize(("flags", "replayed"), [(AUTO, True), (ON, True), (OFF, False)])
def test_a_mixture_replays_routes_unless_it_is_told_not_to(flags, replayed):
    assert replays_routes(parse("train_ppo_ray", flags), make_mixture()) is replayed


def test_routers_that_take_no_routes_are_left_to_themselves_unless_routes_are_asked_for(caplog):
    policy = make_mixture()
    policy.routers = dataclasses.replace(policy.routers, problem="layer 1 has 2 routers")
    with caplog.at_level("INFO"):
        assert not replays_routes(parse("train_ppo_ray", OFF), policy)
        assert not caplog.text
        assert not replays_routes(parse("train_ppo_ray", AUTO), policy)
    assert "(--algo.router_replay): layer 1 has 2 routers" in caplog.text
    with pytest.raises(ConfigError, match="the routes of qwen3_moe cannot be replayed: layer 1 has 2 routers; leave"):
        replays_routes(parse("train_ppo_ray", ON), policy)


def test_a_model_without_experts_has_no_routes_to_replay(caplog):
    policy = make_models().policy
    with caplog.at_level("INFO"):
        assert not replays_routes(parse("train_ppo_ray", AUTO), policy)
    assert not caplog.text
    with pytest.raises(ConfigError, match="the routes of qwen2 cannot be replayed: it is no mixture of experts"):
        replays_routes(parse("train_ppo_ray", ON), policy)
