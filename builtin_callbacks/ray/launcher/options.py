"""What `RayLauncher` is given, checked where it is given."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....events.checks import is_number, is_whole_number

ADDRESS = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


def check_workers(num_workers: Any, as_ranks: Any) -> tuple[int, int]:
    """Refuse what is no number of workers; return the least and the most.

    Raises:
        TypeError: it is no number, nor two.
        ValueError: it is out of range.
    """
    pair = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    if len(pair) != 2 or not all(map(is_whole_number, pair)):
        raise TypeError(f"num_workers is a whole number, or (least, most) of them; got {num_workers!r}.")
    if not 1 <= pair[0] <= pair[1]:
        raise ValueError(f"num_workers is from 1 on, and (least, most) come in this order; got {num_workers!r}.")
    if as_ranks is not None and not is_whole_number(as_ranks):
        raise TypeError(f"as_ranks is a whole number, or None; got {as_ranks!r}.")
    if as_ranks is not None and as_ranks < 1:
        raise ValueError(f"as_ranks is a whole number from 1 on, or None; got {as_ranks!r}.")
    return pair


def check_resources(use_gpu: Any, resources_per_worker: Any) -> None:
    """Refuse what is no claim of a worker's.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: a number is out of range, or a worker takes nothing.
    """
    if not isinstance(use_gpu, bool):
        raise TypeError(f"use_gpu is True or False, got {use_gpu!r}.")
    if resources_per_worker is None:
        return
    pairs = resources_per_worker.items() if isinstance(resources_per_worker, Mapping) else [(None, None)]
    if not all(isinstance(name, str) and is_number(amount) for name, amount in pairs):
        raise TypeError(f"resources_per_worker maps names to numbers, got {resources_per_worker!r}.")
    amounts = list(resources_per_worker.values())
    if not all(math.isfinite(each) for each in amounts):
        raise ValueError(f"resources_per_worker has a number that is not finite: {resources_per_worker!r}.")
    if min(amounts, default=0) < 0:
        raise ValueError(f"resources_per_worker has a negative number: {resources_per_worker!r}.")
    if not amounts or not (use_gpu or any(amounts)):
        raise ValueError(
            f"resources_per_worker={resources_per_worker!r} takes nothing: give what a worker takes, such as "
            f"{{'CPU': 1}}, or leave it out."
        )


def check_failures(max_failures: Any, backoff: Any, grace: Any) -> None:
    """Refuse what says nothing about failures.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of range.
    """
    if not is_whole_number(max_failures):
        raise TypeError(f"max_failures is a whole number, got {max_failures!r}.")
    if max_failures < -1:
        raise ValueError(f"max_failures is a whole number from 0 on, or -1 for any number; got {max_failures!r}.")
    _check_seconds("backoff", backoff, zero=True)
    _check_seconds("grace", grace)


def check_storage(storage_path: Any, name: Any, keep: Any) -> None:
    """Refuse what leads to no storage.

    Raises:
        TypeError: one is of the wrong type.
        ValueError: the name or the number will not do.
    """
    if storage_path is not None and not isinstance(storage_path, str | Path):
        raise TypeError(f"storage_path is a folder, an address such as 's3://...', or None; got {storage_path!r}.")
    if storage_path == "":
        raise ValueError("storage_path is a folder, an address such as 's3://...', or None; got ''.")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string, or None for a new one; got {name!r}.")
    if name is not None and (not name.strip(".") or "/" in name or "\\" in name):
        raise ValueError(f"name is that of a folder in the storage, without slashes; got {name!r}.")
    if keep is not None and not is_whole_number(keep):
        raise TypeError(f"keep is a whole number, or None for all; got {keep!r}.")
    if keep is not None and keep < 1:
        raise ValueError(f"keep is a whole number from 1 on, or None for all; got {keep!r}.")


def check_address(address: Any, source: str = "address") -> None:
    """Refuse what is no address of a cluster.

    Args:
        address: `auto`, `host:port`, or None.
        source: where it was given.

    Raises:
        TypeError: it is no string.
        ValueError: it is that of Ray's client, or none at all.
    """
    if address is None or address == "auto":
        return
    if not isinstance(address, str):
        raise TypeError(f"{source} is 'auto', 'host:port', or None; got {address!r}.")
    if address.startswith("ray://"):
        raise ValueError(
            f"{source}={address!r} is for Ray's client, and this process has to be on a machine of the cluster: run "
            f"the script there with address='auto', or by `ray job submit`."
        )
    matched = ADDRESS.fullmatch(address)
    if matched is None or not 1 <= int(matched["port"]) <= 65535:
        raise ValueError(f"{source} is 'auto', 'host:port', or None; got {address!r}.")


def check_intervals(**intervals: Any) -> None:
    """Refuse what is no interval.

    Raises:
        TypeError: one is no number.
        ValueError: one is out of range.
    """
    for name, seconds in intervals.items():
        if seconds is not None:
            _check_seconds(name, seconds)


def _check_seconds(name: str, seconds: Any, *, zero: bool = False) -> None:
    least = "a number of seconds from 0 on" if zero else "a positive number of seconds"
    if not is_number(seconds):
        raise TypeError(f"{name} is {least}, got {seconds!r}.")
    if not 0 <= seconds < math.inf or (not seconds and not zero):
        raise ValueError(f"{name} is {least}, got {seconds!r}.")
