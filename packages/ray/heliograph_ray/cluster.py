"""The connection to a Ray cluster, which is started if none exists."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from socket import create_connection
from typing import Any, Protocol

from heliograph.spi import require

CHECK_INTERVAL = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
CONNECT_TIMEOUT = 10.0  # seconds
ADDRESS = re.compile(r"(?P<host>[^\s/:]+|\[[0-9a-fA-F:.]+\]):(?P<port>[0-9]{1,5})")

logger = logging.getLogger("heliograph")


class Keeper(Protocol):
    """Keeps workers or a cluster alive between calls."""

    def close_if_idle(self) -> None: ...


KEEPERS: set[Keeper] = set()  # of this process


@contextmanager
def connect(address: str | None, *, needed: Mapping[str, float], cpus: int = 1) -> Iterator[None]:
    """Connect to a cluster within the context; disconnect afterwards only if this call connected.

    Closes idle kept workers first, because they may occupy the whole cluster.

    Args:
        address: `auto` or `host:port`; None uses the connected cluster, `RAY_ADDRESS`, or starts a local one.
        needed: the resources, by name, that a local cluster must have.
        cpus: the minimum number of CPUs of a local cluster; they may exceed the number of cores.
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
    with restored_handlers(signal.SIGTERM):
        _start(ray, address, cpus)
    connected = connected_address()
    try:
        if address is None:
            _check_resources(ray.cluster_resources(), needed)
        yield
    finally:
        if connected_address() == connected:  # other code may have connected to another cluster
            ray.shutdown()


def connected_address() -> str | None:
    ray = require("ray", "RayLauncher", extra="ray")
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else None


def _start(ray: Any, address: str | None, cpus: int) -> None:
    if address is None:
        cores = os.cpu_count() or 1
        if cpus > cores:
            logger.warning("the workers need %d CPUs and share the %d cores of this machine", cpus, cores)
        ray.init("local", num_cpus=max(cpus, cores), include_dashboard=False)
        return
    try:
        _check_connection(address)
        ray.init(address)
    except OSError as error:
        raise ConnectionError(
            f"There is no Ray cluster at {address!r}: {error}. Start one with `ray start --head`, which prints its "
            f"address, or omit address=, so that RayLauncher starts a local one for the run."
        ) from error


def _address_from_environment() -> str | None:
    address = os.environ.get("RAY_ADDRESS") or None
    if address == "local":
        return None
    check_address(address, "RAY_ADDRESS")
    return address


def _check_connection(address: str) -> None:
    if address != "auto":
        host, _, port = address.rpartition(":")
        create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()


def _check_resources(total: Mapping[str, float], needed: Mapping[str, float]) -> None:
    for name, amount in needed.items():
        if amount > total.get(name, 0.0):
            raise ValueError(
                f"The workers need {amount:g} {name}, but the cluster that RayLauncher started on this machine has "
                f"{total.get(name, 0.0):g}. Reduce num_workers, use_gpu or resources_per_worker, or pass the address= "
                f"of a larger cluster."
            )


def _check_same(address: str | None) -> None:
    connected = connected_address()
    if address not in (None, "auto", connected):
        raise RuntimeError(
            f"address={address!r} was passed, but this process is connected to the Ray cluster at {connected}. Omit "
            f"address= to use that one, or call ray.shutdown() first."
        )


@contextmanager
def restored_handlers(*signums: int) -> Iterator[None]:
    """Restore signal handlers that Ray replaces."""
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {signum: signal.getsignal(signum) for signum in signums} if is_main else {}
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            if handler is not None:  # None if C code installed it, which cannot be restored
                signal.signal(signum, handler)


def check_address(address: str | None, source: str = "address") -> None:
    if address is None or address == "auto":
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"{source}={address!r} is for Ray's client, but this process must run on a machine of the cluster: run "
            f"the script there with address='auto', or with `ray job submit`."
        )
    matched = ADDRESS.fullmatch(address)
    if matched is None or not 1 <= int(matched["port"]) <= 65535:
        raise ValueError(f"{source} is 'auto', 'host:port', or None; got {address!r}.")
