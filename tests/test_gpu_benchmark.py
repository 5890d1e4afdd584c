"""The benchmark that waits for a GPU, tried on the CPU: the same code on tiny models."""

import json
import sys

import pytest
import torch.multiprocessing

from benchmarks.gpu import main, one_part, parts
from tests.ranks import forks_for_spawned


def rows_of(name):
    rows = []
    parts.ALL[name](parts.Place("cpu"), lambda **row: rows.append(json.loads(json.dumps(row))))
    return rows


def test_what_is_installed_is_listed():
    assert rows_of("environment")[0]["lightning"][0].isdigit()


@pytest.mark.slow
def test_shares_of_frozen_work_have_their_parts():
    rows = rows_of("frozen_share")
    by_layer = [row for row in rows if "frozen_share" in row]
    assert {(row["model"], row["samples"]) for row in by_layer} == {
        (name, count) for name in ("sd21", "controlnet") for count in (1, 2)
    }
    for row in by_layer:
        trained_s = row["forward_s"] + row["backward_s"]
        assert row["frozen_share"] == pytest.approx(sum(row["encoders_s"].values()) / trained_s)
    of_controlnet = next(row for row in by_layer if row["model"] == "controlnet")
    assert "frozen unet" in of_controlnet["encoders_s"]  # the locked half
    assert any("by_hand_frozen_share" in row for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdxl", "sd3", "flux"])
def test_layers_of_large_models_are_timed(name):
    rows = rows_of(name)
    timed = next(
        row["forward_and_backward_us"] for row in rows if len(row) == 2 and "us" in str(row)
    )
    assert all(forward > 0 for _, forward, _ in timed)
    assert any(row.get("samples") == 2 for row in rows)


@pytest.mark.slow
def test_patches_are_timed_beside_plain_steps():
    rows = rows_of("patches")
    assert {(row["model"], row["resolution"], row["num_patches"]) for row in rows} == {
        (name, pixels, n) for name in ("pixart", "sd3") for pixels in (64, 128) for n in (2, 4)
    }
    assert all(row["ratio"] > 0 for row in rows)


def kernels_differ_little(rows):
    rows = {(row["attention"], row["num_patches"]): row for row in rows}
    return (
        rows["_native_math", 2]["difference"] < 0.01 and "flash-attn" in rows["flash", 1]["refused"]
    )


def blocks_have_no_breaks(rows):
    compiled = [row["graphs"] > 0 for row in rows if row["compile"]]
    return [row["breaks"] for row in rows] == [0] * 4 and all(compiled)


def caches_differ_little(rows):
    pairs = [(num_patches, limit) for num_patches in (1, 2) for limit in (None, 0.05, 0.2)]
    differences = [row["difference"] for row in rows if row["threshold"] == 0.2]
    tried = [(row["num_patches"], row["threshold"]) for row in rows]
    return tried == pairs and all(0 < each < 0.1 for each in differences)


@pytest.mark.slow
@pytest.mark.table
@pytest.mark.parametrize(
    ("name", "is_right"),
    [
        ("attention", kernels_differ_little),
        ("compiled", blocks_have_no_breaks),
        ("caches", caches_differ_little),
        ("streaming", lambda rows: [row["streaming"] for row in rows] == ["none", "all"]),
        ("graphs", lambda rows: [row["eager_s"] > 0 for row in rows] == [True]),
        ("quantized", lambda rows: [row.get("quantization") for row in rows[1:]] == ["float8", "int8", "nf4"]),
    ],
)  # fmt: skip
def test_a_part_measures_each_of_its_cases(name, is_right):
    assert is_right(rows_of(name))


@pytest.mark.slow
def test_one_rank_is_timed_beside_plain_lightning():
    (row,) = rows_of("overhead")
    assert row["ratio"] == pytest.approx(row["diffpipe_s"] / row["plain_s"])


@pytest.fixture
def _forked_ranks(monkeypatch):
    """Processes that are spawned would import everything, eight seconds of a processor for each."""
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: forks_for_spawned)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.table
@pytest.mark.usefixtures("_forked_ranks")
def test_two_ranks_share_a_device():
    """Each takes it as the only one of a host of its own."""
    rows = rows_of("gloo")
    assert rows[-1]["filling_changes_nothing"]
    assert {row["rank"] for row in rows[:-1] if row["filling"] == "shares"} == {0, 1}
    assert all(row["filled_s"] > 0 for row in rows[:-1] if row["filling"] == "shares")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.table
@pytest.mark.usefixtures("_forked_ranks")
def test_two_stages_equal_one_process_in_every_precision():
    rows = rows_of("parity")
    assert [row["precision"] for row in rows[::2]] == ["32-true", "bf16-mixed", "bf16-true"]
    assert all(row["loss_error"] < 0.01 for row in rows)


@pytest.mark.slow
def test_what_a_part_found_before_it_hangs_or_crashes_is_kept(tmp_path, monkeypatch):
    monkeypatch.setitem(main.PARTS, "no such part", 60)
    path = tmp_path / "gpu.json"
    common = ["--device", "cpu", "--json", str(path), "--parts"]
    monkeypatch.setattr(sys, "argv", ["main.py", *common, "no such part", "environment"])
    main.main()
    found = json.loads(path.read_text())["parts"]
    assert found["no such part"]["status"] == "failed with exit code 1"
    assert "there is no part 'no such part'" in found["no such part"]["said"]
    assert found["environment"]["status"] == "ok"
    assert found["environment"]["rows"][0]["torch"]
    assert main.run_part("environment", "cpu", 0.05)["status"] == "not done in 0 s"


def test_every_part_can_be_run():
    assert parts.ALL.keys() == main.PARTS.keys()
    assert one_part.ALONE.keys() < parts.ALL.keys()


def test_a_part_without_time_is_not_begun(tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--json", str(path), "--budget-s", "5", "--parts", "gloo"]
    monkeypatch.setattr(sys, "argv", ["main.py", *options])
    main.main()
    assert json.loads(path.read_text())["parts"]["gloo"]["status"] == "not begun: no time left"
    assert "gloo: not begun" in capsys.readouterr().out
