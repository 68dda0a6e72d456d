"""Who else was started with this process, read from what launchers tell it; and when that means DeepSpeed."""

from dataclasses import replace

import pytest
import torch

from openrlhf.backends.base import choose_backend, start_backend
from openrlhf.backends.deepspeed import deepspeed_config
from openrlhf.backends.ranks import Launch, first_host, name_the_meeting_place, own_device, read_launch
from openrlhf.config.backend import BackendSection
from openrlhf.config.fields import ConfigError

ALONE = Launch(0, 1, 0)
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
BATCH_STEP = {"SLURM_JOB_ID": "123456", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
"""What a batch script sees outside srun: the size of its allocation, and itself as task 0."""


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, ALONE),
        (TORCHRUN, Launch(5, 8, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch(1, 2, 1)),
        (SRUN, Launch(5, 8, 1)),
        (SRUN | TORCHRUN | {"RANK": "3"}, Launch(3, 8, 1)),
        (BATCH_STEP, ALONE),
        (BATCH_STEP | {"SLURM_STEP_NUM_TASKS": "1"}, ALONE),
        ({"SLURM_NTASKS": "8"}, ALONE),
    ],
    ids=[
        "python",
        "torchrun or deepspeed",
        "one machine",
        "srun",
        "torchrun under srun",
        "batch script",
        "step of one task",
        "login node",
    ],
)
def test_a_launcher_says_who_we_are(environment, launch):
    assert read_launch(environment) == launch


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("gpu[9,07]", "gpu9"),
        ("login1,gpu[07-09]", "login1"),
        ("rack[2-3]n[04-05]", "rack2n04"),
        ("gpu[07-09]-ib.cluster,x", "gpu07-ib.cluster"),
    ],
)
def test_the_first_host_of_a_list_of_nodes(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", ",gpu1", "gpu[", "(null)"])
def test_slurm_node_list_is_refused_if_malformed(nodes):
    with pytest.raises(ValueError, match="not a list of nodes"):
        first_host(nodes)


def test_tasks_of_srun_meet_at_their_first_node_and_a_port_of_their_job():
    """20000 + 123456 mod 20000 = 23456; the same for every task of the job, another for the next job."""
    environment = dict(SRUN)
    name_the_meeting_place(environment, read_launch(environment))
    named = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert named == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "23456",
    }


def test_a_meeting_place_that_is_named_stays():
    for environment in (dict(TORCHRUN), SRUN | TORCHRUN):
        name_the_meeting_place(environment, read_launch(environment))
        assert {name: environment[name] for name in TORCHRUN} == TORCHRUN


def test_the_own_device_is_the_local_one_or_the_only_one_to_be_seen():
    assert own_device(Launch(5, 8, 1), visible=4) == 1
    assert own_device(Launch(5, 8, 1), visible=1) == 0


# ------------------------------------------------------------------------------------- plain torch or DeepSpeed

PLAIN = BackendSection()
TWO = Launch(0, 2, 0)


@pytest.mark.parametrize(
    ("backend", "ds", "launch", "expected"),
    [
        ("auto", PLAIN, ALONE, "torch"),
        ("torch", PLAIN, ALONE, "torch"),
        ("deepspeed", PLAIN, ALONE, "deepspeed"),
        ("auto", PLAIN, TWO, "deepspeed"),
        ("auto", replace(PLAIN, adam_offload=True), ALONE, "deepspeed"),
        ("auto", replace(PLAIN, tensor_parallel_size=2), TWO, "deepspeed"),
        ("auto", replace(PLAIN, ring_attn_size=2), TWO, "deepspeed"),
        ("auto", replace(PLAIN, zero_stage=3), ALONE, "torch"),
    ],
)
def test_several_processes_and_what_plain_torch_cannot_do_are_deepspeeds(backend, ds, launch, expected):
    assert choose_backend(backend, ds, launch).name == expected


@pytest.mark.parametrize(
    ("backend", "ds", "launch", "said"),
    [
        ("torch", PLAIN, TWO, "--train.backend torch is one process.*2 processes needs deepspeed"),
        ("torch", replace(PLAIN, adam_offload=True), ALONE, "--ds.adam_offload needs deepspeed"),
        ("torch", replace(PLAIN, tensor_parallel_size=2), TWO, "2 processes needs deepspeed"),
        ("auto", replace(PLAIN, tensor_parallel_size=2), ALONE, "--ds.tensor_parallel_size 2: 1 processes cannot be"),
        ("auto", replace(PLAIN, ring_attn_size=2), ALONE, "--ds.ring_attn_size 2: 1 processes cannot be"),
        (
            "auto",
            replace(PLAIN, tensor_parallel_size=2, ring_attn_size=2),
            Launch(0, 6, 0),
            "--ds.tensor_parallel_size 2 × --ds.ring_attn_size 2: 6 processes cannot be divided into groups of 4",
        ),
        ("auto", replace(PLAIN, tensor_parallel_size=2), Launch(0, 3, 0), "3 processes.*start a multiple of it"),
    ],
)
def test_backend_settings_that_cannot_work_are_refused_by_flag(backend, ds, launch, said):
    with pytest.raises(ConfigError, match=said):
        choose_backend(backend, ds, launch)


def test_fp16_that_deepspeed_cannot_compute_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("openrlhf.backends.deepspeed.computes_in", lambda dtype: dtype != torch.float16)
    with pytest.raises(ConfigError, match=r"--ds.param_dtype fp16.*--train.backend torch"):
        start_backend("deepspeed", replace(PLAIN, param_dtype="fp16"))


# ------------------------------------------------------------------------------------------ what DeepSpeed is told


def test_deepspeed_neither_counts_nor_weighs_micro_batches():
    """Losses are weighted over the whole step: any number of backwards, then one step, whatever the batch."""
    config = deepspeed_config(BackendSection(), dtype=torch.bfloat16, max_norm=0.5)
    assert config["gradient_accumulation_steps"] == 1
    assert config["managed_gradient_accumulation"] is False
    assert config["gradient_clipping"] == 0.5
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deepspeed_computes_in_the_dtype_of_the_model(dtype):
    config = deepspeed_config(BackendSection(), dtype=dtype)
    assert config["bf16"]["enabled"] is (dtype == torch.bfloat16)
    assert config["fp16"]["enabled"] is (dtype == torch.float16)


@pytest.mark.parametrize(("stage", "overlapped"), [(0, False), (1, False), (2, True), (3, True)])
def test_reduction_overlaps_with_backward_where_it_happens_during_it(stage, overlapped):
    config = deepspeed_config(BackendSection(zero_stage=stage, overlap_comm=True), dtype=torch.float32)
    assert config["zero_optimization"]["stage"] == stage
    assert config["zero_optimization"]["overlap_comm"] is overlapped
    assert not deepspeed_config(BackendSection(zero_stage=stage), dtype=torch.float32)["zero_optimization"][
        "overlap_comm"
    ]


def test_flags_reach_deepspeed():
    section = BackendSection(zero_stage=3, adam_offload=True, zpg=4, tensor_parallel_size=2)
    config = deepspeed_config(section, dtype=torch.float32)
    sharing = config["zero_optimization"]
    assert sharing["zero_hpz_partition_size"] == 4
    assert sharing["offload_optimizer"]["device"] == "cpu"
    assert config["tensor_parallel"] == {"autotp_size": 2}


def test_deepspeed_config_mentions_only_what_is_asked_for():
    config = deepspeed_config(BackendSection(zero_stage=2), dtype=torch.float32)
    assert not config["zero_optimization"].keys() & {"zero_hpz_partition_size", "offload_optimizer"}
    assert "tensor_parallel" not in config
