"""The lab with real namespaces: what hosts see of each other, how commands end, and that nothing stays behind.

Needs root; without it these tests are skipped, but for the one that looks at what is said then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LabError, UsageError
from paceline.lab import Lab, unavailable
from paceline.lab.probe import shares

pytestmark = pytest.mark.timeout(30)
root_only = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

CLI = [sys.executable, "-c", "from paceline.cli.main import run; run()", "lab"]

# Every rank greets rank 0 by its own address, with what it was told about itself.
GREET = """
import os, socket
rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if rank == 0:
    server = socket.create_server((os.environ["MASTER_ADDR"], port))
    for _ in range(size - 1):
        guest, (address, _) = server.accept()
        print(address, guest.makefile().readline(), end="", flush=True)
else:
    for _ in range(200):
        try:
            guest = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)
            break
        except ConnectionRefusedError:
            import time; time.sleep(0.05)
    guest.sendall(f"{rank} of {size} on {socket.gethostname()} {os.listdir('/sys/class/net')}\\n".encode())
"""

LISTEN = """
import socket
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("", 7000))
datagrams.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("239.1.2.3") + bytes(4))
server = socket.create_server(("::", 7001), family=socket.AF_INET6)
print("ready", flush=True)
print(datagrams.recv(100).decode(), server.accept()[1][0])
"""
SPEAK = """
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"all", ("239.1.2.3", 7000))
for address in ("fd00:198:18::2", "fd00:198:18::3"):
    socket.create_connection((address, 7001), 5)
print(socket.gethostbyname("host2"))
"""

# 33 is SO_RCVBUFFORCE: what is lost is to be lost on the way.
COUNT = """
import socket
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)
datagrams.bind(("", 7000))
print("ready", flush=True)
count = 0
while datagrams.recv(2000) != b"end":
    count += 1
print(count)
"""
SEND = """
import socket
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.connect(("198.18.0.2", 7000))
for _ in range(10000):
    datagrams.send(bytes(500))
for _ in range(20):
    datagrams.send(b"end")
"""

ECHO = """
import socket
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("", 7000))
print("ready", flush=True)
while True:
    datagrams.sendto(*datagrams.recvfrom(100))
"""
ASK = """
import socket, sys
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.settimeout(0.2)
for line in sys.stdin:
    try:
        datagrams.sendto(line.encode(), ("198.18.0.1", 7000))
        print(datagrams.recv(100).decode(), end="", flush=True)
    except OSError:
        print("nothing", flush=True)
"""


def _python(lab: Lab, rank: int, program: str) -> Any:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return lab.hosts[rank].popen([sys.executable, "-c", program], **pipes)


def lab_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=25, check=False)


@pytest.mark.lab(hosts=3)
def test_ranks_see_each_other(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.run([sys.executable, "-c", GREET], timeout_s=20) == 0
    greetings = sorted(capsys.readouterr().out.replace("'lo', 'eth0'", "'eth0', 'lo'").splitlines())
    assert greetings == [f"[0] 198.18.0.{r + 1} {r} of 3 on host{r} ['eth0', 'lo']" for r in (1, 2)]
    assert [host.address for host in lab.hosts] == ["198.18.0.1", "198.18.0.2", "198.18.0.3"]


@pytest.mark.lab(hosts=2)
def test_hosts_are_not_taken_for_one(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    script = (
        "hostname; cat /proc/sys/kernel/random/boot_id; ls -d /proc/[0-9]* | wc -l; ls /dev/shm; touch /dev/shm/$RANK"
    )
    assert lab.run(["sh", "-c", script], timeout_s=10) == 0
    lines = capsys.readouterr().out.splitlines()
    names, boots, processes = zip(
        *([line[4:] for line in lines if line.startswith(f"[{rank}]")] for rank in (0, 1)), strict=True
    )  # and nothing in shared memory
    assert names == ("host0", "host1")
    assert len({*boots, Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 3
    assert all(int(number) < 10 for number in processes), "a host sees this machine's processes"


@pytest.mark.lab(hosts=3)
def test_ipv6_names_and_multicast_work(lab: Lab) -> None:
    listeners = [_python(lab, rank, LISTEN) for rank in (1, 2)]
    for listener in listeners:
        assert listener.stdout.readline() == "ready\n"
    assert _python(lab, 0, SPEAK).communicate(timeout=10)[0] == "198.18.0.3\n"
    for listener in listeners:
        assert listener.communicate(timeout=10)[0] == "all fd00:198:18::1\n"


COUNT_PARTS = """
import socket, struct
listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
listener.bind(("239.192.7.7", 7001))
request = socket.inet_aton("239.192.7.7") + socket.inet_aton("0.0.0.0")
listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
print("ready", flush=True)
listener.settimeout(2.0)
parts = []
while True:
    try:
        parts.append(struct.unpack("<II", listener.recv(2000)[:8]))
    except TimeoutError:
        break
