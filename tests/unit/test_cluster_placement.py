"""Who sits where, as data: plans worked out by hand from what documents' commands ask for."""

import dataclasses
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.cluster.placement import DeviceSlot, Node, PlacementRequest, Role, Size, fit, plan, requested
from openrlhf.config import ConfigError, parse

ACTOR, CRITIC, REF, TEACHER, REWARD, ENGINE = Role
SEPARATE = """
    --ref_num_nodes 1 --ref_num_gpus_per_node 8 --reward_num_nodes 1 --reward_num_gpus_per_node 8
    --critic_num_nodes 1 --critic_num_gpus_per_node 8 --actor_num_nodes 1 --actor_num_gpus_per_node 8
    --vllm_num_engines 4 --vllm_tensor_parallel_size 2 --pretrain org/sft --reward_pretrain org/rm"""
HYBRID_7B = """
    --actor_num_nodes 1 --actor_num_gpus_per_node 8 --critic_num_nodes 0 --reward_num_nodes 0
    --ref_num_nodes 0 --ref_num_gpus_per_node 0 --vllm_num_engines 8 --vllm_tensor_parallel_size 1
    --colocate_all_models --advantage_estimator group_norm --init_kl_coef 1e-3 --remote_rm_url http://h/get_reward"""
PPO_70B = """
    --actor_num_nodes 2 --actor_num_gpus_per_node 8 --ref_num_nodes 2 --ref_num_gpus_per_node 8
    --critic_num_nodes 2 --critic_num_gpus_per_node 8 --reward_num_nodes 2 --reward_num_gpus_per_node 8
    --colocate_actor_ref --colocate_critic_reward --vllm_num_engines 4 --vllm_tensor_parallel_size 4
    --reward_pretrain org/rm"""
GPUS = [Node(8, 64)]


def asked(words: str, *, devices: int = 8, engines: bool = True, cpus: int = 1) -> PlacementRequest:
    config = parse("train_ppo_ray", ["--train.launcher", "ray", *shlex.split(words)])
    return requested(config, devices_per_node=devices, engines_by_default=engines, cpus_per_device=cpus)


def planned(words: str, **machine):
    return plan(asked(words, **machine))


def shape(pools) -> list[tuple[str, int, int]]:
    """Per pool: who, blocks, devices of a block."""
    return [(pool.name, len(pool.blocks), len(pool.blocks[0])) for pool in pools.pools]


# --------------------------------------------------------------------------------------------------- plans


def test_7b_on_8_gpus_is_one_pool():
    """GRPO, all shared: 8 devices; actor, reference (0 × 0: as many as the actor) and an engine on each, a third each."""
    whole = planned(HYBRID_7B)
    assert shape(whole) == [("actor+ref+vllm", 1, 8)]
    assert whole.pools[0].blocks[0][5] == (
        DeviceSlot(ACTOR, 5, 0.33),
        DeviceSlot(REF, 5, 0.33),
        DeviceSlot(ENGINE, 5, 0.33),
    )
    assert fit(whole, GPUS).nodes == ((0,),)


def test_70b_on_48_gpus_is_three_pools():
    """2 × 8 actor and reference, 2 × 8 critic and reward, 4 engines of 4: 16 + 16 + 16, and six nodes are full."""
    whole = planned(PPO_70B)
    assert shape(whole) == [("actor+ref", 2, 8), ("critic+reward", 2, 8), ("vllm", 4, 4)]
    assert whole.devices == 48
    assert [place.slot for place in whole.placements(ENGINE)][3:6] == [
        DeviceSlot(ENGINE, 0, 1.0, 3),
        DeviceSlot(ENGINE, 1, 1.0, 0),
        DeviceSlot(ENGINE, 1, 1.0, 1),
    ]
    assert fit(whole, GPUS * 6).nodes == ((0, 1), (2, 3), (4, 4, 5, 5))
    assert "8 short" in fit(whole, GPUS * 5).problem


