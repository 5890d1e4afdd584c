import json
import multiprocessing
import warnings

import pytest
import torch

from lightning_diffpipe import ModelProfile
from lightning_diffpipe.graph.probe import probe
from lightning_diffpipe.graph.versions import circumstances
from lightning_diffpipe.profiling import bench, profiler
from lightning_diffpipe.profiling.measure import Subject
from lightning_diffpipe.profiling.profiler import cached_profile, profile_path
from lightning_diffpipe.profiling.state import take_samples
from lightning_diffpipe.sampling.rehearsal import tolerance_of
from tests.profiling.toys import CpuClock, toy

# As many repeats as no look at a kept profile takes; one alone would be as quick as chance has it.
OPTIONS = {"sample_counts": (2,), "repeats": 5}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFPIPE_CACHE", str(tmp_path))
    return tmp_path / "profiles"


@pytest.fixture
def measured(monkeypatch):
    """Counts how often a profile was really measured, looks at a kept one aside."""
    calls = []
    original = profiler.measure_profile

    def counting(subject, *rest):
        if subject.repeats == OPTIONS["repeats"]:
            calls.append(subject)
        return original(subject, *rest)

    monkeypatch.setattr(profiler, "measure_profile", counting)
    monkeypatch.setattr(profiler, "TOLERANCE", 1e6)  # the machine that tests run on is busy
    return calls


def test_is_measured_once(folder, measured):
    module, step, batch, graph = toy()
    first = cached_profile(Subject(module, step, batch, graph, **OPTIONS))
    assert cached_profile(Subject(module, step, batch, graph, **OPTIONS)) == first
    assert len(measured) == 1
    (kept,) = folder.iterdir()
    assert ModelProfile.from_json(kept.read_text()) == first
    assert kept.name.startswith("Toy-")


