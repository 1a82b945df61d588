from __future__ import annotations

import pytest
from heliograph.core.distributed.membership import Membership, membership

THIRD = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}


def test_a_process_of_which_nobody_says_anything_is_alone() -> None:
    assert membership({}) == Membership(0, 0, 1, 1, "", 0, agent_store=False)
    assert membership({"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}) == Membership()


def test_takes_its_place_from_the_environment() -> None:
    assert membership(THIRD) == Membership(3, 1, 4, 2, "node-0", 29500, agent_store=False)
    assert membership(THIRD | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).agent_store
    assert not membership(THIRD | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_reads_the_environment_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in THIRD.items():
        monkeypatch.setenv(name, value)
    assert membership() == membership(THIRD)


def test_one_of_one_needs_no_address() -> None:
    assert membership({"RANK": "0", "WORLD_SIZE": "1"}) == Membership()


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_a_store_on_the_loopback_means_that_all_processes_are_on_this_machine(address: str) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": "29500"}
    assert membership(given) == Membership(1, 1, 2, 2, address, 29500)


def test_does_not_guess_a_place_on_one_of_several_machines() -> None:
    given = {name: value for name, value in THIRD.items() if not name.startswith("LOCAL")}
    with pytest.raises(ValueError, match="rank 3 of 4,"):
        membership(given)


def test_nobody_has_to_say_how_many_processes_a_machine_has() -> None:
    given = {name: value for name, value in THIRD.items() if name != "LOCAL_WORLD_SIZE"}
    assert membership(given) == Membership(3, 1, 4, None, "node-0", 29500)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_refuses_what_is_set_by_halves(missing: str) -> None:
    given = {name: value for name, value in THIRD.items() if name != missing}
    with pytest.raises(ValueError, match=rf"{missing}\. Start this process"):
        membership(given)


def test_refuses_a_local_rank_alone() -> None:
    with pytest.raises(ValueError, match="LOCAL_RANK=0, but not RANK"):
        membership({"LOCAL_RANK": "0"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4, .* contradict each other"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2 in the environment contradict"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 in the environment contradict"),
        ({"RANK": "-1"}, "RANK='-1' in the environment must be a whole number"),
        ({"RANK": "one"}, "RANK='one' in the environment must be a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0, .* contradict"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment must be a whole number"),
    ],
)
def test_refuses_what_cannot_be(changed: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        membership(THIRD | changed)