@pytest.mark.parametrize(
    ("flags", "pools"),
    [
        ("", [("actor", 1, 8), ("ref", 1, 8), ("critic", 1, 8), ("reward", 1, 8), ("vllm", 4, 2)]),
        ("--colocate_actor_ref", [("actor+ref", 1, 8), ("critic", 1, 8), ("reward", 1, 8), ("vllm", 4, 2)]),
        ("--colocate_critic_reward", [("actor", 1, 8), ("ref", 1, 8), ("critic+reward", 1, 8), ("vllm", 4, 2)]),
        ("--colocate_actor_ref --colocate_critic_reward", [("actor+ref", 1, 8), ("critic+reward", 1, 8), ("vllm", 4, 2)]),
        ("--colocate_all_models", [("actor+critic+ref+reward+vllm", 1, 8)]),
        ("--colocate_all_models --teacher.model_name_or_path t", [("actor+critic+ref+teacher+reward+vllm", 1, 8)]),
        ("--colocate_actor_ref --colocate_critic_reward --teacher.model_name_or_path t --teacher.num_gpus_per_node 4", [("actor+ref", 1, 8), ("critic+reward", 1, 8), ("teacher", 1, 4), ("vllm", 4, 2)]),
        ("--colocate_all_models --async_train", [("actor+critic+ref+reward", 1, 8), ("vllm", 4, 2)]),
    ],
)  # fmt: skip
def test_placement_roles_that_share_devices(flags, pools):
    assert shape(planned(f"{SEPARATE} {flags}")) == pools


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ("--init_kl_coef 0", {REF}),
        ("--advantage_estimator rloo", {CRITIC}),
        ("--remote_rm_url f.py", {REWARD}),
        ("--vllm_num_engines 0", {ENGINE}),
        ("--lora_rank 8", {REF}),  # it is the actor without its adapter
        ("--init_kl_coef 0 --advantage_estimator rloo --remote_rm_url f.py --vllm_num_engines 0", {REF, CRITIC, REWARD, ENGINE}),
    ],
)  # fmt: skip
def test_a_group_that_is_not_needed_is_not_there(flags, missing):
    words = SEPARATE.replace("--vllm_num_engines 4", "" if "engines" in flags else "--vllm_num_engines 4")
    if "remote" in flags:
        words = words.replace("--reward_pretrain org/rm", "")
    present = {role for pool in planned(f"{words} {flags}").pools for role in pool.roles}
    assert present == set(Role) - missing - {TEACHER}


def test_a_smaller_group_lives_on_the_first_devices():
    """Actor 2 × 4, critic 1 × 4: ranks 0 … 3 of the critic sit beside those of the actor, on its first node."""
    whole = planned(
        "--colocate_all_models --actor_num_nodes 2 --actor_num_gpus_per_node 4 --critic_num_gpus_per_node 4"
    )
    assert [(place.bundle, place.slot.rank) for place in whole.placements(CRITIC)] == [(i, i) for i in range(4)]
    first, second = whole.pools[0].blocks
    assert all(CRITIC in {slot.role for slot in bundle} for bundle in first)
    assert not any(CRITIC in {slot.role for slot in bundle} for bundle in second)


def test_roles_on_the_same_devices_live_in_the_same_processes():
    """A smaller group has its own. Five roles take a fifth each: actor and reference together two."""
    whole = planned(
        f"{SEPARATE} --colocate_all_models --reward_num_gpus_per_node 2 --critic_num_gpus_per_node 2".replace(
            "--critic_num_gpus_per_node 8", ""
        ).replace("--reward_num_gpus_per_node 8", "")
    )
    assert [(spec.name, len(spec.placements), spec.placements[0].slot.share) for spec in whole.process_groups()] == [
        ("actor+ref", 8, 0.4),
        ("critic+reward", 2, 0.4),
    ]  # fmt: skip
    assert [spec.name for spec in planned(SEPARATE).process_groups()] == ["actor", "ref", "critic", "reward"]


def test_sizes_left_to_the_machine():
    """Four devices: a group by itself takes them all; a guest is as large as its host, engines fill the actor's."""
    alone = asked("--actor_num_nodes 2", devices=4)
    assert alone.groups == {ACTOR: Size(2, 4), CRITIC: Size(1, 4), REF: Size(1, 4)}
    assert alone.engines == 8
    shared = planned("--actor_num_nodes 2 --colocate_all_models --vllm_tensor_parallel_size 2", devices=4)
    assert {role: len(shared.placements(role)) for role in Role} == {
        ACTOR: 8,
        CRITIC: 8,
        REF: 8,
        TEACHER: 0,
        REWARD: 0,
        ENGINE: 8,
    }
    assert shared.request.engines == 4
    assert asked("", devices=1, engines=False).engines == 0


def test_async_on_a_single_device_shares_it_only_when_told():
    words = "--colocate_all_models --async_train --init_kl_coef 0 --advantage_estimator rloo"
    apart = planned(words, devices=1)
    assert shape(apart) == [("actor", 1, 1), ("vllm", 1, 1)]
    assert fit(apart, [Node(1, 8)]).problem.endswith("it fits with --train.async_share_device")
    assert shape(planned(words + " --train.async_share_device", devices=1)) == [("actor+vllm", 1, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--colocate_all_models --critic_num_gpus_per_node 8", "--critic.num_gpus_per_node is 8: make it 4 or less"),
        ("--colocate_actor_ref --ref_num_gpus_per_node 2", "--train.colocate_actor_ref puts the ref model on the actor's 4"),
        ("--colocate_all_models --vllm_num_engines 3", "must equal the actor's 4 devices"),
        ("--vllm_tensor_parallel_size 3", "--vllm.tensor_parallel_size 3 does not divide the actor's 4 devices"),
        ("--colocate_all_models --actor_num_nodes 3 --vllm_num_engines 2 --vllm_tensor_parallel_size 6", "stays on one node"),
    ],
)  # fmt: skip
def test_sharing_that_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        planned(words, devices=4)


def test_the_table_is_for_people():
    assert planned(HYBRID_7B.replace("--vllm_num_engines 8 --vllm_tensor_parallel_size 1", "--vllm_num_engines 4 --vllm_tensor_parallel_size 2")).table() == (
        "devices  role   workers  share\n"
        "1 × 8    actor  8        0.33\n"
        "         ref    8        0.33\n"
        "         vllm   4 × 2    0.33\n"
        "8 devices"
    )  # fmt: skip


