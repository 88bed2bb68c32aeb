"""NVIDIA GPUs. Written against PyTorch's documented interface; not verified on hardware yet."""

from __future__ import annotations

from isotrain.device.accelerator import Accelerator

CUDA = Accelerator(
    type="cuda",
    collectives="cpu:gloo,cuda:nccl",
    rebuild_shared="torch.multiprocessing.reductions:rebuild_cuda_tensor",
    interface_variable="NCCL_SOCKET_IFNAME",
    visible_devices_variable="CUDA_VISIBLE_DEVICES",
    ray_resource="GPU",
    numerics_variables=(
        "CUDA_VISIBLE_DEVICES",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "NCCL_ALGO",
        "NCCL_PROTO",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    ),
    flash_packages=("flash_attn",),
    # transformers' own choice where torch has the kernel. Not verified on hardware yet.
    experts="grouped_mm",
    # Dense bf16 figures of the data sheets (SXM where there are several forms).
    peak_bf16_tflops={
        "A100": 312,
        "A800": 312,
        "H100": 989,
        "H800": 989,
        "H200": 989,
        "H20": 148,
        "B200": 2250,
        "L40S": 362,
        "A10": 125,
        "A30": 165,
        "RTX 4090": 165,
    },
    deterministic_variables=lambda environment: {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
)
