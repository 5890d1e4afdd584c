"""Two hosts on one machine: network namespaces, joined by a link that can die, come back, or be slow.

    namespace 0, 10.77.0.1 | dp0 ── Link.run, a thread of this process ── dp1 | namespace 1, 10.77.0.2

Each interface is a TAP device, whose frames the thread reads and writes. So nothing but root and /dev/net/tun is
needed (`tc netem` is missing in many kernels), and a frame that is not passed on vanishes: no end of it sees that.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import selectors
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_TUNSETIFF, _TAP, _NO_HEADER = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 1 << 16
_MOST_WAITING_S = 1.0  # of frames on their way; what would come later is lost, as in a switch
ADDRESSES = "10.77.0.1", "10.77.0.2"


def why_not() -> str | None:
    """Returns why this process cannot make hosts; None if it can."""
    if os.geteuid():
        return "network namespaces are made by root only"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


class Link:
    """What joins two hosts; close it at the end.

    Args:
        delay_s: How long a frame is on its way.
        bits_per_s: How much passes in each direction.

    Attributes:
        is_dead: Nothing passes.
        commands: For each host a command that runs another one there.
    """

    def __init__(self, delay_s: float = 0.0, bits_per_s: float = math.inf) -> None:
        self.is_dead, self._delay_s, self._bits_per_s = False, delay_s, bits_per_s
        self._closing = threading.Event()
        self._taps: list[int] = []
        self._holders: list[subprocess.Popen[str]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        try:
            self.commands = [self._open_host(rank) for rank in (0, 1)]
            self._thread.start()
        except BaseException:
            self.close()
            raise

    def _open_host(self, rank: int) -> list[str]:
        # A process holds the namespaces until its standard input ends, with this process at the latest.
        script = f"hostname host{rank} && echo && read end"
        holds = ["unshare", "--net", "--uts", "sh", "-c", script]
        holder = subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._holders.append(holder)
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise RuntimeError("no network namespace could be made")
        enters = ["nsenter", "--net", "--uts", "--target", str(holder.pid)]
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._taps.append(tap)
        request = struct.pack("16sH22x", b"dptap%d", _TAP | _NO_HEADER)
        made, own = fcntl.ioctl(tap, _TUNSETIFF, request)[:16].rstrip(b"\0").decode(), f"dp{rank}"
        for command in (
            ["ip", "link", "set", made, "netns", str(holder.pid), "name", own],
            [*enters, "ip", "addr", "add", f"{ADDRESSES[rank]}/24", "dev", own],
            [*enters, "ip", "link", "set", own, "up"],
            [*enters, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        return [*enters, "env", f"GLOO_SOCKET_IFNAME={own}"]

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for tap in self._taps:
            selector.register(tap, selectors.EVENT_READ)
        waiting: dict[int, deque[tuple[float, bytes]]] = {tap: deque() for tap in self._taps}
        free_s = dict.fromkeys(self._taps, 0.0)
        while not self._closing.is_set():
            due_s = min((frames[0][0] for frames in waiting.values() if frames), default=math.inf)
            ready = selector.select(min(max(due_s - time.monotonic(), 0.0), 0.1))
            now_s = time.monotonic()
            for key, _ in ready:
                with contextlib.suppress(OSError):  # the interface is down
                    frame, to = os.read(key.fd, _FRAME_BYTES), self._taps[key.fd == self._taps[0]]
                    if not self.is_dead and free_s[to] < now_s + _MOST_WAITING_S:
                        free_s[to] = max(free_s[to], now_s) + 8 * len(frame) / self._bits_per_s
                        waiting[to].append((free_s[to] + self._delay_s, frame))
            for tap, frames in waiting.items():
                while frames and (self.is_dead or frames[0][0] <= now_s):
                    with contextlib.suppress(OSError):
                        _, frame = frames.popleft()
                        if not self.is_dead:
                            os.write(tap, frame)

    def close(self) -> None:
        """Ends the link and the hosts."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for tap in self._taps:
            os.close(tap)
        for holder in self._holders:
            holder.communicate()


@contextlib.contextmanager
def linked_hosts(delay_s: float = 0.0, bits_per_s: float = math.inf) -> Iterator[Link]:
    """Makes a link, and ends it."""
    link = Link(delay_s, bits_per_s)
    try:
        yield link
    finally:
        link.close()