# --------------------------------------------------------------------------------------------- does it fit


@pytest.mark.parametrize(
    ("words", "nodes", "problem"),
    [
        (
            SEPARATE,
            GPUS,
            "the run needs 40 devices (actor 8, ref 8, critic 8, reward 8, vllm 8) and the cluster has 8: 32 short; "
            "it fits with --train.colocate_all, or with --train.colocate_actor_ref --actor.num_gpus_per_node 2 "
            "--critic.num_gpus_per_node 2 --ref.num_gpus_per_node 2 --reward.num_gpus_per_node 2 --vllm.num_engines 1",
        ),
        (
            SEPARATE,
            GPUS * 3,
            "the run needs 40 devices (actor 8, ref 8, critic 8, reward 8, vllm 8) and the cluster has 24 (8 + 8 + 8): "
            "16 short; it fits with --train.colocate_actor_ref --train.colocate_critic_reward, or with "
            "--actor.num_gpus_per_node 4 --critic.num_gpus_per_node 4 --ref.num_gpus_per_node 4 "
            "--reward.num_gpus_per_node 4",  # 4 × 4 + 4 × 2 = 24
        ),
        (  # the models fill the node; async engines need another
            HYBRID_7B + " --async_train",
            [Node(8, 64), Node(6, 64)],
            "the run needs 16 devices (actor+ref 8, vllm 8) and the cluster has 14 (8 + 6): 2 short; "
            "it fits with --vllm.num_engines 6, or with --actor.num_gpus_per_node 4",
        ),
        (
            HYBRID_7B,
            [Node(4, 32)] * 2,
            "the run needs 8 devices, 8 of them (actor+ref+vllm) on one node, and the cluster has 8 (4 + 4), which cannot "
            "be divided like that; it fits with --actor.num_nodes 2 --actor.num_gpus_per_node 4, or with "
            "--actor.num_gpus_per_node 4 --vllm.num_engines 4",
        ),
        (HYBRID_7B, [Node(8, 3)], "the run needs 8 CPUs, 1 for each device (actor+ref+vllm 8), and the cluster has 3: 5 short; "
         "it fits with --actor.num_gpus_per_node 2 --vllm.num_engines 2"),
        (HYBRID_7B, [Node(0, 64)], "the run needs 8 devices (actor+ref+vllm 8) and the cluster has 0: 8 short; "
         "no flags make it fit: give it a larger cluster"),
    ],
)  # fmt: skip
def test_fit_says_what_is_short_and_which_flags_would_fit(words, nodes, problem):
    assert fit(planned(words), nodes).problem == problem


def test_neighbours_go_to_the_node_with_the_least_room():
    """4 + 4 fill the node of 8; the block of 2 goes to the node of 2, and the node of 16 stays free."""
    request = PlacementRequest(groups={ACTOR: Size(1, 4), CRITIC: Size(1, 4), REF: Size(1, 2)})
    assert fit(plan(request), [Node(16, 16), Node(2, 2), Node(8, 8)]).nodes == ((2,), (1,), (2,))


def test_fit_counts_only_devices_where_workers_share_cpus():
    request = PlacementRequest(groups={ACTOR: Size(1, 8)}, cpus_per_device=0)
    assert fit(plan(request), [Node(8, 2)]).nodes == ((0,),)
    assert fit(plan(dataclasses.replace(request, cpus_per_device=1)), [Node(8, 2)]).problem


sizes = st.builds(Size, st.integers(1, 3), st.sampled_from([1, 2, 4, 8]))


@given(
    groups=st.fixed_dictionaries({ACTOR: sizes}, optional={CRITIC: sizes, REF: sizes, REWARD: sizes}),
    engines=st.integers(0, 4),
    parts=st.sampled_from([1, 2, 4]),
    nodes=st.lists(st.builds(Node, st.integers(0, 16), st.just(64)), min_size=1, max_size=6),
)
def test_plan_gives_every_worker_one_slot_and_overfills_no_node(groups, engines, parts, nodes):
    request = PlacementRequest(groups=groups, engines=engines, parts=parts)
    whole = plan(request)
    for role, size in groups.items():
        assert [place.slot.rank for place in whole.placements(role)] == list(range(size.total))
    assert [(p.slot.rank, p.slot.part) for p in whole.placements(ENGINE)] == [(e, p) for e in range(engines) for p in range(parts)]  # fmt: skip
    assert all(sum(slot.share for slot in bundle) <= 1 for pool in whole.pools for bundle in pool.bundles)
    found = fit(whole, nodes)
    assert bool(found.nodes) != bool(found.problem)
    if found.nodes:
        used = [0] * len(nodes)
        for pool, places in zip(whole.pools, found.nodes, strict=True):
            for block, node in zip(pool.blocks, places, strict=True):
                used[node] += len(block)
        assert all(u <= node.devices for u, node in zip(used, nodes, strict=True))
