"""The connection to a cluster: the one that is there, or one of our own for as long as it is needed."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import create_connection
from typing import Any

from ...core.system.extras import require
from .launcher.options import check_address

CHECKS = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
START = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
ANSWER = 10.0  # seconds that a cluster has to take a connection

logger = logging.getLogger("heliograph")


@contextmanager
def connected(address: str | None, *, needed: Mapping[str, float], cpus: int = 1) -> Iterator[None]:
    """Be connected to a cluster; leave it as it was, and end what was started here.

    Args:
        address: of the cluster: `auto` or `host:port`. None takes the one that this process is connected to, or that
            `RAY_ADDRESS` names, or starts one on this machine.
        needed: what a cluster that is started here must have, by name; another one may still grow.
        cpus: how many CPUs one that is started here has at least; fewer cores are shared.

    Raises:
        ConnectionError: there is no cluster at the address.
        RuntimeError: this process is connected to another one.
        ValueError: this machine does not have what is needed, or the address is none.
    """
    check_address(address)
    ray = require("ray", "RayLauncher", extra="ray")
    if ray.is_initialized():
        _check_same(ray, address)
        yield
        return
    address = address or _address_around()
    with _handlers_kept():
        _connect(ray, address, cpus)
    try:
        if address is None:
            _check_room(ray.cluster_resources(), needed)
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None, cpus: int) -> None:
    if address is None:
        cores = os.cpu_count() or 1
        if cpus > cores:
            logger.warning("the workers take %d CPUs, and this machine has %d cores, which they share", cpus, cores)
        ray.init("local", num_cpus=max(cpus, cores), include_dashboard=False)
        return
    try:
        _check_answers(address)
        ray.init(address)
    except OSError as error:
        raise ConnectionError(
            f"There is no Ray cluster at {address!r}: {error}. `ray start --head` starts one on a machine, and says "
            f"its address; without address=, RayLauncher starts one here for as long as a run takes."
        ) from error


def _address_around() -> str | None:
    """Return the address that the environment names; None where it names none, or says that one is to be started."""
    found = os.environ.get("RAY_ADDRESS") or None
    if found == "local":
        return None
    check_address(found, "RAY_ADDRESS")
    return found


def _check_answers(address: str) -> None:
    """Raise OSError where nobody takes a connection: Ray would try for minutes, deaf to Ctrl-C."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        create_connection((host.strip("[]"), int(port)), ANSWER).close()


def _check_room(there: Mapping[str, float], needed: Mapping[str, float]) -> None:
    for name, amount in needed.items():
        if amount > there.get(name, 0.0):
            raise ValueError(
                f"The workers take {amount:g} {name}, and the cluster that RayLauncher has started on this machine has "
                f"{there.get(name, 0.0):g}: ask for less (num_workers, use_gpu, resources_per_worker), or give the "
                f"address= of a cluster that has it."
            )


def _check_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise RuntimeError(
            f"address={address!r} was asked for, but this process is connected to the Ray cluster at {here}. Leave "
            f"address out to use that one, or call ray.shutdown() first."
        )


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Give back the handler of SIGTERM, in place of which Ray installs its own and leaves it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if former is not None:  # installed by other than Python code, and so cannot be given back
            signal.signal(signal.SIGTERM, former)


def intervals(check: float | None, start: float | None) -> dict[str, str]:
    """Return the variables that Ray Train reads when it starts a run; for those that are None, Ray's own stay."""
    given = {CHECKS: check, START: start}
    return {name: str(seconds) for name, seconds in given.items() if seconds is not None}
