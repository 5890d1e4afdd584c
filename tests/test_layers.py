"""Who may import whom. A forbidden edge is explained, because it always has a better place."""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "lightning_diffpipe"
ROOT = Path(__file__).parent.parent / PACKAGE

# room -> rooms of this package it may import
ALLOWED = {
    "errors": set(),
    "clock": set(),
    "coroutine": set(),
    "files": set(),
    "host_memory": set(),
    "planning": {"errors"},
    "viewing": {"planning", "errors"},
    "graph": {"coroutine", "host_memory", "planning", "errors"},
    "quantization": {"graph", "errors"},
    "profiling": {"clock", "files", "host_memory", "graph", "planning", "errors"},
    "comm": {"coroutine", "graph", "planning", "errors"},
    "runtime": {"clock", "comm", "graph", "planning", "errors"},
    "sampling": {"clock", "comm", "coroutine", "graph", "planning", "quantization", "errors"},
    "pipelines": {"errors"},
}
TOP = {"training", "callbacks", "predictor", "modules", "data", "checkpoint_files",
       "checkpoint_shards", "model_sources", "__init__"}  # fmt: skip
# room -> third-party packages it may import; None: any
THIRD_PARTY = {
    "errors": set(),
    "clock": {"torch"},
    "coroutine": {"torch"},
    "files": set(),
    "host_memory": set(),
    "planning": set(),
    "viewing": {"matplotlib"},
    "graph": {"torch", "numpy"},
    "quantization": {"torch", "diffusers", "transformers", "bitsandbytes", "torchao"},
    "profiling": {"torch", "numpy", "diffusers", "transformers", "rich"},
    "comm": {"torch"},
    "runtime": {"torch", "numpy"},
    "sampling": {"torch", "numpy", "diffusers", "safetensors", "transformers"},
    "pipelines": {"torch", "transformers", "PIL"},
}
REASONS = {
    "planning": "planning is pure, so that it can be tested without a GPU; move the measurement to profiling/",
    "viewing": "viewing is pure, so that plans can be read anywhere; only viewing/plot.py may draw with matplotlib",
    "runtime": "the runtime obeys plans and knows no Lightning; translate hooks in strategy.py",
    "graph": "the graph knows one process only; communication belongs to comm/",
}
# file -> why it imports torch.distributed although it does not lie in comm/
DISTRIBUTED = {
    "training/processes.py": "makes the default process group by way of Lightning",
    "sampling/world.py": "makes the default process group where Lightning does not",
    "checkpoint_shards.py": "writes and reads torch's format of divided checkpoints, in a group of the Mesh",
    "graph/calltree.py": "asks whether there are other ranks, to refuse that a step talks to them",
}


@functools.cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules imported anywhere in a file, type checking included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_stay_in_their_room(path):
    room = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == PACKAGE and room in ALLOWED and len(parts) > 1:
            allowed = ALLOWED[room] | {room}
            assert parts[1] in allowed, (
                f"{path.relative_to(ROOT)} imports {name}. {REASONS.get(room, '')}; "
                f"{room} may import {sorted(allowed)}"
            )
        elif (
            parts[0] != PACKAGE and parts[0] not in sys.stdlib_module_names and room in THIRD_PARTY
        ):
            assert parts[0] in THIRD_PARTY[room], (
                f"{path.relative_to(ROOT)} imports {name}. {REASONS.get(room, '')}"
            )


