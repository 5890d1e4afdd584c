"""What the ranks of a PipeFusion pipeline have sent, against the formulas."""

from collections import Counter


def assert_traffic_is_as_planned(samplers, request):
    """Bytes and messages, of all ranks together, as integers."""
    num_bytes, num_messages = Counter(), Counter()
    for sampler in samplers:
        num_bytes += sampler.statistics.traffic.bytes_sent
        num_messages += sampler.statistics.traffic.messages_sent
    first = samplers[0]
    layout = first._layouts.layout_for(request)
    setting, plan = first.setting(layout, first.positions, request), first.statistics.plan
    latent_bytes = request.latents.numel() * request.latents.element_size()
    inside = setting.attention_bytes(first.sequence_mode)
    # What crosses the cut and what returns is spread over two links each, but is not more.
    cut_bytes = setting.stages.cut_bytes(layout)
    assert dict(num_bytes) == plan.bytes_sent(cut_bytes, latent_bytes, inside)
    assert dict(num_messages) == plan.messages_sent(
        setting.stages.messages_per_call(), setting.attention_messages(first.sequence_mode)
    )
