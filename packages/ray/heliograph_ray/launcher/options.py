"""Checks of the arguments of `RayLauncher`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heliograph.spi import check_number, check_whole_number, is_number, is_whole_number

ADDRESS = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")


def check_workers(num_workers: Any) -> tuple[int, int]:
    """Return the least and the most workers.

    Raises:
        TypeError: `num_workers` is neither a whole number nor two.
        ValueError: a number is out of its range.
    """
    pair = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    if len(pair) != 2 or not all(map(is_whole_number, pair)):
        raise TypeError(f"num_workers is a whole number, or (least, most) of them; got {num_workers!r}.")
    if not 1 <= pair[0] <= pair[1]:
        raise ValueError(f"num_workers is at least 1, and (least, most) are in this order; got {num_workers!r}.")
    return pair


def check_resources(use_gpu: Any, resources_per_worker: Any) -> None:
    """Check the resources of a worker.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: a number is out of its range, or a worker takes nothing.
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
    """Check the arguments about failures.

    Raises:
        ValueError: an argument is not a number, or out of its range.
    """
    check_whole_number("max_failures, -1 for any number,", max_failures, at_least=-1)
    check_number("backoff", backoff, of="seconds", at_least=0)
    check_number("grace", grace, of="seconds", more_than=0)


def check_storage(storage_path: Any, name: Any, keep: Any) -> None:
    """Check the arguments about the storage.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the name is not that of a folder, or the number is out of its range.
    """
    if storage_path is not None and not isinstance(storage_path, str | Path):
        raise TypeError(f"storage_path is a folder, an address such as 's3://...', or None; got {storage_path!r}.")
    if storage_path == "":
        raise ValueError("storage_path is a folder, an address such as 's3://...', or None; got ''.")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is a string, or None for a new one; got {name!r}.")
    if name is not None and (not name.strip(".") or "/" in name or "\\" in name):
        raise ValueError(f"name becomes the name of a folder in the storage, so it has no slashes; got {name!r}.")
    if keep is not None:
        check_whole_number("keep", keep, at_least=1, or_else="None for all")


def check_address(address: Any, source: str = "address") -> None:
    """Check the address of a cluster.

    Args:
        address: `auto`, `host:port`, or None.
        source: the argument or environment variable that holds it, for messages.

    Raises:
        TypeError: it is not a string.
        ValueError: it is an address for Ray's client, or not an address.
    """
    if address is None or address == "auto":
        return
    if not isinstance(address, str):
        raise TypeError(f"{source} is 'auto', 'host:port', or None; got {address!r}.")
    if address.startswith("ray://"):
        raise ValueError(
            f"{source}={address!r} is for Ray's client, but this process has to run on a machine of the cluster: run "
            f"the script there with address='auto', or with `ray job submit`."
        )
    matched = ADDRESS.fullmatch(address)
    if matched is None or not 1 <= int(matched["port"]) <= 65535:
        raise ValueError(f"{source} is 'auto', 'host:port', or None; got {address!r}.")


def check_intervals(**intervals: Any) -> None:
    """Check intervals in seconds, by the names of their arguments.

    Raises:
        ValueError: one is not a number, or out of its range.
    """
    for name, seconds in intervals.items():
        if seconds is not None:
            check_number(name, seconds, of="seconds", more_than=0)