def test_no_files_import_each_other():
    """Also not for types alone, nor by way of others; a package hands on names of its files."""
    module_of = {
        path: ".".join((PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)) for path in FILES
    }
    graph = {
        module: imports_of(path) & set(module_of.values()) for path, module in module_of.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names them


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_hydra_and_wandb_have_one_home(path):
    names = imports_of(path)
    relative = str(path.relative_to(ROOT))
    tops = {name.split(".")[0] for name in names}
    assert "wandb" not in tops, f"{relative} imports wandb; log through trainer.logger"
    if room_of(path) != "cli":
        assert not tops & {"hydra", "omegaconf"}, f"{relative} imports hydra; only cli may"
    if room_of(path) == "viewing" and "matplotlib" in tops:
        assert path.stem == "plot", "only viewing/plot.py may draw with matplotlib"


def test_only_comm_talks_to_other_ranks():
    """By import, or by attribute of torch; every exception is there, and has its reason."""
    talk = {
        str(path.relative_to(ROOT))
        for path in FILES
        if re.search(
            r"torch\.distributed(?!\.run\b)|from torch import distributed", path.read_text()
        )
    }
    outside = {path for path in talk if not path.startswith("comm/")}
    assert outside == DISTRIBUTED.keys(), "use the Mesh, a Transport or Links of comm/"


MODELS = re.compile(
    r"flux|sdxl|sd[123]|pixart|hunyuan|ltx|chroma|lumina|qwen|cogv|kandinsky|mochi|auraflow|stable_?diffusion|"
    r"kolors|hidream|(?<![a-z])(wan|sana|dit)(?![a-z])",
    re.IGNORECASE,
)
# file -> why its code names models
OF_MODELS = {
    "modules/latent_diffusion.py": "the step of the built-in models; all others are trained by their own call"
}


def words_of_code(path: Path) -> set[str]:
    """Names and strings in a file that are no prose."""
    tree, words = ast.parse(path.read_text()), set[str]()
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        words |= {
            v for _, v in ast.iter_fields(node) if isinstance(v, str) and id(node) not in prose
        }
    return {word for word in words if " " not in word.strip()}


def test_no_code_is_for_one_model():
    """Layers, tokens, frozen parts and guidance are found by looking, so that a new model needs no line."""
    assert not [path.name for path in FILES if MODELS.search(path.stem)]
    prose = [path for path in FILES if MODELS.search(path.read_text())]
    found = {path: sorted(filter(MODELS.search, words_of_code(path))) for path in prose}
    named = {str(path.relative_to(ROOT)): words for path, words in found.items() if words}
    assert named.keys() == OF_MODELS.keys(), named


HEAVY = {"torch", "lightning", "diffusers", "transformers", "matplotlib", "wandb", "PIL"}
CALL = """
import json, sys
from lightning_diffpipe.cli import main
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def modules_after(code: str, *arguments: str, cwd: Path) -> set[str]:
    """Top-level modules that a process of its own has imported in the end; it prints them last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, timeout=60, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_planning_verbs_import_no_torch(tmp_path):
    """History: each of them took 7 seconds to start, as the package imported everything."""
    layer = {"name": "block", "forward_s": {"1": 0.1}, "backward_s": {"1": 0.2}}
    sizes = ("parameter_bytes", "gradient_bytes", "boundary_bytes_per_sample")
    layer |= dict.fromkeys((*sizes, "activation_bytes_per_sample"), 1)
    backbones = [{"name": "unet", "layers": [layer, layer | {"name": "end"}]}]
    profile = {"format": "diffpipe-profile/1", "name": "two", "backbones": backbones}
    (tmp_path / "profile.json").write_text(json.dumps(profile | {"encoders": []}))
    for arguments in (
        ["--help"],
        ["plan", "profile=profile.json", "global_batch_size=4", "output=plan.json"],
        ["show", "plan.json"],
        ["diff", "plan.json", "plan.json"],
    ):
        imported = modules_after(CALL, *arguments, cwd=tmp_path)
        assert not imported & HEAVY, f"diffpipe {' '.join(arguments)}"


REGISTERED = """
import importlib, json, sys
import lightning_diffpipe
importlib.reload(lightning_diffpipe)
alone = sorted({name.partition(".")[0] for name in sys.modules})
from lightning.pytorch.strategies import StrategyRegistry
assert type(StrategyRegistry.get("diffpipe")) is lightning_diffpipe.DiffPipeStrategy
# Again, with Lightning there first: its import takes seconds.
StrategyRegistry.remove("diffpipe")
for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_diffpipe"]:
    del sys.modules[name]
before = lightning_diffpipe
import lightning_diffpipe
assert lightning_diffpipe is not before
assert type(StrategyRegistry.get("diffpipe")) is lightning_diffpipe.DiffPipeStrategy
print(json.dumps(alone))
"""


def test_the_strategy_is_registered_whichever_is_imported_first(tmp_path):
    """Importing this package imports no Lightning, but Lightning knows the strategy when it comes."""
    assert not modules_after(REGISTERED, cwd=tmp_path) & HEAVY


def test_every_room_is_known():
    rooms = {room_of(path) for path in FILES}
    unknown = rooms - ALLOWED.keys() - TOP - {"cli", "conf"}
    assert not unknown, f"new rooms {sorted(unknown)}: say in this test who may import whom"


def test_tests_do_not_import_each_other():
    """What several of them need has a file of its own."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module = (node.module or "").split(".")[-1]
                assert not module.startswith("test_"), (
                    f"{path.name} imports from {module}.py; move what both need to a file without tests"
                )


def table() -> str:
    """The import table of the architecture document."""
    rows = ["| package | may import | third party |", "|---|---|---|"]
    for room, allowed in ALLOWED.items():
        third = ", ".join(sorted(THIRD_PARTY[room])) or "none: standard library only"
        rows.append(f"| `{room}` | {', '.join(sorted(allowed)) or '-'} | {third} |")
    return "\n".join(rows)


def test_the_architecture_document_shows_this_table():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    assert table() in text, f"docs/architecture.md should contain:\n\n{table()}"