def test_other_layers_types_batches_devices_and_versions_have_other_files(folder, monkeypatch):
    module, step, batch, graph = toy()
    path = lambda: profile_path(module, graph, torch.device("cpu"), (2,), "toy")
    paths = [path(), profile_path(module, graph, torch.device("meta"), (2,), "toy")]
    paths.append(profile_path(module, graph, torch.device("cpu"), (2, 4), "toy"))
    deeper, _, _, deeper_graph = toy(num_blocks=5)
    paths.append(profile_path(deeper, deeper_graph, torch.device("cpu"), (2,), "toy"))
    wider = probe(module, step, take_samples(batch, 8, 4), max_share=0.1)
    paths.append(profile_path(module, wider, torch.device("cpu"), (2,), "toy"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    paths.append(path())
    monkeypatch.undo()
    module.head.bfloat16()
    paths.append(path())
    assert len(set(paths)) == len(paths)


def test_precision_and_kernels_have_files_of_their_own(monkeypatch):
    """History: on a GPU `32-true` and `bf16-mixed` shared a file, as autocast changes nothing in a probe."""
    module, step, batch, graph = toy()
    path = lambda: profile_path(module, graph, torch.device("cpu"), (2,), "toy")
    paths = [path()]
    cuda = torch.backends.cuda
    for place, name, value in (
        (cuda, "flash_sdp_enabled", lambda: False),
        (profiler, "float32_precisions", lambda: ("tf32", "none", "none")),
        (module, "gradient_checkpointing", True),
        (module, "processor", object()),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value, raising=False)
            paths.append(path())
    try:
        for dtype in (torch.float16, torch.bfloat16):
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", dtype)
            mixed = probe(module, step, take_samples(batch, 8, 2), max_share=0.1)
            paths.append(profile_path(module, mixed, torch.device("cpu"), (2,), "toy"))
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert mixed.digest == graph.digest
    assert mixed.autocast == {"cuda torch.bfloat16"}
    assert len(set(paths)) == len(paths)


SETTINGS_OF_TF32 = (
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.allow_tf32 = True",
)


@pytest.mark.parametrize("setting", SETTINGS_OF_TF32)
def test_precision_is_known_by_whatever_name_it_was_set(setting):
    """History: torch's older names refuse to answer once the newer ones are used, and sampling and kept encodings
    asked them.

    No process can go back to the older names, so each setting has a fork of its own.
    """
    module, _, _, graph = toy()
    path = lambda: profile_path(module, graph, torch.device("cpu"), (2,), "toy")
    before = path()

    def check():
        exec(setting)
        assert path() != before, setting
        tolerance_of(module, torch.zeros(1), convolves_parts=True)
        circumstances()

    process = multiprocessing.get_context("fork").Process(target=check)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_bytes_that_a_layer_keeps_are_looked_at(folder, monkeypatch, factor):
    """History: fused attention in place of one by hand kept the file, and the memory planned."""
    module, step, batch, graph = toy()
    subject = Subject(module, step, batch, graph, **OPTIONS)
    document = json.loads(cached_profile(subject).to_json())
    monkeypatch.setattr(profiler, "TOLERANCE", 1e6)
    layer = document["backbones"][0]["layers"][1]
    assert layer["activation_bytes_per_sample"] > 0
    for each in document["backbones"][0]["layers"]:
        each["activation_bytes_per_sample"] = int(factor * each["activation_bytes_per_sample"])
    kept = ModelProfile.from_json(json.dumps(document))
    assert profiler.still_holds(kept, subject, "kept") == (factor == 1.0)


def test_a_look_that_runs_out_of_memory_measures_anew(folder, measured, monkeypatch):
    """Something else may hold the memory that was there when the profile was taken."""
    module, step, batch, graph = toy()
    subject = Subject(module, step, batch, graph, **OPTIONS)
    kept = cached_profile(subject)

    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(profiler, "measure_profile", full)
    assert not profiler.still_holds(kept, subject, "kept")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lambda kept: kept[: len(kept) // 2], "not valid JSON|JSON"),
        (lambda kept: "", "JSON"),
        (lambda kept: kept.replace("diffpipe-profile/1", "diffpipe-profile/9"), "format"),
        (lambda kept: kept.replace("blocks.0", "unet.0"), "describes another model"),
        (lambda kept: json.dumps({"somebody": "else"}), "unknown key 'somebody'"),
    ],
)
def test_a_corrupt_or_foreign_file_is_named_and_rebuilt(folder, measured, text, reason):
    module, step, batch, graph = toy()
    cached_profile(Subject(module, step, batch, graph, **OPTIONS))
    (kept,) = folder.iterdir()
    kept.write_text(text(kept.read_text()))
    with pytest.warns(UserWarning, match=kept.name) as caught:
        cached_profile(Subject(module, step, batch, graph, **OPTIONS))
    assert any(part in str(caught[0].message) for part in reason.split("|"))
    assert len(measured) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_profile(Subject(module, step, batch, graph, **OPTIONS))
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_a_warning_only(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIFFPIPE_CACHE", str(tmp_path / "file"))
    module, step, batch, graph = toy()
    with pytest.warns(UserWarning, match="cannot keep the profile"):
        assert cached_profile(Subject(module, step, batch, graph, **OPTIONS)).backbones


def slower(profile, factor):
    """The same profile, as a busy machine would have given it."""
    document = json.loads(profile.to_json())
    for part in (*document["backbones"], *document["encoders"]):
        for layer in part["layers"]:
            for key in {"forward_s", "backward_s", "weight_gradient_s"} & layer.keys():
                layer[key] = {count: factor * seconds for count, seconds in layer[key].items()}
    return json.dumps(document)


@pytest.mark.parametrize(("factor", "holds"), [(1.0, True), (40.0, False), (0.01, False)])
def test_a_profile_of_a_busy_machine_is_measured_anew(
    folder, measured, caplog, monkeypatch, factor, holds
):
    """History: a profile taken beside other work stayed, and promised 820 ms where 516 were measured."""
    monkeypatch.setattr(profiler, "TOLERANCE", 9.0)
    monkeypatch.setattr(bench, "clock_for", lambda device: CpuClock())
    module, step, batch, graph = toy()
    subject = Subject(module, step, batch, graph, **OPTIONS)
    first = cached_profile(subject)
    (kept,) = folder.iterdir()
    kept.write_text(slower(first, factor))
    again = cached_profile(subject)
    assert len(measured) == (1 if holds else 2)
    assert (kept.name in caplog.text) != holds
    assert again.trained_s(2) < 10 * first.trained_s(2)
    assert ModelProfile.from_json(kept.read_text()) == again


def test_times_of_frozen_layers_are_looked_at(folder, monkeypatch):
    """History: only those of trained layers were compared."""
    module, step, batch, graph = toy()
    subject = Subject(module, step, batch, graph, **OPTIONS)
    profile = cached_profile(subject)
    monkeypatch.setattr(profiler, "TOLERANCE", 9.0)
    monkeypatch.setattr(bench, "clock_for", lambda device: CpuClock())
    document = json.loads(profile.to_json())
    document["encoders"][0]["layers"][0]["forward_s"] = {"2": 1000.0}
    slow = ModelProfile.from_json(json.dumps(document))
    assert slow.trained_s(2) == profile.trained_s(2)
    assert not profiler.still_holds(slow, subject, "kept")


def test_ranks_follow_the_first_ones_verdict(folder, measured):
    """Also one that has no file of its own, on another machine."""
    module, step, batch, graph = toy()
    subject = Subject(module, step, batch, graph, **OPTIONS)
    first = cached_profile(subject)
    (kept,) = folder.iterdir()
    kept.unlink()
    assert cached_profile(subject, agree=lambda known: first) == first
    assert len(measured) == 1
    cached_profile(subject, agree=lambda known: None)
    assert len(measured) == 2
