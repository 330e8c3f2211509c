"""What devices can compute at most, by their makers: dense matrix products, in FLOP/s."""

# H100 and H200 with NVLink (SXM); the PCIe and NVL boards of the same name are slower, so names are compared whole.
HOPPER = {"bfloat16": 989e12, "float16": 989e12, "tf32": 494e12, "float32": 67e12}
AMPERE = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12}
NOMINAL = {
    "NVIDIA H100 80GB HBM3": HOPPER,
    "NVIDIA H200": HOPPER,
    "NVIDIA A100-SXM4-40GB": AMPERE,
    "NVIDIA A100-SXM4-80GB": AMPERE,
    "NVIDIA A100-PCIE-40GB": AMPERE,
    "NVIDIA A100 80GB PCIe": AMPERE,
}


def nominal_peak(device: str, kind: str) -> float | None:
    """Of a device by torch's name for it, in this type; None for devices and types that are not listed."""
    return NOMINAL.get(device, {}).get(kind)
