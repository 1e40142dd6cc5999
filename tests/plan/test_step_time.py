"""The model of time: what can't overlap is waited for, each layer hides what it can, and links are shared."""

from dataclasses import replace

import pytest

from actmem.config import Layout
from actmem.plan.planned_models import planned_model_of
from actmem.plan.search import find_plans
from actmem.plan.step_time import DEVICES, GIBIBYTE, LINK_SHARE, MODEL_ERROR, Cluster, Shards, data_seconds, gib_or_mib
from actmem_course.bench.measure_runs import step_time_results

CLUSTER = Cluster(64, 80 * GIBIBYTE)
SHARDS = Shards(10**8, 10**7, 12)


def layout(stage, p=1, m=1):
    return Layout(64 // p, 1, p, num_model_chunks=m, sequence_parallel=False, zero_stage=stage)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3)])
def test_room_moves_seconds_from_waiting_to_hidden(stage, p, m):
    runs = [data_seconds(SHARDS, layout(stage, p, m), 8, (room, 2 * room), CLUSTER) for room in (0.0, 1e-4, 1e-3, 1e9)]
    waiting = [each for each, _ in runs]
    assert runs[0][1] == pytest.approx(0) and waiting == sorted(waiting, reverse=True) and waiting[-1] > 0
    assert all(sum(run) == pytest.approx(sum(runs[0])) for run in runs)


def test_the_first_weights_and_the_last_gradients_never_hide():
    ranks, n = 64, 8
    per_byte = (ranks - 1) / ranks / CLUSTER.link(ranks, 1)
    latency = CLUSTER.latency(ranks, 1)
    passes = {0: (0, 2), 1: (1, 1), 2: (1, n), 3: (n, n)}
    for stage, (gathers, reduces) in passes.items():
        waiting, _ = data_seconds(SHARDS, layout(stage), n, (1e9, 1e9), CLUSTER)
        elements = SHARDS.of_layer + SHARDS.of_ends
        closed = (2 * gathers + 4 * reduces) * elements * per_byte + 2 * (gathers + reduces) * latency
        assert waiting == pytest.approx(closed)


def test_a_group_has_the_ports_of_all_its_members_in_a_node():
    port, node = CLUSTER.device.network_bytes_per_second, CLUSTER.device.node_bytes_per_second
    assert [CLUSTER.link(64 // t, t) / LINK_SHARE for t in (1, 2, 4, 8)] == [8 * port, 4 * port, 2 * port, port]
    assert CLUSTER.link(8, 1) == CLUSTER.link(2, 4) == LINK_SHARE * node
    fast = replace(CLUSTER, device=replace(CLUSTER.device, network_bytes_per_second=node))
    assert fast.link(64, 1) == LINK_SHARE * node


def test_tensor_traffic_beside_backward_leaves_data_traffic_less_room():
    model, sizes = planned_model_of("llama3-8b"), {"tensor_parallel_size": 4, "data_parallel_size": 2, "zero_stage": 3}
    # Eight GPUs on one node's links, and in nodes of four, where data-parallel ranks have the network.
    seconds = [
        find_plans(model, Cluster(8, 80 * GIBIBYTE, per_node, device), 8, 1, sizes).plans[0].seconds
        for per_node in (8, 4)
        for device in (replace(DEVICES["h100"], node_bytes_per_second=10**10, network_bytes_per_second=10**10),)
    ]
    assert seconds[0].tensor == seconds[1].tensor and seconds[0].data > seconds[1].data


def test_the_papers_own_times_are_as_near_as_plans_that_are_called_equal():
    own = [abs(result.difference_percent) / 100 for result in step_time_results() if "table 5" in result.source]
    assert sorted(own)[6] < MODEL_ERROR < sorted(own)[7]


def test_a_little_too_much_is_never_0_gib():
    assert gib_or_mib(2**20 // 2) == "0.50 MiB" and gib_or_mib(3 * 2**29) == "1.5 GiB"
