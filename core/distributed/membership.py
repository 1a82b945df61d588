"""The place of this process among the training processes, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)  # any of them means that there are several ranks
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LARGEST_PORT = 65535


@dataclass(frozen=True, slots=True)
class Membership:
    """This process among the training processes.

    Attributes:
        rank: among all, from 0.
        local_rank: among the processes of this machine, from 0.
        world_size: the number of processes.
        local_world_size: the number of processes on this machine; None if unknown.
        address: of the store for the rendezvous; empty if none is needed.
        port: of the store.
        agent_store: whether torchrun's agent hosts the store; otherwise rank 0 does.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int | None = 1
    address: str = ""
    port: int = 0
    agent_store: bool = False


def membership(environment: Mapping[str, str] | None = None) -> Membership:
    """Return this process's place, as set in the environment by torchrun, `launch` or the user; alone by default.

    If the default process group of `torch.distributed` is initialized, it has the rank and the world size.

    Args:
        environment: `os.environ` by default.

    Raises:
        ValueError: the variables are incomplete, not numbers, or contradict each other.
    """
    variables = os.environ if environment is None else environment
    if environment is None and dist.is_initialized():
        member = _within(dist.get_rank(), dist.get_world_size(), variables)
        return replace(member, agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    if not any(name in variables for name in RANK_VARIABLES):
        return Membership()
    member = _within(_number(variables, "RANK"), _number(variables, "WORLD_SIZE", least=1), variables)
    if member.world_size == 1:
        return member
    port = _number(variables, "MASTER_PORT", least=1)
    if port > _LARGEST_PORT:
        raise ValueError(f"MASTER_PORT={port} in the environment is not a port: the largest is {_LARGEST_PORT}.")
    address = _text(variables, "MASTER_ADDR")
    agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return replace(member, address=address, port=port, agent_store=agent_store)


def _within(rank: int, world_size: int, variables: Mapping[str, str]) -> Membership:
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} and WORLD_SIZE={world_size} in the environment contradict each other: ranks count from 0 to "
            f"WORLD_SIZE - 1."
        )
    if world_size == 1:
        return Membership()
    if "LOCAL_RANK" not in variables:
        if variables.get("MASTER_ADDR") in _LOOPBACK:  # all processes must be on this machine
            return Membership(rank, rank, world_size, world_size)
        raise ValueError(
            f"This process is rank {rank} of {world_size}, but LOCAL_RANK is not set, and the processes may be on "
            f"several machines: set it to this process's number on its machine, from 0 (0 if each machine runs one "
            f"process)."
        )
    local_rank = _number(variables, "LOCAL_RANK")
    local_world_size = _number(variables, "LOCAL_WORLD_SIZE", least=1) if "LOCAL_WORLD_SIZE" in variables else None
    if local_world_size is not None and not local_rank < local_world_size <= world_size:
        raise ValueError(
            f"LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_world_size} and WORLD_SIZE={world_size} in the "
            f"environment contradict each other: local ranks count from 0 to LOCAL_WORLD_SIZE - 1, which is less than "
            f"WORLD_SIZE."
        )
    return Membership(rank, local_rank, world_size, local_world_size)


def _number(variables: Mapping[str, str], name: str, least: int = 0) -> int:
    text = _text(variables, name)
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(f"{name}={text!r} in the environment must be a whole number of at least {least}.")
    return int(text)


def _text(variables: Mapping[str, str], name: str) -> str:
    text = variables.get(name, "")
    if text:
        return text
    present = [f"{key}={variables[key]}" for key in RANK_VARIABLES if key in variables]
    raise ValueError(
        f"The environment sets {', '.join(present)}, but not {name}. Start this process with torchrun or "
        f"heliograph.launch; or set all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and LOCAL_RANK; or none, to "
        f"train alone."
    )
