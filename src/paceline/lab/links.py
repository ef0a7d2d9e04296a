"""What a lab's network consists of, as lines for ``ip -batch`` and ``tc -batch``.

iproute2 rather than pyroute2: it is on every Linux that could run a lab, a lab of eight hosts takes eighteen commands,
and pyroute2 (0.9) cannot delete a tbf that it has made.

A host's ``eth0`` and a port of the switch are the two ends of a veth pair. Each end shapes what leaves it: the host
its uplink, the switch the host's downlink. Loss is drawn where packets come in at a host, so that the receivers of
one multicast lose different packets, and by a classic BPF program, since that needs neither nft nor netem.
"""

from __future__ import annotations

import json

from paceline.errors import LabError

INTERFACE = "eth0"
MTU_BYTES = 1500

# TCP hands down packets of up to this size, which travel whole, with the headers of their segments accounted for.
# That takes a third less work than 16 KiB; with 64 KiB, flows that share a link get in each other's way.
GSO_BYTES = 32_768

# What a bucket holds leaves at once after a pause: that is how far a short message can outrun its link (64 MB by less
# than 0.4%), and what a link can catch up after its timer came late, as timers on a busy machine do. It must hold
# the largest packet.
BURST_S = 0.001
_LEAST_BURST_BYTES = 36_000
_MOST_BURST_BYTES = 256_000

# What a switch's port can hold before it drops.
QUEUE_S = 0.05
_LEAST_QUEUE_BYTES = 256_000

_DROP, _PASS = 2, 0  # TC_ACT_SHOT, TC_ACT_OK
_ARP = 0x0806


def address(host: int) -> str:
    """The IPv4 address of a host: 198.18.0.0/15 is set aside for benchmarks."""
    return f"198.18.{(host + 1) // 256}.{(host + 1) % 256}"


def address6(host: int) -> str:
    """The IPv6 address of a host."""
    return f"fd00:198:18::{host + 1:x}"


def names(num_hosts: int) -> str:
    """For ``/etc/hosts``: host3 is an IPv4 address, as programs expect; the others are there to be looked up backwards.

    PyTorch's store does that with addresses in their IPv6 form, and complains where there is no answer.
    """
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    for host in range(num_hosts):
        four, six = address(host), address6(host)
        lines += [f"{four} host{host}", f"::ffff:{four} host{host}.mapped", f"{six} host{host}.v6"]
    return _text(lines)


def port(host: int) -> str:
    """The switch's end of a host's link."""
    return f"port{host}"


def switch_lines(pids: list[int]) -> str:
    """For ``ip``, in the switch: a bridge that floods multicast, and a cable to each host."""
    lines = ["link add name switch type bridge mcast_snooping 0", "link set switch up"]
    for host, pid in enumerate(pids):
        lines += [
            f"link add {port(host)} mtu {MTU_BYTES} type veth peer name {INTERFACE} mtu {MTU_BYTES} netns {pid}",
            f"link set {port(host)} master switch up",
        ]
    return _text(lines)


def host_lines(host: int, *, lossy: bool) -> str:
    """For ``ip``, in a host. On a lossy link TCP sends packet by packet, as each can be lost."""
    gso = "gso_max_segs 1" if lossy else f"gso_max_size {GSO_BYTES}"
    return _text(
        [
            "link set lo up",
            f"link set {INTERFACE} {gso}",
            f"addr add {address(host)}/15 dev {INTERFACE}",
            f"addr add {address6(host)}/64 dev {INTERFACE} nodad",
            f"link set {INTERFACE} up",
            f"route add 224.0.0.0/4 dev {INTERFACE}",
        ]
    )


def shaping_line(device: str, rate_bytes_per_s: float) -> str:
    """For ``tc``: what leaves this device leaves at this rate."""
    burst = min(max(_LEAST_BURST_BYTES, round(rate_bytes_per_s * BURST_S)), _MOST_BURST_BYTES)
    queue = max(_LEAST_QUEUE_BYTES, round(rate_bytes_per_s * QUEUE_S))
    bits = round(rate_bytes_per_s * 8)
    return f"qdisc replace dev {device} root tbf rate {bits}bit burst {burst} limit {queue}\n"


COUNTERS = ("-statistics", "-json", "qdisc", "show")
"""For ``tc``: what has left each device. The shaper counts large packets with the headers of all their parts, as they
are sent; the counters of the interfaces do not."""


def bytes_sent(counters: str, device: str) -> int:
    """What the shaper of a device has let through, from what ``tc`` says."""
    for qdisc in json.loads(counters):
        if qdisc.get("dev") == device and qdisc.get("root"):
            return int(qdisc["bytes"])
    raise LabError(f"tc has no counters of {device}; does this kernel have tbf?")


def loss_lines(share: float) -> str:
    """For ``tc``, in a host: this share of the packets that come in is lost. ARP is spared: losing it costs seconds."""
    if share == 0:
        return ""
    program = [
        (0x28, 0, 0, 0xFFFFF000),  # load the protocol
        (0x15, 3, 0, _ARP),
        (0x20, 0, 0, 0xFFFFF038),  # load a random number of 32 bits
        (0x35, 1, 0, round(share * 2**32)),
        (0x06, 0, 0, _DROP),
        (0x06, 0, 0, _PASS),
    ]
    bytecode = ",".join(f"{code} {true} {false} {value}" for code, true, false, value in program)
    return _text(
        [
            f"qdisc add dev {INTERFACE} clsact",
            f'filter add dev {INTERFACE} ingress bpf direct-action bytecode "{len(program)},{bytecode}"',
        ]
    )


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
