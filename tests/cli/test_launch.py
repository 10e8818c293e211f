"""Several processes: what is launched is what Accelerate and torch understand."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.run import get_args_parser

from specctl.cli.app.launch import configuration, launch_command

WORDS = ["train-draft", "--recipe", "eagle3", "--gpus", "4"]


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(("parallel", "kind"), [("ddp", "MULTI_GPU"), ("fsdp", "FSDP")])
def test_accelerate_reads_the_shipped_configuration(parallel: str, kind: str) -> None:
    found = load_config_from_file(str(configuration(parallel)))
    assert str(found.distributed_type).endswith(kind)
    assert found.mixed_precision == "no"  # the loop's own autocast decides
    assert found.num_machines == 1


def test_a_sharded_launch_asks_accelerate_for_fsdp_of_version_two() -> None:
    command = launch_command(WORDS, 4, is_cpu=False, parallel="fsdp")
    assert command[1:3] == ["-m", "accelerate.commands.launch"]
    args = launch_command_parser().parse_args(command[3:])
    assert args.num_processes == 4
    assert (args.training_script, args.training_script_args) == ("specctl", WORDS)
    settings = load_config_from_file(args.config_file).fsdp_config
    for name, value in settings.items():
        assert hasattr(args, name), name
        setattr(args, name, value)
    args.use_fsdp, args.mixed_precision, args.dynamo_backend = True, "no", "no"
    env = prepare_multi_gpu_env(args)
    assert env["ACCELERATE_USE_FSDP"] == "true"
    assert str(env["FSDP_VERSION"]) == "2"


def test_cpu_processes_are_started_by_torch() -> None:
    command = launch_command(WORDS, 2, is_cpu=True)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    args = get_args_parser().parse_args(command[3:])
    assert (args.nproc_per_node, args.module) == ("2", True)
    assert args.training_script == "specctl"
    assert args.training_script_args == WORDS