print(*(f"{packet}:{part}" for packet, part in parts))
"""
SEND_LARGE = """
import socket, struct, time
UDP_SEGMENT = 103
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 1200)
for packet in range(100):
    parts = b"".join(struct.pack("<II", packet, part).ljust(1200, b".") for part in range(20))
    sender.sendto(parts, ("239.192.7.7", 7001))
    time.sleep(0.002)
"""


@pytest.mark.lab(hosts=3, loss=0.3)
def test_of_a_large_multicast_single_packets_are_lost_others_at_each_receiver(lab: Lab) -> None:
    """The kernel sends 20 packets in one piece (UDP_SEGMENT): on a lossy link each of them is lost for itself."""
    listeners = [_python(lab, rank, COUNT_PARTS) for rank in (1, 2)]
    for listener in listeners:
        assert listener.stdout.readline() == "ready\n"
    assert _python(lab, 0, SEND_LARGE).communicate(timeout=20)[0] == ""
    received = [set(listener.communicate(timeout=20)[0].split()) for listener in listeners]
    for parts in received:
        assert 0.65 < len(parts) / 2000 < 0.75
        of_packet = [sum(part.startswith(f"{packet}:") for part in parts) for packet in range(100)]
        assert sum(0 < number < 20 for number in of_packet) > 90, "most pieces have lost some of their packets"
    assert 0.43 < len(received[0] & received[1]) / 2000 < 0.55, "0.7 squared: losses are independent"


@pytest.mark.lab(hosts=2)
def test_bytes_of_a_port_are_counted_with_their_headers(lab: Lab) -> None:
    before = lab.port_bytes()
    program = (
        "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "[s.sendto(bytes(1000), ('198.18.0.2', 9)) for _ in range(100)]"
    )
    assert _python(lab, 0, program).communicate(timeout=10)[0] == ""
    time.sleep(0.2)  # until the last has left the queue of the switch
    after = lab.port_bytes()
    sent, received = after[0].sent - before[0].sent, after[1].received - before[1].received
    assert 100 * 1042 <= sent < 100 * 1042 + 1000  # and an ARP or two
    assert 100 * 1042 <= received < 100 * 1042 + 1000


@root_only
def test_the_command_line_returns_the_worst_code_and_the_first_error() -> None:
    done = lab_command("--hosts", "3", "--late", "1:20ms", "--", "sh", "-c", "echo $PACELINE_LAB_LATE; exit $RANK")
    assert done.returncode == 2
    assert sorted(done.stdout.splitlines()) == ["[0] 1:20ms", "[1] 1:20ms", "[2] 1:20ms"]
    assert "failed first, with exit code" in done.stderr
    crash = "import os, time; time.sleep(60) if os.environ['RANK'] != '1' else os.abort()"
    done = lab_command("--hosts", "2", "--grace", "100ms", "--", sys.executable, "-c", crash)
    assert done.returncode == 128 + signal.SIGABRT
    assert "rank 1 failed first, by SIGABRT" in done.stderr
    assert lab_command("--scenario", "lan4", "--timeout", "200ms", "--", "sleep", "60").returncode == 124


@root_only
def test_two_labs_at_once_do_not_meet() -> None:
    runs = [
        subprocess.Popen([*CLI, "--hosts", "2", "--", sys.executable, "-c", GREET], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for run in runs:
        out, _ = run.communicate(timeout=20)
        assert run.returncode == 0
        assert out.startswith("[0] 198.18.0.2 1 of 2 on host1 ")


def _left_over(tag: str, namespaces: set[str]) -> list[str]:
    """Processes that carry the tag or live in one of these network namespaces."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if tag in command or os.readlink(process / "ns" / "net") in namespaces:
                    found.append(f"{process.name} {command}")
            except OSError:
                pass  # it has ended meanwhile
    return found


