"""The connection to a cluster: an existing one, or one that is started and ended here."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import create_connection
from typing import Any, Protocol

from heliograph.spi import require

from .launcher.options import check_address

CHECK_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
CONNECT_TIMEOUT = 10.0  # seconds

logger = logging.getLogger("heliograph")


class Keeper(Protocol):
    """What keeps workers between calls, or a cluster that it has started."""

    def close_if_idle(self) -> None:
        """End them, unless a call is under way."""


KEEPERS: set[Keeper] = set()  # of this process


@contextmanager
def connect(address: str | None, *, needed: Mapping[str, float], cpus: int = 1) -> Iterator[None]:
    """Connect to a cluster within the context; disconnect after it only if this function has connected.

    What this process keeps on a cluster for later calls is ended before: it might take all the room.

    Args:
        address: of the cluster: `auto` or `host:port`. None uses the one that this process is connected to, or that
            `RAY_ADDRESS` names, or starts one on this machine.
        needed: resources, by name, that a cluster that is started here must have; an existing one may still grow.
        cpus: the least number of CPUs of a cluster that is started here; more than there are cores share them.

    Raises:
        ConnectionError: there is no cluster at the address.
        RuntimeError: this process is connected to another cluster.
        ValueError: this machine does not have the needed resources, or the address is not valid.
    """
    check_address(address)
    ray = require("ray", "RayLauncher", extra="ray")
    for keeper in list(KEEPERS):
        keeper.close_if_idle()
    if ray.is_initialized():
        _check_same(address)
        yield
        return
    address = address or _address_from_environment()
    with _kept_sigterm_handler():
        _start(ray, address, cpus)
    connected = connected_address()
    try:
        if address is None:
            _check_resources(ray.cluster_resources(), needed)
        yield
    finally:
        if connected_address() == connected:  # not somebody else's
            ray.shutdown()


def connected_address() -> str | None:
    """Return the address of the cluster that this process is connected to; None without one. It connects to none."""
    ray = require("ray", "RayLauncher", extra="ray")
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None


def _start(ray: Any, address: str | None, cpus: int) -> None:
    if address is None:
        cores = os.cpu_count() or 1
        if cpus > cores:
            logger.warning("the workers take %d CPUs, and this machine has %d cores, which they share", cpus, cores)
        ray.init("local", num_cpus=max(cpus, cores), include_dashboard=False)
        return
    try:
        _check_connection(address)
        ray.init(address)
    except OSError as error:
        raise ConnectionError(
            f"There is no Ray cluster at {address!r}: {error}. Start one with `ray start --head`, which prints its "
            f"address, or leave address= out: then RayLauncher starts one here for the time of a run."
        ) from error


def _address_from_environment() -> str | None:
    """Return RAY_ADDRESS; None if it is not set, or is `local`, which means that a cluster is to be started."""
    found = os.environ.get("RAY_ADDRESS") or None
    if found == "local":
        return None
    check_address(found, "RAY_ADDRESS")
    return found


def _check_connection(address: str) -> None:
    """Raise OSError if the address does not accept a connection: Ray would try for minutes, and ignore Ctrl-C."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


def _check_resources(total: Mapping[str, float], needed: Mapping[str, float]) -> None:
    for name, amount in needed.items():
        if amount > total.get(name, 0.0):
            raise ValueError(
                f"The workers take {amount:g} {name}, and the cluster that RayLauncher has started on this machine has "
                f"{total.get(name, 0.0):g}: ask for less (num_workers, use_gpu, resources_per_worker), or give the "
                f"address= of a cluster that has it."
            )


def _check_same(address: str | None) -> None:
    connected = connected_address()
    if address not in (None, "auto", connected):
        raise RuntimeError(
            f"address={address!r} was given, but this process is connected to the Ray cluster at {connected}. Leave "
            f"address= out to use that one, or call ray.shutdown() first."
        )


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if former is not None:  # not installed by Python code, and so cannot be restored
            signal.signal(signal.SIGTERM, former)


def intervals(check: float | None, start: float | None) -> dict[str, str]:
    """Return the environment variables that Ray Train reads when it starts a run; None keeps Ray's default."""
    given = {CHECK_INTERVAL: check, START_TIMEOUT: start}
    return {name: str(seconds) for name, seconds in given.items() if seconds is not None}
