"""The addresses on which a process listens."""

import ipaddress
import os
from pathlib import Path

from verl.processes.child import descendants


def listening(pid: int) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses of the TCP sockets on which a process accepts connections (Linux)."""
    links = [_link(file) for file in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                found.append(_address(fields[1].partition(":")[0]))
    return found


def processes_below(pid: int) -> list[int]:
    """The child processes of a process, and their child processes."""
    return list(descendants(pid))


def _link(file: Path) -> str:
    try:
        return os.readlink(file)
    except FileNotFoundError:  # closed since
        return ""


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as the kernel prints it: words of 32 bits in the order of this machine."""
    words = [int(text[start : start + 8], 16).to_bytes(4, "little") for start in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    return getattr(address, "ipv4_mapped", None) or address
