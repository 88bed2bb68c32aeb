"""Which interface collectives use: real gloo ranks in two network namespaces that stand for machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import isotrain
from isotrain.engine.world import address_towards_master, interface_of, use_interface
from isotrain.errors import LaunchError

RANK = Path(__file__).with_name("interface_rank.py")
# Both have a second interface; their names are 127.0.1.1, as Debian writes it; nothing leads elsewhere.
MACHINES = r"""
set -e
printf '127.0.0.1 localhost\n127.0.1.1 %s\n10.77.0.1 first\n' "$(hostname)" > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts
unshare -n sleep 120 & other=$!
trap 'kill $other' EXIT
while [ "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.05; done
in_other() { nsenter -t $other -n "$@"; }
for one in near:1:77 apart:1:78; do
    IFS=: read name host net <<< "$one"
    ip link add $name type veth peer name far_$name
    ip link set far_$name netns $other
    ip addr add 10.$net.0.1/24 dev $name; ip link set $name up
    in_other ip addr add 10.$net.0.2/24 dev far_$name; in_other ip link set far_$name up
done
ip link set lo up; in_other ip link set lo up
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=$4 MASTER_PORT=29511
RANK=1 in_other "$2" "$3" > "$1/1" 2>&1 & second=$!
RANK=0 "$2" "$3" > "$1/0" 2>&1
wait $second
"""


def _can_make_machines() -> bool:
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip", "bash")):
        return False
    attempt = "ip link add near type veth peer name far && mount --bind /etc/hosts /etc/hosts"
    return subprocess.run(["unshare", "-rnm", "sh", "-c", attempt], capture_output=True).returncode == 0


@pytest.mark.ranks
@pytest.mark.skipif(not _can_make_machines(), reason="no network namespaces with links here")
@pytest.mark.parametrize("master", ["10.77.0.1", "first"])
def test_ranks_of_two_machines_meet(tmp_path: Path, master: str) -> None:
    source = str(Path(isotrain.__file__).parents[1])
    unset = ("GLOO_SOCKET_IFNAME", "RANK", "ISOTRAIN_STORE", "TORCHELASTIC_USE_AGENT_STORE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        ["unshare", "-rnm", "bash", "-c", MACHINES, "bash", str(tmp_path), sys.executable, str(RANK), master],
        env={**environment, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    said = [(tmp_path / str(rank)).read_text() for rank in range(2) if (tmp_path / str(rank)).exists()]
    assert done.returncode == 0, done.stderr[-2000:] + "\n".join(said)[-4000:]
    assert [text.splitlines()[-1] for text in said] == ["3.0 near near", "3.0 far_near far_near"]


def test_finds_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.3.2.1") == "lo"
    with pytest.raises(LaunchError, match=r"no network interface has the address 203\.0\.113\.9"):
        interface_of("203.0.113.9")


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("DEVICE_SOCKET_IFNAME", raising=False)
    use_interface(lambda: pytest.fail("not asked for"), "DEVICE_SOCKET_IFNAME")
    assert os.environ["DEVICE_SOCKET_IFNAME"] == "ib0"
    monkeypatch.setenv("DEVICE_SOCKET_IFNAME", "ib1")
    use_interface(lambda: pytest.fail("not asked for"), "DEVICE_SOCKET_IFNAME")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["DEVICE_SOCKET_IFNAME"]) == ("ib0", "ib1")


def test_one_machine_stays_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("DEVICE_SOCKET_IFNAME", raising=False)
    use_interface(lambda: address_towards_master("localhost", one_machine=True), "DEVICE_SOCKET_IFNAME")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["DEVICE_SOCKET_IFNAME"] == "lo"
    del os.environ["GLOO_SOCKET_IFNAME"], os.environ["DEVICE_SOCKET_IFNAME"]


def test_refuses_a_master_without_an_address() -> None:
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=no\.such\.host.*set GLOO_SOCKET_IFNAME"):
        address_towards_master("no.such.host.invalid", one_machine=False)
