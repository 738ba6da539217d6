"""What jax calls GPUs: devices that are there "gpu", those of a topology that is compiled for "cuda"."""

from __future__ import annotations

GPU_PLATFORMS = ("gpu", "cuda")