def _wait_until_nothing_is_left(tag: str, namespaces: set[str]) -> None:
    while _left_over(tag, namespaces):  # the test's time limit ends this
        time.sleep(0.02)


@root_only
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_nothing_is_left_however_the_lab_ends(number: int, code: int) -> None:
    tag = f"paceline-test-{uuid.uuid4()}"
    interfaces = sorted(os.listdir("/sys/class/net"))
    daemon = (
        f"trap '' INT TERM HUP; setsid sh -c 'sleep 3600; : {tag}' & readlink /proc/self/ns/net; sleep 3600; : {tag}"
    )
    command = [*CLI, "--hosts", "2", "--ranks-per-host", "2", "--", "sh", "-c", daemon]
    lab = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert lab.stdout is not None
    namespaces = {lab.stdout.readline().split()[1] for _ in range(4)}
    assert len(namespaces) == 2
    assert len(_left_over(tag, set())) >= 8
    lab.send_signal(number)
    assert lab.wait(15) == code
    _wait_until_nothing_is_left(tag, namespaces)
    assert sorted(os.listdir("/sys/class/net")) == interfaces
    lab.stdout.close()


@pytest.mark.lab(hosts=2)
def test_what_is_started_is_ours_and_dies_with_the_lab(lab: Lab) -> None:
    process = lab.hosts[1].popen(["sleep", "3600"])
    assert os.readlink(f"/proc/{process.pid}/ns/net") == os.readlink(lab.hosts[1].namespace)
    process.send_signal(signal.SIGSTOP)  # reaches it, not somebody in between
    assert os.waitid(os.P_PID, process.pid, os.WSTOPPED) is not None
    namespaces = {os.readlink(host.namespace) for host in lab.hosts}
    lab.close()
    assert process.returncode == -signal.SIGKILL
    _wait_until_nothing_is_left("no such tag", namespaces)
    with pytest.raises(LabError, match="not running"):
        _ = lab.hosts


