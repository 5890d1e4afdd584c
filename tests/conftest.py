"""One torch thread, fixed seeds, and golden files that can be rewritten."""

import gc
import logging
import os
import threading
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

from tests import gpu_like

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")

# Laws are tried with the same examples each time: nothing fails by chance beside what it has nothing to do with.
# HYPOTHESIS_PROFILE=random draws others, and more (`make test-random`). A busy machine is no reason to fail.
_PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("tests", derandomize=True, **_PATIENT)
settings.register_profile("random", max_examples=2000, **_PATIENT)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "tests"))

gpu_like.install()

# Half a million objects come with the imports of all tests, and stay: they are not searched for garbage meanwhile,
# nor by collections during the tests (`all_objects_in_sight` says where they are needed).
gc.disable()

# Imported by the server of test processes only: it probes a module, and hides all objects from gc.
collect_ignore = ["warm.py"]


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files")


def pytest_configure(config):
    """Hides GPUs from all tests but those marked `gpu`: on one, other last bits come out than on the CPU."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if servers := getattr(config, "workerinput", {}).get("servers"):
        from tests import ranks

        ranks.use_servers(servers)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Lets all workers fork from the same two servers, whose imports take a processor seven seconds each."""
    from tests import ranks  # not before GPUs are hidden

    if _only_distributed(node.config):
        node.workerinput["servers"] = ranks.start_servers()


def pytest_ignore_collect(collection_path, config):
    """Files that mark no test as distributed are not imported where only such tests run."""
    if _only_distributed(config) and collection_path.suffix == ".py":
        is_test = collection_path.name.startswith("test_")
        return not (is_test and b"mark.distributed" in collection_path.read_bytes()) or None
    return None


def _only_distributed(config):
    return config.option.markexpr.split(" ")[0] == "distributed"


def pytest_report_header():
    return f"torch {version('torch')}, lightning {version('lightning')}"


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000)  # 700 objects are made, and searched, a hundred times in a probe
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed():
    import torch  # not before: what hands out tests to workers runs none, and starts seconds earlier

    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(autouse=True)
def _a_log_that_no_command_has_set_up():
    """History: records of the level that a command had chosen failed tests that expected none."""
    yield
    logger = logging.getLogger("lightning_diffpipe")
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()
    logger.propagate = True


# What torchrun, Lightning and diffpipe tell the processes that they start, and what makes programs write colours.
_FOREIGN = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "FORCE_COLOR", "TTY_COMPATIBLE"),
)


@pytest.fixture(autouse=True)
def _nobodys_rank():
    """Each test begins as if its process had been started by hand, and so do the processes that it starts.

    History: Lightning keeps the process group of a fit, and variables that tell where to meet; commands that later
    tests of the process started took them for their own.
    """
    import torch.distributed as dist

    _forget_foreign()
    yield
    _forget_foreign()
    if dist.is_initialized():
        dist.destroy_process_group()


def _forget_foreign():
    for name in _FOREIGN:
        os.environ.pop(name, None)


@pytest.fixture
def update_golden(request):
    return request.config.getoption("--update-golden")


@pytest.fixture(autouse=True)
def _watchers_end_with_their_test():
    """History: 60 threads of watchers took the interpreter in turns, and left a tenth of it to tests."""
    before = threading.enumerate()
    yield
    for thread in set(threading.enumerate()) - set(before):
        if thread.name == "diffpipe-watcher":
            from lightning_diffpipe.comm.watcher import watcher

            target = getattr(thread, "_target", None)  # of one that goes on
            if target is not None and target.__self__ is not watcher:
                target.__self__._thread = None
