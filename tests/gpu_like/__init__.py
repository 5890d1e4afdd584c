"""GPUs where there are none: torch for CPUs believes in eight, whose memory and arithmetic are the host's.

What a GPU refuses is refused: operators on tensors of two devices, more memory than a process may have
(`torch.cuda.set_per_process_memory_fraction`). What makes the host wait for one is counted.
Streams and events are there, but everything happens at once: what comes of a wait that is missing only a GPU shows.
NCCL is gloo under NCCL's rules (`tests/nccl_like.py`).

    python -m tests.gpu_like -m pytest tests/test_gpu.py -m gpu      # `make test-gpu-like`
    install()                            # in such a process, before anything asks torch whether there are GPUs

Operators are dispatched by a library of C++ (`device.cpp`), as PyTorch's own example of a new device does it; it
is registered before torch is imported, since torch asks once.

Source:
    https://github.com/pytorch/pytorch/tree/main/test/cpp_extensions/open_registration_extension
"""

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

LIBRARY = "DIFFPIPE_TESTS_GPU_LIKE"
_MEMORY_BYTES = 16 << 30
NUM_DEVICES = 8
ACCELERATOR = "gpu" if LIBRARY in os.environ else "cpu"


def built() -> Path:
    """Compiles the library, which takes a processor ten seconds, if it is not there; needs g++."""
    import torch

    source, inside = Path(__file__).with_name("device.cpp"), Path(torch.__file__).parent
    digest = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"diffpipe_gpu_like_{digest}.so"
    if library.exists():
        return library
    include, lib = inside / "include", inside / "lib"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = [
        "g++", "-O0", "-shared", "-fPIC", "-std=c++20", "-w", *(f"-I{each}" for each in folders),
        source, "-o", f"{library}.{os.getpid()}",
        f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=600)
    Path(f"{library}.{os.getpid()}").replace(library)
    return library


def install() -> None:
    """Gives torch its devices, in a process of `with_gpus` that has not got them; no other."""
    if LIBRARY not in os.environ:
        return
    import torch

    if torch.cuda.is_available():
        return
    library = ctypes.CDLL(os.environ[LIBRARY])
    library.allocated_bytes.restype = library.most_allocated_bytes.restype = ctypes.c_int64
    vars(torch.cuda).update(_functions(library))
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.version.cuda = "13.0"
    torch.Tensor.record_stream = lambda self, stream: None
    torch.serialization.register_package(5, lambda storage: None, _moved)
    torch.UntypedStorage.clone = lambda self: _bytes_of(self).clone().untyped_storage()
    _exchange_over_gloo(torch)


def waits() -> dict[str, int]:
    """What has made the host wait for a device since the last call: how often, by operator."""
    text = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL(os.environ[LIBRARY]).read_waits(text, ctypes.c_int64(len(text)))
    pairs = (line.rsplit("=", 1) for line in text.value.decode().splitlines())
    return {name: int(count) for name, count in pairs}


def _bytes_of(storage: Any) -> Any:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _moved(storage: Any, location: Any) -> Any:
    """A storage that was read from a file, on the device that it was saved from."""
    is_gpu = str(location).startswith("cuda")
    return _bytes_of(storage).to(location).untyped_storage() if is_gpu else None


def _exchange_over_gloo(torch: Any) -> None:
    """Lets gloo, which gets what lies in the same memory, stand for NCCL, under its rules."""
    from tests.nccl_like import pretend_nccl

    dist = torch.distributed
    make = dist.init_process_group

    def init_process_group(backend: str | None = None, **options: Any) -> None:
        make("gloo" if backend == "nccl" else backend, **options)
        begun = pretend_nccl()
        torch.cuda.synchronize = lambda device=None: begun.synchronize()

    dist.is_nccl_available = lambda: True
    dist.init_process_group = init_process_group


class Event:
    """Happens at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at_s = 0.0

    def record(self, stream: Any = None) -> None:
        self.at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.at_s - self.at_s)


class Stream:
    """Whatever is begun in it has ended."""

    cuda_stream = device_index = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def wait_stream(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _functions(library: Any) -> dict[str, Any]:
    """Those of torch.cuda."""
    import torch

    # The first ones that are made are those of the devices.
    generators = tuple(torch.Generator(f"cuda:{i}") for i in range(NUM_DEVICES))
    streams = [Stream()]
    about = [
        SimpleNamespace(
            name="GPU of the tests", major=9, minor=0, total_memory=_MEMORY_BYTES, uuid=str(index)
        )
        for index in range(NUM_DEVICES)
    ]

    def index_of(device: Any) -> int:
        if device is None or isinstance(device, int):
            return library.current_device() if device is None or device < 0 else device
        index = torch.device(device).index
        return library.current_device() if index is None else index

    def generator_of(device: Any = None) -> torch.Generator:
        return generators[index_of(device)]

    def exchange(index: int) -> int:
        before = library.current_device()
        if index >= 0:
            library.set_device(index)
        return before

    @contextlib.contextmanager
    def stream(entered: Stream | None) -> Iterator[None]:
        streams.append(entered or streams[-1])
        try:
            yield
        finally:
            streams.pop()

    def set_stream(entered: Stream) -> None:
        streams[-1] = entered

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        generator_of(device).set_state(state)

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    limits = [_MEMORY_BYTES]

    def limit(fraction: float, device: Any = None) -> None:
        limits.append(int(fraction * _MEMORY_BYTES))
        library.limit_allocated(ctypes.c_int64(limits[-1]))

    def free_bytes(device: Any = None) -> tuple[int, int]:
        return limits[-1] - library.allocated_bytes(), _MEMORY_BYTES

    nothing = lambda *args, **kwargs: None
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": nothing,
        "init": nothing,
        "synchronize": nothing,
        "empty_cache": nothing,
        "ipc_collect": nothing,
        "device_count": lambda: NUM_DEVICES,
        "current_device": lambda: library.current_device(),
        "set_device": lambda device: library.set_device(index_of(device)),
        "_exchange_device": exchange,
        "_maybe_exchange_device": exchange,
        "get_device_properties": lambda device=None: about[index_of(device)],
        "get_device_capability": lambda device=None: (about[0].major, about[0].minor),
        "get_device_name": lambda device=None: about[0].name,
        "get_arch_list": lambda: ["sm_90"],
        "can_device_access_peer": lambda device, peer: False,
        "Event": Event,
        "Stream": Stream,
        "StreamContext": stream,
        "stream": stream,
        "set_stream": set_stream,
        "current_stream": lambda device=None: streams[-1],
        "default_stream": lambda device=None: streams[0],
        "memory_allocated": lambda device=None: library.allocated_bytes(),
        "memory_reserved": lambda device=None: library.allocated_bytes(),
        "max_memory_allocated": lambda device=None: library.most_allocated_bytes(),
        "max_memory_reserved": lambda device=None: library.most_allocated_bytes(),
        "reset_peak_memory_stats": lambda device=None: library.reset_most_allocated(),
        "memory_stats": lambda device=None: {},
        "mem_get_info": free_bytes,
        "set_per_process_memory_fraction": limit,
        "default_generators": generators,
        "get_rng_state": lambda device=None: generator_of(device).get_state(),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": lambda states: [*map(set_rng_state, states, range(NUM_DEVICES))],
        "manual_seed": lambda seed: generator_of().manual_seed(seed),
        "manual_seed_all": seed_all,
        "seed": lambda: generator_of().seed(),
        "initial_seed": lambda: generator_of().initial_seed(),
    }
