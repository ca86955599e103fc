"""What makers publish about GPUs, for people to compare a measurement with; nothing is computed from it."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """What its maker publishes about a GPU.

    Rates are dense (no structured sparsity) and those of products accumulated in float32; None where the hardware has
    no such unit.

    Args:
        name: The product's name.
        pattern: A regular expression for the whole of the name that torch reports.
        arch: The compilation target.
        bf16_tflops, fp16_tflops, fp8_tflops, tf32_tflops: Matrix units, TFLOP/s.
        fp32_tflops: Vector units (on AMD: matrix units), TFLOP/s.
        memory_gb_s: Peak of the memory, 10^9 bytes/s.
        l2_mb: Size of the last cache that all units share, MB.
        source: Where the numbers are from.
    """

    name: str
    pattern: str
    arch: str
    bf16_tflops: float | None
    fp16_tflops: float
    fp32_tflops: float
    tf32_tflops: float | None
    fp8_tflops: float | None
    memory_gb_s: float
    l2_mb: float
    source: str


def _spec(
    name: str,
    pattern: str,
    arch: str,
    bf16: float | None,
    fp32: float,
    tf32: float | None,
    fp8: float | None,
    memory_gb_s: float,
    l2_mb: float,
    source: str,
    *,
    fp16: float | None = None,
) -> GpuSpec:
    """A row of the table; float16 is as fast as bfloat16 unless said."""
    half = fp16 if fp16 is not None else bf16
    assert half is not None
    return GpuSpec(
        name=name,
        pattern=pattern,
        arch=arch,
        bf16_tflops=bf16,
        fp16_tflops=half,
        fp32_tflops=fp32,
        tf32_tflops=tf32,
        fp8_tflops=fp8,
        memory_gb_s=memory_gb_s,
        l2_mb=l2_mb,
        source=source,
    )


_HOPPER = "NVIDIA H100 and H200 datasheets: half of the rates with sparsity"
_GRACE = "NVIDIA GH200 datasheet: half of the rates with sparsity"
_BLACKWELL = "NVIDIA HGX datasheet, an eighth of the board: half of the rates with sparsity"
_A100 = "NVIDIA A100 datasheet"
_ADA = "NVIDIA L4, L40 and L40S datasheets: half of the rates with sparsity"
_GA102 = "NVIDIA A10, A40 and RTX A6000 datasheets: half of the rates with sparsity"
_RTX30 = "NVIDIA Ampere GA102 whitepaper, appendix A: float32 accumulation, dense"
_RTX40 = "NVIDIA Ada whitepaper, appendix A: float32 accumulation, dense"
_RTX50 = "NVIDIA RTX Blackwell whitepaper, appendix: float32 accumulation, dense"
_VOLTA = "NVIDIA Tesla V100 datasheet"
_CDNA3 = "AMD Instinct MI300X and MI325X product pages, without sparsity; the cache is the Infinity Cache"
_CDNA4 = "AMD Instinct MI350X and MI355X product pages, without sparsity; the cache is the Infinity Cache"

KNOWN_GPUS: tuple[GpuSpec, ...] = (
    _spec("H100 SXM", r"NVIDIA H100 80GB HBM3", "sm_90a", 989.4, 66.9, 494.7, 1978.9, 3352, 50, _HOPPER),
    _spec("H100 PCIe", r"NVIDIA H100 PCIe", "sm_90a", 756.5, 51.2, 378.0, 1513.0, 2039, 50, _HOPPER),
    _spec("H100 NVL", r"NVIDIA H100 NVL", "sm_90a", 835.5, 60.0, 417.5, 1670.5, 3938, 50, _HOPPER),
    _spec("H200 SXM", r"NVIDIA H200", "sm_90a", 989.4, 66.9, 494.7, 1978.9, 4800, 50, _HOPPER),
    _spec("H200 NVL", r"NVIDIA H200 NVL", "sm_90a", 835.5, 60.0, 417.5, 1670.5, 4800, 50, _HOPPER),
    _spec("GH200 96GB", r"NVIDIA GH200 480GB", "sm_90a", 989.4, 66.9, 494.7, 1978.9, 4000, 50, _GRACE),
    _spec("GH200 144GB", r"NVIDIA GH200 144G HBM3e", "sm_90a", 989.4, 66.9, 494.7, 1978.9, 4900, 50, _GRACE),
    _spec("B200", r"NVIDIA B200", "sm_100a", 2250.0, 75.0, 1125.0, 4500.0, 7700, 126, _BLACKWELL),
    _spec(
        "B300",
        r"NVIDIA B300(?: SXM6(?: AC)?)?",
        "sm_103a",
        2250.0,
        75.0,
        1125.0,
        4500.0,
        8000,
        126,
        _BLACKWELL,
    ),
    _spec("A100 SXM 40GB", r"(?:NVIDIA )?A100-SXM4-40GB", "sm_80", 312.0, 19.5, 156.0, None, 1555, 40, _A100),
    _spec("A100 SXM 80GB", r"(?:NVIDIA )?A100-SXM4-80GB", "sm_80", 312.0, 19.5, 156.0, None, 2039, 40, _A100),
    _spec(
        "A100 PCIe 40GB", r"(?:NVIDIA )?A100-PCIE-40GB", "sm_80", 312.0, 19.5, 156.0, None, 1555, 40, _A100
    ),
    _spec(
        "A100 PCIe 80GB", r"(?:NVIDIA )?A100 80GB PCIe", "sm_80", 312.0, 19.5, 156.0, None, 1935, 40, _A100
    ),
    _spec("L40S", r"NVIDIA L40S", "sm_89", 362.0, 91.6, 183.0, 733.0, 864, 96, _ADA),
    _spec("L40", r"NVIDIA L40", "sm_89", 181.0, 90.5, 90.5, 362.0, 864, 96, _ADA),
    _spec("L4", r"NVIDIA L4", "sm_89", 121.0, 30.3, 60.0, 242.5, 300, 48, _ADA),
    _spec("A10", r"NVIDIA A10", "sm_86", 125.0, 31.2, 62.5, None, 600, 6, _GA102),
    _spec("A40", r"NVIDIA A40", "sm_86", 149.7, 37.4, 74.8, None, 696, 6, _GA102),
    _spec("RTX A6000", r"(?:NVIDIA )?RTX A6000", "sm_86", 154.8, 38.7, 77.4, None, 768, 6, _GA102),
    _spec("RTX 3080", r"(?:NVIDIA )?GeForce RTX 3080", "sm_86", 59.5, 29.8, 29.8, None, 760, 5, _RTX30),
    _spec("RTX 3090", r"(?:NVIDIA )?GeForce RTX 3090", "sm_86", 71.2, 35.6, 35.6, None, 936, 6, _RTX30),
    _spec("RTX 4080", r"NVIDIA GeForce RTX 4080", "sm_89", 97.5, 48.7, 48.7, 194.9, 717, 64, _RTX40),
    _spec("RTX 4090", r"NVIDIA GeForce RTX 4090", "sm_89", 165.2, 82.6, 82.6, 330.3, 1008, 72, _RTX40),
    _spec("RTX 5080", r"NVIDIA GeForce RTX 5080", "sm_120a", 112.6, 56.3, 56.3, 225.1, 960, 64, _RTX50),
    _spec("RTX 5090", r"NVIDIA GeForce RTX 5090", "sm_120a", 209.5, 104.8, 104.8, 419.0, 1792, 96, _RTX50),
    _spec(
        "T4",
        r"(?:NVIDIA )?Tesla T4",
        "sm_75",
        None,
        8.1,
        None,
        None,
        320,
        4,
        "NVIDIA T4 datasheet",
        fp16=65.0,
    ),
    _spec(
        "V100 SXM",
        r"(?:NVIDIA )?Tesla V100-SXM[23]-\d+GB",
        "sm_70",
        None,
        15.7,
        None,
        None,
        900,
        6,
        _VOLTA,
        fp16=125.0,
    ),
    _spec(
        "V100 PCIe",
        r"(?:NVIDIA )?Tesla V100-PCIE-\d+GB",
        "sm_70",
        None,
        14.0,
        None,
        None,
        900,
        6,
        _VOLTA,
        fp16=112.0,
    ),
    _spec("MI300X", r"AMD Instinct MI300X", "gfx942", 1307.4, 163.4, 653.7, 2614.9, 5325, 256, _CDNA3),
    _spec("MI325X", r"AMD Instinct MI325X", "gfx942", 1307.4, 163.4, 653.7, 2614.9, 6000, 256, _CDNA3),
    _spec("MI350X", r"AMD Instinct MI350X", "gfx950", 2306.9, 144.2, None, 4613.7, 8000, 256, _CDNA4),
    _spec("MI355X", r"AMD Instinct MI355X", "gfx950", 2516.6, 157.3, None, 5033.2, 8000, 256, _CDNA4),
)


def known_gpu(name: str) -> GpuSpec | None:
    """The table's row for the name that torch reports; None for a device that the table does not have.

    The whole name must fit: a slice of a GPU (MIG), a laptop's or a "Ti" is another device than its namesake.
    """
    return next((spec for spec in KNOWN_GPUS if re.fullmatch(spec.pattern, name.strip())), None)
