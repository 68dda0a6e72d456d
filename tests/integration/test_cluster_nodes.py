"""A Ray that is there already, of two nodes: joined, and divided as the plan says."""

import pytest
import ray
from ray.cluster_utils import Cluster as Raylets

from openrlhf.cluster.launch import WORKER, ClusterError, placed, ray_cluster
from openrlhf.cluster.placement import PlacementRequest, Role, Size, plan

LARGE, SMALL = 4, 2


@ray.remote
class Sitter:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, as two raylets of one machine, which count 4 and 2 workers."""
    nodes = Raylets(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "resources": {WORKER: LARGE}})
    nodes.add_node(num_cpus=1, num_gpus=0, resources={WORKER: SMALL})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        with ray_cluster() as joined:
            yield joined
    nodes.shutdown()


def test_actor_and_engines_sit_on_different_nodes(cluster):
    """Three workers of an actor go to the large node, an engine of two to the small one, side by side."""
    assert sorted(node.devices for node in cluster.total) == [SMALL, LARGE]
    request = PlacementRequest(groups={Role.ACTOR: Size(1, 3)}, engines=1, parts=2, cpus_per_device=cluster.kind.cpus)
    with placed(plan(request), cluster) as whole:
        where = {}
        for role in (Role.ACTOR, Role.ENGINE):
            places = whole.plan.placements(role)
            sitters = [Sitter.options(**whole.options(place)).remote() for place in places]
            where[role] = set(ray.get([sitter.node.remote() for sitter in sitters], timeout=60))
            assert where[role] == {whole.node_id(place) for place in places}
    assert len(where[Role.ACTOR]) == len(where[Role.ENGINE]) == 1
    assert where[Role.ACTOR] != where[Role.ENGINE]


def test_a_group_that_no_node_holds_is_told_to_spread_out(cluster):
    """Six devices there are, four on one node."""
    request = PlacementRequest(groups={Role.ACTOR: Size(1, 6)}, cpus_per_device=0)
    with (
        pytest.raises(ClusterError, match=r"it fits with --actor\.num_nodes 3 --actor\.num_gpus_per_node 2"),
        placed(plan(request), cluster),
    ):
        pass