@pytest.mark.lab(hosts=2)
def test_a_lab_without_its_keeper_is_over(lab: Lab) -> None:
    process = lab.hosts[1].popen(["sleep", "3600"])
    namespaces = {os.readlink(host.namespace) for host in lab.hosts}
    os.kill(int(Path(f"/proc/{lab.hosts[0].pid}/stat").read_text().split()[3]), signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    _wait_until_nothing_is_left("no such tag", namespaces)  # the kernel ends the hosts one after the other
    with pytest.raises(LabError, match="host 0 is gone"):
        lab.run(["true"])


@root_only
def test_a_lab_inside_a_lab() -> None:
    done = lab_command("--hosts", "1", "--", *CLI, "--hosts", "2", "--", "hostname")
    assert sorted(done.stdout.splitlines()) == ["[0] [0] host0", "[0] [1] host1"], done.stderr


@pytest.mark.lab(hosts=2, loss=0.2)
def test_loss_drops_its_share(lab: Lab) -> None:
    receiver = _python(lab, 1, COUNT)
    assert receiver.stdout.readline() == "ready\n"
    _python(lab, 0, SEND).communicate(timeout=10)
    received = int(receiver.communicate(timeout=10)[0])
    assert received / 10_000 == pytest.approx(0.8, abs=0.02)  # five standard deviations


@pytest.mark.lab(hosts=2)
def test_a_cut_link_carries_nothing_until_it_is_mended(lab: Lab) -> None:
    server, asker = _python(lab, 0, ECHO), _python(lab, 1, ASK)
    assert server.stdout.readline() == "ready\n"

    def answer(question: str) -> str:
        asker.stdin.write(f"{question}\n")
        asker.stdin.flush()
        return str(asker.stdout.readline().strip())

    assert answer("before") == "before"
    lab.cut(0)
    assert answer("meanwhile") == "nothing"
    lab.mend(0)
    while answer("after") != "after":  # the neighbours find each other again; the test's time limit ends this
        pass
    for process in (server, asker):
        process.kill()
        process.communicate()


@pytest.mark.lab("uplink8")
def test_links_have_the_rates_of_the_cluster_and_new_ones_when_set(lab: Lab) -> None:
    switch = Path(f"/proc/{lab.hosts[0].pid}/stat").read_text().split()[3]  # its parent, the keeper, lives there

    def rates(rank: int) -> list[str]:
        places = (lab.hosts[rank].namespace, "eth0"), (f"/proc/{switch}/ns/net", f"port{rank}")
        shown = [
            subprocess.run(
                ["nsenter", f"--net={namespace}", "tc", "qdisc", "show", "dev", device],
                capture_output=True, text=True, timeout=10, check=True,
            ).stdout
            for namespace, device in places
        ]  # fmt: skip
        return [text.split(" rate ")[1].split()[0] for text in shown]

    assert rates(5) == ["100Mbit", "500Mbit"]
    lab.set_rate(5, up="10mbit")
    assert rates(5) == ["10Mbit", "500Mbit"]
    assert rates(4) == ["100Mbit", "500Mbit"]
    lab.set_rate(5, up="20mbit", down="30mbit")
    assert rates(5) == ["20Mbit", "30Mbit"]
    assert lab.cluster.hosts[5].down_bytes_per_s == 30e6 / 8
    with pytest.raises(UsageError, match="no host 8"):
        lab.cut(8)


@pytest.mark.lab(hosts=2, up="100mbit", down="200mbit")
def test_no_flow_outruns_its_link(lab: Lab) -> None:
    found = shares(lab, [(0, 1), (1, 0)], size_bytes=4_000_000, rounds=2)
    assert len(found) == 2
    assert max(found) < 1.02  # a full bucket is 1%; a busy machine makes it less, never more
    lab.set_rate(0, down="50mbit")
    assert max(shares(lab, [(1, 0)], size_bytes=2_000_000, rounds=1)) < 1.04


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--loss", "100%", "--", "true"], "--loss is a share"),
        (["--scenario", "lan9", "--", "true"], "there is no cluster 'lan9'"),
        (["--scenario", "lan8", "--hosts", "4", "--", "true"], "leave the others out"),
        (["--scenario", "lan8", "--ranks-per-host", "2", "--", "true"], "leave the others out"),
        (["--ranks-per-host", "0", "--", "true"], "at least 1 rank, not 0"),
        (["--ranks-per-host", "-2", "--", "true"], "at least 1 rank, not -2"),
        (["--ranks-per-host", "33", "--", "true"], "at most 256 ranks"),
        (["--ranks-per-host", "1.5", "--", "true"], "'--ranks-per-host'"),
        (["--hosts", "2", "--ranks-per-host", "2", "--late", "4:1s", "--", "true"], "the ranks are 0 to 3"),
        (["--hosts", "2", "--late", "1", "--", "true"], "RANK:DURATION"),
        (["--hosts", "2"], "Missing argument"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    done = lab_command(*arguments)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@root_only
def test_without_root_a_sentence_says_so() -> None:
    bare = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", *CLI, "--hosts", "2", "--", "true"]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("paceline: error: the lab needs root")
    assert "sudo" in done.stderr
