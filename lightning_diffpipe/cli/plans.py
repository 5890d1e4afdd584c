"""`diffpipe profile`, `plan`, `show` and `diff`."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.cli.launch import module_of, num_ranks_of, on_ranks, prepare
from lightning_diffpipe.cli.values import file_errors, named, plain, require_writable, verb
from lightning_diffpipe.errors import ConfigurationError, require_choice, require_number

_PATIENCE = timedelta(seconds=120)


@verb("time every layer of a model: diffpipe profile model=glyph_unet output=profile.json")
def profile(config: DictConfig) -> Any:
    """Times the layers of `model` on batches of `data`, and writes a profile to `output`.

    On several processes the links between them are timed before, and written to `cluster_output`.
    """
    if config.output is None:
        raise ConfigurationError("output=null names no file; leave it out for profile.json")
    for output in (config.output, config.cluster_output):
        require_writable(output)
    prepare(config)
    from lightning_diffpipe.profiling.step_run import placeable

    placeable(config.device)
    on_ranks(num_ranks_of(plain(config)), lambda: _measure_links(config))
    if int(os.environ.get("RANK", "0")):
        return None
    from lightning_diffpipe.profiling import profile as measure
    from lightning_diffpipe.profiling.measure import default_step, in_precision
    from lightning_diffpipe.training.before_training import why_empty

    module = module_of(config)
    data = hydra.utils.instantiate(config.data)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    batch = next(iter(loader), None)
    if batch is None:
        raise ConfigurationError(why_empty(loader))
    step = in_precision(default_step(module), config.precision, config.device)
    names = "device", "sample_counts", "repeats", "budget_s", "name", "max_share", "progress"
    result = measure(module, batch, step=step, **{name: config[name] for name in names})
    _write(config.output, result.to_json())
    layers, frozen = result.layers, result.frozen_layers
    for samples, _ in layers[0].forward_s.points:
        path_s = result.trained_s(samples)
        frozen_s = sum(layer.forward_s.at(samples) for layer in frozen)
        print(f"{samples:5d} samples: path {1e3 * path_s:.1f} ms, frozen {1e3 * frozen_s:.1f} ms")
    print(f"{config.output}  {len(layers)} layers of the path, {len(frozen)} frozen layers")
    return result


def _measure_links(config: DictConfig) -> None:
    """Writes a cluster of the running processes, if there are several; a collective call."""
    import torch

    from lightning_diffpipe.comm.bandwidth import measure_launched
    from lightning_diffpipe.viewing.text import seconds, size

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    cluster = measure_launched(device, _PATIENCE)
    if int(os.environ["RANK"]) == 0:
        _write(config.cluster_output, cluster.to_json())
        rate, latency = cluster.p2p.bandwidth_bytes_per_s, cluster.p2p.latency_s
        print(
            f"{config.cluster_output}  {cluster.num_ranks} ranks; from one to another "
            f"{size(rate)}/s after {seconds(latency)}"
        )


@verb("find the fastest pipeline: diffpipe plan profile=profile.json global_batch_size=64")
def plan(config: DictConfig) -> Any:
    """Plans for a profile on a cluster, prints the plan, and writes it to `output`."""
    from lightning_diffpipe.planning.options import PlanOptions
    from lightning_diffpipe.planning.search import find_plan
    from lightning_diffpipe.viewing.report import explain, report
    from lightning_diffpipe.viewing.text import seconds

    values = plain(config)
    if values["output"] is not None:
        require_writable(values["output"])
    require_number("disk_bytes_per_s", values["disk_bytes_per_s"], above=0)
    names = ("global_batch_size", "filling", "optimizer_bytes_factor", "encode_first")
    settings = {key: values[key] for key in names} | values["strategy"]
    with named({name: f"strategy.{name}" for name in values["strategy"]}):
        options = PlanOptions.from_dict(settings)
        cluster = _cluster(values["cluster"])
        # After what may be refused: a model on paper takes seconds.
        profile = _profile_to_plan(config)
        start_s = time.perf_counter()
        best = find_plan(profile, cluster, options)
    searched_s = time.perf_counter()
    took = f"found in {seconds(searched_s - start_s)}"
    if values["explain"]:
        rate = values["disk_bytes_per_s"]
        why = explain(best, profile, cluster, values["explain_s"], rate)
        best = replace(best, changes=why.changes)
        took += f"; what else could be changed was searched for {seconds(time.perf_counter() - searched_s)}"
    if values["output"] is not None:  # before anything is printed: whoever reads may have gone
        _write(values["output"], best.to_json())
    print(report(best))
    if values["explain"] and not best.changes:
        print("\nNone of the changes that were tried would make the step shorter.")
    print(f"\n{took}")
    if values["output"] is not None:
        batch = (
            f"; train with data.batch_size={best.samples_per_pipeline}, the samples of one of its "
            f"{best.num_pipelines} pipelines"
        )
        print(f"wrote {values['output']}{batch if best.num_pipelines > 1 else ''}")
    return best


def _profile_to_plan(config: DictConfig) -> Any:
    """Reads the profile at `profile`, or models that of a well-known `model`."""
    model = plain(config.get("model") or OmegaConf.create({"path": None}))
    if (config.profile is None) == (model.get("path", "") is None):
        raise ConfigurationError(
            "give profile=FILE, written by diffpipe profile, or model.path=FOLDER for one without weights, or one "
            f"such as model=flux; {'neither' if config.profile is None else 'both'} was given"
        )
    if config.profile is not None:
        from lightning_diffpipe.planning.profile import ModelProfile

        return ModelProfile.from_json(_read(config.profile), config.profile)
    if "_target_" in model:
        raise ConfigurationError(
            "this model can be measured: write a profile with diffpipe profile model=..., "
            "then plan with profile=FILE"
        )
    from lightning_diffpipe.modules.on_paper import ModelOnPaper

    with named({name: f"model.{name}" for name in model}):
        profile = ModelOnPaper(**model).profile()
    print(f"{profile.name}; sizes are exact, times are not measured\n")
    return profile


def _cluster(group: dict[str, Any]) -> Any:
    """Returns a cluster by the values of its group; with `path` one that was measured, changed by the others."""
    from lightning_diffpipe.planning.cluster import Cluster

    values = _without_none(group)
    path = values.pop("path", None)
    if path is None:
        return Cluster.from_dict(values)
    return Cluster.from_json(_read(path), path).changed(values)


def _read(path: str) -> str:
    with file_errors("read", path):
        return Path(path).read_text()


def _write(path: str, content: str) -> None:
    from lightning_diffpipe.files import write_atomically

    with file_errors("write", path):
        write_atomically(Path(path), content)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _without_none(v) if isinstance(v, dict) else v for k, v in values.items()}
    return {key: value for key, value in nested.items() if value is not None}


@verb("print a plan or a profile, or draw a plan: diffpipe show plan.json as=image output=plan.svg")
def show(config: DictConfig) -> None:
    """Shows `plan` as a report, a timeline, a trace or an image; a profile as a table of its layers."""
    from lightning_diffpipe.planning.plan import PipelinePlan
    from lightning_diffpipe.planning.profile import FORMAT, ModelProfile
    from lightning_diffpipe.viewing.plot import chrome_trace, plot
    from lightning_diffpipe.viewing.report import cost_table, report

    values = plain(config)
    form, output = values["as"], values["output"]
    require_choice("as", form, ("report", "timeline", "trace", "image"))
    if (output is None) == (form in ("trace", "image")):
        hint = "is a file: add output=FILE" if output is None else "is printed: leave out output"
        raise ConfigurationError(f"as={form} {hint}")
    if output is not None:
        require_writable(output)
    text = _read(values["plan"])
    if form == "report" and FORMAT in text[:100]:
        profile = ModelProfile.from_json(text, values["plan"])
        print(cost_table(profile, values["samples"]))
        return
    plan = PipelinePlan.from_json(text, values["plan"])
    if values["profile"] is not None:
        rate = values["disk_bytes_per_s"]
        plan = _explained(plan, values["profile"], values.get("cluster"), rate)
    match form:
        case "report":
            print(report(plan, values["max_columns"]))
        case "timeline":
            print(plan.timeline.render(max_columns=values["max_columns"]))
        case "trace":
            _write(output, chrome_trace({"planned": plan.timeline}))
        case "image":
            with file_errors("write", output):
                Path(output).parent.mkdir(parents=True, exist_ok=True)
                plot({"planned": plan.timeline}, output, f"plan {plan.digest}")
    if output is not None:
        print(f"wrote {output}")


def _explained(
    plan: Any, profile: str, cluster: dict[str, Any] | None, disk_bytes_per_s: float
) -> Any:
    """Returns the plan with the changes that would help, which it searches; both by the costs of this profile."""
    from lightning_diffpipe.planning.profile import ModelProfile
    from lightning_diffpipe.viewing.report import explain
    from lightning_diffpipe.viewing.text import seconds

    costs = ModelProfile.from_json(_read(profile), profile)
    ranks = _cluster({"num_ranks": plan.num_ranks} if cluster is None else cluster)
    start_s = time.perf_counter()
    why = explain(plan, costs, ranks, disk_bytes_per_s=disk_bytes_per_s)
    print(f"What could be changed was searched for {seconds(time.perf_counter() - start_s)}.\n")
    if why.plan is not plan:
        links = "free links, as no cluster is given" if cluster is None else "this cluster"
        print(
            f"With profile {profile} and {links} these stages take {seconds(why.plan.planned.iteration_s)} a step, "
            f"instead of {seconds(plan.planned.iteration_s)} as planned. What follows is by these costs.\n"
        )
    return replace(why.plan, changes=why.changes)


@verb("say how two plans differ: diffpipe diff before.json after.json")
def diff(config: DictConfig) -> None:
    """Compares `before` with `after`."""
    from lightning_diffpipe.planning.plan import PipelinePlan
    from lightning_diffpipe.viewing.report import diff as difference

    values = plain(config)
    before, after = (
        PipelinePlan.from_json(_read(values[name]), values[name]) for name in ("before", "after")
    )
    print(difference(before, after))
