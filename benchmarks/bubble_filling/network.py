"""DDP and the filled pipeline over a real slow link: two network namespaces, 1 Gbit/s, 0.1 ms each way.

    namespace diffpipe0 (rank 0, 10.77.0.1) ---- veth, tc tbf 1gbit + netem ---- diffpipe1 (rank 1, 10.77.0.2)

Needs root, `ip` and `tc`; says what failed where that is not possible. Each rank is a process of its own in
its namespace, so that every byte goes over the link.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMESPACES = ("diffpipe0", "diffpipe1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATE, DELAY = "1gbit", "100us"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")


def make_link() -> str:
    """Two namespaces and the link between them.

    Returns:
        How the rate is limited.

    Raises:
        RuntimeError: The machine does not permit it; names the command.
    """
    remove_link()
    for name in NAMESPACES:
        _run(f"ip netns add {name}")
    _run("ip link add dpveth0 type veth peer name dpveth1")
    for number, (name, address) in enumerate(zip(NAMESPACES, ADDRESSES, strict=True)):
        _run(f"ip link set dpveth{number} netns {name}")
        inside = f"ip netns exec {name}"
        _run(f"{inside} ip addr add {address}/24 dev dpveth{number}")
        _run(f"{inside} ip link set dpveth{number} up")
        _run(f"{inside} ip link set lo up")
        _run(
            f"{inside} tc qdisc add dev dpveth{number} root tbf rate {RATE} burst 256kb latency 50ms"
        )
    return f"tbf {RATE}"


def remove_link() -> None:
    """Takes the namespaces down, with all that is in them."""
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", "dpveth0"], capture_output=True, check=False)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each workload; one row that says what failed, if the link cannot be made."""
    try:
        make_link()
    except (RuntimeError, OSError) as error:
        remove_link()
        return [{"link": "none", "why": str(error)}]
    try:
        return [_measured(name, 4, arguments.rounds) for name in ("stable_diffusion", "controlnet")]
    finally:
        remove_link()


def _measured(workload: str, microbatches: int, rounds: int) -> dict[str, Any]:
    systems = ["filled", "unfilled", "limit", "DDP"]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        settings = json.dumps([workload, microbatches, rounds, systems, str(result)])
        ranks = []
        for rank, (name, address) in enumerate(zip(NAMESPACES, ADDRESSES, strict=True)):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "29533", "GLOO_SOCKET_IFNAME": f"dpveth{rank}", "OMP_NUM_THREADS": "1",
                "TP_SOCKET_IFNAME": f"dpveth{rank}", "DIFFPIPE_ADDRESS": address,
            }  # fmt: skip
            command = ["ip", "netns", "exec", name, sys.executable, __file__, settings]
            ranks.append(subprocess.Popen(command, env=environment))
        codes = [rank.wait(timeout=600) for rank in ranks]
        if any(codes):
            raise RuntimeError(f"a rank failed: exit codes {codes}")
        found = json.loads(result.read_text())
    median = found["medians"]
    return {
        "workload": workload,
        "M": microbatches,
        "link, Gbit/s": found["gbit_per_s"],
        "filled, ms": 1e3 * median["filled"],
        "limit / filled": median["limit"] / median["filled"],
        "unfilled / filled": median["unfilled"] / median["filled"],
        "DDP / filled": median["DDP"] / median["filled"],
    }


def _rank(settings: str) -> None:
    """One rank, in its namespace."""
    import time

    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.bubble_filling.real import compare
    from benchmarks.harness import medians

    workload, microbatches, rounds, systems, result = json.loads(settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, buffer = dist.get_rank(), torch.zeros(1 << 24)
    rates = []
    for _ in range(3):  # what the link really carries
        dist.barrier()
        started_s = time.perf_counter()
        if rank == 0:
            dist.send(buffer, 1)
        else:
            dist.recv(buffer, 0)
        rates.append(buffer.nbytes * 8 / (time.perf_counter() - started_s) / 1e9)
    found = compare(rank, workload, microbatches, rounds, systems)
    if rank == 1:
        numbers = {"medians": medians(found["times"]), "gbit_per_s": sorted(rates)[1]}
        Path(result).write_text(json.dumps(numbers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(sys.argv[1])
