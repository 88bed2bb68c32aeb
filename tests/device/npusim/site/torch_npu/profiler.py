"""The profiler, of host operators alone: a simulated device has no others."""

import torch


class profile(torch.profiler.profile):
    def __init__(self, *, activities=None):
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU])
