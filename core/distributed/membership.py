"""The place of this process among the training processes, from its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

# Any of them means that there are several ranks.
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    has_joined = environment is None and dist.is_initialized()
    if has_joined:
        rank, world_size = dist.get_rank(), dist.get_world_size()
    elif any(name in variables for name in RANK_VARIABLES):
        rank, world_size = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    else:
        return Membership()
    if (rank, world_size) == (0, 1):
        return Membership()
    local_rank = rank
    local_world_size: int | None = world_size
    if "LOCAL_RANK" in variables:
        local_rank = _number(variables, "LOCAL_RANK")
        local_world_size = _number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else None
    elif variables.get("MASTER_ADDR") not in LOOPBACK:  # else all processes must be on this machine
        raise ValueError(
            f"This process is rank {rank} of {world_size}, but LOCAL_RANK is not set, and the processes may be on "
            f"several machines: set it to this process's number on its machine, from 0 (0 if each machine runs one "
            f"process)."
        )
    if rank >= world_size or not local_rank < (local_world_size or world_size) <= world_size:
        raise ValueError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} in "
            f"the environment contradict each other: ranks count from 0 to WORLD_SIZE - 1, local ranks from 0 to "
            f"LOCAL_WORLD_SIZE - 1."
        )
    agent_store = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = ("", 0) if has_joined else (_text(variables, "MASTER_ADDR"), _number(variables, "MASTER_PORT"))
    return Membership(rank, local_rank, world_size, local_world_size, address, port, agent_store)


def _number(variables: Mapping[str, str], name: str) -> int:
    text = _text(variables, name)
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name}={text!r} in the environment must be a whole number.")
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
