"""Sizes of layers, to which profiling adds times and saved bytes."""

from dataclasses import replace

from lightning_diffpipe.graph.sizes import layer_sizes
from lightning_diffpipe.planning.profile import Seconds
from lightning_diffpipe.profiling.measure import LayerTimer, measure_profile
from tests.profiling.toys import toy

NOTHING = Seconds.per_sample(0.0)


def without_times(profile):
    """What does not depend on a run."""
    (backbone,) = profile.backbones
    layers = (
        replace(
            layer, forward_s=NOTHING, backward_s=NOTHING, weight_gradient_s=None,
            activation_bytes_per_sample=0, activation_bytes_per_microbatch=0,
        )
        for layer in backbone.layers
    )  # fmt: skip
    backbone = replace(backbone, layers=tuple(layers), repeated_s=None, split_s=None)
    encoders = (
        replace(e, layers=tuple(replace(layer, forward_s=NOTHING) for layer in e.layers))
        for e in profile.encoders
    )
    return replace(profile, backbones=(backbone,), encoders=tuple(encoders))


def test_profiling_adds_times_to_sizes_and_changes_none():
    module, step, batch, graph = toy()
    sizes = layer_sizes(module, graph)
    timer = LayerTimer(
        module, step, batch, graph, sample_counts=(2,), repeats=3, finds_results=False
    )
    profile = measure_profile(timer)
    assert without_times(profile) == sizes
    assert sum(x.parameter_bytes for x in (*sizes.layers, *sizes.frozen_layers)) == sum(
        p.nbytes for p in module.parameters()
    )
    assert all(x.forward_s.at(2) > 0 for x in (*profile.layers, *profile.frozen_layers))
